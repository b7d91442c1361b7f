"""Slows a backend down to a bandwidth in bytes a second, and a latency for each call."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

from ckptstore.backends.base import Backend, Buffer, ObjectInfo, ObjectWriter
from ckptstore.backends.scatter import wanted_bytes
from ckptstore.backends.wrapper import WrapperBackend, WrapperWriter, bytes_of
from ckptstore.config import SYSTEM, Environment
from ckptstore.errors import InvalidInputError


class ThrottledBackend(WrapperBackend):
    """Shares a bandwidth among all threads, both directions together.

    Parameters
    ----------
    bytes_per_s
        Bandwidth; 0 for no limit.
    latency_s
        Wait before each call, in each thread separately.

    Raises
    ------
    InvalidInputError
        For a negative number.
    """

    def __init__(
        self,
        inner: Backend,
        *,
        bytes_per_s: float = 0.0,
        latency_s: float = 0.0,
        environment: Environment = SYSTEM,
    ) -> None:
        super().__init__(inner)
        if bytes_per_s < 0 or latency_s < 0:
            msg = f"bytes_per_s={bytes_per_s} and latency_s={latency_s} must not be negative"
            raise InvalidInputError(msg)
        self._bytes_per_s = bytes_per_s
        self._latency_s = latency_s
        self._environment = environment
        self._lock = threading.Lock()
        self._free_at = 0.0

    def put(self, key: str, data: Buffer) -> None:
        """Wait, then pass on."""
        self.wait(len(data))
        self.inner.put(key, data)

    def put_if_absent(self, key: str, data: Buffer) -> None:
        """Wait, then pass on."""
        self.wait(len(data))
        self.inner.put_if_absent(key, data)

    def open_writer(self, key: str) -> ObjectWriter:
        """Wait, then pass on."""
        self.wait(0)
        return _ThrottledWriter(self.inner.open_writer(key), self)

    def get(self, key: str, *, bytes_max: int) -> bytes:
        """Pass on, then wait for the time that the bytes take at the bandwidth."""
        self.wait(0)
        data = self.inner.get(key, bytes_max=bytes_max)
        self.pace(len(data))
        return data

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Wait, then pass on."""
        self.wait(wanted_bytes(buffers))
        self.inner.read_into(key, offset, buffers)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """Wait once, then pass on."""
        self.wait(0)
        yield from self.inner.list(prefix, after=after)

    def stat(self, key: str) -> ObjectInfo:
        """Wait, then pass on."""
        self.wait(0)
        return self.inner.stat(key)

    def delete(self, key: str) -> None:
        """Wait, then pass on."""
        self.wait(0)
        self.inner.delete(key)

    def wait(self, size_bytes: int) -> None:
        """Wait for one call's latency and for its bytes."""
        if self._latency_s:
            self._environment.sleep(self._latency_s)
        self.pace(size_bytes)

    def pace(self, size_bytes: int) -> None:
        """Wait until the bandwidth has room for `size_bytes` more."""
        if not self._bytes_per_s or not size_bytes:
            return
        with self._lock:
            now = self._environment.monotonic()
            self._free_at = max(self._free_at, now) + size_bytes / self._bytes_per_s
            pause = self._free_at - now
        self._environment.sleep(pause)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (self.inner, self._bytes_per_s, self._latency_s)


def _rebuild(inner: Backend, bytes_per_s: float, latency_s: float) -> ThrottledBackend:
    return ThrottledBackend(inner, bytes_per_s=bytes_per_s, latency_s=latency_s)


class _ThrottledWriter(WrapperWriter):
    def __init__(self, inner: ObjectWriter, backend: ThrottledBackend) -> None:
        super().__init__(inner)
        self._backend = backend

    def write(self, data: Buffer | Sequence[Buffer]) -> None:
        self._backend.pace(bytes_of(data))
        self.inner.write(data)

    def commit(self) -> None:
        self._backend.wait(0)
        self.inner.commit()
