"""Which pieces are known already, and where: the lookup behind sharing."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ckptstore.format.manifest import PieceTable

__all__ = ["KnownPieces", "Location"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """Where the bytes of one piece lie."""

    pack: str
    """Id of the pack, 32 hex digits."""
    offset: int
    """Of the chunk's header in the pack, in bytes."""
    stored_bytes: int
    inner: int
    """Where the piece begins in the decoded chunk, in bytes."""
    slab_bytes: int
    """Length of the decoded chunk."""


class KnownPieces:
    """Looks pieces up by id in the tables of a few versions: the parent, usually.

    Holds 16 bytes a piece besides the tables. Immutable, so any thread may look.

    Parameters
    ----------
    without
        Ids of packs that may not be shared, since they were condemned.
    """

    def __init__(self, tables: Sequence[PieceTable], *, without: Collection[str] = ()) -> None:
        self._tables = [_Sorted(table) for table in tables if len(table)]
        self._without = frozenset(without)

    def find(self, piece_id: bytes, raw_bytes: int) -> Location | None:
        """Return where the piece of this id and length lies, or None.

        Parameters
        ----------
        piece_id
            BLAKE3-256 of the piece, 32 bytes.
        raw_bytes
            Its length: a second witness that costs nothing.
        """
        for table in self._tables:
            location = table.find(piece_id, raw_bytes)
            if location is not None and location.pack not in self._without:
                return location
        return None


class _Sorted:
    """One table with its ids sorted by their first 8 bytes."""

    __slots__ = ("_keys", "_order", "_table")

    def __init__(self, table: PieceTable) -> None:
        keys: npt.NDArray[np.uint64] = np.ascontiguousarray(table.ids).view(np.uint64)[:, 0]
        self._order = np.argsort(keys, kind="stable").astype(np.uint32)
        self._keys = keys[self._order]
        self._table = table

    def find(self, piece_id: bytes, raw_bytes: int) -> Location | None:
        table = self._table
        key = np.frombuffer(piece_id, np.uint64, 1)[0]
        at = int(self._keys.searchsorted(key))
        while at < len(self._keys) and self._keys[at] == key:
            row = int(self._order[at])
            if table.ids[row].tobytes() == piece_id and int(table.raw[row]) == raw_bytes:
                return Location(
                    pack=table.packs[int(table.pack[row])],
                    offset=int(table.offset[row]),
                    stored_bytes=int(table.stored[row]),
                    inner=int(table.inner[row]),
                    slab_bytes=int(table.slab[row]),
                )
            at += 1
        return None
