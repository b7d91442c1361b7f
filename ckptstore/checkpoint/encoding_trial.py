"""The trial of a tensor in a lossy form: its facts, the error that it would have, its recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np

from ckptstore import limits
from ckptstore.checkpoint.encoded_sources import Elements, parts_of, torn
from ckptstore.encodings.casts import raw_dtype
from ckptstore.encodings.coding import Difference, Form, ValueRange, decode_elements
from ckptstore.encodings.encoding import Encoding
from ckptstore.encodings.encoding_rules import loses_small
from ckptstore.format.manifest import Manifest, TensorRecord
from ckptstore.format.tables import Recipe
from ckptstore.hashing import Hasher, PieceChecksums, xxh3_64
from ckptstore.objects.sources import Source

# Elements that are looked at together. Source: as the step of the encodings, in cache.
_STEP: Final = 1 << 16


Key: TypeAlias = "tuple[bytes, str, tuple[int, ...], tuple[int, ...] | None, str, str, int, str]"
"""What was given, what it is, and the form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFacts:
    """Digest, range and checksums of a tensor."""

    given: bytes
    """BLAKE3-256 of its bytes."""
    seen: ValueRange
    steps: Sequence[int]
    """XXH3-64 of each step: what :func:`measure` must find again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """The tensor that a form gives back, and the pieces that it stores."""

    digest: bytes
    """BLAKE3-256 of the bytes that come back."""
    difference: Difference
    pieces: tuple[Sequence[int], Sequence[int]]
    """XXH3-64 of each piece of the codes, and of the scales; of a cast the latter are none."""


def look(source: Source, step: int) -> TensorFacts:
    """Read a float tensor once, and say what it is.

    Parameters
    ----------
    step
        Elements per checksum.

    Raises
    ------
    TornStateError
        It is not what was staged.
    """
    hasher, seen = Hasher(), ValueRange()
    steps = PieceChecksums(step * source.itemsize)
    kind = raw_dtype(source.dtype)
    for part in parts_of(source, _STEP * source.itemsize, copy=True):
        hasher.update(part)
        steps.update(part)
        raw = np.frombuffer(part, kind)
        for at in range(0, len(raw), _STEP):
            seen.add(source.dtype, raw[at : at + _STEP])
    return TensorFacts(given=hasher.digest(), seen=seen, steps=steps.checksums())


def measure(
    elements: Elements, form: Form, looked: TensorFacts, grids: tuple[int, int], name: str
) -> TrialResult:
    """Encode a tensor and restore it, keeping nothing of either.

    Parameters
    ----------
    grids
        Bytes of a piece of the codes, and of the scales.
    name
        Of the tensor, for errors.

    Raises
    ------
    TornStateError
        The tensor is not what was looked at.
    """
    difference, hasher = Difference(), Hasher()
    codes, scales = PieceChecksums(grids[0]), PieceChecksums(grids[1])
    for number, at in enumerate(range(0, elements.count, form.step)):
        raw = elements.read(at, min(at + form.step, elements.count), copy=True)
        if xxh3_64(raw.data.cast("B")) != looked.steps[number]:
            raise torn(name)
        coded = form.encode(elements.dtype, raw, elements.rounding)
        restored = np.empty_like(raw)
        out = restored.data.cast("B")
        made = np.ascontiguousarray(coded.codes).data.cast("B")
        factors = None if coded.scales is None else coded.scales.data.cast("B")
        decode_elements(
            form.kind, form.code, form.block, elements.dtype, form.dtype, 0, made, factors, out,
            elements.rounding,
        )  # fmt: skip
        hasher.update(out)
        codes.update(made)
        if factors is not None:
            scales.update(factors)
        difference.add(elements.dtype, raw, restored)
    return TrialResult(
        digest=hasher.digest(),
        difference=difference,
        pieces=(codes.checksums(), scales.checksums()),
    )


def form_key(given: bytes, record: TensorRecord, form: Form) -> Key:
    """Return what tells whether the codes of one tensor are those of another."""
    plain = (given, record.dtype, record.shape, record.order)
    return (*plain, form.kind, form.code, form.block, form.dtype)


def known_forms(parent: Manifest) -> dict[Key, Recipe]:
    """Return the recipes of a version by what was given and the form."""
    found = {}
    for record in parent.tensors:
        recipe = record.recipe
        if recipe is not None:
            form = Form(
                kind=recipe.kind,
                code=recipe.code,
                block=recipe.block,
                dtype=parent.tensors[recipe.sources[0]].dtype,
            )
            found[form_key(recipe.given, record, form)] = recipe
    return found


def recipe_of(encoding: Encoding, form: Form, looked: TensorFacts, measured: TrialResult) -> Recipe:
    """Return the recipe of a measured tensor; its sources are named later."""
    plain: dict[str, Any] = {
        "kind": form.kind,
        "sources": (),
        "code": form.code,
        "block": form.block,
        "digest": measured.digest,
        "given": looked.given,
    }
    if measured.digest == looked.given:
        return Recipe(**plain, exact=True)
    return Recipe(
        **plain,
        exact=False,
        max_abs=measured.difference.max_abs,
        rel_l2=measured.difference.rel_l2,
        max_abs_bound=encoding.max_abs,
        rel_l2_bound=encoding.rel_l2,
    )


def divides(encoding: Encoding, record: TensorRecord, looked: TensorFacts) -> str:
    """Return why a tensor of an optimizer may not lose its small elements; empty if it may."""
    seen = looked.seen
    if record.role != "optimizer" or seen.negative or not seen.positive:
        return ""
    if not loses_small(encoding):
        return ""
    return (
        "no element is negative, as of second moments: small ones would become 0, and an optimizer "
        "divides by them; dynamic8 and bf16 keep them"
    )


def over(encoding: Encoding, max_abs: float, rel_l2: float) -> str:
    """Return which bound errors are over; empty if none."""
    if encoding.max_abs is not None and not max_abs <= encoding.max_abs:
        return f"an element would differ by {max_abs:g}, more than {encoding.max_abs:g}"
    bound = limits.ENCODING_REL_L2_MAX if encoding.rel_l2 is None else encoding.rel_l2
    if not rel_l2 <= bound:
        return f"the relative error would be {rel_l2:g}, more than {bound:g}"
    return ""
