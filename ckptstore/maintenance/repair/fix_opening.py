"""Mends what opens a store: its ``store.json``, and the records of its keys.

Little in ``store.json`` is needed to read a store, and most of that can be found again: the log
says that there is a store and since when, manifests of versions that were saved here say the size
of chunks, and the storage is probed again. A copy of the same log in a second store brings all of
it back, with the store's own id.

A ``store.json`` that is missing is put if absent. A damaged one occupies its name: as a damaged
commit, it is only replaced for a caller who vouches that no one else writes.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, islice
from typing import Final, Literal

import msgspec

from ckptstore import errors, keyring, limits
from ckptstore.backends.base import Backend, PutIfAbsent
from ckptstore.backends.encrypted import EncryptedBackend
from ckptstore.backends.sealing import DataKey, UserKey, unwrap
from ckptstore.catalog.commits import Commit
from ckptstore.catalog.reading import LogReader
from ckptstore.config import SYSTEM, Environment, Options, writer_identity
from ckptstore.format import keys
from ckptstore.format.encryption import KeyRecord
from ckptstore.format.segments import MAGIC
from ckptstore.format.superblock import Superblock
from ckptstore.maintenance.replicas.copy_manifest import ORIGIN_KEY
from ckptstore.repo import Prober, Repo, probe_backend, unsafe
from ckptstore.superblocks import encrypted_superblock, read_superblock, write_superblock

_LOOKED_AT: Final = 20
"""Commits, from either end, and manifests of the newest versions. Source: one that is sound is
enough, and damage comes in stretches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuperblockFinding:
    """Damage of ``store.json``, and the result of mending it."""

    key: str
    what: Literal["missing", "damaged"]
    mended: bool
    """It is right again; in a dry run, it can be made so."""
    why: str
    """The damage, and the obstacle to mending it."""
    source: Literal["copy", "rebuilt", "keys"]
    """A copy of the same log, the objects of this store, or, of an encrypted store, its record of
    keys."""
    new: tuple[str, ...] = ()
    """Fields that could not be had, and are new: ``store_id``, say. ``chunk_bytes`` is one of
    them if no version was saved here or those that were disagree; `why` has their sizes."""


def mend_superblock(
    backend: Backend,
    *,
    source: Repo | None = None,
    options: Options | None = None,
    environment: Environment = SYSTEM,
    prober: Prober = probe_backend,
    dry_run: bool = False,
    key: UserKey | None = None,
) -> SuperblockFinding | None:
    """Put ``store.json`` back if it is missing or damaged; None if it is sound.

    Parameters
    ----------
    source
        A second store; used if it has the same log.
    dry_run
        Report the damage; write nothing, and do not probe.
    key
        Of an encrypted store: the newest record of keys holds all that is needed.

    Raises
    ------
    StoreNotFoundError
        It is missing, and no commit says that there is a store.
    CorruptObjectError
        It is damaged, and no commit can be read.
    UnsupportedFeatureError
        A newer ckptstore made the store.
    ReadOnlyError, UnsafeBackendError, StorageError
        The storage cannot be written to.
    """
    options = options if options is not None else Options()
    damage = _damage(backend)
    if damage is None:
        return None
    opened = _keys(backend, key)
    reading = backend
    if opened is not None:
        segment_bytes = opened[0].encryption.segment_bytes
        reading = EncryptedBackend(backend, opened[1], segment_bytes=segment_bytes)
    commits = _commits(reading, environment)
    if not commits:
        _refuse(backend, damage)
    copied = None if source is None or opened else _copy(source, commits, environment)
    found, new, doubt = (copied, (), "") if copied else _rebuilt(reading, commits, environment)
    if opened is not None:
        found, new, doubt = encrypted_superblock(found, opened[0]), ("by",), ""
    why = (damage or f"{keys.STORE_KEY} is missing") + doubt
    taken = bool(damage) and not options.single_writer
    if taken:
        why += (
            ": its name is taken by the damaged object: open the store as a single writer "
            "(ckptstore repair --single-writer) to have it replaced, or move it away"
        )
    elif not dry_run:
        _write(backend, found, options, prober, environment, replaces=bool(damage))
    return SuperblockFinding(
        key=keys.STORE_KEY,
        what="damaged" if damage else "missing",
        mended=not taken,
        why=why,
        source="keys" if opened else "copy" if copied else "rebuilt",
        new=new,
    )


