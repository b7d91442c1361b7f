"""Requirements of a conformance suite on its subclass: a backend, and a way around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from ckptstore.backends.base import Backend

__all__ = ["SideDoor", "calls_of", "pattern"]


def pattern(size_bytes: int, seed: int = 0) -> bytes:
    """Return bytes in which any shift or swap shows: a fixed sequence of period 251."""
    period = bytes((7 * i + 31 * seed) % 251 for i in range(251))
    return (period * (size_bytes // 251 + 1))[:size_bytes]


def calls_of(backend: Backend, key: str) -> dict[str, Callable[[], object]]:
    """Return a call of each method that takes a key, by its name."""

    def write() -> None:
        """Write an object in a stream."""
        with backend.open_writer(key) as writer:
            writer.write(b"x")
            writer.commit()

    return {
        "put": lambda: backend.put(key, b"x"),
        "put_if_absent": lambda: backend.put_if_absent(key, b"x"),
        "open_writer": write,
        "get": lambda: backend.get(key, bytes_max=9),
        "read_into": lambda: backend.read_into(key, 0, [memoryview(bytearray(1))]),
        "stat": lambda: backend.stat(key),
        "delete": lambda: backend.delete(key),
    }


class SideDoor:
    """Reads and changes the storage without the backend under test.

    A subclass sets the attributes that its three ``raw_`` methods need in its ``backend`` fixture::

        class TestMine(BackendConformance):
            backend_name = "mine"

            @pytest.fixture
            def backend(self, tmp_path):
                self.root = tmp_path
                backend = MyBackend(tmp_path)
                yield backend
                backend.close()

            def raw_read(self, key): ...
            def raw_write(self, key, data): ...
            def raw_keys(self): ...
    """

    backend_name: ClassVar[str]
    """``Backend.name`` of the tested backend."""
    secrets: ClassVar[tuple[str, ...]] = ()
    """Credentials that the fixture gives to the backend; they must not show anywhere."""
    clock_skew_s: ClassVar[float] = 120.0
    """Largest difference of the storage's clock from this machine's, in seconds."""

    def raw_read(self, key: str) -> bytes | None:
        """Return the stored bytes of an object, or None."""
        raise NotImplementedError

    def raw_write(self, key: str, data: bytes) -> None:
        """Store an object, or replace it; `key` may break the key rules."""
        raise NotImplementedError

    def raw_keys(self) -> set[str]:
        """Return the names of everything stored, temporary files included."""
        raise NotImplementedError
