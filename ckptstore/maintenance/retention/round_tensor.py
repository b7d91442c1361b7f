"""Rounding: one tensor of a version in fewer bits, and how far that is from what was saved.

Errors add up over the steps of ageing. What is recorded is a bound of the distance to what was
*saved*: by the triangle inequality the largest difference is at most the sum of those of the steps,
and of the relative errors r1 and r2 at most r1 + r2 + r1 * r2 remains, since the second one is
relative to what the first step left. Of a single step it is what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ckptstore import limits
from ckptstore.checkpoint.encoded_sources import Elements, coded_sources, grid_of
from ckptstore.checkpoint.encoding_trial import look, measure, recipe_of
from ckptstore.encodings.casts import FLOATS
from ckptstore.encodings.coding import Form
from ckptstore.encodings.encoding import Encoding
from ckptstore.encodings.encoding_rules import is_second_moment, loses_small
from ckptstore.format.dtypes import bytes_of
from ckptstore.format.manifest import TensorRecord
from ckptstore.format.paths import Path
from ckptstore.format.tables import Recipe
from ckptstore.objects.sources import Source


@dataclass(frozen=True, slots=True)
class Coding:
    """A tensor in fewer bits: its sources to be written, and its records in the manifest."""

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
    record: TensorRecord, source: Source, tried: Sequence[Encoding], *, name: str, chunk_bytes: int
) -> tuple[Coding | None, list[str]]:
    """Return a tensor in the first form that holds it within its bounds, and why not in others.

    Parameters
    ----------
    tried
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
    for encoding in tried:
        form = Form.of(encoding, signed=True)
        looked = look(source, form.step)
        form = Form.of(encoding, signed=looked.seen.negative)
        problem = form.problem(looked.seen)
        if not problem:
            coded = coded_sources(record, elements, form)
            made = [one.source for one in coded]
            grids = [grid_of(one.nbytes, one.row_bytes, one.itemsize, chunk_bytes) for one in made]
            measured = measure(elements, form, looked, (grids[0], grids[-1]), name)
            recipe = recipe_of(encoding, form, looked, measured)
            if record.recipe is not None and not record.recipe.exact:
                recipe = _since_saved(record.recipe, recipe, encoding)
            problem = measured.difference.problem or _over(recipe, encoding)
            if not problem:
                blocks = f", blocks of {form.block}" if form.block else ""
                records = tuple(one.record for one in coded)
                return Coding(recipe, records, tuple(made), encoding.name + blocks), problems
        problems.append(f"{encoding.name}: {problem}")
    return None, problems


def _since_saved(before: Recipe, step: Recipe, encoding: Encoding) -> Recipe:
    """Return the recipe of a step with errors against what was saved: those of the steps, added up.

    Parameters
    ----------
    before
        Of the steps up to now, which is not exact.
    """
    rel_l2 = before.rel_l2 + step.rel_l2 + before.rel_l2 * step.rel_l2
    exact = step.digest == before.given
    return replace(
        step,
        exact=exact,
        given=before.given,
        max_abs=0.0 if exact else math.nextafter(before.max_abs + step.max_abs, math.inf),
        rel_l2=0.0 if exact else math.nextafter(rel_l2, math.inf),
        max_abs_bound=None if exact else encoding.max_abs,
        rel_l2_bound=None if exact else encoding.rel_l2,
    )


def _over(recipe: Recipe, encoding: Encoding) -> str:
    """Return the bound that is passed; empty if none is."""
    rel_l2 = limits.ENCODING_REL_L2_MAX if encoding.rel_l2 is None else encoding.rel_l2
    if recipe.rel_l2 > rel_l2:
        return f"rel_l2 {recipe.rel_l2:g} is over {rel_l2:g}"
    if encoding.max_abs is not None and recipe.max_abs > encoding.max_abs:
        return f"max_abs {recipe.max_abs:g} is over {encoding.max_abs:g}"
    if not (math.isfinite(recipe.max_abs) and math.isfinite(recipe.rel_l2)):
        return "its error is not finite"
    return ""