def _damage(backend: Backend) -> str | None:
    """Return the damage of the superblock: None for none, an empty text if it is missing."""
    try:
        return "" if read_superblock(backend) is None else None
    except errors.UnsupportedFeatureError:
        raise
    except (errors.IntegrityError, errors.FormatError) as error:
        return error.message


def _keys(backend: Backend, key: UserKey | None) -> tuple[KeyRecord, DataKey] | None:
    """Return the record and key that open the objects of a store; None without encryption.

    Its first commit decides: a record of keys may be left from a creator that did not get far.
    """
    looked = False
    for info in islice(backend.list(keys.COMMITS_PREFIX), _LOOKED_AT):
        # Another may be sound.
        with suppress(errors.CorruptObjectError, errors.ObjectNotFoundError):
            data, looked = backend.get(info.key, bytes_max=limits.COMMIT_BYTES_MAX * 2), True
            if not data.startswith(MAGIC):
                continue
            if key is None:
                raise keyring.missing_key(backend.url)
            return keyring.open_keys(backend, key)
    if key is not None and looked:
        msg = f"nothing at {backend.url} is encrypted, but a key was given"
        hint = "leave the key out: encryption_key=, --key, CKPTSTORE_KEY"
        raise errors.EncryptionKeyError(msg, hint=hint)
    return None


def _commits(backend: Backend, environment: Environment) -> list[Commit]:
    """Return some sound commits from the beginning of the log, oldest first."""
    reader = LogReader(backend, environment)
    listed = (keys.commit_number(info.key) for info in backend.list(keys.COMMITS_PREFIX))
    found = []
    for number in islice(filter(None, listed), _LOOKED_AT):
        try:
            found.append(reader.read(number))
        except errors.UnsupportedFeatureError:
            raise
        except (errors.IntegrityError, errors.FormatError):
            continue  # another may be sound
    return found


def _refuse(backend: Backend, damage: str) -> None:
    if damage:
        msg = f"{damage}; and no commit at {backend.url} can be read that says what it was of"
        hint = f"if nothing is stored there, remove {keys.STORE_KEY} and create the store anew"
        raise errors.CorruptObjectError(msg, hint=hint)
    msg = f"there is no store at {backend.url}: neither {keys.STORE_KEY} nor a commit"
    left = any(True for prefix in keys.OBJECT_PREFIXES for _ in backend.list(prefix))
    hint = "restore commits/ from a backup" if left else f"create one: ckptstore init {backend.url}"
    raise errors.StoreNotFoundError(f"{msg} that can be read", hint=hint)


def _copy(source: Repo, commits: list[Commit], environment: Environment) -> Superblock | None:
    """Return the superblock of a second store if its log is the same."""
    reader = LogReader(source.backend, environment)
    for commit in commits:
        try:
            same = reader.find(commit.number, wait=False)
        except (errors.IntegrityError, errors.FormatError):
            continue  # another may be sound
        if same is not None:
            return source.superblock if same.digest == commit.digest else None
    return None


def _rebuilt(
    backend: Backend, commits: list[Commit], environment: Environment
) -> tuple[Superblock, tuple[str, ...], str]:
    """Return a superblock made from the store's objects, the fields that are new, a doubt."""
    new, first = ["store_id", "by"], commits[0]
    if first.number != 1:
        new.append("created_at_ms")
    provisional = Superblock(
        store_id=environment.random_hex(16),
        chunk_bytes=limits.CHUNK_BYTES_DEFAULT,
        created_at_ms=first.body.at_ms,
        by=writer_identity()[: limits.BY_CHARS_MAX],
        backend=backend.name,
        put_if_absent=PutIfAbsent.UNKNOWN.value,
        single_writer=False,
    )
    own, foreign = _chunk_bytes(Repo(backend, provisional, environment=environment))
    votes = own or foreign
    if not votes:
        return provisional, (*new, "chunk_bytes"), ""
    # The most common; the newest of those as common, since Counter keeps the order of insertion.
    chunk_bytes = votes.most_common(1)[0][0]
    doubt = ""
    if len(votes) > 1 or not own:
        new.append("chunk_bytes")
        said = ", ".join(f"{size} ({count})" for size, count in votes.most_common())
        which = "saved here" if own else "that came from other stores, and there are no others,"
        doubt = f"; chunk_bytes is uncertain: the versions {which} say {said}"
    return msgspec.structs.replace(provisional, chunk_bytes=chunk_bytes), tuple(new), doubt


