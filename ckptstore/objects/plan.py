"""The plan of a read: which pieces lie in which chunks, and which chunks one request fetches.

Pure: nothing is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from ckptstore.backends.base import Capabilities
from ckptstore.format.manifest import PieceTable
from ckptstore.format.pack import CHUNK_HEADER_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadItem:
    """One piece that is asked for."""

    row: int
    """In the piece table."""
    out: memoryview | None
    """Where to: writable, C-contiguous, exactly the piece; None to check it and drop it."""
    label: str
    """The tensor, for errors."""
    then: tuple[Callable[[memoryview], None], ...] = ()
    """Called with the piece, once, when it is checked; by the thread that did, which has it in the
    processor's cache. Whoever reads pieces from elsewhere has to do so too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRead:
    """One chunk and what is wanted of it."""

    offset: int
    stored_bytes: int
    raw_bytes: int
    items: tuple[ReadItem, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Neighbouring chunks of one pack, fetched with one request."""

    pack: str
    chunks: tuple[ChunkRead, ...]

    @property
    def start(self) -> int:
        """Return the offset of the first chunk's header, in bytes."""
        return self.chunks[0].offset

    @property
    def end(self) -> int:
        """Return the offset after the last chunk, in bytes."""
        last = self.chunks[-1]
        return last.offset + CHUNK_HEADER_BYTES + last.stored_bytes


def plan_spans(
    table: PieceTable, items: Sequence[ReadItem], capabilities: Capabilities
) -> list[Span]:
    """Return the fetches for `items`: each chunk once, neighbours joined, no span too large.

    So that fetches run in parallel and memory stays bounded: see :func:`join_chunks`.
    """
    rows = np.fromiter((item.row for item in items), np.int64, len(items))
    order = np.lexsort((table.inner[rows], table.offset[rows], table.pack[rows]))
    spans: list[Span] = []
    ordered = (items[at] for at in order)
    for pack, found in groupby(ordered, lambda item: int(table.pack[item.row])):
        by_chunk = groupby(found, lambda item: int(table.offset[item.row]))
        chunks = (_chunk(table, tuple(members)) for _, members in by_chunk)
        joined = join_chunks(chunks, capabilities)
        spans += (Span(pack=table.packs[pack], chunks=tuple(part)) for part in joined)
    return spans


def _chunk(table: PieceTable, members: tuple[ReadItem, ...]) -> ChunkRead:
    row = members[0].row
    return ChunkRead(
        offset=int(table.offset[row]),
        stored_bytes=int(table.stored[row]),
        raw_bytes=int(table.slab[row]),
        items=members,
    )


class Stored(Protocol):
    """A chunk in a pack: where, and its lengths in bytes."""

    @property
    def offset(self) -> int:
        """Of the header, in the pack."""

    @property
    def stored_bytes(self) -> int:
        """Without the header."""

    @property
    def raw_bytes(self) -> int:
        """Decoded."""


C = TypeVar("C", bound=Stored)


def join_chunks(chunks: Iterable[C], capabilities: Capabilities) -> Iterator[list[C]]:
    """Cut chunks of one pack, in the order of their offsets, into what one request fetches each.

    Chunks closer than ``read_gap_bytes`` are joined, since a request costs more than the gap;
    a request ends at ``read_bytes_max``, if it has more than one chunk.
    """
    part: list[C] = []
    end = 0
    for chunk in chunks:
        after = chunk.offset + CHUNK_HEADER_BYTES + chunk.stored_bytes
        if part and not (
            0 <= chunk.offset - end <= capabilities.read_gap_bytes
            and after - part[0].offset <= capabilities.read_bytes_max
        ):
            yield part
            part = []
        part.append(chunk)
        end = after
    if part:
        yield part


def cut_rows(
    table: PieceTable, rows: npt.NDArray[np.int64], size_bytes: int
) -> Iterator[npt.NDArray[np.int64]]:
    """Cut rows into parts of about so many stored bytes each, in the order of packs and offsets.

    No chunk is cut into two.
    """
    if not len(rows):
        return
    order = rows[np.lexsort((table.offset[rows], table.pack[rows]))]
    pack, offset, stored = table.pack[order], table.offset[order], table.stored[order]
    first = np.ones(len(order), bool)
    first[1:] = (pack[1:] != pack[:-1]) | (offset[1:] != offset[:-1])
    begins = np.where(first, stored, 0).cumsum(dtype=np.uint64) - stored
    parts = begins // np.uint64(size_bytes)
    yield from np.split(order, np.flatnonzero(np.diff(parts)) + 1)
