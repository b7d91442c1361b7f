"""Lookup of pieces that are stored already, for sharing; and tables made of places."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ckptstore.format.manifest import COLUMNS, PieceTable
from ckptstore.format.tables import NO_BASE

Ids = npt.NDArray[np.uint8]
NUMBERS: Final = np.dtype([*COLUMNS.items()])
"""A row of a :class:`PieceTable` without the id, by the names of its columns."""


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
    base: Base | None = None
    """What the chunk refers to, if it is a delta."""

    @property
    def packs(self) -> tuple[str, ...]:
        """Return the packs that are needed to have the piece."""
        return (self.pack,) if self.base is None else (self.pack, self.base.location.pack)


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """The piece that a delta refers to: as long as the piece itself, and no delta."""

    piece_id: bytes
    location: Location


def location_of(table: PieceTable, row: int) -> Location:
    """Return where the piece in one row lies, and what it refers to if it is a delta."""
    base, (pack, offset) = table.base_of(row), table.chunk_of(row)
    return Location(
        pack=pack,
        offset=offset,
        stored_bytes=int(table.stored[row]),
        inner=int(table.inner[row]),
        slab_bytes=int(table.slab[row]),
        base=None if base is None else base_of(table, base),
    )


def base_of(table: PieceTable, row: int) -> Base:
    """Return the piece in one row as what a delta refers to; it is none itself."""
    return Base(piece_id=table.ids[row].tobytes(), location=location_of(table, row))


def placed_table(ids: Ids, raw: npt.NDArray[np.uint32], places: Iterable[Location]) -> PieceTable:
    """Return the table of pieces that lie at `places`, with what deltas refer to behind them.

    Parameters
    ----------
    ids, raw
        Columns of the rows; see :class:`PieceTable`.
    places
        One for each row. If a base is stored more than once, its first place counts.
    """
    packs: dict[str, int] = {}
    rows: list[tuple[int, ...]] = []
    bases: dict[int, Base] = {}
    for row, (length, place) in enumerate(zip(raw.tolist(), places, strict=True)):
        rows.append(numbers_of(length, place, packs))
        if place.base is not None:
            bases[row] = place.base
    return table_of(ids, np.array(rows, NUMBERS), packs, bases)


def remap(table: PieceTable, rows: Sequence[int], place: Callable[[int], Location]) -> PieceTable:
    """Return the pieces of some rows in the places that they have elsewhere.

    Parameters
    ----------
    rows
        Pieces of tensors; what deltas refer to comes behind them, as far as it is still needed.
    place
        Gives the new place of the piece in a row of `table`.
    """
    chosen = np.fromiter(rows, np.int64, len(rows))
    return placed_table(table.ids[chosen], table.raw[chosen], map(place, rows))


def numbers_of(raw: int, place: Location, packs: dict[str, int]) -> tuple[int, ...]:
    """Return the numbers of a row by its length and place; a new pack gets the next number."""
    pack = packs.setdefault(place.pack, len(packs))
    return (raw, pack, place.offset, place.stored_bytes, place.inner, place.slab_bytes)


def table_of(
    ids: Ids, numbers: npt.NDArray[Any], packs: dict[str, int], bases: Mapping[int, Base]
) -> PieceTable:
    """Return the table of pieces of tensors, with what deltas refer to behind them.

    Parameters
    ----------
    numbers
        Of each row: see :func:`numbers_of`.
    packs
        Ids of packs to their numbers; is added to.
    bases
        By row. If a base is stored more than once, its first place counts.
    """
    places: dict[bytes, int] = {}
    more: list[tuple[int, ...]] = []
    column = [NO_BASE] * len(ids)
    for row, base in sorted(bases.items()):
        if base.piece_id not in places:
            places[base.piece_id] = len(ids) + len(more)
            more.append(numbers_of(int(numbers["raw"][row]), base.location, packs))
        column[row] = places[base.piece_id]
    numbers = np.concatenate((numbers, np.array(more, NUMBERS)))
    base_ids = np.frombuffer(b"".join(places), np.uint8).reshape(-1, 32)
    return PieceTable(
        ids=np.concatenate((ids, base_ids)),
        packs=list(packs),
        base=np.array(column + [NO_BASE] * len(more), np.uint32) if more else None,
        **{name: np.ascontiguousarray(numbers[name]) for name in COLUMNS},
    )


class KnownPieces:
    """Looks pieces up by id in the tables of a few versions: the parent, usually.

    Holds 16 bytes a piece besides the tables. Immutable, so any thread may look.

    Parameters
    ----------
    without
        Ids of packs that may not be shared, since they were condemned.
    deltas
        Whether pieces may be shared that are differences to others.
    """

    def __init__(
        self, tables: Sequence[PieceTable], *, without: Collection[str] = (), deltas: bool = True
    ) -> None:
        self._deltas = deltas
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
            if location is None or not self._without.isdisjoint(location.packs):
                continue
            if self._deltas or location.base is None:
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
        """Return where the first piece of this id and size lies."""
        table = self._table
        key = np.frombuffer(piece_id, np.uint64, 1)[0]
        at = int(self._keys.searchsorted(key))
        while at < len(self._keys) and self._keys[at] == key:
            row = int(self._order[at])
            if table.ids[row].tobytes() == piece_id and int(table.raw[row]) == raw_bytes:
                return location_of(table, row)
            at += 1
        return None
