"""Counts the requests to a backend: calls, bytes, seconds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from ckptstore.backends.base import Backend, Buffer, ObjectInfo, ObjectWriter
from ckptstore.backends.scatter import wanted_bytes
from ckptstore.backends.wrapper import WrapperBackend, WrapperWriter, bytes_of
from ckptstore.config import SYSTEM, Environment

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Meter:
    """Totals of one operation."""

    calls: int = 0
    failures: int = 0
    """Calls that raised any exception."""
    bytes_moved: int = 0
    """Of successful calls: payload written or read; objects listed count nothing."""
    seconds: float = 0.0
    """Time inside the backend, summed over threads."""


class MeteredBackend(WrapperBackend):
    """Meters every call by the name of its method; ``writer.write`` and ``writer.commit`` too."""

    def __init__(self, inner: Backend, *, environment: Environment = SYSTEM) -> None:
        super().__init__(inner)
        self._environment = environment
        self._lock = threading.Lock()
        self._meters: dict[str, Meter] = {}

    def snapshot(self) -> Mapping[str, Meter]:
        """Return the current meters, by operation; operations not used are left out."""
        with self._lock:
            return dict(self._meters)

    def put(self, key: str, data: Buffer) -> None:
        """Pass on and count."""
        self.run("put", lambda: self.inner.put(key, data), len(data))

    def put_if_absent(self, key: str, data: Buffer) -> None:
        """Pass on and count."""
        self.run("put_if_absent", lambda: self.inner.put_if_absent(key, data), len(data))

    def open_writer(self, key: str) -> ObjectWriter:
        """Pass on and count."""
        return _MeteredWriter(self.run("open_writer", lambda: self.inner.open_writer(key)), self)

    def get(self, key: str, *, bytes_max: int) -> bytes:
        """Pass on and count."""
        return self.run("get", lambda: self.inner.get(key, bytes_max=bytes_max), size_of=len)

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Pass on and count."""
        size = wanted_bytes(buffers)
        self.run("read_into", lambda: self.inner.read_into(key, offset, buffers), size)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """Pass on; counts one call, and the seconds that its steps took."""
        infos = self.inner.list(prefix, after=after)
        spent, failures = 0.0, 1
        try:
            while True:
                start = self._environment.monotonic()
                info = next(infos, None)
                spent += self._environment.monotonic() - start
                if info is None:
                    failures = 0
                    return
                failures = 0
                yield info
                failures = 1
        finally:
            self._add("list", Meter(calls=1, failures=failures, seconds=spent))

    def stat(self, key: str) -> ObjectInfo:
        """Pass on and count."""
        return self.run("stat", lambda: self.inner.stat(key))

    def delete(self, key: str) -> None:
        """Pass on and count."""
        self.run("delete", lambda: self.inner.delete(key))

    def run(
        self,
        operation: str,
        call: Callable[[], T],
        size_bytes: int = 0,
        *,
        size_of: Callable[[T], int] | None = None,
    ) -> T:
        """Return ``call()``, metered under the name `operation`."""
        start = self._environment.monotonic()
        failures, moved = 1, 0
        try:
            result = call()
            failures, moved = 0, size_bytes if size_of is None else size_of(result)
        finally:
            seconds = self._environment.monotonic() - start
            meter = Meter(calls=1, failures=failures, bytes_moved=moved, seconds=seconds)
            self._add(operation, meter)
        return result

    def _add(self, operation: str, more: Meter) -> None:
        with self._lock:
            old = self._meters.get(operation, Meter())
            self._meters[operation] = replace(
                old,
                calls=old.calls + more.calls,
                failures=old.failures + more.failures,
                bytes_moved=old.bytes_moved + more.bytes_moved,
                seconds=old.seconds + more.seconds,
            )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.inner,)


class _MeteredWriter(WrapperWriter):
    def __init__(self, inner: ObjectWriter, backend: MeteredBackend) -> None:
        super().__init__(inner)
        self._backend = backend

    def write(self, data: Buffer | Sequence[Buffer]) -> None:
        self._backend.run("writer.write", lambda: self.inner.write(data), bytes_of(data))

    def commit(self) -> None:
        self._backend.run("writer.commit", self.inner.commit)
