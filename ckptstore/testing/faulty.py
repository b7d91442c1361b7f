"""A backend that fails on purpose, at exactly the call that a test names."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

from ckptstore.backends.base import Backend, Buffer, ObjectInfo
from ckptstore.backends.wrapper import WrapperBackend
from ckptstore.errors import StorageError

__all__ = ["CALLS", "WRITES", "Fault", "FaultyBackend", "When"]

T = TypeVar("T")

WRITES = frozenset(
    {"put", "put_if_absent", "open_writer", "writer.write", "writer.commit", "delete"}
)
"""Names of the calls that change the storage."""
CALLS = WRITES | {"get", "read_into", "list", "stat"}
"""Names of all calls that can be made to fail; ``writer.*`` are those of an open writer."""


class When(StrEnum):
    """Effect of a fault on the call that it hits."""

    BEFORE = "before"
    """It raises, and the storage never hears of it."""
    AFTER = "after"
    """It is carried out, and raises all the same: a lost reply."""
    TRUNCATED = "truncated"
    """A write stores only the first half and raises; a read returns only the first half."""
    CALLBACK = "callback"
    """``Fault.callback`` is called first, then the call goes on undisturbed."""


@dataclass(slots=True, kw_only=True)
class Fault:
    """A choice of calls, and their failure. Counts its own calls; safe from any thread.

    Parameters
    ----------
    calls
        Names out of ``CALLS``; calls of other names are not counted.
    at
        The first call that fails, counted from 1; 0 fails none and only counts.
    times
        Number of calls in a row from `at` on; 0 for every one: a permanent failure.
    error
        Makes the exception that is raised.
    callback
        Called with the name of the call and its key (to kill a process, wait, or race).
    """

    calls: frozenset[str] = CALLS
    at: int = 1
    times: int = 1
    when: When = When.BEFORE
    error: Callable[[], Exception] = field(default=lambda: StorageError("injected failure"))
    callback: Callable[[str, str], None] = field(default=lambda _call, _key: None)
    seen: int = 0
    """Calls that were counted."""
    hits: int = 0
    """Calls that were hit."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __post_init__(self) -> None:
        """Refuse names of calls that do not exist: such a test would test nothing."""
        unknown = self.calls - CALLS
        if unknown:
            raise ValueError(f"no such calls: {sorted(unknown)}")

    def takes(self, call: str) -> bool:
        """Count one call, and return whether it fails."""
        if call not in self.calls:
            return False
        with self._lock:
            self.seen += 1
            last = self.at + self.times - 1 if self.times else self.seen
            hit = 0 < self.at <= self.seen <= last
            self.hits += hit
        return hit


class FaultyBackend(WrapperBackend):
    """Passes calls on, except for those that one of its faults hits.

    ::

        backend = FaultyBackend(inner, Fault(calls=WRITES, at=3))  # the third write fails
        backend = FaultyBackend(inner, Fault(at=3, times=0))  # all from the third on
        backend = FaultyBackend(inner, Fault(at=0)); ...; fault.seen  # how many calls are there?
    """

    def __init__(self, inner: Backend, *faults: Fault) -> None:
        super().__init__(inner)
        self.faults: list[Fault] = list(faults)

    def around(self, call: str, key: str, action: Callable[[], T], size_bytes: int = 0) -> T:
        """Carry out a call that knows no half, or fail."""
        return self.run(call, key, action)

    def put(self, key: str, data: Buffer) -> None:
        """Write, or fail."""
        self._write("put", self.inner.put, key, data)

    def put_if_absent(self, key: str, data: Buffer) -> None:
        """Create, or fail."""
        self._write("put_if_absent", self.inner.put_if_absent, key, data)

    def get(self, key: str, *, bytes_max: int) -> bytes:
        """Read, or fail; truncated: the first half."""

        def half() -> bytes:
            data = self.inner.get(key, bytes_max=bytes_max)
            return data[: len(data) // 2]

        return self.run("get", key, lambda: self.inner.get(key, bytes_max=bytes_max), half=half)

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Read, or fail; truncated: silently, the second half of each buffer is zeros."""

        def half() -> None:
            """Fill the buffers, and zero the second half of each."""
            self.inner.read_into(key, offset, buffers)
            for buffer in buffers:
                tail = len(buffer) // 2
                buffer[tail:] = bytes(len(buffer) - tail)

        self.run("read_into", key, lambda: self.inner.read_into(key, offset, buffers), half=half)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """List, or fail at the first object; truncated: the first half of the objects."""

        def whole() -> list[ObjectInfo]:
            return [*self.inner.list(prefix, after=after)]

        def half() -> list[ObjectInfo]:
            infos = whole()
            return infos[: len(infos) // 2]

        yield from self.run("list", prefix, whole, half=half)

    def run(
        self, call: str, key: str, action: Callable[[], T], *, half: Callable[[], T] | None = None
    ) -> T:
        """Carry out one call with the effect of the first fault that hits it."""
        hit = [fault for fault in self.faults if fault.takes(call)]
        if not hit:
            return action()
        fault = hit[0]
        if fault.when is When.CALLBACK:
            fault.callback(call, key)
            return action()
        if fault.when is When.AFTER:
            action()
        elif fault.when is When.TRUNCATED and half is not None:
            result = half()
            if call not in WRITES:
                return result
        raise fault.error()

    def _write(
        self, call: str, write: Callable[[str, Buffer], None], key: str, data: Buffer
    ) -> None:
        half = memoryview(data)[: len(data) // 2]
        self.run(call, key, lambda: write(key, data), half=lambda: write(key, half))
