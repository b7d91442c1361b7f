"""Base classes of all wrappers: pass every call on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Self, TypeVar

from ckptstore.backends import base
from ckptstore.backends.scatter import wanted_bytes

if TYPE_CHECKING:
    from ckptstore.backends.buffers import BufferPool
    from ckptstore.backends.storage_classes import ColdStorage

T = TypeVar("T")


def bytes_of(data: base.Buffer | Sequence[base.Buffer]) -> int:
    """Return the number of bytes in a call to ``ObjectWriter.write``."""
    return sum(memoryview(part).nbytes for part in base.parts_of(data))


class WrapperBackend(base.Backend):
    """Passes every call on to another backend, which it owns from then on.

    A wrapper overrides :meth:`around`, or the calls that it changes. ``url``, ``name`` and
    capabilities are the inner ones: layers above notice the wrapper only by its effect.
    """

    def __init__(self, inner: base.Backend) -> None:
        self.inner = inner
        self.url: str = inner.url
        self.name: str = inner.name
        self.transfers = inner.transfers

    @property
    def capabilities(self) -> base.Capabilities:
        """Return the properties that the inner backend declares."""
        return self.inner.capabilities

    def over(self, inner: base.Backend) -> Self:
        """Return a wrapper with the same state around another backend."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.inner = inner
        return other

    def past_caches(self) -> base.Backend:
        """Return this wrapper around what the inner backend returns."""
        inner = self.inner.past_caches()
        return self if inner is self.inner else self.over(inner)

    def around(self, call: str, key: str, action: Callable[[], T], size_bytes: int = 0) -> T:
        """Return ``action()``, which passes one call on; all calls for objects come through here.

        Parameters
        ----------
        call
            Name of the method; ``writer.write`` and ``writer.commit`` of an open writer.
        key
            Key of the object; prefix of a listing.
        size_bytes
            Bytes to write or to read; 0 for ``get``, whose result tells.
        """
        return action()

    def put(self, key: str, data: base.Buffer) -> None:
        """Pass on."""
        self.around("put", key, lambda: self.inner.put(key, data), bytes_of(data))

    def put_if_absent(self, key: str, data: base.Buffer) -> None:
        """Pass on."""
        size = bytes_of(data)
        self.around("put_if_absent", key, lambda: self.inner.put_if_absent(key, data), size)

    def open_writer(self, key: str) -> base.ObjectWriter:
        """Return a writer whose calls go through :meth:`around` too."""
        writer = self.around("open_writer", key, lambda: self.inner.open_writer(key))
        return _HookedWriter(writer, self, key)

    def get(self, key: str, *, bytes_max: int) -> bytes:
        """Pass on."""
        return self.around("get", key, lambda: self.inner.get(key, bytes_max=bytes_max))

    def read_into(self, key: str, offset: int, buffers: base.Buffers) -> None:
        """Pass on."""
        size = wanted_bytes(buffers)
        self.around("read_into", key, lambda: self.inner.read_into(key, offset, buffers), size)

    def list(self, prefix: str, *, after: str = "") -> Iterator[base.ObjectInfo]:
        """Pass on."""
        return self.around("list", prefix, lambda: self.inner.list(prefix, after=after))

    def stat(self, key: str) -> base.ObjectInfo:
        """Pass on."""
        return self.around("stat", key, lambda: self.inner.stat(key))

    def delete(self, key: str) -> None:
        """Pass on."""
        self.around("delete", key, lambda: self.inner.delete(key))

    def make_durable(self, keys: Iterable[str]) -> None:
        """Pass on."""
        self.inner.make_durable(keys)

    def remove_leftovers(self, *, modified_before: float, dry_run: bool = False) -> base.Leftovers:
        """Pass on."""
        return self.inner.remove_leftovers(modified_before=modified_before, dry_run=dry_run)

    def keep_reserve(self, *, whole: bool = True) -> None:
        """Pass on."""
        self.inner.keep_reserve(whole=whole)

    def drop_reserve(self) -> None:
        """Pass on."""
        self.inner.drop_reserve()

    def remarks(self) -> Sequence[str]:
        """Pass on."""
        return self.inner.remarks()

    def staging(self) -> BufferPool | None:
        """Pass on."""
        return self.inner.staging()

    def cold_storage(self) -> ColdStorage | None:
        """Pass on."""
        return self.inner.cold_storage()

    def close(self) -> None:
        """Close the inner backend."""
        self.inner.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"


class WrapperWriter(base.ObjectWriter):
    """Passes every call on to another writer, which it owns from then on."""

    def __init__(self, inner: base.ObjectWriter) -> None:
        self.inner = inner

    def write(self, data: base.Buffer | Sequence[base.Buffer]) -> None:
        """Pass on."""
        self.inner.write(data)

    def write_kept(self, data: Sequence[base.Buffer], done: Callable[[], None]) -> None:
        """Pass on."""
        self.inner.write_kept(data, done)

    def commit(self) -> None:
        """Pass on."""
        self.inner.commit()

    def abort(self) -> None:
        """Pass on."""
        self.inner.abort()


class _HookedWriter(WrapperWriter):
    """Passes calls on through the hook of a wrapper, except for ``abort``."""

    def __init__(self, inner: base.ObjectWriter, backend: WrapperBackend, key: str) -> None:
        super().__init__(inner)
        self._backend = backend
        self._key = key

    def write(self, data: base.Buffer | Sequence[base.Buffer]) -> None:
        size = bytes_of(data)
        self._backend.around("writer.write", self._key, lambda: self.inner.write(data), size)

    def write_kept(self, data: Sequence[base.Buffer], done: Callable[[], None]) -> None:
        write = partial(self.inner.write_kept, data, done)
        self._backend.around("writer.write", self._key, write, bytes_of(data))

    def commit(self) -> None:
        self._backend.around("writer.commit", self._key, self.inner.commit)
