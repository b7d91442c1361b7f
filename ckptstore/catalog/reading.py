"""Reads the log: which numbers are there, and what their commits say.

Names are never probed. On NFS a failed lookup is remembered for up to 30 s, while a listing shows
a new name at once; so the tail is listed, and only what was listed is opened. What is known to
exist but cannot be opened yet is tried again for a bounded time, then it is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import takewhile

from ckptstore import limits
from ckptstore.backends.base import Backend, ObjectInfo
from ckptstore.catalog.commits import Commit, decode_commit
from ckptstore.config import Environment
from ckptstore.errors import (
    CkptStoreError,
    CorruptObjectError,
    ObjectNotFoundError,
    UnsupportedFeatureError,
)
from ckptstore.format.keys import COMMITS_PREFIX, commit_key, commit_number


class LogReader:
    """Access to the commits of one store. Any thread may call what does not say otherwise."""

    def __init__(self, backend: Backend, environment: Environment) -> None:
        self._backend = backend
        self._environment = environment
        self._told: _Told | None = None

    def numbers(
        self, after: int, *, told: list[_Told] | None = None
    ) -> tuple[list[int], CorruptObjectError | None]:
        """List the commits after number `after`.

        Parameters
        ----------
        told
            Gets what the listing tells of the first and the last.

        Returns
        -------
        tuple
            The numbers ``after + 1, after + 2 ...`` without a gap, and the error that names the
            first missing commit where one is missing though a later one is there.
        """
        numbers: list[int] = []

        def look() -> bool:
            """List anew; say whether no number is missing between."""
            found = ((commit_number(item.key), item) for item in self._list(after))
            listed = [(number, item) for number, item in found if number is not None]
            numbers[:] = [number for number, _ in listed]
            if told is not None:
                told[:] = [_Told.of(*one) for one in (listed[:1] + listed[-1:])]
            return not numbers or numbers[-1] - after == len(numbers)

        # A directory that is read while commits appear may show a later one and miss an earlier.
        if self._wait(look):
            return numbers, None
        whole = [n for i, n in enumerate(numbers) if n == after + 1 + i]
        missing = commit_key(after + 1 + len(whole))
        msg = f"the log has a gap: {missing} is missing, though {commit_key(numbers[-1])} is there"
        return whole, CorruptObjectError(msg, hint="restore it from a replica or a backup")

    def tail(self, after: int) -> tuple[list[int], CorruptObjectError | None]:
        """List as :meth:`numbers`, and remember of the last commit what :meth:`since` compares.

        By one thread at a time.
        """
        told: list[_Told] = []
        found = self.numbers(after, told=told)
        self._told = told[-1] if told else None
        return found

    def wrote(self, number: int, size_bytes: int) -> None:
        """Remember the last commit, which this process wrote. By one thread at a time."""
        self._told = _Told(number=number, size_bytes=size_bytes)

    def since(self, number: int, digest: str) -> tuple[list[int], CorruptObjectError | None]:
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
        known, told = self._told, list[_Told]()
        numbers, gap = self.numbers(number - 1, told=told)
        if numbers[:1] == [number]:
            if known is not None and known.contradicts(told[0]) and self._is_other(number, digest):
                msg = f"{commit_key(number)} is not the commit that was there before"
                hint = "was the store replaced or restored? open it anew to see"
                return [], CorruptObjectError(msg, hint=hint)
            self._told = told[-1]
            return numbers[1:], gap
        if gap is not None:
            return [], gap
        if self.find(number, wait=True) is not None:
            return self.numbers(number)
        msg = f"{commit_key(number)}, which was there before, is gone: the log was cut short"
        hint = "was the store emptied, replaced, restored or unmounted? open it anew to see"
        return [], CorruptObjectError(msg, hint=hint)

    def _is_other(self, number: int, digest: str) -> bool:
        """Say whether a sound commit of a number has another digest; damage is told elsewhere."""
        try:
            return self.read(number).digest != digest
        except (CorruptObjectError, UnsupportedFeatureError):
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    """What a listing tells of one commit."""

    number: int
    size_bytes: int
    modified_at: float | None = None
    """None: it was written here, and no listing has told yet."""

    @classmethod
    def of(cls, number: int, info: ObjectInfo) -> _Told:
        return cls(number=number, size_bytes=info.size_bytes, modified_at=info.modified_at)

    def contradicts(self, later: _Told) -> bool:
        """Say whether the same number is told to be of another size or time."""
        if self.number != later.number:
            return False
        timed = self.modified_at is not None and self.modified_at != later.modified_at
        return timed or self.size_bytes != later.size_bytes


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
