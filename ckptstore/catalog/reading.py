"""Reads the log: the numbers of its commits, and their content.

Names are not probed where they can be listed (:mod:`ckptstore.catalog.unlisted` does where they
cannot). On NFS a failed lookup is remembered for up to 30 s, while a listing shows a new name at
once; so the tail is listed, and only what was listed is opened. What is known to exist but cannot
be opened yet is tried again for a bounded time, then it is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count, takewhile

from ckptstore import errors, limits
from ckptstore.backends.base import Backend, ObjectInfo
from ckptstore.backends.transfers import Threads
from ckptstore.catalog import snapshots
from ckptstore.catalog.commits import Commit, decode_commit
from ckptstore.catalog.unlisted import Unlisted
from ckptstore.config import Environment
from ckptstore.format.keys import COMMITS_PREFIX, commit_key, commit_number


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

    def numbers(self, after: int) -> tuple[list[int], errors.CorruptObjectError | None]:
        """List the commits after number `after`.

        Returns
        -------
        tuple
            The numbers ``after + 1, after + 2 ...`` without a gap, and the error that names the
            first missing commit where one is missing though a later one is there.
        """
        listed, gap = self._listed(after)
        return list(listed), gap

    def _listed(self, after: int) -> tuple[dict[int, ObjectInfo], errors.CorruptObjectError | None]:
        """List as :meth:`numbers`, with what the listing says of each commit."""
        listed: dict[int, ObjectInfo] = {}

        def look() -> bool:
            """List again; return whether no number is missing between."""
            found = ((commit_number(item.key), item) for item in self._list(after))
            listed.clear()
            listed.update((number, item) for number, item in found if number is not None)
            return not listed or max(listed) - after == len(listed)

        # A directory that is read while commits appear may show a later one and miss an earlier.
        if self._wait(look):
            return listed, None
        whole = {
            number: listed[number] for number in takewhile(listed.__contains__, count(after + 1))
        }
        missing = commit_key(after + 1 + len(whole))
        last = commit_key(max(listed))
        msg = f"the log has a gap: {missing} is missing, though {last} is there"
        return whole, errors.CorruptObjectError(msg, hint="restore it from a replica or a backup")

    def tail(self, after: int) -> tuple[list[int], errors.CorruptObjectError | None]:
        """List as :meth:`numbers`, and remember of the last commit what :meth:`since` compares.

        By one thread at a time.
        """
        listed, gap = self._listed(after)
        self._remember(listed)
        return list(listed), gap

    def wrote(self, number: int, size_bytes: int) -> None:
        """Remember the last commit, which this process wrote. By one thread at a time."""
        self._last = (number, size_bytes, None)

    def since(self, number: int, digest: str) -> tuple[list[int], errors.CorruptObjectError | None]:
        """List the commits after commit `number`, which was seen before and must be there still.

        No commit is ever deleted: where it is gone the log was cut short, or the store emptied or
        replaced. What was committed then would follow nothing. Nor is one ever changed: where the
        listing tells another size or time of it than before, it is read again. Costs no request
        more otherwise. By one thread at a time.

        Parameters
        ----------
        digest
            Of that commit.
        """
        if not number:
            return self.tail(0)
        listed, gap = self._listed(number - 1)
        if number in listed:
            if self._contradicts(number, listed[number]) and self._is_other(number, digest):
                msg = f"{commit_key(number)} is not the commit that was there before"
                hint = "was the store replaced or restored? open it again to see"
                return [], errors.CorruptObjectError(msg, hint=hint)
            self._remember(listed)
            return list(listed)[1:], gap
        if gap is not None:
            return [], gap
        if self.find(number, wait=True) is not None:
            return self.numbers(number)
        msg = f"{commit_key(number)}, which was there before, is gone: the log was cut short"
        hint = "was the store emptied, replaced, restored or unmounted? open it again to see"
        return [], errors.CorruptObjectError(msg, hint=hint)

    def _remember(self, listed: Mapping[int, ObjectInfo]) -> None:
        last = max(listed, default=0)
        info = listed.get(last)
        self._last = None if info is None else (last, info.size_bytes, info.modified_at)

    def _contradicts(self, number: int, info: ObjectInfo) -> bool:
        """Return whether the last commit is listed with another size or time than before."""
        if self._last is None or self._last[0] != number:
            return False
        _, size_bytes, modified_at = self._last
        return size_bytes != info.size_bytes or modified_at not in (None, info.modified_at)

    def _is_other(self, number: int, digest: str) -> bool:
        """Return whether a sound commit of a number has another digest; False for damage."""
        try:
            return self.read(number).digest != digest
        except (errors.CorruptObjectError, errors.UnsupportedFeatureError):
            return False

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

    def read_many(
        self, numbers: Sequence[int]
    ) -> tuple[list[Commit], errors.CkptStoreError | None]:
        """Read commits in parallel.

        Returns
        -------
        tuple
            The commits in order up to the first that cannot be read, and why it cannot, or None.
        """
        workers = min(self._backend.capabilities.concurrency, len(numbers))
        if workers < 2:
            return _until_error(map(self._try_read, numbers))
        with Threads(workers, thread_name_prefix="ckptstore-log") as pool:
            return _until_error(pool.map(self._try_read, numbers))

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

    def _try_read(self, number: int) -> Commit | errors.CkptStoreError:
        try:
            return self.read(number)
        except errors.CkptStoreError as error:
            return error


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


def _until_error(
    results: Iterator[Commit | errors.CkptStoreError],
) -> tuple[list[Commit], errors.CkptStoreError | None]:
    commits: list[Commit] = []
    for result in results:
        if isinstance(result, errors.CkptStoreError):
            return commits, result
        commits.append(result)
    return commits, None