def _chunk_bytes(repo: Repo) -> tuple[Counter[int], Counter[int]]:
    """Count the sizes of chunks in the newest manifests, newest first.

    Of versions that were saved here, and of those that came from other stores: a fork keeps the
    size that its own store had.
    """
    try:
        catalog = repo.refresh()
    except (errors.IntegrityError, errors.FormatError):
        catalog = repo.log.catalog  # what came before the damage
    own: Counter[int] = Counter()
    foreign: Counter[int] = Counter()
    looked = 0
    for version in catalog.versions(newest_first=True):
        votes = foreign if ORIGIN_KEY in version.metadata else own
        if votes is foreign and foreign.total() >= _LOOKED_AT:
            continue
        # Another may be sound.
        with suppress(errors.IntegrityError, errors.FormatError, errors.NotFoundError):
            votes[repo.manifests.load(version).chunk_bytes] += 1
        looked += votes is own
        if looked >= _LOOKED_AT:
            break
    return own, foreign


def _write(
    backend: Backend,
    found: Superblock,
    options: Options,
    prober: Prober,
    environment: Environment,
    *,
    replaces: bool,
) -> None:
    """Probe the storage, and write a superblock with the result, if that is wished and safe."""
    if options.read_only:
        raise errors.ReadOnlyError(f"{backend.url} was opened read-only")
    probed = prober(backend, environment)
    conditional = probed.put_if_absent is PutIfAbsent.ATOMIC
    if not conditional and not options.single_writer:
        raise unsafe(backend.url, probed.put_if_absent)
    superblock = msgspec.structs.replace(
        found,
        backend=backend.name,
        put_if_absent=probed.put_if_absent.value,
        single_writer=not conditional,
        probe=dict(probed.report),
    )
    if replaces:
        backend.delete(keys.STORE_KEY)
    write_superblock(backend, superblock, environment)  # another repair may be faster


# --- records of keys ----------------------------------------------------------------------------

# An intruder who can write to the storage can put a record below ``keys/``, whose number is higher
# than that of the one that counts. It opens nothing: a record has a seal, which follows from the
# data key and the record's number. But it stands in the way, of opening and of the next rotation.
# Only a user who knows that nobody is rotating the key can say that it is to go.


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
        atomic = verdict is PutIfAbsent.ATOMIC
        if not (kept or atomic or single_writer):
            raise unsafe(backend.url, verdict)
        records = keyring.KeyRecords(backend=backend, environment=environment, conditional=atomic)
        record = sound[-1] if kept else _write_record(records, good[0], user_key, number)
        # The highest first: until then it counts, wrong as it is.
        records.delete(record, gone[::-1])
    deleted = tuple(map(keys.key_record_key, gone))
    return KeysMended(dry_run=dry_run, record=number, kept=kept, deleted=deleted)


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
    numbers = sorted(keyring.record_numbers(backend))
    if len(numbers) > limits.KEY_RECORDS_MAX:
        most = limits.KEY_RECORDS_MAX
        msg = f"{len(numbers)} records are below {keys.KEYS_PREFIX}, more than {most}"
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
            record = keyring.read_record(backend, number)
            read += 1
            data_key = unwrap(record, user_key, where=keys.key_record_key(number))
            if (record.store_id, record.encryption) == (superblock.store_id, superblock.encryption):
                found.append((record, data_key))
    if found:
        return found
    if read:
        msg = f"the key {user_key.id} opens none of {len(numbers)} records below {keys.KEYS_PREFIX}"
        raise errors.WrongKeyError(msg, hint="give the key that the store was opened with last")
    msg = f"no record below {keys.KEYS_PREFIX} at {backend.url} can be read"
    hint = "restore keys/ from a backup: nothing opens it otherwise"
    raise errors.CorruptObjectError(msg, hint=hint)


def _write_record(
    records: keyring.KeyRecords, opened: tuple[KeyRecord, DataKey], user_key: UserKey, number: int
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
        msg = f"another process has written {keys.key_record_key(number)} at {records.backend.url}"
        raise errors.AmbiguousWriteError(msg, hint="see who does, and do it again")
    keyring.check_written(records.backend, written, user_key)
    return written
