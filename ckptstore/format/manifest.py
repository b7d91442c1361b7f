"""Manifests: everything that one version holds, and where each piece of it lies.

Stored as a binary record frame (see ``framing``) around one MessagePack map:

=========== ============================================================================
version     id of the version, 32 hex digits
chunk_bytes the store's chunk size when it was written
skeleton    the state's structure, encoded by ``skeleton``
tensors     per tensor ``[dtype, role, shape, order or nil, bytes, piece count]``; dtype and
            role are places in the lists of names that follow
dtypes      names of dtypes
roles       names of roles
packs       16 bytes per pack: the ids of the packs that hold the pieces
ids         32 bytes per piece: BLAKE3-256 of its bytes, in order of the tensors
raw         u32 per piece: its length
pack        u32 per piece: place of its pack in ``packs``
offset      u64 per piece: of its chunk's header in the pack
stored      u32 per piece: stored length of the chunk
inner       u32 per piece: where it begins in the decoded chunk (pieces of small tensors share one)
slab        u32 per piece: length of the decoded chunk
rule        by which rule the roles were given (see ``roles``); 1 where it is missing
blocks      only where a tensor is stored in boxes (see ``blocks``; flag ``BLOCKS`` of the frame):
            per such tensor ``[place in tensors, bytes]``; per box its offsets and its sizes, u64
recipes     only where a tensor follows from others and has no pieces (see ``recipes``; flag
            ``RECIPES``): per such tensor what :meth:`Recipe.encode` returns, in order of places
base        only where a piece is a delta (see ``bases``; flag ``BASES``): u32 per piece, the row of
            the piece that it refers to, or 2**32 - 1; the last of ``tensors`` then stands for those
=========== ============================================================================

Columns are little-endian and compress well, so that a piece costs some 45 bytes and a version is
read from this record alone, with no store-wide index.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from ckptstore import limits
from ckptstore.collector_pause import collector_paused
from ckptstore.errors import CorruptObjectError, LimitError
from ckptstore.format import framing, tables
from ckptstore.format.blocks import Blocks, tiling_problem
from ckptstore.format.dtypes import ITEM_BYTES
from ckptstore.format.tables import PieceTable, Recipe, Stored, TensorRecord

__all__ = [
    "FLAG_BASES", "FLAG_BLOCKS", "FLAG_RECIPES", "MAGIC", "Manifest", "PieceTable",
    "TensorRecord", "decode", "encode", "outline",
]  # fmt: skip

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


class ManifestBody(msgspec.Struct, frozen=True, kw_only=True):
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
    rule: int = 1
    blocks: Annotated[list[tuple[int, bytes]], msgspec.Meta(max_length=limits.TENSORS_MAX)] = []
    recipes: Annotated[list[Stored], msgspec.Meta(max_length=limits.TENSORS_MAX)] = []
    base: bytes = b""


# Made once, on import: msgspec 0.22 crashes (a NULL pointer) when several threads decode the first
# record of a type at once, since each fills in what is known of the type.
BODY: Final = msgspec.msgpack.Decoder(ManifestBody)


def table_of(body: ManifestBody, where: str) -> PieceTable:
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


def _is_sized(item: int | None, shape: Sequence[int], nbytes: int) -> bool:
    """Return whether a shape gives the bytes, unless the dtype is unknown, and can be counted."""
    if 0 in shape:
        return nbytes == 0 and math.prod(filter(None, shape)) < 1 << 59
    return item is None or item * math.prod(shape) == nbytes


def tensors_of(
    body: ManifestBody, pieces: PieceTable, where: str
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
    first, blocks = [0], _blocks(body, where)
    for place, (dtype, role, shape, order, nbytes, count) in enumerate(body.tensors):
        fits = (
            0 <= dtype < len(body.dtypes)
            and 0 <= role < len(body.roles)
            and count >= 0
            and nbytes >= 0
            and len(shape) <= limits.TENSOR_DIMS_MAX
            and 0 <= min(shape, default=0) <= max(shape, default=0) < 1 << 63
            and (order is None or sorted(order) == list(range(len(shape))))
            and _is_sized(ITEM_BYTES.get(body.dtypes[dtype]), shape, nbytes)
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
    role = tables.BASE_ROLE
    return TensorRecord(dtype="uint8", shape=(size,), order=None, role=role, nbytes=size)


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
            problem = tables.bases_problem(pieces.base, pieces, own=first[-2])
    if problem:
        raise corrupt(where, f"deltas: {problem}")
    return tensors[:-1], first[:-1]


def _add_recipes(body: ManifestBody, records: list[TensorRecord], where: str) -> None:
    """Give each tensor the recipe that it has; all of them can be followed."""
    last = -1
    for stored in body.recipes:
        place, recipe = stored[0], Recipe.decode(stored)
        if recipe is None or not last < place < len(records):
            raise corrupt(where, f"the recipe of tensor {place} is none")
        records[place] = records[place].replace(recipe=recipe)
        last = place
    for place, *_ in body.recipes:
        if problem := tables.recipe_problem(place, records):
            raise corrupt(where, f"tensor {place} follows from {problem}")


def _blocks(body: ManifestBody, where: str) -> dict[int, Blocks]:
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


MAGIC: Final = b"CKPTMANI"
FLAG_BLOCKS: Final = 1
"""A tensor is stored in boxes: a reader that does not know how would take them for rows."""
FLAG_RECIPES: Final = 2
"""A tensor follows from others: a reader that does not know how would take it for empty."""
FLAG_BASES: Final = 4
"""A piece is stored as its difference to another one."""
_FLAGS: Final = FLAG_BLOCKS | FLAG_RECIPES | FLAG_BASES
_FLAG_FIELDS: Final = (
    (FLAG_BLOCKS, "blocks", "blocks"),
    (FLAG_RECIPES, "recipes", "recipes"),
    (FLAG_BASES, "bases", "base"),
)
"""Each flag, its name in errors, and the field that a record has if it is set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The full description of one version's content."""

    version: str
    chunk_bytes: int
    skeleton: bytes
    """Encoded by :func:`ckptstore.format.skeleton.encode`; validated when it is decoded."""
    tensors: tuple[TensorRecord, ...]
    first: tuple[int, ...]
    """Per tensor, and one more at the end: place of its first piece in `pieces`."""
    pieces: PieceTable
    """From row ``first[-1]`` on: what deltas refer to."""
    rule: int = 1
    """The rule of :mod:`ckptstore.format.roles` that gave the roles."""

    @property
    def sources(self) -> frozenset[int]:
        """Places of the tensors that recipes name; such a one may be hidden, or visible too."""
        return frozenset(
            source for record in self.tensors if record.recipe for source in record.recipe.sources
        )


