"""What a manifest holds in memory: a record per tensor, and a table of the pieces of them all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptstore import limits
from ckptstore.format import bases
from ckptstore.format.blocks import Blocks
from ckptstore.format.dtypes import bytes_of
from ckptstore.format.recipes import CASTS, CODES, SCALED, Recipe


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


def recipe_problem(place: int, records: Sequence[TensorRecord]) -> str:
    """Return why the recipe of a record cannot be followed; empty if it can, or if it has none.

    Parameters
    ----------
    place
        Of the record.
    records
        All of the manifest.
    """
    record = records[place]
    recipe = record.recipe
    if recipe is None:
        return ""
    wanted = 1 if recipe.kind == "cast" else 2
    if len(recipe.sources) != wanted or len(set(recipe.sources)) != wanted:
        return f"a {recipe.kind} of {len(recipe.sources)} sources"
    if not all(0 <= source < len(records) for source in recipe.sources):
        return "a source that is not there"
    sources = [records[source] for source in recipe.sources]
    if any(source.recipe is not None for source in sources):
        return "a source that has a recipe itself"
    if any(one.blocks is not None for one in (record, *sources)):
        return "a tensor that is stored in boxes"
    if (sources[0].shape, sources[0].order) != (record.shape, record.order):
        return "a source of another shape or order"
    if record.dtype not in (CASTS if recipe.kind == "cast" else SCALED):
        return f"a {recipe.kind} to {record.dtype}"
    if bytes_of(record.dtype, record.shape) != record.nbytes:
        return "bytes that are not those of its dtype and shape"
    return _errors_problem(recipe) or (
        _cast_problem(record, recipe, sources[0])
        if recipe.kind == "cast"
        else _scaled_problem(record, recipe, sources)
    )


def _cast_problem(record: TensorRecord, recipe: Recipe, source: TensorRecord) -> str:
    if source.dtype not in CASTS or source.dtype == record.dtype:
        return f"a cast from {source.dtype} to {record.dtype}"
    if recipe.code or recipe.block:
        return "a cast with codes"
    if bytes_of(source.dtype, source.shape) != source.nbytes:
        return "a source whose bytes are not those of its dtype and shape"
    return ""


def _scaled_problem(record: TensorRecord, recipe: Recipe, sources: Sequence[TensorRecord]) -> str:
    codes, scales = sources
    count = math.prod(record.shape)
    if not limits.RECIPE_BLOCK_MIN <= recipe.block <= limits.RECIPE_BLOCK_MAX:
        return f"blocks of {recipe.block} elements"
    if codes.dtype != CODES.get(recipe.code) or codes.nbytes != count:
        return f"{recipe.code!r} codes of {codes.dtype}, {codes.nbytes} bytes for {count} elements"
    blocks = -(-count // recipe.block)
    fits = (scales.dtype, scales.shape, scales.order) == ("float32", (blocks,), None)
    if not fits or scales.nbytes != 4 * blocks:
        return f"scales of {scales.dtype}{list(scales.shape)} for {blocks} blocks"
    return ""


def _errors_problem(recipe: Recipe) -> str:
    numbers = (recipe.max_abs, recipe.rel_l2, recipe.max_abs_bound, recipe.rel_l2_bound)
    if not all(number is None or 0 <= number < math.inf for number in numbers):
        return f"errors of {numbers}"
    if recipe.exact and (recipe.digest != recipe.given or numbers != (0, 0, None, None)):
        return "an error, though it is exact"
    return ""
