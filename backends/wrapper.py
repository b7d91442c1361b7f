"""Base classes of all wrappers: pass every call on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from ckptstore.backends.base import (
    Backend,
    Buffer,
    Capabilities,
    Leftovers,
    ObjectInfo,
    ObjectWriter,
)

if TYPE_CHECKING:
    from ckptstore.backends.cold import ColdStorage


def bytes_of(data: Buffer | Sequence[Buffer]) -> int:
    """Return the number of bytes in a call to ``ObjectWriter.write``."""
    if isinstance(data, bytes | bytearray | memoryview):
        return memoryview(data).nbytes
    return sum(memoryview(part).nbytes for part in data)


class WrapperBackend(Backend):
    """Passes every call on to another backend, which it owns from then on.

    A wrapper overrides the calls that it changes. ``url``, ``name`` and capabilities are the inner
    ones: layers above notice the wrapper only by its effect.
    """

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.url = inner.url
        self.name = inner.name

    @property
    def capabilities(self) -> Capabilities:
        """Return the properties that the inner backend declares."""
        return self.inner.capabilities

    def put(self, key: str, data: Buffer) -> None:
        """Pass on."""
        self.inner.put(key, data)

    def put_if_absent(self, key: str, data: Buffer) -> None:
        """Pass on."""
        self.inner.put_if_absent(key, data)

    def open_writer(self, key: str) -> ObjectWriter:
        """Pass on."""
        return self.inner.open_writer(key)

    def get(self, key: str, *, bytes_max: int) -> bytes:
        """Pass on."""
        return self.inner.get(key, bytes_max=bytes_max)

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Pass on."""
        self.inner.read_into(key, offset, buffers)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """Pass on."""
        return self.inner.list(prefix, after=after)

    def stat(self, key: str) -> ObjectInfo:
        """Pass on."""
        return self.inner.stat(key)

    def delete(self, key: str) -> None:
        """Pass on."""
        self.inner.delete(key)

    def make_durable(self, keys: Iterable[str]) -> None:
        """Pass on."""
        self.inner.make_durable(keys)

    def remove_leftovers(self, *, modified_before: float, dry_run: bool = False) -> Leftovers:
        """Pass on."""
        return self.inner.remove_leftovers(modified_before=modified_before, dry_run=dry_run)

    def cold_storage(self) -> ColdStorage | None:
        """Pass on."""
        return self.inner.cold_storage()

    def close(self) -> None:
        """Close the inner backend."""
        self.inner.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"


class WrapperWriter(ObjectWriter):
    """Passes every call on to another writer, which it owns from then on."""

    def __init__(self, inner: ObjectWriter) -> None:
        self.inner = inner

    def write(self, data: Buffer | Sequence[Buffer]) -> None:
        """Pass on."""
        self.inner.write(data)

    def commit(self) -> None:
        """Pass on."""
        self.inner.commit()

    def abort(self) -> None:
        """Pass on."""
        self.inner.abort()
