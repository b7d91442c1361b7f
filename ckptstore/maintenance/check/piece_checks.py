"""What is checked of single packs and pieces, by whoever checks them: no version, no report."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ckptstore import limits
from ckptstore.backends.base import Backend
from ckptstore.errors import CkptStoreError, FormatError, IntegrityError, NotFoundError
from ckptstore.format.manifest import PieceTable
from ckptstore.hashing import xxh3_64
from ckptstore.objects.pack_index import read_index

PieceKey = tuple[str, int, int, bytes]
"""Pack, offset of the chunk, place in the decoded chunk, id: one piece where it lies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One of some equal parts of all chunks.

    By a digest of pack and offset: each chunk is in exactly one part, for good, whoever asks.
    """

    parts: int
    part: int
    """0 to ``parts - 1``."""

    def holds(self, pack: str, offset: int) -> bool:
        """Say whether a chunk is in this part."""
        return xxh3_64(f"{pack} {offset}".encode()) % self.parts == self.part


def frame_problem(backend: Backend, pack: str, size_bytes: int) -> CkptStoreError | None:
    """Return what is wrong with header, index or trailer of a pack: a rebuild needs them, no load.

    Raises
    ------
    StorageError
        The storage failed.
    """
    try:
        read_index(backend, pack, size_bytes)
    except (IntegrityError, FormatError, NotFoundError) as error:
        return error
    return None


def why_lost(key: PieceKey, error: CkptStoreError) -> str:
    """Return what is said of a piece that could not be read."""
    cause = error.__cause__
    why = cause.message if isinstance(cause, CkptStoreError) else error.message
    return f"pack {key[0]}, chunk at byte {key[1]}: {why}"


def piece_key(table: PieceTable, row: int) -> PieceKey:
    """Return the key of the piece in one row."""
    return (
        table.packs[int(table.pack[row])],
        int(table.offset[row]),
        int(table.inner[row]),
        table.ids[row].tobytes(),
    )


def batches(table: PieceTable) -> Iterator[range]:
    """Cut the rows of a table into ranges of at most ``VERIFY_BATCH_BYTES``, one row at least."""
    ends = np.cumsum(table.raw, dtype=np.uint64)
    start = 0
    while start < len(table):
        before = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, before + limits.VERIFY_BATCH_BYTES, "right"))
        stop = max(stop, start + 1)
        yield range(start, stop)
        start = stop
