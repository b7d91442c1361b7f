"""Recipes: tensors that no piece holds, since their bytes follow from other tensors.

A tensor of a manifest is either stored in pieces, or has a recipe. There are two kinds:

``cast``
    Each element is converted from that of another tensor: of another floating-point type, the
    same shape and the same order in memory.
``scaled``
    Each element is a code of 8 bits and the scale of the block that it is in: the first source
    holds a code per element, the second one float32 per block. Blocks are of consecutive elements
    in stored order; the last may be shorter.

What a recipe names is itself stored in pieces, so that no chain is ever followed. Tensors that no
leaf of the skeleton names, but a recipe does, are *hidden*: the codes of a tensor that was stored
in fewer bits, say. A visible tensor may be named as well: bfloat16 weights that are float32
weights, converted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Final

import msgspec

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
    """How the bytes of one tensor follow from others of the same manifest."""

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
