"""The key records of an encrypted store: finds and opens them, and replaces them on a rotation.

``keys/000000000001.json`` is written before ``store.json``, so that a store always has its keys:
of several creators one writes it, and the others use that record. The record of the highest
number counts. A rotation writes the next by put-if-absent, reads it back, and only then deletes
the older records: killed at any point, it leaves a store that the new key or the old one opens,
and of two concurrent rotations the later builds on the earlier. A process that deletes records
checks afterwards that the one to keep still exists.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from ckptstore import errors, limits
from ckptstore.backends.base import Backend
from ckptstore.backends.encrypted import EncryptedBackend
from ckptstore.backends.sealing import DataKey, UserKey, unwrap, wrap
from ckptstore.catalog.reading import wait_until
from ckptstore.catalog.unlisted import key_records
from ckptstore.committing import put_once
from ckptstore.config import SYSTEM, Environment, writer_identity
from ckptstore.format import encryption
from ckptstore.format.encryption import FORMAT, KeyRecord
from ckptstore.format.keys import KEYS_PREFIX, STORE_KEY, key_record_key, key_record_number
from ckptstore.format.superblock import Superblock

MEND_HINT: Final = "ckptstore key mend --key SPEC removes records that your key does not confirm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """Result of a rotation."""

    record: int
    """Number of the record that counts now."""
    keys: tuple[str, ...]
    """Ids of the keys that open the store now."""
    dropped: tuple[str, ...]
    """Ids of those that no longer do."""
    deleted: tuple[str, ...]
    """Records that were removed."""


def unlocked(
    backend: Backend, superblock: Superblock, key: UserKey | None, environment: Environment = SYSTEM
) -> Backend:
    """Return a backend that reads and writes the objects of a store, encrypted or not.

    Raises
    ------
    MissingKeyError, WrongKeyError
        The store is encrypted, and the key is missing or wrong. Only ``keys/`` was read.
    EncryptionKeyError
        A key was given, and the store is not encrypted.
    CorruptObjectError
        The records of keys are lost or damaged, or belong to another store.
    """
    wanted = superblock.encryption
    if wanted is None:
        if key is None:
            return backend
        msg = f"{backend.url} is not encrypted, but a key was given"
        hint = (
            "leave the key out (encryption_key=, --key, CKPTSTORE_KEY) if that is the store you "
            f"mean; if it was encrypted once, its {STORE_KEY} has been replaced"
        )
        raise errors.EncryptionKeyError(msg, hint=hint)
    if key is None:
        raise missing_key(backend.url)
    record, data_key = open_keys(backend, key)
    told = (superblock.store_id, superblock.chunk_bytes, superblock.encryption)
    if told != (record.store_id, record.chunk_bytes, record.encryption):
        msg = f"{STORE_KEY} at {backend.url} contradicts {key_record_key(record.number)}"
        hint = "one of them was changed; remove store.json and run ckptstore repair"
        raise errors.CorruptObjectError(msg, hint=hint)
    return EncryptedBackend(
        backend, data_key, segment_bytes=wanted.segment_bytes, environment=environment
    )


def missing_key(url: str) -> errors.MissingKeyError:
    """Return the error for an encrypted store without a key, with the ways to give one."""
    msg = f"{url} is encrypted, and no key was given"
    hint = (
        "give encryption_key='file:PATH', 'env:NAME' or 'command:CMD' to ckptstore.open, --key to "
        "a command, or set CKPTSTORE_KEY for it; to its second store belongs --to-key, --from-key "
        "or --heal-key"
    )
    return errors.MissingKeyError(msg, hint=hint)


def newest_record(backend: Backend) -> KeyRecord:
    """Return the record with the highest number, which counts.

    Raises
    ------
    CorruptObjectError
        There is none, or it is damaged.
    UnsupportedFeatureError, FormatError
        A newer ckptstore wrote it, or another program.
    """
    for _ in range(limits.KEY_TRIES_MAX):
        numbers = record_numbers(backend)
        if not numbers:
            break
        try:
            with _told_of_others(numbers):
                return read_record(backend, max(numbers))
        except errors.ObjectNotFoundError:
            continue  # a rotation deleted it after the listing
    msg = f"{backend.url} is encrypted, but there is no record of its keys below {KEYS_PREFIX}"
    hint = "restore keys/ from a backup: nothing opens it otherwise"
    raise errors.CorruptObjectError(msg, hint=hint)


def record_numbers(backend: Backend) -> list[int]:
    """Return the numbers of the existing records."""
    if not backend.capabilities.lists:
        return key_records(backend)
    return [number for info in backend.list(KEYS_PREFIX) if (number := key_record_number(info.key))]


def read_record(backend: Backend, number: int) -> KeyRecord:
    """Return one record.

    Raises
    ------
    ObjectNotFoundError
        It does not exist.
    CorruptObjectError, UnsupportedFeatureError, FormatError
        As :func:`newest_record`.
    """
    key = key_record_key(number)
    data = backend.get(key, bytes_max=limits.KEY_RECORD_BYTES_MAX)
    record = encryption.decode_key_record(data, where=key)
    if record.number != number:
        msg = f"{key} holds record {record.number}"
        raise errors.CorruptObjectError(msg, hint="restore keys/ from a backup")
    return record


def open_keys(backend: Backend, user_key: UserKey) -> tuple[KeyRecord, DataKey]:
    """Return the record that counts and the data key in it.

    Raises
    ------
    WrongKeyError
        Other keys wrap the data key.
    CorruptObjectError
        As :func:`newest_record`; or the record was modified.
    """
    record = newest_record(backend)
    try:
        where = key_record_key(record.number)
        return record, unwrap(record, user_key, where=where, place=backend.url)
    except (errors.WrongKeyError, errors.CorruptObjectError):
        with _told_of_others(record_numbers(backend)):
            raise


@contextlib.contextmanager
def _told_of_others(numbers: Sequence[int]) -> Iterator[None]:
    """Add the way out to an error if the newest record opens nothing and older ones exist.

    A rotation deletes the older records. So either it was killed, or an intruder who can write to
    the storage has added a newer record that hides the valid one.
    """
    try:
        yield
    except (errors.WrongKeyError, errors.CorruptObjectError, errors.FormatError) as error:
        if len(numbers) < 2:
            raise
        hint = (
            f"{len(numbers) - 1} more are below {KEYS_PREFIX}; unless somebody has just rotated the"
            f" key: {MEND_HINT}; otherwise: {error.hint}"
        )
        raise type(error)(error.message, hint=hint) from error


def create_keys(
    backend: Backend,
    user_key: UserKey,
    *,
    store_id: str,
    chunk_bytes: int,
    environment: Environment,
    conditional: bool = True,
) -> tuple[KeyRecord, DataKey]:
    """Write record 1 for a store that is about to be made, or read the existing one.

    Parameters
    ----------
    conditional
        False where the storage has no put-if-absent, and the user has promised a single writer.

    Raises
    ------
    WrongKeyError
        Another creator was first, with another key.
    """
    if record_numbers(backend):
        return open_keys(backend, user_key)
    data_key = DataKey(bytes.fromhex(environment.random_hex(32)))
    now_ms = environment.now_ms()
    record = KeyRecord(
        number=1,
        store_id=store_id,
        chunk_bytes=chunk_bytes,
        created_at_ms=now_ms,
        encryption=encryption.Encryption(check=data_key.check(store_id)),
        slots=(),
        at_ms=now_ms,
        by=writer_identity()[: limits.BY_CHARS_MAX],
    )
    records = KeyRecords(backend=backend, environment=environment, conditional=conditional)
    records.put(record, data_key, user_key)
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
    """Wrap the data key by `new`; the keys that opened the store before no longer do.

    No object of the store is changed: anyone who kept an old record and its key, or the data key
    itself, can still read everything.

    Parameters
    ----------
    backend
        The bare backend, without encryption.
    keep_old
        Keep the keys that open the store now, too.

    Raises
    ------
    WrongKeyError
        `old` does not open the store.
    LimitError
        Too many keys are kept.
    AmbiguousWriteError
        The new record may or may not be written, and the store opens with one of the keys; or it is
        written, as the message says, and was not read back, or old ones could not be deleted.
    """
    records = KeyRecords(backend=backend, environment=environment, conditional=conditional)
    for _ in range(limits.KEY_TRIES_MAX):
        record, data_key = open_keys(backend, old)
        if record.number >= limits.COMMIT_NUMBER_MAX:
            msg = f"{key_record_key(record.number)} has the last number possible"
            raise errors.LimitError(msg, hint=f"no rotation wrote it: {MEND_HINT}")
        kept = tuple(slot for slot in record.slots if slot.key != new.id) if keep_old else ()
        follower = msgspec.structs.replace(
            record,
            number=record.number + 1,
            slots=kept,
            at_ms=environment.now_ms(),
            by=writer_identity()[: limits.BY_CHARS_MAX],
        )
        wanted = records.put(follower, data_key, new)
        if wanted is None:
            continue  # another rotation was faster: build on its record
        now = tuple(slot.key for slot in wanted.slots)
        try:
            check_written(backend, wanted, new)  # before anything is deleted
            past = [one for one in record_numbers(backend) if one < wanted.number]
            deleted = records.delete(wanted, past)
        except (errors.StorageError, errors.IntegrityError) as error:
            msg = f"{backend.url} has the record of the new key, and then: {error.message}"
            raise errors.AmbiguousWriteError(msg, hint=f"keep both keys; {MEND_HINT}") from error
        dropped = tuple(slot.key for slot in record.slots if slot.key not in now)
        return Rotation(record=wanted.number, keys=now, dropped=dropped, deleted=deleted)
    msg = f"other processes keep rotating the keys of {backend.url}"
    raise errors.AmbiguousWriteError(msg, hint="try again")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRecords:
    """Write access to the key records of one store."""

    backend: Backend
    """The bare backend, without encryption."""
    environment: Environment
    conditional: bool
    """False where the storage has no put-if-absent, and the user has promised a single writer."""

    def put(self, record: KeyRecord, data_key: DataKey, user_key: UserKey) -> KeyRecord | None:
        """Write a record with one more slot, sealed; return None if its number is taken.

        Raises
        ------
        LimitError
            It has too many slots.
        AmbiguousWriteError
            The record may or may not be written.
        """
        slot = wrap(record, data_key, user_key, bytes.fromhex(self.environment.random_hex(32)))
        whole = msgspec.structs.replace(record, format=FORMAT, slots=(*record.slots, slot), seal="")
        whole = msgspec.structs.replace(whole, seal=data_key.seal_of(whole))
        return whole if self._put(whole) else None

    def delete(self, kept: KeyRecord, numbers: Sequence[int]) -> tuple[str, ...]:
        """Delete the other records than `kept`, which opens the store; return their names.

        Another process may have chosen one of them as the one to keep, and delete `kept`. So each
        process checks afterwards that its own or a later record exists, and else writes it again.
        """
        keys = tuple(map(key_record_key, numbers))
        for key in keys:
            self.backend.delete(key)

        def is_kept() -> bool:
            return max(record_numbers(self.backend), default=0) >= kept.number

        if keys and not wait_until(self.backend, self.environment, is_kept):
            self._put(kept)
        return keys

    def _put(self, record: KeyRecord) -> bool:
        """Write a record; return whether it is the one now stored under its number."""
        data = encryption.encode_key_record(record)
        stored = put_once(
            self.backend,
            key_record_key(record.number),
            data,
            self.environment,
            bytes_max=limits.KEY_RECORD_BYTES_MAX,
            conditional=self.conditional,
        )
        return secrets.compare_digest(stored, data)


def check_written(backend: Backend, record: KeyRecord, new: UserKey) -> None:
    """Read a record back and open it, as a process that opens the store would."""
    with contextlib.suppress(errors.ObjectNotFoundError):  # a later rotation built on it
        unwrap(read_record(backend, record.number), new, where=key_record_key(record.number))
