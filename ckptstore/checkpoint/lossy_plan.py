"""What one tensor becomes in a form: hidden records, their sources, a recipe, or a refusal."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

from ckptstore import limits
from ckptstore.checkpoint.encoded_sources import NOTHING
from ckptstore.checkpoint.encoding_trial import Measured, TensorFacts
from ckptstore.encodings.coding import Form
from ckptstore.encodings.decoding import SCALED
from ckptstore.encodings.encoding import Encoding
from ckptstore.encodings.encoding_rules import loses_small
from ckptstore.format.manifest import Manifest, TensorRecord
from ckptstore.format.recipes import Recipe
from ckptstore.objects.sources import PieceSource, Source

Key: TypeAlias = "tuple[bytes, str, tuple[int, ...], tuple[int, ...] | None, str, str, int, str]"
"""What was given, what it is, and the form."""


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


def hidden_records(record: TensorRecord, form: Form) -> list[TensorRecord]:
    """Return what a form stores of a tensor: codes, and scales if it has any."""
    count = math.prod(record.shape)
    codes = TensorRecord(
        dtype=form.dtype,
        shape=record.shape,
        order=record.order,
        role=record.role,
        nbytes=count * form.item_bytes,
    )
    if form.kind != SCALED:
        return [codes]
    blocks = -(-count // form.block)
    scales = TensorRecord(
        dtype="float32", shape=(blocks,), order=None, role=record.role, nbytes=4 * blocks
    )
    return [codes, scales]


def shells(source: Source, record: TensorRecord, form: Form) -> list[PieceSource]:
    """Return the sources of the same, but for their bytes."""
    found: list[PieceSource] = []
    for made in hidden_records(record, form):
        is_codes = made.shape == record.shape and not found
        item = form.item_bytes if is_codes else 4
        found.append(
            PieceSource(
                nbytes=made.nbytes,
                dtype=made.dtype,
                itemsize=item,
                row_bytes=source.row_bytes // source.itemsize * item if is_codes else item,
                payload=NOTHING.payload,
            )
        )
    return found


def recipe_of(encoding: Encoding, form: Form, looked: TensorFacts, measured: Measured) -> Recipe:
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


def exceeded(encoding: Encoding, measured: Measured) -> str:
    """Return why a measured tensor is not stored in the form; empty if it is."""
    difference = measured.difference
    return difference.problem or over(encoding, difference.max_abs, difference.rel_l2)


def over(encoding: Encoding, max_abs: float, rel_l2: float) -> str:
    """Return which bound errors are over; empty if none."""
    if encoding.max_abs is not None and not max_abs <= encoding.max_abs:
        return f"an element would differ by {max_abs:g}, more than {encoding.max_abs:g}"
    bound = limits.ENCODING_REL_L2_MAX if encoding.rel_l2 is None else encoding.rel_l2
    if not rel_l2 <= bound:
        return f"the relative error would be {rel_l2:g}, more than {bound:g}"
    return ""
