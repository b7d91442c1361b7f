"""The map that a manifest's frame holds: its fields, and what they must fulfil.

:mod:`ckptstore.format.manifest` says what each field is.
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace
from typing import Annotated, Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from ckptstore import limits
from ckptstore.errors import CorruptObjectError
from ckptstore.format import bases
from ckptstore.format.blocks import Blocks, tiling_problem
from ckptstore.format.dtypes import ITEM_BYTES
from ckptstore.format.recipes import Recipe, Stored
from ckptstore.format.tables import PieceTable, TensorRecord, recipe_problem

__all__ = [
    "BODY",
    "COLUMNS",
    "Body",
    "bases_record",
    "corrupt",
    "table_of",
    "tensors_of",
    "without_bases",
]

_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}\Z")
COLUMNS: Final[dict[str, np.dtype[Any]]] = {
    "raw": np.dtype("<u4"),
    "pack": np.dtype("<u4"),
    "offset": np.dtype("<u8"),
    "stored": np.dtype("<u4"),
    "inner": np.dtype("<u4"),
    "slab": np.dtype("<u4"),
}
"""Columns of numbers, as they are stored; each has one a piece."""

_Dims = Annotated[tuple[int, ...], msgspec.Meta(max_length=limits.TENSOR_DIMS_MAX)]
_Tensor = tuple[int, int, _Dims, _Dims | None, int, int]


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """The MessagePack map, typed; what it means is checked by what makes tables of it.

    The lengths of lists are checked before their elements are built: a few bytes of a compressed
    record can stand for millions of elements.
    """

    version: str
    chunk_bytes: int
    skeleton: bytes
    tensors: Annotated[list[_Tensor], msgspec.Meta(max_length=limits.TENSORS_MAX)]
    dtypes: Annotated[list[str], msgspec.Meta(max_length=len(ITEM_BYTES))]
    roles: Annotated[list[str], msgspec.Meta(max_length=limits.ROLES_MAX)]
    packs: bytes
    ids: bytes
    raw: bytes
    pack: bytes
    offset: bytes
    stored: bytes
    inner: bytes
    slab: bytes
    blocks: Annotated[list[tuple[int, bytes]], msgspec.Meta(max_length=limits.TENSORS_MAX)] = []
    recipes: Annotated[list[Stored], msgspec.Meta(max_length=limits.TENSORS_MAX)] = []
    base: bytes = b""


# Made once, on import: msgspec 0.22 crashes (a NULL pointer) when several threads decode the first
# record of a type at once, since each fills in what is known of the type.
BODY: Final = msgspec.msgpack.Decoder(Body)


def table_of(body: Body, where: str) -> PieceTable:
    """Return the columns, of one length and within the limits of chunks and packs.

    Raises
    ------
    CorruptObjectError
        They are not.
    """
    count, rest = divmod(len(body.ids), 32)
    packs_count, packs_rest = divmod(len(body.packs), 16)
    if rest or packs_rest or count > limits.PIECES_MAX or packs_count > limits.PACKS_MAX:
        raise corrupt(where, f"{len(body.ids)} bytes of ids, {len(body.packs)} of packs")
    columns: dict[str, npt.NDArray[Any]] = {}
    for name, dtype in COLUMNS.items():
        column: bytes = getattr(body, name)
        if len(column) != count * dtype.itemsize:
            raise corrupt(where, f"column {name} has {len(column)} bytes for {count} pieces")
        columns[name] = np.frombuffer(column, dtype)
    packs = [body.packs[at : at + 16].hex() for at in range(0, len(body.packs), 16)]
    if count:
        ends = columns["inner"].astype(np.uint64) + columns["raw"]
        over = (
            int(columns["pack"].max()) >= len(packs)
            or int(columns["slab"].max()) > limits.CHUNK_RAW_BYTES_MAX
            or int(columns["stored"].max()) > limits.CHUNK_STORED_BYTES_MAX
            or int(columns["offset"].max()) > limits.PACK_BYTES_MAX
            or bool((ends > columns["slab"]).any())
            or int(columns["raw"].min()) == 0
        )
        if over:
            raise corrupt(where, "a piece points outside its pack or chunk")
    ids = np.frombuffer(body.ids, np.uint8).reshape(count, 32)
    if body.base:
        if len(body.base) != 4 * count:
            raise corrupt(where, f"column base has {len(body.base)} bytes for {count} pieces")
        columns["base"] = np.frombuffer(body.base, np.dtype("<u4"))
    return PieceTable(ids=ids, packs=packs, **columns)


def tensors_of(
    body: Body, pieces: PieceTable, where: str
) -> tuple[tuple[TensorRecord, ...], tuple[int, ...]]:
    """Return the tensors, whose pieces follow each other, and where those of each begin.

    Raises
    ------
    CorruptObjectError
        A tensor is out of bounds, or its pieces do not add up to its bytes.
    """
    if not all(_NAME.match(name) for name in (*body.dtypes, *body.roles)):
        raise corrupt(where, "a dtype or role is no name")
    records: list[TensorRecord] = []
    first = [0]
    blocks = _blocks(body, where)
    for place, (dtype, role, shape, order, nbytes, count) in enumerate(body.tensors):
        fits = (
            0 <= dtype < len(body.dtypes)
            and 0 <= role < len(body.roles)
            and count >= 0
            and nbytes >= 0
            and len(shape) <= limits.TENSOR_DIMS_MAX
            and all(0 <= size < 1 << 63 for size in shape)
            and (order is None or sorted(order) == list(range(len(shape))))
        )
        if not fits:
            raise corrupt(where, f"tensor {place} is out of bounds")
        records.append(
            TensorRecord(
                dtype=body.dtypes[dtype],
                shape=shape,
                order=order,
                role=body.roles[role],
                nbytes=nbytes,
                blocks=blocks.get(place),
            )
        )
        first.append(first[-1] + count)
    if first[-1] != len(pieces):
        raise corrupt(where, f"{first[-1]} pieces named, {len(pieces)} listed")
    _add_recipes(body, records, where)
    sums = np.concatenate(([0], np.cumsum(pieces.raw, dtype=np.uint64)))
    for place, record in enumerate(records):
        own_bytes = 0 if record.recipe else record.nbytes
        if int(sums[first[place + 1]] - sums[first[place]]) != own_bytes:
            raise corrupt(where, f"the pieces of tensor {place} do not add up to its bytes")
    counts = [last - start for start, last in itertools.pairwise(first)]
    items = np.array([ITEM_BYTES.get(record.dtype, 1) for record in records], np.int64)
    if np.any(pieces.raw % np.repeat(items, counts)):
        raise corrupt(where, "a piece ends inside of an element")
    for place in blocks:
        rows = range(first[place], first[place + 1])
        _check_blocks(records[place], sums[rows.start : rows.stop + 1] - sums[rows.start], where)
    return tuple(records), tuple(first)


def bases_record(size: int) -> TensorRecord:
    """Return the record that stands for `size` bytes of what deltas refer to."""
    return TensorRecord(dtype="uint8", shape=(size,), order=None, role=bases.ROLE, nbytes=size)


def without_bases(
    tensors: tuple[TensorRecord, ...], first: tuple[int, ...], pieces: PieceTable, where: str
) -> tuple[tuple[TensorRecord, ...], tuple[int, ...]]:
    """Return what :func:`tensors_of` did, without the record of the bases: the last must be it.

    Raises
    ------
    CorruptObjectError
        It is not, or a piece refers to what it must not.
    """
    problem = "the last tensor does not stand for the bases"
    if tensors and tensors[-1] == bases_record(tensors[-1].nbytes) and pieces.base is not None:
        problem = "a recipe that is made of bases"
        if not any(len(tensors) - 1 in r.recipe.sources for r in tensors if r.recipe):
            problem = bases.bases_problem(
                pieces.base, pieces.raw, pieces.inner, pieces.slab, own=first[-2], ids=pieces.ids
            )
    if problem:
        raise corrupt(where, f"deltas: {problem}")
    return tensors[:-1], first[:-1]


def _add_recipes(body: Body, records: list[TensorRecord], where: str) -> None:
    """Give each tensor the recipe that it has; all of them can be followed."""
    last = -1
    for stored in body.recipes:
        place, recipe = stored[0], Recipe.decode(stored)
        if recipe is None or not last < place < len(records):
            raise corrupt(where, f"the recipe of tensor {place} is none")
        records[place] = replace(records[place], recipe=recipe)
        last = place
    for place, *_ in body.recipes:
        if problem := recipe_problem(place, records):
            raise corrupt(where, f"tensor {place} follows from {problem}")


def _blocks(body: Body, where: str) -> dict[int, Blocks]:
    """Return the boxes by place of their tensor; not yet compared with what it is."""
    found: dict[int, Blocks] = {}
    count = 0
    for place, data in body.blocks:
        inside = 0 <= place < len(body.tensors) and place not in found
        blocks = Blocks.decode(data, len(body.tensors[place][2])) if inside else None
        if blocks is None:
            raise corrupt(where, f"the blocks of tensor {place} are none")
        count += len(blocks)
        if count > limits.BLOCKS_MAX:
            raise corrupt(where, f"more than {limits.BLOCKS_MAX} blocks")
        found[place] = blocks
    return found


def _check_blocks(record: TensorRecord, ends: npt.NDArray[np.uint64], where: str) -> None:
    """Check that boxes tile their tensor, and that none of them begins inside of a piece.

    Parameters
    ----------
    ends
        Bytes before each piece of the tensor, and all of them.
    """
    assert record.blocks is not None  # noqa: S101  # for the type checker: it was asked for
    item = ITEM_BYTES.get(record.dtype, 0)
    problem = tiling_problem(record.shape, record.blocks)
    if record.order is not None or math.prod(record.shape) * item != record.nbytes:
        problem = "boxes are stored row by row, and hold all of it"
    if not problem:
        sizes = record.blocks.table[:, 1].prod(axis=1).astype(np.uint64) * np.uint64(item)
        if not bool(np.isin(np.cumsum(sizes), ends).all()):
            problem = "a piece reaches from one box into the next"
    if problem:
        raise corrupt(where, f"blocks of a tensor of {list(record.shape)}: {problem}")


def corrupt(where: str, what: str) -> CorruptObjectError:
    """Return the error that says what is wrong with a manifest; `where` is the object's key."""
    msg = f"manifest {where}: {what}"
    return CorruptObjectError(msg, hint="run ckptstore verify; other versions are not affected")
