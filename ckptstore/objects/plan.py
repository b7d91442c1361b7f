"""The plan of a read: which pieces lie in which chunks, and which chunks one request fetches.

Pure: nothing is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ckptstore.backends.base import Capabilities
from ckptstore.format.manifest import PieceTable
from ckptstore.format.pack import CHUNK_HEADER_BYTES

__all__ = ["ChunkRead", "Span", "Want", "cut_rows", "plan_spans"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
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
    wants: tuple[Want, ...]


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


def plan_spans(table: PieceTable, wants: Sequence[Want], capabilities: Capabilities) -> list[Span]:
    """Return the fetches for `wants`: each chunk once, neighbours joined, no span too large.

    Ranges closer than ``read_gap_bytes`` are joined, since a request costs more than the gap;
    a span ends at ``read_bytes_max``, so that fetches run in parallel and memory stays bounded.
    """
    rows = np.fromiter((want.row for want in wants), np.int64, len(wants))
    order = np.lexsort((table.inner[rows], table.offset[rows], table.pack[rows]))
    spans: list[Span] = []
    chunks: list[ChunkRead] = []
    pack = -1
    for place, offset, members in _by_chunk(table, wants, order):
        row = members[0].row
        chunk = ChunkRead(
            offset=offset,
            stored_bytes=int(table.stored[row]),
            raw_bytes=int(table.slab[row]),
            wants=tuple(members),
        )
        if chunks:
            end = chunks[-1].offset + CHUNK_HEADER_BYTES + chunks[-1].stored_bytes
            size = offset + CHUNK_HEADER_BYTES + chunk.stored_bytes - chunks[0].offset
            apart = place != pack or not 0 <= offset - end <= capabilities.read_gap_bytes
            if apart or size > capabilities.read_bytes_max:
                spans.append(Span(pack=table.packs[pack], chunks=tuple(chunks)))
                chunks = []
        chunks.append(chunk)
        pack = place
    if chunks:
        spans.append(Span(pack=table.packs[pack], chunks=tuple(chunks)))
    return spans


def _by_chunk(
    table: PieceTable, wants: Sequence[Want], order: npt.NDArray[np.int64]
) -> Iterator[tuple[int, int, list[Want]]]:
    """Yield ``(place of the pack, offset, wants)`` per chunk, in order of offsets."""
    current: tuple[int, int] | None = None
    members: list[Want] = []
    for at in order:
        want = wants[at]
        here = (int(table.pack[want.row]), int(table.offset[want.row]))
        if current is not None and here != current:
            yield (*current, members)
            members = []
        current = here
        members.append(want)
    if current is not None:
        yield (*current, members)


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
