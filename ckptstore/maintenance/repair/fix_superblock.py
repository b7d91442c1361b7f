"""Brings ``store.json`` back, beside a log that can be read.

Little in it is needed to read a store, and most of that can be found again: the log says that there
is a store and since when, manifests of versions that were saved here say the size of chunks, and
the storage is probed again. A copy of the same log in a second store brings all of it back, with
the store's own id.

A ``store.json`` that is missing is put if absent. A damaged one occupies its name: as a damaged
commit, it is only replaced for a caller who vouches that no one else writes.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Final, Literal

import msgspec

from ckptstore import errors, limits
from ckptstore.backends.base import Backend, PutIfAbsent
from ckptstore.backends.encrypted import EncryptedBackend
from ckptstore.backends.sealing import DataKey, UserKey
from ckptstore.catalog.commits import Commit
from ckptstore.catalog.reading import LogReader
from ckptstore.config import SYSTEM, Environment, Options, writer_identity
from ckptstore.format.encryption import KeyRecord
from ckptstore.format.keys import COMMITS_PREFIX, OBJECT_PREFIXES, STORE_KEY, commit_number
from ckptstore.format.segments import MAGIC
from ckptstore.format.superblock import Superblock
from ckptstore.keyring import missing_key, open_keys
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
    keys = _keys(backend, key)
    reading = (
        backend
        if keys is None
        else EncryptedBackend(backend, keys[1], segment_bytes=keys[0].encryption.segment_bytes)
    )
    commits = _commits(reading, environment)
    if not commits:
        _refuse(backend, damage)
    copied = None if source is None or keys else _copy(source, commits, environment)
    found, new, doubt = (copied, (), "") if copied else _rebuilt(reading, commits, environment)
    if keys is not None:
        found, new, doubt = encrypted_superblock(found, keys[0]), ("by",), ""
    why = (damage or f"{STORE_KEY} is missing") + doubt
    taken = bool(damage) and not options.single_writer
    if taken:
        why += (
            ": its name is taken by the damaged object: open the store as a single writer "
            "(ckptstore repair --single-writer) to have it replaced, or move it away"
        )
    elif not dry_run:
        _write(backend, found, options, prober, environment, replaces=bool(damage))
    return SuperblockFinding(
        key=STORE_KEY,
        what="damaged" if damage else "missing",
        mended=not taken,
        why=why,
        source="keys" if keys else "copy" if copied else "rebuilt",
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
    for info in islice(backend.list(COMMITS_PREFIX), _LOOKED_AT):
        # Another may be sound.
        with suppress(errors.CorruptObjectError, errors.ObjectNotFoundError):
            data, looked = backend.get(info.key, bytes_max=limits.COMMIT_BYTES_MAX * 2), True
            if not data.startswith(MAGIC):
                continue
            if key is None:
                raise missing_key(backend.url)
            return open_keys(backend, key)
    if key is not None and looked:
        msg = f"nothing at {backend.url} is encrypted, but a key was given"
        hint = "leave the key out: encryption_key=, --key, CKPTSTORE_KEY"
        raise errors.EncryptionKeyError(msg, hint=hint)
    return None


def _commits(backend: Backend, environment: Environment) -> list[Commit]:
    """Return some sound commits from the beginning of the log, oldest first."""
    reader = LogReader(backend, environment)
    listed = (commit_number(info.key) for info in backend.list(COMMITS_PREFIX))
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
        hint = f"if nothing is stored there, remove {STORE_KEY} and create the store anew"
        raise errors.CorruptObjectError(msg, hint=hint)
    msg = f"there is no store at {backend.url}: neither {STORE_KEY} nor a commit that can be read"
    left = any(True for prefix in OBJECT_PREFIXES for _ in backend.list(prefix))
    hint = f"create one: ckptstore init {backend.url}"
    raise errors.StoreNotFoundError(msg, hint="restore commits/ from a backup" if left else hint)


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
    new = ["store_id", "by"]
    first = commits[0]
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
        backend.delete(STORE_KEY)
    write_superblock(backend, superblock, environment)  # another repair may be faster
