"""Counts the requests to a backend: calls, bytes, seconds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from ckptstore.backends.base import Backend, ObjectInfo
from ckptstore.backends.wrapper import WrapperBackend
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

    def around(self, call: str, key: str, action: Callable[[], T], size_bytes: int = 0) -> T:
        """Return ``action()``, metered under the name of the call."""
        start = self._environment.monotonic()
        failures, moved = 1, 0
        try:
            result = action()
            failures, moved = 0, len(result) if isinstance(result, bytes) else size_bytes
        finally:
            seconds = self._environment.monotonic() - start
            meter = Meter(calls=1, failures=failures, bytes_moved=moved, seconds=seconds)
            self._add(call, meter)
        return result

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

    def _add(self, operation: str, more: Meter) -> None:
        with self._lock:
            old = self._meters.get(operation, Meter())
            self._meters[operation] = replace(
                old, calls=old.calls + more.calls, failures=old.failures + more.failures,
                bytes_moved=old.bytes_moved + more.bytes_moved, seconds=old.seconds + more.seconds,
            )  # fmt: skip

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.inner,)
