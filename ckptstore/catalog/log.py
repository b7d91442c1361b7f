"""The log: versions become visible through it alone, and writers contend for nothing else.

Commit n+1 is put-if-absent by a writer that has folded 1..n. A writer that loses reads what came
first, builds the operations again on the new catalog, and tries the next number.

Lost replies. A commit bears a random write id. When the storage's answer is lost, the commit of
that number is read back: mine means success, another's means conflict, none means that the very
same bytes are sent to the very same number again. A delayed duplicate can never land as a second
version: every send of an attempt has the same key and the same bytes, the key can be created once
only, and no commit is ever deleted. So a late send finds its own commit (no effect), or another's
(no effect), or creates the one commit that was meant. A new write id is drawn, and a new number
tried, only once the old number is *known* to be another's, which no late send can change.
What stays unclear after a few sends raises ``AmbiguousWriteError``, never success; the commit may
still appear, whole, since what it names is durable: its packs must not be taken back.

A damaged end. Where the newest records cannot be read, readers go on with those before, and writers
stop. A repair commits past them, with an operation that sets them aside; the numbers are not used
again, so that put-if-absent decides between it and a writer that has read them whole.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, count, islice

from ckptstore import errors, limits
from ckptstore.backends.base import Backend
from ckptstore.catalog import snapshots
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.commits import FORMAT, MAGIC, Commit, CommitBody, encode_commit, extended
from ckptstore.catalog.reading import LogReader, Unread
from ckptstore.catalog.run_ops import Save
from ckptstore.catalog.state import Op
from ckptstore.config import SYSTEM, Environment
from ckptstore.format.keys import commit_key, snapshot_key

Build = Callable[[Catalog], Sequence[Op]]
"""Makes the operations of a commit from the catalog that it will follow. Called again for every
number that is tried; raises when a precondition does not hold; has no effect of its own."""


_log = logging.getLogger("ckptstore")


@dataclass(frozen=True, slots=True)
class DamagedEnd:
    """The newest records, of which none can be read."""

    first: int
    free: int
    """The next number that is not taken."""
    error: errors.CkptStoreError


class Log:
    """The log of one store, and the catalog that this process has folded from it.

    One instance serves all threads of a process: commits and refreshes take turns under a lock,
    reading :attr:`catalog` takes none. A forked child may go on using its copy.

    Parameters
    ----------
    by
        Who writes, for people who read the log: ``user@host pid``.
    single_writer
        The storage has no put-if-absent and the user vouches that no one else writes. Also an
        attribute, for a caller that finds this out in `check_writable`.
    check_writable
        Called before each commit; raises where commits are not allowed.
    """

    def __init__(
        self,
        backend: Backend,
        environment: Environment = SYSTEM,
        *,
        by: str = "",
        single_writer: bool = False,
        check_writable: Callable[[], object] = bool,
    ) -> None:
        self._backend = backend
        self._environment = environment
        self._by = by[: limits.BY_CHARS_MAX]
        self.single_writer = single_writer
        self._check_writable = check_writable
        self._reader = LogReader(backend, environment)
        self.others: Interleaving = Interleaving(self._reader.read, by=self._by)
        """Warns of second writers."""
        self.catalog: Catalog = Catalog()
        """The catalog as last folded, without looking at the storage; empty before a refresh."""
        self.opened: bool = False
        """Whether the log has been looked at."""
        self.damage: DamagedEnd | None = None
        """The damage of its end, as last looked at."""
        self._warned = 0
        self.began: int = 0
        """The commit of the snapshot that this process began with; 0 for the empty catalog.

        What was condemned and deleted before is unknown here: see
        :attr:`ckptstore.catalog.state.State.gone`.
        """
        self._snapshot = 0
        self._own: Commit | None = None
        self._tried: Commit | None = None
        """What was written last, and may be there although nobody said so."""
        self._lock = threading.RLock()
        self._pid = os.getpid()

    # --- reading ------------------------------------------------------------------------------

    def refresh(self, *, writing: bool = False) -> Catalog:
        """Fold the commits that came since the last call, and return the catalog.

        The first call starts at the newest sound snapshot. One listing, then the new commits.

        Parameters
        ----------
        writing
            Raise if the newest records are damaged; otherwise that is a warning, once.

        Raises
        ------
        CorruptObjectError
            A commit is missing, damaged, or does not follow the one before; the message names
            its key. :attr:`catalog` then holds everything before it, which is safe to read;
            nothing can be committed.
        UnsupportedFeatureError
            A commit was written by a newer version; as above.
        StorageError
            The storage failed; :attr:`catalog` is an older state, whole in itself.
        """
        with self._guard():
            if self.opened:
                known = self.catalog
                listed, worn = self._reader.since(known.number, known.digest)
                self._catch_up(self._reader.settled(listed), max(listed, default=0))
                if worn is not None and self.catalog is known and self.damage is None:
                    self.damage = DamagedEnd(known.number, known.number + 1, worn)
            else:
                self._open()
            if self.damage is not None:
                self._tell(self.damage, writing=writing)
            return self.catalog

    def commits(self, first: int = 1, *, whole: bool = False) -> Iterator[Commit]:
        """Yield the commits from number `first` on, as they are stored, checked as a chain.

        Reads every commit: for the history that people look at, and for verification.

        Parameters
        ----------
        whole
            Raise if the newest records are damaged; otherwise that is a warning.

        Raises
        ------
        CorruptObjectError, UnsupportedFeatureError, StorageError
            As :meth:`refresh`, after what comes before was yielded.
        """
        listed = self._reader.numbers(max(first, 1) - 1)
        records, previous = self._reader.settled(listed), ""
        for record in records:
            if isinstance(record, Unread):
                self._tell(_end(record, records, max(listed)), writing=whole)
                return
            if record.body.previous != previous and (record.follows == 0 or previous):
                msg = f"the history was changed: {record.key} does not follow the commit before it"
                hint = "restore the log from a replica or a backup"
                raise errors.CorruptObjectError(msg, hint=hint)
            previous = record.digest
            yield record

    def other_history(self, numbers: Iterable[int]) -> int:
        """Return the number of a sound snapshot that the log contradicts; 0 where it does not.

        It is of commits that were lost, and others have taken their numbers since.
        """
        confirmed = {self.began, self._snapshot}
        unsure = [n for n in numbers if n <= self.catalog.number and n not in confirmed]
        for catalog in snapshots.read_newest_first(self._backend, unsure):
            with suppress(errors.IntegrityError, errors.UnsupportedFeatureError):
                commit = self._reader.find(catalog.number, wait=False)
                if commit is not None and commit.digest != catalog.digest:
                    return catalog.number
        return 0

    def _open(self) -> None:
        """Start from the newest snapshot that the log confirms, or from the beginning."""
        for catalog in snapshots.read_newest_first(self._backend, self._reader.snapshots()):
            listed = self._reader.tail(catalog.number - 1)
            records = self._reader.settled(listed)
            if _confirmed(catalog, next(records, None)):
                self.catalog = catalog
                self._snapshot = self.began = catalog.number
                break
            snapshots.warn_unconfirmed(catalog.number)
        else:
            listed = self._reader.tail(0)
            records = self._reader.settled(listed)
        self.opened = True
        self._catch_up(records, max(listed, default=0))

    def _catch_up(self, records: Iterator[Commit | Unread], last: int) -> None:
        """Fold the records up to number `last`, and note if the newest are damaged."""
        self.damage = None
        while batch := list(islice(records, limits.COMMIT_READ_BATCH)):
            commits = [record for record in batch if isinstance(record, Commit)]
            unread = next((record for record in batch if isinstance(record, Unread)), None)
            if unread is not None:
                commits = [commit for commit in commits if commit.number < unread.number]
            self.catalog, broken = extended(self.catalog, commits)
            if broken is not None:
                raise broken
            if unread is not None:
                later = chain((r for r in batch if r.number > unread.number), records)
                self.damage = _end(unread, later, last)
                return

    def _tell(self, damage: DamagedEnd, *, writing: bool) -> None:
        """Warn, once, of the damage of the newest records; raise it for a writer."""
        what = f"the end of the log is damaged: {damage.error.message}"
        hint = f"ckptstore repair --store {self._backend.url} mends it, or says what is in the way"
        if writing:
            raise errors.CorruptObjectError(what, hint=hint) from damage.error
        if self._warned != damage.first:
            self._warned = damage.first
            _log.warning("%s; reading goes on with what is before; %s", what, hint)

    # --- writing ------------------------------------------------------------------------------

    def append(self, build: Build) -> Commit:
        """Commit what `build` makes of the newest catalog; durable and visible on return.

        An interruption (``KeyboardInterrupt``) may leave the commit there or not, whole in
        either case; nothing is claimed about it, and the next refresh shows which it was.

        Parameters
        ----------
        build
            See :data:`Build`. Called under the lock of the log: it must not wait for a thread
            that commits.

        Raises
        ------
        CommitConflictError
            Others were faster for ``COMMIT_WAIT_S``; or, with a single writer, there are others.
        AmbiguousWriteError
            It could not be found out whether the commit is there; it may also appear later.
        InvalidInputError, LimitError
            The operations cannot be committed.
        CkptStoreError
            What `build` raises, what :meth:`refresh` raises, what the storage raises.
        """
        commit = self.append_any(build)
        if commit is None:
            raise errors.InvalidInputError("a commit without operations")
        return commit

    def append_any(self, build: Build, *, mending: bool = False) -> Commit | None:
        """Commit as :meth:`append` does; None, and no commit, if `build` finds nothing to do.

        With `mending`, commit past the damaged end of the log, which the operations set aside;
        nothing is committed where it is not damaged any more.
        """
        with self._guard():
            self._check_writable()
            end = self._environment.monotonic() + limits.COMMIT_WAIT_S
            for lost in count():
                catalog = self.refresh(writing=not mending)
                ops = () if mending and self.damage is None else tuple(build(catalog))
                if not ops:
                    return None
                data, commit, after = self._prepare(catalog, ops)
                if commit.number % limits.COMMITS_PER_FOLDER == 0:  # its own folder is synced alone
                    self._backend.make_durable([commit_key(commit.number - 1)])
                if (self._claim_alone if self.single_writer else self._claim)(data, commit):
                    self.catalog, self._own = after, commit
                    self._reader.wrote(commit.number, len(data))
                    self.others.note(commit, after)
                    self._snapshot_if_due(after)
                    return commit
                if self._environment.monotonic() >= end:
                    msg = f"other writers were faster {lost + 1} times, last at {commit.key}"
                    raise errors.CommitConflictError(msg, hint="try again when fewer write at once")
                self._pause(lost)
        raise AssertionError  # pragma: no cover - the loop has no other end

    def _prepare(self, catalog: Catalog, ops: tuple[Op, ...]) -> tuple[bytes, Commit, Catalog]:
        """Return the bytes of the next commit, the commit, and the catalog after it."""
        body = CommitBody(
            magic=MAGIC,
            format=FORMAT,
            number=catalog.number + 1 if self.damage is None else self.damage.free,
            previous=catalog.digest,
            write_id=self._environment.random_hex(16),
            at_ms=self._environment.now_ms(),
            by=self._by,
            ops=ops,
        )
        data, commit = encode_commit(body)
        after, error = extended(catalog, [commit])
        if error is not None:
            raise errors.InvalidInputError(f"this cannot be committed: {error}") from error
        return data, commit, after

    def _claim(self, data: bytes, commit: Commit) -> bool:
        """Put the commit if its number is free; True if it is there, False if another's is."""
        for sent in range(limits.COMMIT_SENDS_MAX):
            try:
                self._backend.put_if_absent(commit.key, data)
            except errors.ObjectExistsError as error:
                found = self._look(commit, error, wait=True)
                if found is None:
                    raise _unclear(commit, "it exists, but is not listed") from error
                return _is_mine(commit, found)
            except (errors.AmbiguousWriteError, errors.TransientStorageError) as error:
                found = self._look(commit, error, wait=False)
                if found is not None:
                    return _is_mine(commit, found) and self._durable(commit)
                if sent + 1 == limits.COMMIT_SENDS_MAX:
                    raise _unclear(commit, error.message) from error
                self._pause(sent)
            except errors.StorageError as error:
                found = self._look(commit, error, wait=False)
                if found is not None and _is_mine(commit, found):
                    raise _unclear(commit, f"it shows, but {error.message}") from error
                raise
            else:
                return True
        raise AssertionError  # pragma: no cover - the loop has no other end

    def _durable(self, commit: Commit) -> bool:
        """Return True once a commit is durable that was read back: its folder may not be synced."""
        try:
            self._backend.make_durable([commit.key])
        except errors.StorageError as error:
            raise _unclear(commit, f"it shows, but {error.message}") from error
        return True

    def _look(self, commit: Commit, cause: errors.CkptStoreError, *, wait: bool) -> Commit | None:
        """Return the stored commit of the number of `commit`; a failure to look settles nothing."""
        try:
            return self._reader.find(commit.number, wait=wait)
        except errors.StorageError as error:
            raise _unclear(commit, f"{cause.message}; reading back: {error.message}") from error

    def _claim_alone(self, data: bytes, commit: Commit) -> bool:
        """Write the commit without put-if-absent, and find out if someone else did too.

        This detects a second writer, most of the time; it cannot keep one out.
        """
        tried, self._tried = self._tried, commit
        own = tried if tried and tried.digest == commit.body.previous else self._own
        if own is not None and own.number != commit.number - 1:
            raise _two_writers(f"commit {commit.number - 1} is not by this one")
        if own is not None and self._reader.read(own.number).digest != own.digest:
            hint = "stop the other writer; run ckptstore verify"
            raise _two_writers(f"{own.key} was replaced", hint)
        self._check_free(commit)
        failure: errors.StorageError | None = None
        try:
            self._backend.put(commit.key, data)
        except errors.ObjectExistsError as error:
            raise _two_writers(f"{commit.key} appeared meanwhile") from error
        except (errors.AmbiguousWriteError, errors.TransientStorageError) as error:
            failure = error
        found = self._look(commit, failure or errors.StorageError("written"), wait=failure is None)
        if found is None:
            raise _unclear(commit, failure.message if failure else "not listed") from failure
        if not _is_mine(commit, found):
            raise _two_writers(f"{commit.key} is another's")
        return failure is None or self._durable(commit)

    def _check_free(self, commit: Commit) -> None:
        """Raise if a single writer's next commit is there already, or listings seem incomplete.

        A listing that lacks the last commits would have this writer begin a second log.
        """
        named = self._reader.opens(commit.number)
        if self._reader.find(commit.number, wait=named) is not None:
            raise _two_writers(f"{commit.key} appeared meanwhile")
        if named:
            raise _hidden(f"{commit.key} is there, but not listed")
        if self._own is None:
            newer = [number for number in self._reader.snapshots() if number >= commit.number]
            for catalog in snapshots.read_newest_first(self._backend, newer):
                key = snapshot_key(catalog.number)
                raise _hidden(
                    f"{key} is there, but the log ends before {commit.key}",
                    f"; without a copy of it, move {key} away to go on with what is left",
                )

    def _snapshot_if_due(self, catalog: Catalog) -> None:
        if not snapshots.due(catalog.number, self._snapshot):
            return
        if catalog.number % snapshots.period(catalog.number):
            # Overdue as far as this process knows: others may have written one since.
            newest = snapshots.newest_number(self._backend, catalog.number)
            self._snapshot = max(self._snapshot, newest)
            if not snapshots.due(catalog.number, self._snapshot):
                return
        self._write_snapshot(catalog)

    def leave_snapshot(self) -> None:
        """Write a snapshot, unless there are hardly any commits after the newest one known here.

        For a process that is done for a while: the next to open the store reads few commits. Never
        raises: a snapshot is a cache.
        """
        with self._guard():
            catalog = self.catalog
            bound = max(limits.SNAPSHOT_LEFT_COMMITS, catalog.versions_count // 1000)
            if catalog.number - self._snapshot >= bound:
                self._write_snapshot(catalog)

    def _write_snapshot(self, catalog: Catalog) -> None:
        if snapshots.write(self._backend, catalog, single_writer=self.single_writer):
            self._snapshot = catalog.number

    def _pause(self, lost: int) -> None:
        bound = min(limits.COMMIT_BACKOFF_CAP_S, limits.COMMIT_BACKOFF_BASE_S * 2 ** min(lost, 20))
        self._environment.sleep(bound * self._environment.jitter())

    def _guard(self) -> threading.RLock:
        """Return the lock; a forked child gets its own, since its copy may be held for ever."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._lock = threading.RLock()
        return self._lock


def _is_mine(commit: Commit, found: Commit) -> bool:
    return found.body.write_id == commit.body.write_id


def _confirmed(catalog: Catalog, record: Commit | Unread | None) -> bool:
    """Return whether the log's commit of the snapshot's number has the snapshot's digest."""
    if isinstance(record, Unread):
        if not (record.damaged or isinstance(record.error, errors.UnsupportedFeatureError)):
            raise record.error
        return False
    return record is not None and record.digest == catalog.digest


def _end(record: Unread, later: Iterable[Commit | Unread], last: int) -> DamagedEnd:
    """Return the damage that begins with a record; raise it if it is not that of the end.

    Parameters
    ----------
    later
        The records after it.
    last
        Number of the last one that is listed.
    """
    free = last + 1
    for one in (record, *later):
        if isinstance(one, Commit):
            raise record.error
        if not one.damaged:
            raise one.error
        if one.missing:
            free = min(free, one.number)
    return DamagedEnd(record.number, free, record.error)


def _two_writers(why: str, hint: str = "stop the other writer") -> errors.CommitConflictError:
    msg = f"two writers are at work in a store that was opened for a single one: {why}"
    return errors.CommitConflictError(msg, hint=hint)


def _hidden(why: str, otherwise: str = "") -> errors.CorruptObjectError:
    hint = "does the storage list all files? if so, restore the log from a replica or a backup"
    return errors.CorruptObjectError(f"the log is longer than listed: {why}", hint=hint + otherwise)


def _unclear(commit: Commit, why: str) -> errors.AmbiguousWriteError:
    msg = f"it is not known whether {commit.key} was written: {why}"
    hint = "look whether the version is there before saving it again; it may still appear"
    return errors.AmbiguousWriteError(msg, hint=hint)


class Interleaving:
    """Notices, once, that another process saves to a run that this process saves to.

    Nothing is wrong with such a log: the saves form one line, each with the one before for a
    parent. But two trainings that were given one name by mistake look like one that jumps, and
    ``best`` and retention choose among both. The log calls it under its lock.

    Parameters
    ----------
    read
        Returns the commit of a number; called when somebody else has saved.
    by
        Who this process is: ``user@host pid``.
    """

    def __init__(self, read: Callable[[int], Commit], *, by: str) -> None:
        self._read = read
        self._where = by.rpartition(" ")[0]
        """The user and host of this process."""
        self._kin = {by} if by else set()
        self._last: dict[str, int] = {}
        """Number of the commit with this log's newest version of each run."""
        self._told: set[str] = set()

    def befriend(self, pid: int) -> None:
        """Take another process of this host for this one, which it saves for."""
        self._kin.add(f"{self._where} {pid}")

    def expect(self, run: str) -> None:
        """Say nothing of other writers of a run."""
        self._told.add(run)

    def note(self, commit: Commit, after: Catalog) -> None:
        """Look at a commit of this log's own, and warn if others' saves came in between."""
        for op in commit.ops:
            if not isinstance(op, Save):
                continue
            last = self._last.get(op.run)
            self._last[op.run] = commit.number
            if last is None or op.run in self._told or not op.parent:
                continue
            parent = after.version(op.parent)
            # A rollback, by any process, leads to an older one.
            if parent.run == op.run and parent.commit > last:
                who = self._who(parent.commit)
                if who in self._kin:
                    continue
                self._told.add(op.run)
                _log.warning(
                    "run %s: %s saved step %d between two saves of this process; if these are two "
                    "trainings, give each a run of its own",
                    op.run,
                    who,
                    parent.step,
                )

    def _who(self, number: int) -> str:
        try:
            return self._read(number).body.by or "somebody else"
        except errors.CkptStoreError:
            return "somebody else"