def encode(manifest: Manifest) -> bytes:
    """Return the stored form of a manifest.

    What was encoded is decoded again: nothing is ever written that this version would refuse.

    Raises
    ------
    LimitError
        If a reader would refuse it, for its size or for anything else.
    """
    bases = _bases_records(manifest)  # one, which has the last pieces, or none
    tensors = [*manifest.tensors, *bases]
    dtypes = sorted({record.dtype for record in tensors})
    roles = sorted({record.role for record in tensors})
    dtype_at = {name: place for place, name in enumerate(dtypes)}
    role_at = {name: place for place, name in enumerate(roles)}
    table = manifest.pieces
    borders = (*manifest.first, *(len(table) for _ in bases))
    counts = [last - start for start, last in itertools.pairwise(borders)]
    body: dict[str, Any] = {
        "version": manifest.version,
        "chunk_bytes": manifest.chunk_bytes,
        "skeleton": manifest.skeleton,
        "tensors": [
            [dtype_at[r.dtype], role_at[r.role], r.shape, r.order, r.nbytes, count]
            for r, count in zip(tensors, counts, strict=True)
        ],
        "dtypes": dtypes,
        "roles": roles,
        "rule": manifest.rule,
        "packs": bytes.fromhex("".join(table.packs)),
        "ids": table.ids.tobytes(),
    }
    for name, dtype in COLUMNS.items():
        body[name] = getattr(table, name).astype(dtype, copy=False).tobytes()
    blocks = [(n, r.blocks.encode()) for n, r in enumerate(manifest.tensors) if r.blocks]
    if blocks:
        body["blocks"] = blocks
    recipes = [r.recipe.encode(n) for n, r in enumerate(manifest.tensors) if r.recipe]
    if recipes:
        body["recipes"] = recipes
    if table.base is not None:
        body["base"] = table.base.astype("<u4", copy=False).tobytes()
    raw = msgspec.msgpack.encode(body)
    if len(raw) > limits.MANIFEST_RAW_BYTES_MAX:
        msg = f"a manifest of {len(raw)} bytes; {limits.MANIFEST_RAW_BYTES_MAX} is the limit"
        raise LimitError(msg, hint="use a larger chunk size: ckptstore init --chunk-size")
    flags = sum(flag for flag, _, field in _FLAG_FIELDS if field in body)
    data = framing.encode_frame(MAGIC, raw, flags=flags)
    try:
        decode(data, where="of this save", version=manifest.version)
    except CorruptObjectError as error:
        msg = f"no version can be written that would not load: {error.message}"
        raise LimitError(msg) from error
    return data


