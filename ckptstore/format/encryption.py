"""Records of the encryption of a store: parameters and wrapped keys, never a key itself.

The superblock has the parameters. ``keys/<12 digits>.json`` has them too, and the random data key
of the store, wrapped by each user's key that opens it. The record of the highest number counts;
a rotation writes the next one by put-if-absent and deletes those before it. A JSON envelope
(:mod:`ckptstore.format.framing`), since it must be read before anything can be decrypted.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from ckptstore import limits
from ckptstore.errors import CorruptObjectError, LimitError
from ckptstore.format.fields import By, ChunkBytes, CommitNumber, Id, TimeMs
from ckptstore.format.framing import decode_record, encode_envelope

FEATURE: Final = "encrypted-v1"
"""The required feature of a superblock with :class:`Encryption`."""

FORMAT: Final = 2
"""Of records that are written; those of format 1 have no seal."""


def _hex(count: int) -> msgspec.Meta:
    return msgspec.Meta(pattern=rf"^[0-9a-f]{{{2 * count}}}\Z")


class Encryption(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of the encryption of a store's objects."""

    cipher: Literal["aes-256-gcm"] = "aes-256-gcm"
    segment_bytes: Annotated[
        int, msgspec.Meta(ge=limits.SEGMENT_BYTES_MIN, le=limits.SEGMENT_BYTES_MAX)
    ] = limits.SEGMENT_BYTES_DEFAULT
    """Of a segment before encryption."""
    check: Annotated[str, _hex(16)]
    """Follows from the data key, and tells whether another key is the same; tells nothing else."""


class KeySlot(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The data key, as one user's key wraps it."""

    key: Annotated[str, _hex(8)]
    """Id of the user's key; follows from it, and tells nothing else of it."""
    salt: Annotated[str, _hex(32)]
    wrapped: Annotated[str, _hex(48)]
    """32 bytes of the data key, encrypted, and a tag of 16."""
    sealed: bool = False
    """Whether it opens only records that have a seal; bound into `wrapped`. Not so in slots that
    came from a record of format 1."""


class KeyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One object below ``keys/``: all that opens a store, and that brings ``store.json`` back."""

    magic: Literal["ckptstore-keys"] = "ckptstore-keys"
    format: Annotated[int, msgspec.Meta(ge=1, le=FORMAT)] = FORMAT
    number: CommitNumber
    """That of its name."""
    store_id: Id
    chunk_bytes: ChunkBytes
    created_at_ms: TimeMs
    """When the store was created."""
    encryption: Encryption
    slots: Annotated[
        tuple[KeySlot, ...], msgspec.Meta(min_length=1, max_length=limits.KEY_SLOTS_MAX)
    ]
    at_ms: TimeMs
    by: By
    seal: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{64})?\Z")] = ""
    """32 bytes that follow from the data key and from all the rest, see :func:`sealed_text`; empty
    in format 1, which has none."""


def encode_key_record(record: KeyRecord) -> bytes:
    """Return the object.

    Raises
    ------
    LimitError
        It has too many keys.
    """
    if not 1 <= len(record.slots) <= limits.KEY_SLOTS_MAX:
        msg = f"a store is opened by 1 to {limits.KEY_SLOTS_MAX} keys, not {len(record.slots)}"
        raise LimitError(msg, hint="rotate without --keep-old, which drops the others")
    return encode_envelope(msgspec.json.encode(record))


def decode_key_record(data: bytes, *, where: str) -> KeyRecord:
    """Check and parse an object below ``keys/``.

    Raises
    ------
    CorruptObjectError
        The digest, a type or a limit is wrong.
    UnsupportedFeatureError
        A newer ckptstore wrote it.
    FormatError
        It is no such record.
    """
    unlike = "is no record of keys"
    refusal = f"{where} {unlike}"
    record = decode_record(KeyRecord, data, where=where, unlike=unlike, refusal=refusal)
    wants_seal = record.format > 1
    sealed = any(slot.sealed for slot in record.slots)
    if wants_seal is not bool(record.seal) or (sealed and not wants_seal):
        msg = f"{where} has format {record.format}, and a seal that does not go with it"
        raise CorruptObjectError(msg)
    return record


def wrapping_context(record: KeyRecord, key_id: str, *, sealed: bool) -> bytes:
    """Return the fields that a wrapped key is bound to: a change of any breaks the wrapping."""
    title = "ckptstore wrapped key v2" if sealed else "ckptstore wrapped key v1"
    return "\n".join((title, *_store_lines(record), key_id)).encode()


def sealed_text(record: KeyRecord) -> bytes:
    """Return what the seal of a record vouches for: its number, and everything else in it."""
    slots = (
        f"{slot.key} {slot.salt} {slot.wrapped} {'sealed' if slot.sealed else 'open'}"
        for slot in record.slots
    )
    first = ("ckptstore key record v2", str(record.number), *_store_lines(record))
    rest = (str(record.at_ms), str(len(record.slots)), *slots, record.by)
    return "\n".join((*first, *rest)).encode()


def _store_lines(record: KeyRecord) -> tuple[str, ...]:
    """Return what a record says of its store, a line each."""
    found = record.encryption
    values = (record.store_id, record.chunk_bytes, record.created_at_ms)
    return tuple(map(str, (*values, found.cipher, found.segment_bytes, found.check)))
