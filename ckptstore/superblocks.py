"""The record that makes a location a store, ``store.json``: reads it, and writes it exactly once.

Of several concurrent creators exactly one writes it, and the others find it. With a key, the
first record of keys is written before it.
"""

from __future__ import annotations

import msgspec

from ckptstore import limits
from ckptstore.backends.base import Backend
from ckptstore.backends.sealing import UserKey
from ckptstore.committing import put_once
from ckptstore.config import Environment
from ckptstore.errors import CorruptObjectError, ObjectNotFoundError
from ckptstore.format.encryption import FEATURE, KeyRecord
from ckptstore.format.keys import OBJECT_PREFIXES, STORE_KEY, key_record_key
from ckptstore.format.superblock import Superblock, decode_superblock, encode_superblock
from ckptstore.keyring import create_keys


def read_superblock(backend: Backend) -> Superblock | None:
    """Return the superblock, or None if there is none.

    Where the client may cache a failed lookup (NFS), the location is listed instead.
    """
    known = backend.capabilities
    listed = backend.list(STORE_KEY) if known.lists and known.lookup_lag_s > 0 else None
    if listed is not None and not any(info.key == STORE_KEY for info in listed):
        return None
    try:
        data = backend.get(STORE_KEY, bytes_max=limits.SUPERBLOCK_BYTES_MAX)
    except ObjectNotFoundError:
        return None
    return _decoded(data)


def _decoded(data: bytes) -> Superblock:
    try:
        return decode_superblock(data, where=STORE_KEY)
    except CorruptObjectError as error:
        hint = "ckptstore repair --single-writer, while no one else writes, rewrites it"
        raise CorruptObjectError(error.message, hint=hint) from error


def remains(backend: Backend) -> str:
    """Return the key of an object below the store's prefixes; empty if none is listed."""
    for prefix in OBJECT_PREFIXES if backend.capabilities.lists else ():
        for info in backend.list(prefix):
            return info.key
    return ""


def write_superblock(backend: Backend, wanted: Superblock, environment: Environment) -> Superblock:
    """Put ``store.json`` and return the stored one: `wanted`, or another creator's."""
    stored = put_once(
        backend,
        STORE_KEY,
        encode_superblock(wanted),
        environment,
        bytes_max=limits.SUPERBLOCK_BYTES_MAX,
        conditional=not wanted.single_writer,
    )
    return _decoded(stored)


def write_encrypted(
    backend: Backend, wanted: Superblock, key: UserKey, environment: Environment
) -> tuple[Superblock, bool]:
    """Write a record of keys, then the superblock; return the superblock, and whether it is ours.

    Creators with one key share the record of the first: there is one data key, durable before the
    superblock, no matter which of them writes that.
    """
    record, _ = create_keys(
        backend,
        key,
        store_id=wanted.store_id,
        chunk_bytes=wanted.chunk_bytes,
        environment=environment,
        conditional=not wanted.single_writer,
    )
    mine = record.store_id == wanted.store_id
    wanted = encrypted_superblock(wanted, record)
    found = write_superblock(backend, wanted, environment)
    if found.encryption is None and mine:  # a concurrent creator made a store without encryption
        backend.delete(key_record_key(record.number))
    return found, found == wanted


def encrypted_superblock(superblock: Superblock, record: KeyRecord) -> Superblock:
    """Return a superblock with the encryption that a record of keys describes."""
    return msgspec.structs.replace(
        superblock,
        features=tuple(sorted({*superblock.features, FEATURE})),
        store_id=record.store_id,
        chunk_bytes=record.chunk_bytes,
        created_at_ms=record.created_at_ms,
        encryption=record.encryption,
    )
