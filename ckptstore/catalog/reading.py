"""Reads the log: which numbers are there, and what their commits say.

Names are never probed. On NFS a failed lookup is remembered for up to 30 s, while a listing shows
a new name at once; so the tail is listed, and only what was listed is opened. What is known to
exist but cannot be opened yet is tried again for a bounded time, then it is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile

from ckptstore import limits
from ckptstore.backends.base import Backend, ObjectInfo
from ckptstore.config import Environment
from ckptstore.errors import CkptStoreError, CorruptObjectError, ObjectNotFoundError
from ckptstore.format.commit import Commit, decode_commit
from ckptstore.format.keys import COMMITS_PREFIX, commit_key, commit_number

__all__ = ["LogReader", "wait_until"]


class LogReader:
    """Stateless access to the commits of one store; any thread may call it."""

    def __init__(self, backend: Backend, environment: Environment) -> None:
        self._backend = backend
        self._environment = environment

    def numbers(self, after: int) -> tuple[list[int], CorruptObjectError | None]:
        """List the commits after number `after`.

        Returns
        -------
        tuple
            The numbers ``after + 1, after + 2 ...`` without a gap, and the error that names the
            first missing commit where one is missing though a later one is there.
        """
        numbers: list[int] = []

        def look() -> bool:
            found = (commit_number(item.key) for item in self._list(after))
            numbers[:] = [number for number in found if number is not None]
            return not numbers or numbers[-1] - after == len(numbers)

        # A directory that is read while commits appear may show a later one and miss an earlier.
        if self._wait(look):
            return numbers, None
        whole = [n for i, n in enumerate(numbers) if n == after + 1 + i]
        missing = commit_key(after + 1 + len(whole))
        msg = f"the log has a gap: {missing} is missing, though {commit_key(numbers[-1])} is there"
        return whole, CorruptObjectError(msg, hint="restore it from a replica or a backup")

    def since(self, number: int) -> tuple[list[int], CorruptObjectError | None]:
        """List the commits after commit `number`, which was seen before and must be there still.

        No commit is ever deleted: where it is gone the log was cut short, or the store emptied or
        replaced. What was committed then would follow nothing. Costs no request more.
        """
        if not number:
            return self.numbers(0)
        numbers, gap = self.numbers(number - 1)
        if numbers[:1] == [number]:
            return numbers[1:], gap
        if gap is not None:
            return [], gap
        if self.find(number, wait=True) is not None:
            return self.numbers(number)
        msg = f"{commit_key(number)}, which was there before, is gone: the log was cut short"
        hint = "was the store emptied, replaced, restored or unmounted? open it anew to see"
        return [], CorruptObjectError(msg, hint=hint)

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
            try:
                data.append(self._backend.get(key, bytes_max=limits.COMMIT_BYTES_MAX))
            except ObjectNotFoundError:
                return False
            return True

        if not self._wait(open_it):
            msg = f"{key} is listed, but cannot be opened"
            raise CorruptObjectError(msg, hint="restore it from a replica or a backup")
        commit = decode_commit(data[0], where=key)
        if commit.number != number:
            msg = f"{key} holds commit {commit.number}"
            raise CorruptObjectError(msg)
        return commit

    def read_many(self, numbers: Sequence[int]) -> tuple[list[Commit], CkptStoreError | None]:
        """Read commits in parallel.

        Returns
        -------
        tuple
            The commits in order up to the first that cannot be read, and why it cannot, or None.
        """
        workers = min(self._backend.capabilities.concurrency, len(numbers))
        if workers < 2:
            return _until_error(map(self._try_read, numbers))
        with ThreadPoolExecutor(workers, thread_name_prefix="ckptstore-log") as pool:
            return _until_error(pool.map(self._try_read, numbers))

    def find(self, number: int, *, wait: bool) -> Commit | None:
        """Return commit `number` if a listing shows it; with `wait`, give it time to show."""
        key = commit_key(number)

        def look() -> bool:
            found = takewhile(lambda item: item.key <= key, self._list(number - 1))
            return any(item.key == key for item in found)

        return self.read(number) if (self._wait(look) if wait else look()) else None

    def _wait(self, done: Callable[[], bool]) -> bool:
        return wait_until(self._backend, self._environment, done)

    def _list(self, after: int) -> Iterator[ObjectInfo]:
        return self._backend.list(COMMITS_PREFIX, after=commit_key(after))

    def _try_read(self, number: int) -> Commit | CkptStoreError:
        try:
            return self.read(number)
        except CkptStoreError as error:
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
    results: Iterator[Commit | CkptStoreError],
) -> tuple[list[Commit], CkptStoreError | None]:
    commits: list[Commit] = []
    for result in results:
        if isinstance(result, CkptStoreError):
            return commits, result
        commits.append(result)
    return commits, None
