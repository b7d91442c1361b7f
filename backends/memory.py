"""Objects in this process's memory: the oracle of the tests, and a scratch store."""

from __future__ import annotations

import os
import threading
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from typing import NamedTuple

from ckptstore import errors
from ckptstore.backends import base
from ckptstore.backends.buffered_writer import BufferedWriter
from ckptstore.config import SYSTEM, Environment
from ckptstore.limits import MIB

CAPABILITIES = base.Capabilities(
    put_if_absent=base.PutIfAbsent.ATOMIC,
    pack_bytes=64 * MIB,
    part_bytes=64 * MIB,
    read_gap_bytes=0,
    read_bytes_max=16 * MIB,
    concurrency=4,
    scatter_read=True,
    lookup_lag_s=0.0,
    private=True,
)


class _Object(NamedTuple):
    data: bytes
    modified_at: float


class _Space:
    """The objects under one name."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.objects: dict[str, _Object] = {}
        self.keys: list[str] = []

    def store(self, key: str, item: _Object, *, absent: bool = False) -> None:
        """Write one object; with `absent`, only if the key is free."""
        with self.lock:
            if key not in self.objects:
                insort(self.keys, key)
            elif absent:
                raise errors.ObjectExistsError(f"{key} exists")
            self.objects[key] = item

    def item(self, key: str) -> _Object:
        """Return one object."""
        with self.lock:
            found = self.objects.get(key)
        if found is None:
            raise errors.ObjectNotFoundError(f"{key} is not there")
        return found

    def drop(self, key: str) -> None:
        """Remove an object if it exists."""
        with self.lock:
            if self.objects.pop(key, None) is not None:
                del self.keys[bisect_left(self.keys, key)]

    def infos(self, prefix: str, after: str) -> list[base.ObjectInfo]:
        """Return the listing at this moment."""
        with self.lock:
            first = max(bisect_left(self.keys, prefix), bisect_right(self.keys, after))
            # "\x7f" sorts after every character that a key may hold.
            end = bisect_left(self.keys, prefix + "\x7f")
            return [_info(key, self.objects[key]) for key in self.keys[first:end]]


def _info(key: str, item: _Object) -> base.ObjectInfo:
    return base.ObjectInfo(key=key, size_bytes=len(item.data), modified_at=item.modified_at)


_spaces: dict[str, _Space] = {}


def _renew_locks() -> None:
    """Give a forked child new locks: a thread of the parent may have held the old ones."""
    for space in _spaces.values():
        space.lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_locks)


class MemoryBackend(base.Backend):
    """One named space of objects; all instances of one name in a process share it.

    A forked child has a copy from the moment of the fork; a spawned one starts empty.
    """

    def __init__(self, name: str, *, environment: Environment = SYSTEM) -> None:
        self.url: str = f"memory://{name}"
        self.name = "memory"
        self._space_name = name
        self._environment = environment

    @property
    def capabilities(self) -> base.Capabilities:
        """Return the properties of memory."""
        return CAPABILITIES

    def put(self, key: str, data: base.Buffer) -> None:
        """Write a whole object."""
        self._space.store(base.check_key(key), self._object(data))

    def put_if_absent(self, key: str, data: base.Buffer) -> None:
        """Create an object under the lock of the space."""
        self._space.store(base.check_key(key), self._object(data), absent=True)

    def open_writer(self, key: str) -> base.ObjectWriter:
        """Return a writer that collects in memory and stores on commit."""
        base.check_key(key)
        return BufferedWriter(lambda body: self.put(key, body.getvalue()))

    def get(self, key: str, *, bytes_max: int) -> bytes:
        """Return a whole object."""
        data = self._space.item(base.check_key(key)).data
        base.check_size(key, len(data), bytes_max)
        return data

    def read_into(self, key: str, offset: int, buffers: base.Buffers) -> None:
        """Copy a range into `buffers`."""
        data = memoryview(self._space.item(base.check_key(key)).data)
        for buffer in buffers:
            part = data[offset : offset + len(buffer)]
            if len(part) < len(buffer):
                msg = f"{key} ends at byte {len(data)}, before byte {offset + len(buffer)}"
                raise errors.CorruptObjectError(msg)
            buffer[:] = part
            offset += len(buffer)

    def list(self, prefix: str, *, after: str = "") -> Iterator[base.ObjectInfo]:
        """Yield the objects as they were when the call began."""
        base.check_prefix(prefix)
        yield from self._space.infos(prefix, after)

    def stat(self, key: str) -> base.ObjectInfo:
        """Return size and time of one object."""
        return _info(key, self._space.item(base.check_key(key)))

    def delete(self, key: str) -> None:
        """Remove one object."""
        self._space.drop(base.check_key(key))

    def close(self) -> None:
        """Do nothing: the objects live as long as the process."""

    @property
    def _space(self) -> _Space:
        return _spaces.setdefault(self._space_name, _Space())

    @property
    def objects(self) -> dict[str, _Object]:
        """The space's own dictionary, not a copy: for tests that bypass the methods."""
        return self._space.objects

    def _object(self, data: base.Buffer) -> _Object:
        return _Object(bytes(data), self._environment.now_ms() / 1000)


def open_memory(url: str, **options: object) -> MemoryBackend:
    """Return the backend of a ``memory://name`` URL.

    Raises
    ------
    InvalidUrlError
        If the URL names nothing, or options are given: memory takes none.
    """
    if options:
        msg = f"memory takes no storage options, but got {', '.join(sorted(options))}"
        raise errors.InvalidUrlError(msg)
    name = url.partition("://")[2].strip("/")
    if not name or "//" in name:
        msg = f"a memory store needs a name: {url!r}"
        raise errors.InvalidUrlError(msg, hint="write memory://some-name")
    return MemoryBackend(name)