def _bases_records(manifest: Manifest) -> list[TensorRecord]:
    """Return the record that stands for what deltas refer to; none where nothing is a delta."""
    if manifest.pieces.base is None:
        return []
    return [bases_record(int(manifest.pieces.raw[manifest.first[-1] :].sum(dtype=np.uint64)))]


@collector_paused()
def decode(data: bytes, *, where: str, version: str) -> Manifest:
    """Return the manifest in `data`, every number within its limits and consistent.

    Parameters
    ----------
    where
        The object's key, for errors.
    version
        The id that it must be of.

    Raises
    ------
    CorruptObjectError
        If anything does not fit. Nothing larger than the limits is ever allocated.
    UnsupportedFeatureError
        If a newer ckptstore wrote it.
    """
    body = _unpacked(BODY, data, where)
    if body.version != version:
        raise corrupt(where, f"it describes version {body.version[:40]!r}, not {version}")
    if not limits.CHUNK_BYTES_MIN <= body.chunk_bytes <= limits.CHUNK_RAW_BYTES_MAX:
        raise corrupt(where, f"chunk size {body.chunk_bytes}")
    flags = framing.frame_flags(data)
    for flag, name, field in _FLAG_FIELDS:
        if bool(getattr(body, field)) != bool(flags & flag):
            raise corrupt(where, f"the flag of {name} is not what the record holds")
    pieces = table_of(body, where)
    tensors, first = tensors_of(body, pieces, where)
    if body.base:
        tensors, first = without_bases(tensors, first, pieces, where)
    return Manifest(
        version=body.version,
        chunk_bytes=body.chunk_bytes,
        skeleton=body.skeleton,
        tensors=tensors,
        first=first,
        pieces=pieces,
        rule=body.rule,
    )


_Record = TypeVar("_Record")


def _unpacked(decoder: msgspec.msgpack.Decoder[_Record], data: bytes, where: str) -> _Record:
    """Return what the frame of a manifest holds, as the type of `decoder`."""
    raw = framing.decode_frame(
        MAGIC, data, where=where, raw_bytes_max=limits.MANIFEST_RAW_BYTES_MAX, flags_known=_FLAGS
    )
    try:
        return decoder.decode(raw)
    except framing.UNDECODABLE as error:
        raise corrupt(where, f"not a manifest: {error}") from error


class _Outline(msgspec.Struct, frozen=True, kw_only=True):
    """The two fields of the map that tell which version it is of, and which objects it needs."""

    version: str
    packs: bytes


# Made once, as the decoder of the whole map.
_OUTLINE: Final = msgspec.msgpack.Decoder(_Outline)


def outline(data: bytes, *, where: str) -> tuple[str, tuple[str, ...]]:
    """Return the version that a manifest says it is of, and the ids of the packs that it names.

    For manifests that nothing needs; one that is to be relied on is read by :func:`decode`, which
    checks it whole.

    Raises
    ------
    CorruptObjectError
        If it is no manifest.
    UnsupportedFeatureError
        If a newer ckptstore wrote it.
    """
    body = _unpacked(_OUTLINE, data, where)
    size = len(body.packs)
    if size % 16 or size > 16 * limits.PACKS_MAX:
        raise corrupt(where, f"{size} bytes of packs")
    return body.version, tuple(body.packs[at : at + 16].hex() for at in range(0, size, 16))
