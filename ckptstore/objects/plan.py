"""The plan of a read: which pieces lie in which chunks, and which chunks one request fetches.

Pure: nothing is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ckptstore import limits
from ckptstore.backends.base import Capabilities
from ckptstore.format.manifest import PieceTable
from ckptstore.format.pack import CHUNK_HEADER_BYTES
from ckptstore.objects.joining import join_chunks

_RANGES_A_THREAD: Final = 4
"""Ranges that each thread gets at least, if the longest ones are too few to read."""
_RANGE_BYTES_MIN: Final = 2 * limits.MIB
"""Below, requests take longer than their bytes."""


class ReadItem(NamedTuple):
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


Items = Sequence[ReadItem]


class ChunkRead(NamedTuple):
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


def plan_spans(table: PieceTable, items: Items, capabilities: Capabilities) -> list[Span]:
    """Return the fetches for `items`: each chunk once, neighbours joined, no span too large.

    So that fetches run in parallel and memory stays bounded: see :func:`join_chunks`.
    """
    rows = np.fromiter((item.row for item in items), np.int64, len(items))
    order = np.lexsort((table.inner[rows], table.offset[rows], table.pack[rows]))
    rows = rows[order]
    columns = (table.pack, table.offset, table.stored, table.slab)
    ordered = zip(order.tolist(), *(column[rows].tolist() for column in columns), strict=True)
    spans: list[Span] = []
    for pack, found in groupby(ordered, itemgetter(1)):
        chunks = (
            ChunkRead(offset, stored, raw, tuple([items[at] for at, *_ in members]))
            for (offset, stored, raw), members in groupby(found, itemgetter(2, 3, 4))
        )
        joined = join_chunks(chunks, capabilities)
        spans += (Span(pack=table.packs[pack], chunks=tuple(part)) for part in joined)
    return spans


def finer(
    capabilities: Capabilities, table: PieceTable, items: Items, threads: int = 8
) -> Capabilities:
    """Return capabilities whose ranges are so short that each of some threads gets a few of them.

    Loads leave the default, for any number of threads: a request takes 4 ms of the interpreter,
    which counts for more than an even end (docs/design/0025-width.md).
    """
    rows = np.unique(np.fromiter((item.row for item in items), np.int64, len(items)))
    return shorter(capabilities, int(table.stored[rows].sum()), threads)


def shorter(capabilities: Capabilities, total: int, threads: int) -> Capabilities:
    """Return capabilities with such ranges for a read of `total` bytes."""
    share = total // (_RANGES_A_THREAD * threads)
    most = min(capabilities.read_bytes_max, max(share, _RANGE_BYTES_MIN))
    return replace(capabilities, read_bytes_max=most)


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
