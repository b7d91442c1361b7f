"""Whether tensors that follow from others are what their recipes say: made, compared, dropped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from ckptstore.backends.base import Backend
from ckptstore.checkpoint.content import Content
from ckptstore.checkpoint.ranges import Range, read_ranges
from ckptstore.config import Options
from ckptstore.errors import CorruptTensorError
from ckptstore.hashing import blake3_of


def recipe_key(content: Content, index: int) -> bytes:
    """Return what is equal for tensors that follow in the same way from the same pieces."""
    records = content.manifest.tensors
    record = records[index]
    assert record.recipe is not None  # noqa: S101  # for the type checker: callers have asked
    sources = [records[place].dtype for place in record.recipe.sources]
    recipe = replace(record.recipe, sources=())
    what = msgspec.msgpack.encode((record.dtype, record.nbytes, sources, recipe.encode(0)))
    return blake3_of([what, content.manifest.pieces.ids[content.rows(index)].tobytes()])


def row_of_recipe(content: Content, index: int) -> range:
    """Return a row beyond those of the pieces: what was found of a recipe is kept under it."""
    row = len(content.manifest.pieces) + index
    return range(row, row + 1)


def problem_with(
    content: Content, indices: Sequence[int], *, backend: Backend, options: Options
) -> str:
    """Make some tensors, and return what is wrong with one of them; empty if nothing is.

    Raises
    ------
    StorageError
        The storage failed.
    """
    tensors = content.manifest.tensors
    whole = [Range(index=n, start=0, nbytes=tensors[n].nbytes, out=None) for n in indices]
    try:
        read_ranges(content, whole, backend=backend, options=options)
    except CorruptTensorError as error:
        return error.message.partition(": ")[2]
    return ""


def problems_of(
    content: Content, indices: Sequence[int], *, backend: Backend, options: Options
) -> dict[int, str]:
    """Make some tensors; one by one, if something else comes than there should.

    Returns
    -------
    dict[int, str]
        What is wrong with which tensor; those that are right are left out.

    Raises
    ------
    StorageError
        The storage failed.
    """
    if not problem_with(content, indices, backend=backend, options=options):
        return {}
    found = {i: problem_with(content, [i], backend=backend, options=options) for i in indices}
    return {index: text for index, text in found.items() if text}
