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
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np

from ckptstore import limits
from ckptstore.errors import CorruptObjectError, LimitError
from ckptstore.format import framing
from ckptstore.format.manifest_body import (
    BODY,
    COLUMNS,
    bases_record,
    corrupt,
    table_of,
    tensors_of,
    without_bases,
)
from ckptstore.format.tables import PieceTable, TensorRecord

__all__ = [
    "FLAG_BASES",
    "FLAG_BLOCKS",
    "FLAG_RECIPES",
    "MAGIC",
    "Manifest",
    "PieceTable",
    "TensorRecord",
    "decode",
    "encode",
    "outline",
]

MAGIC: Final = b"CKPTMANI"
FLAG_BLOCKS: Final = 1
"""A tensor is stored in boxes: a reader that does not know how would take them for rows."""
FLAG_RECIPES: Final = 2
"""A tensor follows from others: a reader that does not know how would take it for empty."""
FLAG_BASES: Final = 4
"""A piece is stored as its difference to another one."""
_FLAGS: Final = FLAG_BLOCKS | FLAG_RECIPES | FLAG_BASES


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
    tensors = [*manifest.tensors, *_bases_records(manifest)]
    dtypes = sorted({record.dtype for record in tensors})
    roles = sorted({record.role for record in tensors})
    dtype_at = {name: place for place, name in enumerate(dtypes)}
    role_at = {name: place for place, name in enumerate(roles)}
    table = manifest.pieces
    borders = (
        manifest.first if len(tensors) == len(manifest.tensors) else (*manifest.first, len(table))
    )
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
    flags = (FLAG_BLOCKS if blocks else 0) | (FLAG_RECIPES if recipes else 0)
    if table.base is not None:
        body["base"] = table.base.astype("<u4", copy=False).tobytes()
        flags |= FLAG_BASES
    raw = msgspec.msgpack.encode(body)
    if len(raw) > limits.MANIFEST_RAW_BYTES_MAX:
        msg = f"a manifest of {len(raw)} bytes; {limits.MANIFEST_RAW_BYTES_MAX} is the limit"
        raise LimitError(msg, hint="use a larger chunk size: ckptstore init --chunk-size")
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
    raw = framing.decode_frame(
        MAGIC, data, where=where, raw_bytes_max=limits.MANIFEST_RAW_BYTES_MAX, flags_known=_FLAGS
    )
    try:
        body = BODY.decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise corrupt(where, f"not a manifest: {error}") from error
    if body.version != version:
        raise corrupt(where, f"it describes version {body.version[:40]!r}, not {version}")
    if not limits.CHUNK_BYTES_MIN <= body.chunk_bytes <= limits.CHUNK_RAW_BYTES_MAX:
        raise corrupt(where, f"chunk size {body.chunk_bytes}")
    flags = framing.frame_flags(data)
    if bool(body.blocks) != bool(flags & FLAG_BLOCKS):
        raise corrupt(where, "the flag of blocks is not what the record holds")
    if bool(body.recipes) != bool(flags & FLAG_RECIPES):
        raise corrupt(where, "the flag of recipes is not what the record holds")
    if bool(body.base) != bool(flags & FLAG_BASES):
        raise corrupt(where, "the flag of bases is not what the record holds")
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
    )


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
    raw = framing.decode_frame(
        MAGIC, data, where=where, raw_bytes_max=limits.MANIFEST_RAW_BYTES_MAX, flags_known=_FLAGS
    )
    try:
        body = _OUTLINE.decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise corrupt(where, f"not a manifest: {error}") from error
    size = len(body.packs)
    if size % 16 or size > 16 * limits.PACKS_MAX:
        raise corrupt(where, f"{size} bytes of packs")
    return body.version, tuple(body.packs[at : at + 16].hex() for at in range(0, size, 16))
