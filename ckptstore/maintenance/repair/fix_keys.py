"""Finds and removes records of keys that no holder of the key has written.

An intruder who can write to the storage can put a record below ``keys/``, whose number is higher
than that of the one that counts. It opens nothing: a record has a seal, which follows from the data
key and the record's number. But it stands in the way, of opening and of the next rotation. Only a
user who knows that nobody is rotating the key can say that it is to go.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from itertools import count

import msgspec

from ckptstore import errors, limits
from ckptstore.backends.base import Backend, PutIfAbsent
from ckptstore.backends.sealing import DataKey, UserKey, unwrap
from ckptstore.config import SYSTEM, Environment, writer_identity
from ckptstore.format.encryption import KeyRecord
from ckptstore.format.keys import KEYS_PREFIX, key_record_key
from ckptstore.format.superblock import Superblock
from ckptstore.keyring import KeyRecords, check_written, read_record, record_numbers
from ckptstore.repo import unsafe
from ckptstore.superblocks import read_superblock


@dataclass(frozen=True, slots=True, kw_only=True)
class KeysMended:
    """Result of mending the records of keys; in a dry run, the foreseen one."""

    dry_run: bool
    record: int
    """Number of the record that counts now; of the one that the key opens, if nothing was wrong."""
    kept: bool
    """Whether that was there before, with all the keys that opened the store. If not, it is new,
    and the key that was given is the only one that opens the store."""
    deleted: tuple[str, ...]
    """Records that were taken away, with `dry_run` those that would be."""


def mend_keys(
    backend: Backend,
    user_key: UserKey,
    *,
    single_writer: bool = False,
    dry_run: bool = False,
    environment: Environment = SYSTEM,
) -> KeysMended:
    """Take away the records of keys that `user_key` does not vouch for.

    The newest record that the key opens, and that has a seal, stays as it is if its number can
    count. If none has a seal (a store from before there were seals), or its number is the last that
    there is, a new one is written, which the given key alone opens.

    Parameters
    ----------
    backend
        As it is, without encryption.
    single_writer
        Nobody else writes at the same time; needed on storage that cannot create an object
        conditionally.

    Raises
    ------
    StoreNotFoundError
        There is no store.
    EncryptionKeyError
        It is not encrypted.
    WrongKeyError
        The key opens none of the records.
    CorruptObjectError
        None can be read.
    LimitError
        There are too many to look at.
    UnsafeBackendError
        One has to be written, and the storage cannot create an object conditionally.
    AmbiguousWriteError, StorageError
        The storage failed, or others write at once. Do it again.
    """
    superblock = _superblock(backend)
    numbers = _numbers(backend)
    good = _opened(backend, superblock, user_key, numbers)
    sound = [record for record, _ in good if record.seal]
    kept = bool(sound) and sound[-1].number < limits.COMMIT_NUMBER_MAX
    taken = set(numbers)
    number = sound[-1].number if kept else next(free for free in count(1) if free not in taken)
    gone = [other for other in numbers if other != number]
    if not dry_run:
        verdict = PutIfAbsent(superblock.put_if_absent)
        conditional = verdict is PutIfAbsent.ATOMIC
        if not (kept or conditional or single_writer):
            raise unsafe(backend.url, verdict)
        records = KeyRecords(backend=backend, environment=environment, conditional=conditional)
        record = sound[-1] if kept else _write(records, good[0], user_key, number)
        # The highest first: until then it counts, wrong as it is.
        records.delete(record, gone[::-1])
    return KeysMended(
        dry_run=dry_run, record=number, kept=kept, deleted=tuple(map(key_record_key, gone))
    )


def _superblock(backend: Backend) -> Superblock:
    """Return that of an encrypted store; refuse any other, and that there is none."""
    superblock = read_superblock(backend)
    if superblock is None:
        msg = f"there is no store at {backend.url}"
        raise errors.StoreNotFoundError(msg, hint="ckptstore repair, if its store.json was lost")
    if superblock.encryption is None:
        raise errors.EncryptionKeyError(f"{backend.url} is not encrypted")
    return superblock


def _numbers(backend: Backend) -> list[int]:
    """Return the numbers of all records, the lowest first; refuse to look at too many."""
    numbers = sorted(record_numbers(backend))
    if len(numbers) > limits.KEY_RECORDS_MAX:
        msg = f"{len(numbers)} records are below {KEYS_PREFIX}, more than {limits.KEY_RECORDS_MAX}"
        hint = "remove those from storage whose times show that they are new"
        raise errors.LimitError(msg, hint=hint)
    return numbers


def _opened(
    backend: Backend, superblock: Superblock, user_key: UserKey, numbers: list[int]
) -> list[tuple[KeyRecord, DataKey]]:
    """Return the records that a key opens and that are of this store, the lowest number first."""
    found = []
    read = 0
    for number in numbers:
        with suppress(
            errors.CorruptObjectError,
            errors.FormatError,
            errors.UnsupportedFeatureError,
            errors.WrongKeyError,
            errors.ObjectNotFoundError,
        ):
            record = read_record(backend, number)
            read += 1
            data_key = unwrap(record, user_key, where=key_record_key(number))
            if (record.store_id, record.encryption) == (superblock.store_id, superblock.encryption):
                found.append((record, data_key))
    if found:
        return found
    if read:
        msg = f"the key {user_key.id} opens none of {len(numbers)} records below {KEYS_PREFIX}"
        raise errors.WrongKeyError(msg, hint="give the key that the store was opened with last")
    msg = f"no record below {KEYS_PREFIX} at {backend.url} can be read"
    hint = "restore keys/ from a backup: nothing opens it otherwise"
    raise errors.CorruptObjectError(msg, hint=hint)


def _write(
    records: KeyRecords, opened: tuple[KeyRecord, DataKey], user_key: UserKey, number: int
) -> KeyRecord:
    record, data_key = opened
    fresh = msgspec.structs.replace(
        record,
        number=number,
        slots=(),
        at_ms=records.environment.now_ms(),
        by=writer_identity()[: limits.BY_CHARS_MAX],
    )
    written = records.put(fresh, data_key, user_key)
    if written is None:
        msg = f"another process has written {key_record_key(number)} at {records.backend.url}"
        raise errors.AmbiguousWriteError(msg, hint="see who does, and do it again")
    check_written(records.backend, written, user_key)
    return written
