"""Tables of a manifest in memory: a record per tensor, and the pieces of them all.

A piece may be stored as its difference to another one, its *base*. The base need not belong to any
tensor of the version: it is a piece of an older one, most likely. So a manifest lists the bases
that it needs behind the pieces of its tensors, as one more tensor of role ``base`` that no leaf
names; in memory these are the rows of the table after those of the last tensor. Packs of bases are
thus named by the manifest like any others, and live as long as a child does. A base is never a
delta itself: a load takes one step.

A tensor of a manifest is either stored in pieces, or has a recipe: its bytes follow from other
tensors. There are two kinds:

``cast``
    Each element is converted from that of another tensor: of another floating-point type, the
    same shape and the same order in memory.
``scaled``
    Each element is a code of 8 bits and the scale of the block that it is in: the first source
    holds a code per element, the second one float32 per block. Blocks are of consecutive elements
    in stored order; the last may be shorter.

The sources of a recipe are stored in pieces, so that no chain is ever followed. Tensors that no
leaf of the skeleton names, but a recipe does, are *hidden*: the codes of a tensor that was stored
in fewer bits, say. A visible tensor may be named as well: bfloat16 weights that are float32
weights, converted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from ckptstore import limits
from ckptstore.format.blocks import Blocks
from ckptstore.format.dtypes import bytes_of

NO_BASE: Final = 0xFFFF_FFFF
"""In the column ``base``: the piece is stored by itself."""
BASE_ROLE: Final = "base"
"""Of the record that stands for the bases in a manifest."""

Column = npt.NDArray[np.uint32]


def bases_problem(base: Column, pieces: PieceTable, *, own: int) -> str:
    """Return why the bases of a table cannot be followed; empty if they can.

    Parameters
    ----------
    base
        Its column of bases, which is there.
    own
        How many rows are pieces of tensors; the others are the bases.
    """
    raw, ids = pieces.raw, pieces.ids
    if bool((base[own:] != NO_BASE).any()):
        return "a base that is a delta itself"
    rows = np.flatnonzero(base[:own] != NO_BASE)
    named = base[rows].astype(np.int64)
    if own == len(base) or not len(rows):
        return "no base, or none that is needed"
    if int(named.min()) < own or int(named.max()) >= len(base):
        return "a base that is not there"
    if len(np.unique(named)) != len(base) - own:
        return "a base that nothing needs"
    if bool((raw[rows] != raw[named]).any()):
        return "a base of another length"
    if bool((pieces.inner[rows] != 0).any()) or bool((pieces.slab[rows] != raw[rows]).any()):
        return "a delta that is a part of a chunk"
    if bool((ids[rows] == ids[named]).all(axis=1).any()):
        return "a delta of a piece to itself"
    return ""


def taking(
    base: Column | None, rows: npt.NDArray[Any] | Sequence[int]
) -> tuple[Any, Column | None]:
    """Return which rows a part of a table needs, bases behind the others, and its column ``base``.

    Parameters
    ----------
    rows
        Pieces of tensors, in the order that they are to have.
    """
    wanted = np.asarray(rows, np.int64)
    if base is None:
        return wanted, None
    named = base[wanted]
    deltas = named != NO_BASE
    bases, places = np.unique(named[deltas], return_inverse=True)
    if not len(bases):
        return wanted, None
    column = np.full(len(wanted) + len(bases), NO_BASE, np.uint32)
    column[np.flatnonzero(deltas)] = places.astype(np.uint32) + np.uint32(len(wanted))
    return np.concatenate((wanted, bases.astype(np.int64))), column


CASTS: Final = frozenset(
    {"float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"}
)
"""Types between which a cast converts, to the nearest value, ties to even."""
SCALED: Final = frozenset({"float64", "float32", "float16", "bfloat16"})
"""Types that codes and scales stand for."""
CODES: Final[Mapping[str, str]] = {
    "linear": "int8",
    "dynamic-signed": "uint8",
    "dynamic-unsigned": "uint8",
}
"""How a code becomes a number, and the type that holds codes. Places in it are stored."""
_KINDS: Final = ("cast", "scaled")
_DIGEST_BYTES: Final = 32

Stored = tuple[
    int,
    int,
    Annotated[tuple[int, ...], msgspec.Meta(max_length=2)],
    int,
    int,
    Annotated[bytes, msgspec.Meta(max_length=2 * _DIGEST_BYTES)],
    Annotated[tuple[float | None, ...], msgspec.Meta(max_length=4)],
]
"""``[place, kind, sources, code, block, digests, errors]``; see :meth:`Recipe.encode`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Derivation of the bytes of one tensor from others of the same manifest."""

    kind: str
    """``cast`` or ``scaled``."""
    sources: tuple[int, ...]
    """Places of records: of a cast ``(values,)``, of a scaled one ``(codes, scales)``."""
    code: str = ""
    """Of a scaled one: a key of :data:`CODES`. Of a cast empty."""
    block: int = 0
    """Of a scaled one: elements that share a scale. Of a cast 0."""
    exact: bool
    """Whether what was saved comes back bit for bit."""
    digest: bytes
    """BLAKE3-256 of the bytes that come back, in stored order."""
    given: bytes
    """The same of the bytes that were saved. Equal if it is exact."""
    max_abs: float = 0.0
    """Largest difference of an element to what was saved, over the finite ones."""
    rel_l2: float = 0.0
    """Root of the sum of squared differences, over that of the squares of what was saved."""
    max_abs_bound: float | None = None
    """What was allowed when it was saved; None for anything."""
    rel_l2_bound: float | None = None

    def encode(self, place: int) -> Stored:
        """Return the stored form.

        Parameters
        ----------
        place
            Of the tensor among those of the manifest.
        """
        code = 0 if self.kind == "cast" else list(CODES).index(self.code)
        digests = self.digest if self.exact else self.digest + self.given
        bounds = (self.max_abs_bound, self.rel_l2_bound)
        errors = () if self.exact else (self.max_abs, self.rel_l2, *bounds)
        return place, _KINDS.index(self.kind), self.sources, code, self.block, digests, errors

    @classmethod
    def decode(cls, stored: Stored) -> Recipe | None:
        """Return what :meth:`encode` made; None if it cannot be that.

        Says nothing of whether it fits its tensor: that is
        :func:`ckptstore.format.tables.recipe_problem`.
        """
        _, kind, sources, code, block, digests, errors = stored
        exact = len(digests) == _DIGEST_BYTES
        if (
            not 0 <= kind < len(_KINDS)
            or not 0 <= code < (len(CODES) if kind else 1)
            or len(digests) not in (_DIGEST_BYTES, 2 * _DIGEST_BYTES)
            or len(errors) != (0 if exact else 4)
        ):
            return None
        max_abs, rel_l2, max_abs_bound, rel_l2_bound = errors or (0.0, 0.0, None, None)
        if max_abs is None or rel_l2 is None:
            return None
        return cls(
            kind=_KINDS[kind],
            sources=sources,
            code=list(CODES)[code] if kind else "",
            block=block,
            exact=exact,
            digest=digests[:_DIGEST_BYTES],
            given=digests[-_DIGEST_BYTES:],
            max_abs=max_abs,
            rel_l2=rel_l2,
            max_abs_bound=max_abs_bound,
            rel_l2_bound=rel_l2_bound,
        )

    def moved(self, places: Mapping[int, int]) -> Recipe:
        """Return the same over sources that have other places now."""
        return replace(self, sources=tuple(places[place] for place in self.sources))


class TensorRecord(msgspec.Struct, frozen=True, kw_only=True):
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

    def replace(self, **changes: Any) -> TensorRecord:  # noqa: ANN401 - of these fields
        """Return the same tensor with some fields changed."""
        return msgspec.structs.replace(self, **changes)

    @property
    def identity(self) -> tuple[object, ...]:
        """The fields that, with the ids of its pieces, make two tensors equal; for digests.

        That of a tensor with a recipe holds places of its sources: it tells within one manifest,
        or between manifests of the same tensors.
        """
        plain = (self.dtype, self.shape, self.order, self.nbytes)
        if self.recipe is not None:
            return (*plain, self.recipe.encode(0))
        return plain if self.blocks is None else (*plain, self.blocks.encode())


@dataclass(slots=True, kw_only=True, eq=False, repr=False)
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

    ids: npt.NDArray[np.uint8]
    raw: Column
    pack: Column
    offset: npt.NDArray[np.uint64]
    stored: Column
    inner: Column
    slab: Column
    packs: Sequence[str]
    base: Column | None = None

    def __post_init__(self) -> None:
        """Take the packs of any sequence."""
        self.packs = tuple(self.packs)

    def __len__(self) -> int:
        """Return the number of pieces, those that deltas refer to among them."""
        return len(self.raw)

    def base_of(self, row: int) -> int | None:
        """Return the row that a delta refers to; None for a piece that is stored by itself."""
        if self.base is None or (base := int(self.base[row])) == NO_BASE:
            return None
        return base

    def chunk_of(self, row: int) -> tuple[str, int]:
        """Return the pack and the offset of the chunk that a piece lies in."""
        return self.packs[int(self.pack[row])], int(self.offset[row])

    def take(self, rows: npt.NDArray[Any] | Sequence[int]) -> PieceTable:
        """Return some rows, over the packs that they are in and no others.

        Parameters
        ----------
        rows
            Pieces of tensors; what they refer to comes along, behind them.
        """
        chosen, base = taking(self.base, rows)
        used, pack = np.unique(self.pack[chosen], return_inverse=True)
        names = ("ids", "raw", "offset", "stored", "inner", "slab")
        columns: dict[str, Any] = {name: getattr(self, name)[chosen] for name in names}
        packs = [self.packs[int(place)] for place in used]
        return PieceTable(**columns, pack=pack.astype(np.uint32), packs=packs, base=base)


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
