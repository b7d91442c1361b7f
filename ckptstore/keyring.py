"""The records of keys of an encrypted store: found, opened, made anew when a key is rotated.

``keys/000000000001.json`` is written before ``store.json``, so that no store is ever without its
keys: of several creators one writes it, and the others go on with what is there. The record of the
highest number counts. A rotation writes the next by put-if-absent, reads it back, and only then
deletes those before it: killed anywhere, it leaves a store that the new key or the old one opens,
and of two at once the later builds on the earlier. The newest record is never deleted.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import msgspec

from ckptstore import limits
from ckptstore.backends.base import Backend
from ckptstore.backends.encrypted import EncryptedBackend
from ckptstore.backends.sealing import DataKey, UserKey, unwrap, wrap
from ckptstore.catalog.reading import wait_until
from ckptstore.config import SYSTEM, Environment, writer_identity
from ckptstore.errors import (
    AmbiguousWriteError,
    CorruptObjectError,
    EncryptionKeyError,
    MissingKeyError,
    ObjectExistsError,
    ObjectNotFoundError,
    TransientStorageError,
)
from ckptstore.format.encryption import (
    Encryption,
    KeyRecord,
    decode_key_record,
    encode_key_record,
)
from ckptstore.format.keys import KEYS_PREFIX, STORE_KEY, key_record_key, key_record_number
from ckptstore.format.superblock import Superblock

__all__ = [
    "Rotation",
    "create_keys",
    "has_keys",
    "missing_key",
    "newest_record",
    "open_keys",
    "rotate",
    "unlocked",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """What a rotation did."""

    record: int
    """Number of the record that counts now."""
    keys: tuple[str, ...]
    """Ids of the keys that open the store now."""
    dropped: tuple[str, ...]
    """Ids of those that no longer do."""
    deleted: tuple[str, ...]
    """Records that were removed."""


def unlocked(
    backend: Backend,
    superblock: Superblock,
    user_key: UserKey | None,
    *,
    environment: Environment = SYSTEM,
) -> Backend:
    """Return a backend that reads and writes the objects of a store, encrypted or not.

    Raises
    ------
    MissingKeyError, WrongKeyError
        The store is encrypted, and no key was given, or another. Nothing but ``keys/`` was read.
    EncryptionKeyError
        A key was given, and the store is not encrypted.
    CorruptObjectError
        The records of keys are lost or damaged, or those of another store.
    """
    wanted = superblock.encryption
    if wanted is None:
        if user_key is None:
            return backend
        msg = f"{backend.url} is not encrypted, but a key was given"
        hint = (
            "leave the key out (encryption_key=, --key, CKPTSTORE_KEY) if that is the store you "
            f"mean; if it was encrypted once, somebody has replaced its {STORE_KEY}"
        )
        raise EncryptionKeyError(msg, hint=hint)
    if user_key is None:
        raise missing_key(backend.url)
    record, data_key = open_keys(backend, user_key)
    told = (superblock.store_id, superblock.chunk_bytes, superblock.encryption)
    if told != (record.store_id, record.chunk_bytes, record.encryption):
        msg = f"{STORE_KEY} and {key_record_key(record.number)} at {backend.url} contradict"
        hint = "one of them was changed; remove store.json and run ckptstore repair"
        raise CorruptObjectError(msg, hint=hint)
    return EncryptedBackend(
        backend, data_key, segment_bytes=wanted.segment_bytes, environment=environment
    )


def missing_key(url: str) -> MissingKeyError:
    """Return the error for an encrypted store without a key, with the ways to give one."""
    msg = f"{url} is encrypted, and no key was given"
    hint = (
        "give encryption_key='file:PATH', 'env:NAME' or 'command:CMD' to ckptstore.open, --key to "
        "a command, or set CKPTSTORE_KEY for it; to its second store belongs --to-key, --from-key "
        "or --heal-key"
    )
    return MissingKeyError(msg, hint=hint)


def has_keys(backend: Backend) -> bool:
    """Return whether there is any record of keys."""
    return any(key_record_number(info.key) for info in backend.list(KEYS_PREFIX))


def newest_record(backend: Backend) -> KeyRecord:
    """Return the record that counts.

    Raises
    ------
    CorruptObjectError
        There is none, or it is damaged.
    UnsupportedFeatureError, FormatError
        A newer ckptstore wrote it, or something else.
    """
    for _ in range(limits.KEY_TRIES_MAX):
        listed = backend.list(KEYS_PREFIX)
        newest = max((key_record_number(info.key) or 0 for info in listed), default=0)
        if not newest:
            break
        key = key_record_key(newest)
        try:
            data = backend.get(key, bytes_max=limits.KEY_RECORD_BYTES_MAX)
        except ObjectNotFoundError:
            continue  # a rotation came in between
        record = decode_key_record(data, where=key)
        if record.number != newest:
            msg = f"{key} holds record {record.number}"
            raise CorruptObjectError(msg, hint="restore keys/ from a backup")
        return record
    msg = f"{backend.url} is encrypted, but there is no record of its keys below {KEYS_PREFIX}"
    raise CorruptObjectError(msg, hint="restore keys/ from a backup: nothing opens it otherwise")


def open_keys(backend: Backend, user_key: UserKey) -> tuple[KeyRecord, DataKey]:
    """Return the record that counts and the data key in it.

    Raises
    ------
    WrongKeyError
        It is wrapped by other keys.
    CorruptObjectError
        As :func:`newest_record`; or the record was changed.
    """
    record = newest_record(backend)
    return record, unwrap(record, user_key, where=key_record_key(record.number))


def create_keys(
    backend: Backend,
    user_key: UserKey,
    *,
    store_id: str,
    chunk_bytes: int,
    environment: Environment,
    conditional: bool = True,
) -> tuple[KeyRecord, DataKey]:
    """Write record 1 for a store that is about to be made, or take the one that is there.

    Parameters
    ----------
    conditional
        False where the storage has no put-if-absent, and the user vouched to be alone.

    Raises
    ------
    WrongKeyError
        Another creator was first, with another key.
    """
    if has_keys(backend):
        return open_keys(backend, user_key)
    data_key = DataKey(bytes.fromhex(environment.random_hex(32)))
    now_ms = environment.now_ms()
    record = KeyRecord(
        number=1,
        store_id=store_id,
        chunk_bytes=chunk_bytes,
        created_at_ms=now_ms,
        encryption=Encryption(check=data_key.check(store_id)),
        slots=(),
        at_ms=now_ms,
        by=writer_identity()[: limits.BY_CHARS_MAX],
    )
    slot = wrap(record, data_key, user_key, bytes.fromhex(environment.random_hex(32)))
    _put(backend, msgspec.structs.replace(record, slots=(slot,)), environment, conditional)
    return open_keys(backend, user_key)


def rotate(
    backend: Backend,
    old: UserKey,
    new: UserKey,
    *,
    keep_old: bool = False,
    conditional: bool = True,
    environment: Environment = SYSTEM,
) -> Rotation:
    """Have the data key wrapped by `new`; what opened the store before no longer does.

    No object of the store is changed: whoever has kept an old record and its key, or the data key
    itself, still reads everything.

    Parameters
    ----------
    backend
        As it is, without encryption.
    keep_old
        The keys that open the store now go on to do so.

    Raises
    ------
    WrongKeyError
        `old` does not open the store.
    LimitError
        Too many keys are kept.
    AmbiguousWriteError
        It is not known whether the new record was written; the store opens with one of the keys.
    """
    for _ in range(limits.KEY_TRIES_MAX):
        record, data_key = open_keys(backend, old)
        kept = tuple(slot for slot in record.slots if slot.key != new.id) if keep_old else ()
        slot = wrap(record, data_key, new, bytes.fromhex(environment.random_hex(32)))
        wanted = msgspec.structs.replace(
            record,
            number=record.number + 1,
            slots=(*kept, slot),
            at_ms=environment.now_ms(),
            by=writer_identity()[: limits.BY_CHARS_MAX],
        )
        if not _put(backend, wanted, environment, conditional):
            continue  # another rotation was faster: build on that
        _check_written(backend, wanted, new)  # before anything is deleted
        now = tuple(slot.key for slot in wanted.slots)
        return Rotation(
            record=wanted.number,
            keys=now,
            dropped=tuple(slot.key for slot in record.slots if slot.key not in now),
            deleted=_delete_before(backend, wanted.number),
        )
    msg = f"others rotate the keys of {backend.url} all the time"
    raise AmbiguousWriteError(msg, hint="try again")


def _check_written(backend: Backend, record: KeyRecord, new: UserKey) -> None:
    """Read a record back and open it, as whoever opens the store will."""
    key = key_record_key(record.number)
    try:
        data = backend.get(key, bytes_max=limits.KEY_RECORD_BYTES_MAX)
    except ObjectNotFoundError:
        return  # a later rotation, which has built on it
    unwrap(decode_key_record(data, where=key), new, where=key)


def _delete_before(backend: Backend, number: int) -> tuple[str, ...]:
    old = [
        info.key
        for info in list(backend.list(KEYS_PREFIX))
        if 0 < (key_record_number(info.key) or 0) < number
    ]
    for key in old:
        backend.delete(key)
    return tuple(old)


def _put(backend: Backend, record: KeyRecord, environment: Environment, conditional: bool) -> bool:
    """Write a record; return whether it is the one that is there now under its number."""
    key, data = key_record_key(record.number), encode_key_record(record)
    write = backend.put_if_absent if conditional else backend.put
    for sent in range(limits.COMMIT_SENDS_MAX):
        cause: Exception
        try:
            write(key, data)
        except ObjectExistsError as error:
            cause = error
        except (AmbiguousWriteError, TransientStorageError) as error:
            cause = error
        else:
            return True
        # A lost reply: mine is there, or another's, or none.
        listed = wait_until(
            backend, environment, lambda: any(info.key == key for info in backend.list(key))
        )
        if listed:
            return secrets.compare_digest(
                backend.get(key, bytes_max=limits.KEY_RECORD_BYTES_MAX), data
            )
        if isinstance(cause, ObjectExistsError) or sent + 1 == limits.COMMIT_SENDS_MAX:
            msg = f"it is not known whether {key} was written at {backend.url}"
            raise AmbiguousWriteError(msg, hint="do it again") from cause
    raise AssertionError  # pragma: no cover - the loop has no other end
