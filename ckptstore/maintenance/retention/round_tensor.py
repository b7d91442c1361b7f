"""Rounding: what one tensor of a version becomes in fewer bits, and how far that is from it.

Errors add up over the steps of ageing. What is recorded is a bound of the distance to what was
*saved*: by the triangle inequality the largest difference is at most the sum of those of the steps,
and of the relative errors r1 and r2 at most r1 + r2 + r1 * r2 remains, since the second one is
relative to what the first step left. Of a single step it is what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ckptstore import limits
from ckptstore.checkpoint.encoded_sources import CodedSource, Elements, coded_sources, grid_of
from ckptstore.checkpoint.encoding_trial import TensorFacts, look, measure
from ckptstore.encodings.casts import FLOATS
from ckptstore.encodings.coding import Form
from ckptstore.encodings.encoding import Encoding
from ckptstore.encodings.encoding_rules import is_second_moment, loses_small
from ckptstore.format.dtypes import bytes_of
from ckptstore.format.manifest import TensorRecord
from ckptstore.format.paths import Path
from ckptstore.format.tables import Recipe
from ckptstore.objects.sources import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Coding:
    """A tensor in fewer bits: what is to be written, and what the manifest is to say."""

    recipe: Recipe
    """Its sources are not placed yet: they are those of `records`, in this order."""
    records: tuple[TensorRecord, ...]
    sources: tuple[Source, ...]
    form: str


def wanted(
    record: TensorRecord, item_bytes: int, path: Path, encodings: Sequence[Encoding]
) -> list[Encoding]:
    """Return which of some encodings may be tried on a tensor, the first one first.

    Parameters
    ----------
    item_bytes
        What an element takes as it is stored now: only what takes less is tried.
    """
    count = math.prod(record.shape)
    if record.dtype not in FLOATS or record.role == "rng" or record.blocks is not None:
        return []
    if count < limits.ENCODED_ELEMENTS_MIN or record.nbytes != bytes_of(record.dtype, record.shape):
        return []
    return [
        encoding
        for encoding in encodings
        if Form.of(encoding, signed=True).item_bytes < item_bytes
        and not (loses_small(encoding) and is_second_moment(path, record.role))
    ]


def round_tensor(
    record: TensorRecord,
    source: Source,
    encodings: Sequence[Encoding],
    *,
    name: str,
    chunk_bytes: int,
) -> tuple[Coding | None, list[str]]:
    """Return a tensor in the first form that holds it within its bounds, and why not in others.

    Parameters
    ----------
    encodings
        See :func:`wanted`.
    name
        Of the tensor, for errors.

    Raises
    ------
    CorruptTensorError
        A piece of it is damaged; names the tensor.
    StorageError
        The storage failed.
    """
    elements = Elements(source)
    problems: list[str] = []
    for encoding in encodings:
        form = Form.of(encoding, signed=True)
        looked = look(source, form.step)
        form = Form.of(encoding, signed=looked.seen.negative)
        problem = form.problem(looked.seen)
        if not problem:
            coded = coded_sources(record, elements, form)
            grids = [grid_of(one.source.nbytes, one.source.row_bytes, one.source.itemsize,
                             chunk_bytes) for one in coded]  # fmt: skip
            measured = measure(elements, form, looked, (grids[0], grids[-1]), name)
            recipe = _recipe(record.recipe, form, looked, encoding, measured.digest,
                             measured.difference.max_abs, measured.difference.rel_l2)  # fmt: skip
            problem = measured.difference.problem or _over(recipe, encoding)
            if not problem:
                return _coding(form, coded, recipe, encoding), problems
        problems.append(f"{encoding.name}: {problem}")
    return None, problems


def _recipe(
    before: Recipe | None,
    form: Form,
    looked: TensorFacts,
    encoding: Encoding,
    digest: bytes,
    max_abs: float,
    rel_l2: float,
) -> Recipe:
    """Return the recipe with errors against what was saved: those of the steps, added up."""
    given = looked.given
    if before is not None and not before.exact:
        given = before.given
        max_abs = math.nextafter(before.max_abs + max_abs, math.inf)
        rel_l2 = math.nextafter(before.rel_l2 + rel_l2 + before.rel_l2 * rel_l2, math.inf)
    exact = digest == given
    return Recipe(
        kind=form.kind,
        sources=(),
        code=form.code,
        block=form.block,
        exact=exact,
        digest=digest,
        given=given,
        max_abs=0.0 if exact else max_abs,
        rel_l2=0.0 if exact else rel_l2,
        max_abs_bound=None if exact else encoding.max_abs,
        rel_l2_bound=None if exact else encoding.rel_l2,
    )


def _over(recipe: Recipe, encoding: Encoding) -> str:
    """Return which bound is passed; empty if none is."""
    rel_l2 = limits.ENCODING_REL_L2_MAX if encoding.rel_l2 is None else encoding.rel_l2
    if recipe.rel_l2 > rel_l2:
        return f"rel_l2 {recipe.rel_l2:g} is over {rel_l2:g}"
    if encoding.max_abs is not None and recipe.max_abs > encoding.max_abs:
        return f"max_abs {recipe.max_abs:g} is over {encoding.max_abs:g}"
    if not (math.isfinite(recipe.max_abs) and math.isfinite(recipe.rel_l2)):
        return "its error is not finite"
    return ""


def _coding(form: Form, coded: Sequence[CodedSource], recipe: Recipe, encoding: Encoding) -> Coding:
    blocks = f", blocks of {form.block}" if form.block else ""
    return Coding(
        recipe=recipe,
        records=tuple(one.record for one in coded),
        sources=tuple(one.source for one in coded),
        form=encoding.name + blocks,
    )
