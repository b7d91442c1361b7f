"""Tensors that follow from others which the same call reads whole: made while these are read.

A piece of the source is converted by the thread that has just checked it, while the processor's
cache still holds it, and nothing is read a second time. What is made is compared with the digest
of the recipe, like any tensor that is made whole: its pieces are digested in their order, by
whichever thread has the next one.

Since the digest decides, a :data:`~ckptstore.encodings.casts.Rounding` is used untried at first:
what it makes of a NaN is not defined, and where the digest is another one, the tensor is made once
more by the definition. Needs no torch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from ckptstore.encodings.casts import Rounding
from ckptstore.encodings.coding import cast_elements
from ckptstore.format.dtypes import ITEM_BYTES
from ckptstore.format.manifest import Manifest
from ckptstore.hashing import Hasher
from ckptstore.prefault import prefault

# Bytes that are made again at once. Source: stay in cache; whole elements of any type.
_AGAIN_BYTES: Final = 1 << 20


def follows(manifest: Manifest, index: int) -> bool:
    """Return whether a tensor follows from pieces of one other tensor, each by itself."""
    record = manifest.tensors[index]
    return record.recipe is not None and record.recipe.kind == "cast" and record.nbytes > 0


class DerivedDecode:
    """One such tensor. Any threads may make its pieces, in any order, each piece once.

    Parameters
    ----------
    index
        Its record: :func:`follows`.
    ends
        Where the pieces of its source end, in bytes.
    out
        Memory for all of it.
    rounding
        Rounds to bfloat16 faster than NumPy; None for NumPy.
    """

    def __init__(
        self,
        manifest: Manifest,
        index: int,
        ends: npt.NDArray[np.int64],
        out: memoryview,
        rounding: Rounding | None = None,
    ) -> None:
        record = manifest.tensors[index]
        recipe = record.recipe
        assert recipe is not None  # noqa: S101  # for the type checker: the caller has looked
        (self.source,) = recipe.sources
        self.index = index
        self.nbytes: int = record.nbytes
        self._digest = recipe.digest
        self._dtype, self._given = record.dtype, manifest.tensors[self.source].dtype
        rounds = (self._given, self._dtype) == ("float32", "bfloat16")
        self._rounding = rounding
        self._rough = rounding if rounds else None
        places = ends // ITEM_BYTES[self._given] * ITEM_BYTES[record.dtype]
        self._ends: list[int] = places.tolist()
        self._out = out
        self._lock = threading.Lock()
        self._made: set[int] = set()
        """Pieces that are made, and not yet digested."""
        self._next = 0
        """The first piece that is not digested, or being so."""
        self._busy = False
        self._hasher = Hasher()

    def taking(self, piece: int) -> Callable[[memoryview], None]:
        """Return what is to be called with the bytes of a piece of the source."""
        return partial(self._make, piece)

    def made(self, codes: memoryview) -> Hasher:
        """Return the digest of all of it; every piece must have been made.

        Parameters
        ----------
        codes
            All bytes of the source, checked.
        """
        assert self._next == len(self._ends)  # noqa: S101 - or the reading had failed
        if self._rough is not None and self._hasher.digest() != self._digest:
            self._hasher = Hasher()
            for start in range(0, len(self._out), _AGAIN_BYTES):
                part = self._out[start : start + _AGAIN_BYTES]
                item, given = ITEM_BYTES[self._dtype], ITEM_BYTES[self._given]
                at = start // item * given
                self._exactly(codes[at : at + len(part) // item * given], part)
                self._hasher.update(part)
        return self._hasher

    def _exactly(self, codes: memoryview, out: memoryview) -> None:
        cast_elements(self._given, self._dtype, codes, out, self._rounding)

    def _make(self, piece: int, codes: memoryview) -> None:
        out = self._part(piece)
        prefault(out)
        if not self._roughly(codes, out):
            self._exactly(codes, out)
        with self._lock:
            self._made.add(piece)
            if self._busy:  # another thread is at it, and will see this one
                return
            self._busy = True
        while (turn := self._turn()) is not None:
            self._hasher.update(self._part(turn))

    def _roughly(self, codes: memoryview, out: memoryview) -> bool:
        """Make a piece the quick way, which takes writable and aligned memory; False if not."""
        if self._rough is None:
            return False
        given, made = np.frombuffer(codes, np.float32), np.frombuffer(out, np.uint16)
        plain = given.flags.writeable and given.flags.aligned and made.flags.aligned
        if plain:
            self._rough(given, made)
        return plain

    def _turn(self) -> int | None:
        """Return the next piece that can be digested; None lets go of the right to do so."""
        with self._lock:
            if self._next not in self._made:
                self._busy = False
                return None
            self._made.remove(self._next)
            self._next += 1
            return self._next - 1

    def _part(self, piece: int) -> memoryview:
        return self._out[self._ends[piece - 1] if piece else 0 : self._ends[piece]]
