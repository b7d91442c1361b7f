"""Finds the objects of a store by their names, on storage that cannot list, such as a web server.

Commits have dense numbers and are never deleted, so the newest is found by doubling a step and then
halving it. ``published.json`` spares most of these requests. It may be missing or old, but what it
names must exist: a reader of half a copy would otherwise take it for a shorter log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

from ckptstore import limits
from ckptstore.backends.base import Backend, ObjectInfo
from ckptstore.catalog.snapshots import period
from ckptstore.errors import CorruptObjectError, LimitError, ObjectNotFoundError
from ckptstore.format.keys import PUBLISHED_KEY, commit_key, key_record_key, snapshot_key
from ckptstore.format.published import Published, decode_published

_HINT_STALE = "was it copied whole? A cache may keep an old answer: try again in some minutes"


class Unlisted:
    """Commits and snapshots of one store, found by name; by one thread at a time.

    Parameters
    ----------
    wait
        Calls a function until it is true, or a new name must be visible.
    """

    def __init__(self, backend: Backend, wait: Callable[[Callable[[], bool]], bool]) -> None:
        self._backend = backend
        self._wait = wait
        self._head = 0
        """Newest commit seen so far."""
        self._newest: ObjectInfo | None = None
        """Its size and time."""

    def commits(self, after: int) -> Iterator[ObjectInfo]:
        """Yield the commits after number `after`; size and time are right for the first and last.

        Raises
        ------
        LimitError
            There are more than ``UNLISTED_COMMITS_MAX``.
        """
        ends = self._ends(after)
        if ends is None:
            return
        count = self._head - after
        if count > limits.UNLISTED_COMMITS_MAX:
            msg = f"the server answers for {count} commits after the newest snapshot known"
            raise LimitError(msg, hint="publish the store again; or does it answer for any name?")
        first, last = ends
        yield first
        for number in range(after + 2, self._head + 1):
            yield replace(last, key=commit_key(number))

    def _ends(self, after: int) -> tuple[ObjectInfo, ObjectInfo] | None:
        """Find the newest commit; return the one after number `after`, and it; None without one."""
        first = find(self._backend, commit_key(after + 1))
        if first is None:
            return None
        low, last, step = after + 1, first, 1
        if self._newest is not None and self._head > low:
            low, last = self._head, self._newest
        high = limits.COMMIT_NUMBER_MAX + 1
        while low + 1 < high:
            number = low + step if low + step < high else (low + high) // 2
            info = find(self._backend, commit_key(number))
            if info is None:
                high, step = number, limits.COMMIT_NUMBER_MAX
            else:
                low, last, step = number, info, 2 * step
        self._head, self._newest = low, last
        return first, last

    def snapshots(self) -> list[int]:
        """Return the numbers of snapshots that are likely to exist.

        Raises
        ------
        CorruptObjectError
            A commit that the index names is missing, or the index is damaged.
        """
        index = read_published(self._backend) or Published()

        def look() -> bool:
            """Find the newest commit; return whether the one that the index names exists."""
            return self._ends(max(index.commits - 1, 0)) is not None

        if not look() and index.commits and not self._wait(look):
            msg = f"{PUBLISHED_KEY} names {commit_key(index.commits)}, which is missing"
            raise CorruptObjectError(msg, hint=_HINT_STALE)
        step = period(self._head)
        newest = self._head // step * step
        due = [number for number in (newest, newest - step) if number > index.snapshot]
        found = [number for number in due if find(self._backend, snapshot_key(number))]
        return [*found, *filter(None, [index.snapshot])]


def find(backend: Backend, key: str) -> ObjectInfo | None:
    """Return an object's size and time; None if it is missing."""
    with suppress(ObjectNotFoundError):
        return backend.stat(key)
    return None


def read_published(backend: Backend) -> Published | None:
    """Return the index of a published store; None if it has none."""
    with suppress(ObjectNotFoundError):
        data = backend.get(PUBLISHED_KEY, bytes_max=limits.PUBLISHED_BYTES_MAX)
        return decode_published(data, where=PUBLISHED_KEY)
    return None


def key_records(backend: Backend) -> list[int]:
    """Return the numbers of the key records that exist, from the one that the index names."""
    index = read_published(backend) or Published()
    found: list[int] = []
    for number in range(max(index.key_record, 1), index.key_record + limits.UNLISTED_KEYS_MAX):
        if find(backend, key_record_key(number)) is not None:
            found.append(number)
        elif found:
            break
    return found
