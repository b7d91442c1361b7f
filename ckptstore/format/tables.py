"""What a manifest holds in memory: a record per tensor, and a table of the pieces of them all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptstore.format import bases
from ckptstore.format.blocks import Blocks
from ckptstore.format.recipes import Recipe

__all__ = ["PieceTable", "TensorRecord"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRecord:
    """One tensor: what it is, without where its bytes lie."""

    dtype: str
    """torch's name without ``torch.``"""
    shape: tuple[int, ...]
    order: tuple[int, ...] | None
    """The dimensions from outermost to innermost in memory; None for row-major."""
    role: str
    nbytes: int
    blocks: Blocks | None = None
    """The boxes that it is stored in, one after the other; None where it is stored as one."""
    recipe: Recipe | None = None
    """How its bytes follow from other tensors; it has no pieces then."""

    @property
    def identity(self) -> tuple[object, ...]:
        """What tells, with the ids of its pieces, whether two tensors are equal; for digests.

        That of a tensor with a recipe holds places of its sources: it tells within one manifest,
        or between manifests of the same tensors.
        """
        plain = (self.dtype, self.shape, self.order, self.nbytes)
        if self.recipe is not None:
            return (*plain, self.recipe.encode(0))
        return plain if self.blocks is None else (*plain, self.blocks.encode())


class PieceTable:
    """Where the pieces of a version lie: one row per piece, in the order of the tensors.

    Behind them come the pieces that deltas refer to, if there are any.

    Attributes
    ----------
    ids
        ``uint8[pieces, 32]``; BLAKE3-256 of each piece.
    raw, stored, inner, slab
        ``uint32[pieces]``, bytes; see the module.
    pack
        ``uint32[pieces]``; places in `packs`.
    offset
        ``uint64[pieces]``, bytes.
    packs
        Ids of packs, 32 hex digits each.
    base
        ``uint32[pieces]``; the row that a delta refers to, ``NO_BASE`` for what is none. None where
        nothing is a delta.
    """

    __slots__ = ("base", "ids", "inner", "offset", "pack", "packs", "raw", "slab", "stored")

    def __init__(
        self,
        *,
        ids: npt.NDArray[np.uint8],
        raw: npt.NDArray[np.uint32],
        pack: npt.NDArray[np.uint32],
        offset: npt.NDArray[np.uint64],
        stored: npt.NDArray[np.uint32],
        inner: npt.NDArray[np.uint32],
        slab: npt.NDArray[np.uint32],
        packs: Sequence[str],
        base: npt.NDArray[np.uint32] | None = None,
    ) -> None:
        self.base = base
        self.ids = ids
        self.raw = raw
        self.pack = pack
        self.offset = offset
        self.stored = stored
        self.inner = inner
        self.slab = slab
        self.packs = tuple(packs)

    def __len__(self) -> int:
        """Return the number of pieces, those that deltas refer to among them."""
        return len(self.raw)

    def base_of(self, row: int) -> int | None:
        """Return the row that a delta refers to; None for a piece that is stored by itself."""
        if self.base is None or (base := int(self.base[row])) == bases.NO_BASE:
            return None
        return base

    def take(self, rows: npt.NDArray[Any] | Sequence[int]) -> PieceTable:
        """Return some rows, over the packs that they are in and no others.

        Parameters
        ----------
        rows
            Pieces of tensors; what they refer to comes along, behind them.
        """
        chosen, base = bases.taking(self.base, rows)
        used, pack = np.unique(self.pack[chosen], return_inverse=True)
        return PieceTable(
            ids=self.ids[chosen],
            raw=self.raw[chosen],
            pack=pack.astype(np.uint32),
            offset=self.offset[chosen],
            stored=self.stored[chosen],
            inner=self.inner[chosen],
            slab=self.slab[chosen],
            packs=[self.packs[int(place)] for place in used],
            base=base,
        )
