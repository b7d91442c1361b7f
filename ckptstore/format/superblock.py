"""The superblock, ``store.json``: the description of a store, written once when it is created.

A JSON envelope (:mod:`ckptstore.format.framing`). A reader refuses a higher format, and every
required feature that it does not know; unknown fields are ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec

from ckptstore import errors, limits
from ckptstore.format.encryption import FEATURE, Encryption
from ckptstore.format.fields import By, ChunkBytes, Id, TimeMs
from ckptstore.format.framing import decode_record, encode_envelope

FORMAT: Final = 1
FEATURES_KNOWN: Final[frozenset[str]] = frozenset({FEATURE})
"""Required features that this version understands."""

Feature = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9-]{0,63}\Z")]


class Superblock(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a store, written once."""

    magic: Literal["ckptstore-store"] = "ckptstore-store"
    format: Annotated[int, msgspec.Meta(ge=1, le=FORMAT)] = FORMAT
    features: Annotated[tuple[Feature, ...], msgspec.Meta(max_length=limits.FEATURES_MAX)] = ()
    """What a reader must understand."""
    store_id: Id
    """Random; tells two stores apart that were at the same location."""
    chunk_bytes: ChunkBytes
    """Size of a chunk before compression, in bytes."""
    created_at_ms: TimeMs
    by: By
    backend: Annotated[str, msgspec.Meta(max_length=100)]
    """The kind of backend through which the probe looked."""
    put_if_absent: Literal["atomic", "ignored", "refused", "unknown"]
    """What the probe found; a client of another kind of backend probes for itself."""
    single_writer: bool
    """Created by a user who vouched that no one else writes."""
    probe: dict[str, Any] = {}
    """The probe's report, for people."""
    encryption: Encryption | None = None
    """With the feature ``encrypted-v1``: how everything but this and ``keys/`` is encrypted."""


def encode_superblock(superblock: Superblock) -> bytes:
    """Return the object; what was encoded is decoded again.

    Raises
    ------
    InvalidInputError
        If a field is not within its limits.
    """
    fields = msgspec.to_builtins(superblock)
    if superblock.encryption is None:
        del fields["encryption"]
    data = encode_envelope(msgspec.json.encode(fields))
    try:
        decode_superblock(data, where="the superblock")
    except (errors.CorruptObjectError, errors.FormatError) as error:
        raise errors.InvalidInputError(f"no store can be created so: {error.message}") from error
    return data


def decode_superblock(data: bytes, *, where: str) -> Superblock:
    """Check and parse ``store.json``.

    Raises
    ------
    CorruptObjectError
        If the digest, a type or a limit is wrong.
    UnsupportedFeatureError
        If the store needs a newer version of ckptstore; the message says what for.
    FormatError
        If it is no superblock at all.
    """
    if len(data) > limits.SUPERBLOCK_BYTES_MAX:
        msg = f"{where} has {len(data)} bytes, more than {limits.SUPERBLOCK_BYTES_MAX}"
        raise errors.CorruptObjectError(msg)
    unlike, refusal = "is not a store of ckptstore", f"{where} is not a superblock"
    superblock = decode_record(Superblock, data, where=where, unlike=unlike, refusal=refusal)
    unknown = sorted({*superblock.features} - FEATURES_KNOWN)
    if unknown:
        msg = f"{where}: the store requires {', '.join(unknown)}"
        raise errors.UnsupportedFeatureError(msg, hint="a newer ckptstore made it: upgrade")
    if (superblock.encryption is None) is (FEATURE in superblock.features):
        raise errors.CorruptObjectError(f"{where} contradicts itself about {FEATURE}")
    return superblock
