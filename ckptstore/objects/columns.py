"""A table of pieces while a save fills it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ckptstore.format.manifest import PieceTable
from ckptstore.objects.index import Base, Location, with_bases

__all__ = ["Columns"]


@dataclass(slots=True)
class Columns:
    """The rows of the table, filled by the workers: each row by one of them."""

    ids: npt.NDArray[np.uint8]
    raw: npt.NDArray[np.uint32]
    pack: npt.NDArray[np.uint32]
    offset: npt.NDArray[np.uint64]
    stored: npt.NDArray[np.uint32]
    inner: npt.NDArray[np.uint32]
    slab: npt.NDArray[np.uint32]
    is_new: npt.NDArray[np.bool_]
    stored_new: npt.NDArray[np.int64]
    """As in :class:`ckptstore.objects.piece_writer.Written`, `is_new` too."""
    packs: dict[str, int] = field(default_factory=dict)
    """Ids of packs to their places in the table."""
    bases: dict[int, Base] = field(default_factory=dict)
    """What rows refer to that are deltas."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Guards `packs` and `bases`."""

    @classmethod
    def empty(cls, count: int) -> Columns:
        """Return columns of so many rows, all zero."""
        return cls(
            ids=np.zeros((count, 32), np.uint8),
            raw=np.zeros(count, np.uint32),
            pack=np.zeros(count, np.uint32),
            offset=np.zeros(count, np.uint64),
            stored=np.zeros(count, np.uint32),
            inner=np.zeros(count, np.uint32),
            slab=np.zeros(count, np.uint32),
            is_new=np.zeros(count, np.bool_),
            stored_new=np.zeros(count, np.int64),
        )

    def fill(self, slot: int, piece_id: bytes, raw: int, place: Location) -> None:
        """Say in row `slot` that a piece of `raw` bytes lies in a place."""
        with self.lock:
            self.pack[slot] = self.packs.setdefault(place.pack, len(self.packs))
            if place.base is not None:
                self.bases[slot] = place.base
        self.ids[slot] = np.frombuffer(piece_id, np.uint8)
        self.raw[slot] = raw
        self.offset[slot] = place.offset
        self.stored[slot] = place.stored_bytes
        self.inner[slot] = place.inner
        self.slab[slot] = place.slab_bytes

    def repeat(self, slot: int, of: int) -> None:
        """Give row `slot` the place of row `of`: the same bytes occur twice in one save."""
        for column in (self.ids, self.raw, self.pack, self.offset, self.stored, self.inner):
            column[slot] = column[of]
        self.slab[slot] = self.slab[of]
        if of in self.bases:
            self.bases[slot] = self.bases[of]

    def table(self) -> PieceTable:
        """Return the table, once every row is filled."""
        table = PieceTable(
            ids=self.ids,
            raw=self.raw,
            pack=self.pack,
            offset=self.offset,
            stored=self.stored,
            inner=self.inner,
            slab=self.slab,
            packs=list(self.packs),
        )
        return with_bases(table, self.bases)
