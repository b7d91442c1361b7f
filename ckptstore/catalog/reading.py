"""Reads the log: the numbers of its commits, and their content.

Names are not probed where they can be listed (:mod:`ckptstore.catalog.unlisted` does where they
cannot). On NFS a failed lookup is remembered for up to 30 s, while a listing shows a new name at
once; so the tail is listed, and only what was listed is opened. What is known to exist but cannot
be opened yet is tried again for a bounded time, then it is an error.

Records that a later commit sets aside do not count, whether they can be read or not.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from itertools import takewhile
from typing import NamedTuple

from ckptstore import errors, limits
from ckptstore.backends.base import Backend, ObjectInfo
from ckptstore.backends.transfers import Threads
from ckptstore.catalog import snapshots
from ckptstore.catalog.commits import Commit, decode_commit
from ckptstore.catalog.unlisted import Unlisted
from ckptstore.chunking import batches
from ckptstore.config import Environment
from ckptstore.format.keys import COMMITS_PREFIX, commit_key, commit_number

Listed = dict[int, ObjectInfo | None]
"""Numbers of commits in order, each with its object; None for the first missing in a gap."""


class Unread(NamedTuple):
    """A record of the log that is missing or cannot be read."""

    number: int
    error: errors.CkptStoreError
    missing: bool = False

    @property
    def damaged(self) -> bool:
        """Whether the record itself is at fault: its bytes, or the sectors that held them."""
        cause = self.error.__cause__
        unreadable = isinstance(cause, OSError) and cause.errno == errno.EIO
        return unreadable or isinstance(self.error, errors.IntegrityError)


class LogReader:
    """Access to the commits of one store. Any thread may call what does not say otherwise."""

    def __init__(self, backend: Backend, environment: Environment) -> None:
        self._backend = backend
        self._environment = environment
        self._last: tuple[int, int, float | None] | None = None
        """Number, size and time of the last commit; no time if it was written here."""
        self._unlisted = None if backend.capabilities.lists else Unlisted(backend, self._wait)

    def snapshots(self) -> list[int]:
        """Return the numbers of the catalog snapshots; where none are listed, of likely ones."""
        if self._unlisted is not None:
            return self._unlisted.snapshots()
        return snapshots.listed(self._backend)

    def numbers(self, after: int) -> Listed:
        """List the commits after number `after`."""
        listed: dict[int, ObjectInfo] = {}

        def look() -> bool:
            """List again; return whether no number is missing between."""
            found = ((commit_number(item.key), item) for item in self._list(after))
            listed.clear()
            listed.update((number, item) for number, item in found if number is not None)
            return not listed or max(listed) - after == len(listed)

        # A directory that is read while commits appear may show a later one and miss an earlier.
        if self._wait(look):
            return dict(listed)
        whole: Listed = {}
        due = after + 1
        for number in sorted(listed):
            if number != due:
                whole[due] = None
            whole[number], due = listed[number], number + 1
        return whole

    def tail(self, after: int) -> Listed:
        """List as :meth:`numbers`, and remember of the last commit what :meth:`since` compares.

        By one thread at a time.
        """
        listed = self.numbers(after)
        self._remember(listed)
        return listed

    def wrote(self, number: int, size_bytes: int) -> None:
        """Remember the last commit, which this process wrote. By one thread at a time."""
        self._last = (number, size_bytes, None)

    def since(self, number: int, digest: str) -> tuple[Listed, errors.CkptStoreError | None]:
        """List the commits after commit `number`, which was seen before and must be there still.

        No commit is ever deleted: where it is gone the log was cut short, or the store emptied or
        replaced. What was committed then would follow nothing. Nor is one ever changed: where the
        listing tells another size or time of it than before, it is read again. Costs no request
        more otherwise. By one thread at a time.

        Parameters
        ----------
        digest
            Of that commit.

        Returns
        -------
        tuple
            The later commits; the damage of that commit, if it has become unreadable.

        Raises
        ------
        CorruptObjectError
            It is gone, or another one.
        """
        if not number:
            return self.tail(0), None
        listed = self.numbers(number - 1)
        info = listed.pop(number, None)
        if info is not None:
            damage = self._damage(number, info, digest)
            if damage is None:
                self._remember({number: info, **listed})
            return listed, damage
        if listed:
            raise gap(number)
        if self.find(number, wait=True) is not None:
            return self.numbers(number), None
        msg = f"{commit_key(number)}, which was there before, is gone: the log was cut short"
        hint = "was the store emptied, replaced, restored or unmounted? open it again to see"
        raise errors.CorruptObjectError(msg, hint=hint)

    def _remember(self, listed: Listed) -> None:
        last = max(listed, default=0)
        info = listed.get(last)
        self._last = None if info is None else (last, info.size_bytes, info.modified_at)

    def _damage(self, number: int, info: ObjectInfo, digest: str) -> errors.CkptStoreError | None:
        """Return the damage of the last commit, if it is listed with another size or time."""
        if self._last is None or self._last[0] != number:
            return None
        _, size_bytes, modified_at = self._last
        if size_bytes == info.size_bytes and modified_at in (None, info.modified_at):
            return None
        try:
            other = self.read(number).digest != digest
        except (errors.CorruptObjectError, errors.UnsupportedFeatureError) as error:
            return error
        if other:
            msg = f"{commit_key(number)} is not the commit that was there before"
            hint = "was the store replaced or restored? open it again to see"
            raise errors.CorruptObjectError(msg, hint=hint)
        return None

    def read(self, number: int) -> Commit:
        """Return a commit that was listed.

        Raises
        ------
        CorruptObjectError
            If it is damaged, bears another number, or vanished after it was listed.
        UnsupportedFeatureError
            If a newer version wrote it.
        StorageError
            If the storage failed.
        """
        key = commit_key(number)
        data: list[bytes] = []

        def open_it() -> bool:
            """Read the commit; say whether it was there."""
            try:
                data.append(self._backend.get(key, bytes_max=limits.COMMIT_BYTES_MAX))
            except errors.ObjectNotFoundError:
                return False
            return True

        if not self._wait(open_it):
            msg = f"{key} is listed, but cannot be opened"
            raise errors.CorruptObjectError(msg, hint="restore it from a replica or a backup")
        commit = decode_commit(data[0], where=key)
        if commit.number != number:
            raise errors.CorruptObjectError(f"{key} holds commit {commit.number}")
        return commit

    def settled(self, listed: Listed) -> Iterator[Commit | Unread]:
        """Yield the records of a listing in order, without those that a later one sets aside."""
        held: list[Commit | Unread] = []
        for numbers in batches(list(listed), limits.COMMIT_READ_BATCH):
            for record in self._read_many({number: listed[number] for number in numbers}):
                if isinstance(record, Commit) and record.follows + 1 < record.number:
                    held = [one for one in held if one.number <= record.follows]
                held.append(record)
            known = max(0, len(held) - limits.SET_ASIDE_MAX)
            yield from held[:known]
            del held[:known]
        yield from held

    def _read_many(self, listed: Listed) -> Iterator[Commit | Unread]:
        """Read commits, several at a time."""
        workers = min(self._backend.capabilities.concurrency, len(listed))
        if workers < 2:
            yield from map(self._try_read, listed.items())
            return
        with Threads(workers, thread_name_prefix="ckptstore-log") as pool:
            yield from pool.map(self._try_read, listed.items())

    def find(self, number: int, *, wait: bool) -> Commit | None:
        """Return commit `number` if a listing shows it; with `wait`, give it time to show."""
        key = commit_key(number)

        def look() -> bool:
            found = takewhile(lambda item: item.key <= key, self._list(number - 1))
            return any(item.key == key for item in found)

        return self.read(number) if (self._wait(look) if wait else look()) else None

    def opens(self, number: int) -> bool:
        """Return whether commit `number` can be read by its name, whatever a listing shows."""
        try:
            self._backend.get(commit_key(number), bytes_max=limits.COMMIT_BYTES_MAX)
        except errors.ObjectNotFoundError:
            return False
        return True

    def _wait(self, done: Callable[[], bool]) -> bool:
        return wait_until(self._backend, self._environment, done)

    def _list(self, after: int) -> Iterator[ObjectInfo]:
        if self._unlisted is not None:
            return self._unlisted.commits(after)
        return self._backend.list(COMMITS_PREFIX, after=commit_key(after))

    def _try_read(self, item: tuple[int, ObjectInfo | None]) -> Commit | Unread:
        number, info = item
        try:
            if info is None:
                return Unread(number, gap(number), missing=True)
            if info.size_bytes < 0:
                msg = f"{commit_key(number)} is no file, but takes the name of one"
                raise errors.CorruptObjectError(msg)
            return self.read(number)
        except errors.CkptStoreError as error:
            return Unread(number, error)


def gap(number: int) -> errors.CorruptObjectError:
    """Return the error for a commit that is missing though a later one is there."""
    msg = f"the log has a gap: {commit_key(number)} is missing, though a later commit is there"
    return errors.CorruptObjectError(msg, hint="restore it from a replica or a backup")


def wait_until(backend: Backend, environment: Environment, done: Callable[[], bool]) -> bool:
    """Call `done` until it is true, or the time in which a name may seem absent is over.

    The time is what the backend declares, twice, within the bounds of ``VISIBILITY_WAIT_MIN_S``
    and ``VISIBILITY_WAIT_S``.
    """
    lag_s = backend.capabilities.lookup_lag_s
    wait_s = min(limits.VISIBILITY_WAIT_S, max(limits.VISIBILITY_WAIT_MIN_S, 2 * lag_s))
    end = environment.monotonic() + wait_s
    pause_s = limits.COMMIT_BACKOFF_BASE_S
    while not done():
        if environment.monotonic() >= end:
            return False
        environment.sleep(pause_s)
        pause_s = min(2 * pause_s, limits.COMMIT_BACKOFF_CAP_S)
    return True
