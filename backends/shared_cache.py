"""A cache of immutable objects that the processes of one user on one host share.

A load of several processes fetches each block of a pack or manifest once: the first process that
wants it takes its lock, fetches and publishes it; the others wait for it, and read it from a folder
in memory or on a local disk. Locks are those of open files, which the kernel releases when
a process dies, and a block appears under its name only when it is whole. Nobody relies on either:
what a block holds is checked like the storage's own bytes, by those who read it, and if it is
damaged they turn to :meth:`SharedCacheBackend.past_caches`.

The cache lies below encryption, so an encrypted store leaves only encrypted bytes in it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Final

from ckptstore import limits
from ckptstore.backends.base import Backend, Buffers
from ckptstore.backends.encrypted import EncryptedBackend
from ckptstore.backends.per_process import PerProcess
from ckptstore.backends.scatter import wanted_bytes
from ckptstore.backends.wrapper import WrapperBackend
from ckptstore.config import CACHE_HINT, Environment, workers_default
from ckptstore.errors import InvalidInputError
from ckptstore.format.keys import MANIFESTS_PREFIX, PACKS_PREFIX
from ckptstore.hashing import blake3_hex

_log = logging.getLogger("ckptstore")

_LOCK_FILE: Final = "lock"
_TOTAL: Final = struct.Struct("<Q")
_FLOCK: Final = struct.Struct("hhqqi4x")
"""``struct flock`` of 64-bit Linux."""


class CacheFolder:
    """Blocks of bytes by name, in a folder of this user; any thread and process may use it.

    Parameters
    ----------
    path
        A folder on this host, where this user's own folder is made; it may be shared with other
        users if they cannot rename each other's files (``/dev/shm``).
    bytes_max
        Bytes of all blocks in it, at most; the oldest are removed.

    Raises
    ------
    InvalidInputError
        The folder cannot be made, or is not safe from other users, or has no locks.
    """

    def __init__(self, path: str, *, bytes_max: int, environment: Environment) -> None:
        self._bytes_max = bytes_max
        self._environment = environment
        self._home = Path(path).expanduser().absolute() / f"ckptstore-{os.geteuid()}"
        self._warned = False
        self._adding = PerProcess(threading.Lock)
        # More threads than processors only wait for the interpreter's lock (docs/design/0026).
        self.readers = PerProcess(threading.BoundedSemaphore, workers_default())
        self._stuck = False
        """A process holds the lock of additions and does not go on; nobody waits for it again."""
        try:
            self._home.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                self._home.mkdir(mode=0o700)
            self._check_safe()
            with self._locks() as file:
                _lock(file, 0)
        except (OSError, AttributeError) as error:  # the latter where fcntl has no such locks
            why = getattr(error, "strerror", None) or "this system lacks locks of open files"
            msg = f"the folder {path} cannot hold a cache: {why}"
            raise InvalidInputError(msg, hint=CACHE_HINT) from error

    def _check_safe(self) -> None:
        """Raise unless no other user can write to the folder, or put another in its place."""
        above, home = self._home.parent.stat(), self._home.lstat()
        me = os.geteuid()
        open_above = above.st_mode & 0o022 and not above.st_mode & stat.S_ISVTX
        if above.st_uid not in {0, me} or open_above:
            msg = f"another user could replace what is in the cache folder {self._home.parent}"
            raise InvalidInputError(msg, hint="take a folder of your own, or /dev/shm")
        if not stat.S_ISDIR(home.st_mode) or home.st_uid != me or home.st_mode & 0o077:
            msg = f"other users have access to the cache {self._home}"
            raise InvalidInputError(msg, hint="remove it, or take another folder")

    def read(self, name: str, size: int, offset: int, buffers: Buffers) -> bool:
        """Fill buffers from byte `offset` of a block of `size` bytes; return whether it is here."""
        try:
            file = os.open(self._home / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return False
        try:
            if os.fstat(file).st_size != size:
                return False
            for start in range(0, len(buffers), _BUFFERS_AT_ONCE):
                part = buffers[start : start + _BUFFERS_AT_ONCE]
                if os.preadv(file, part, offset) != wanted_bytes(part):
                    return False
                offset += wanted_bytes(part)
        except OSError:
            return False
        else:
            return True
        finally:
            os.close(file)

    def put(self, blocks: Mapping[str, Buffers]) -> None:
        """Add blocks, if there is room for all; failures are logged once, and cost only time."""
        made = {self._home / f"{name}.{self._environment.random_hex(8)}": name for name in blocks}
        sizes = {path: wanted_bytes(blocks[name]) for path, name in made.items()}
        try:
            with self._adding.get():
                added = self._reserve(sizes)
            for path, name in made.items() if added else ():
                with contextlib.suppress(FileNotFoundError):  # removed as one of the oldest
                    with open(path, "r+b", buffering=0, opener=_private) as file:
                        for part in blocks[name]:
                            left = part
                            while left:
                                left = left[file.write(left) :]
                    path.rename(self._home / name)
        except OSError as error:
            for path in made:
                with contextlib.suppress(OSError):  # the file system is read-only now
                    path.unlink(missing_ok=True)
            self._warn(str(error))

    def drop(self, name: str) -> None:
        """Remove a block."""
        with contextlib.suppress(OSError):
            (self._home / name).unlink(missing_ok=True)

    @contextmanager
    def claims(self) -> Iterator[Callable[[int], bool]]:
        """Yield a function that takes the lock of a number, unless another has it.

        All locks end with the block, or with the process. Where there are no locks any more, such
        as in a folder that was removed, every caller may have each.
        """
        with contextlib.ExitStack() as stack:
            try:
                file = stack.enter_context(self._locks())
            except OSError as error:
                self._warn(str(error))
                yield lambda _: True
                return
            yield partial(self._claim, file)

    def _claim(self, file: int, place: int) -> bool:
        try:
            return _lock(file, place)
        except OSError as error:
            self._warn(str(error))
            return True

    @contextmanager
    def _locks(self) -> Iterator[int]:
        """Open the file of locks; they end with the block, whatever process was forked in it."""
        file = os.open(self._home / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            yield file
        finally:
            try:
                with contextlib.suppress(OSError):
                    _lock(file, 0, fcntl.F_UNLCK, count=0)
            finally:
                os.close(file)

    def _reserve(self, sizes: Mapping[Path, int]) -> bool:
        """Make the files of blocks if all may be added; remove the oldest ones for them.

        They have their sizes from the beginning, so that a count of all files includes them.
        """
        size = sum(sizes.values())
        found = os.statvfs(self._home)
        free = found.f_bavail * found.f_frsize - size
        part = found.f_blocks * found.f_frsize // limits.CACHE_FREE_PART
        if free < min(part, limits.CACHE_FREE_BYTES):
            self._warn("its file system is nearly full")
            return False
        with self._locks() as file:
            deadline = self._environment.monotonic() + limits.CACHE_WAIT_S
            while not _lock(file, 0):
                if self._stuck or self._environment.monotonic() > deadline:
                    self._stuck = True
                    self._warn("a process that has stopped holds its lock")
                    return False
                self._environment.sleep(limits.CACHE_POLL_S)
            self._stuck = False
            data = os.pread(file, _TOTAL.size, 0)
            total = _TOTAL.unpack(data)[0] if len(data) == _TOTAL.size else self._bytes_max
            if total + size > self._bytes_max:
                total = self._shrink(self._bytes_max - self._bytes_max // 8 - size)
            if total + size > self._bytes_max:
                return False
            for path, nbytes in sizes.items():
                with open(path, "xb", buffering=0, opener=_private) as made:
                    made.truncate(nbytes)
            os.pwrite(file, _TOTAL.pack(total + size), 0)
        return True

    def _shrink(self, bytes_max: int) -> int:
        """Remove the oldest files until the others have at most so many bytes; return theirs."""
        found: list[tuple[float, int, str]] = []
        with os.scandir(self._home) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    info = entry.stat(follow_symlinks=False)
                    if entry.name != _LOCK_FILE:
                        found.append((info.st_mtime, info.st_size, entry.path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= bytes_max:
                break
            Path(path).unlink(missing_ok=True)
            total -= size
        return total

    def _warn(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            _log.warning("the cache %s takes nothing more: %s", self._home, why)


_BUFFERS_AT_ONCE: Final = 512
"""Of one call; POSIX systems take 1,024."""


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _lock(file: int, place: int, kind: int = fcntl.F_WRLCK, count: int = 1) -> bool:
    """Lock, or unlock, bytes of a file from a place on; return False if another has locked one.

    Without a count, all that follow.
    """
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, place, count, 0))
    except OSError as error:
        if error.errno in {errno.EAGAIN, errno.EACCES}:
            return False
        raise
    return True


class SharedCacheBackend(WrapperBackend):
    """Reads packs and manifests through a folder; passes every other call on.

    An object that is no longer in the storage is not read from the cache either, once
    ``limits.CACHE_STAT_S`` have passed since this backend looked.

    Parameters
    ----------
    store_id
        The store's, so that several can share a folder.
    """

    def __init__(
        self, inner: Backend, folder: CacheFolder, store_id: str, environment: Environment
    ) -> None:
        super().__init__(inner)
        self._folder, self._store_id, self._environment = folder, store_id, environment
        self._sizes: dict[str, tuple[int, float]] = {}

    def past_caches(self) -> Backend:
        """Return a backend that reads from the storage, and removes what is cached of that."""
        return _PastCache(self)

    def get(self, key: str, *, bytes_max: int) -> bytes:
        """Return a whole object."""
        size = self._size(key)
        if size is None or size > bytes_max:
            return self.inner.get(key, bytes_max=bytes_max)
        data = bytearray(size)
        self.read_into(key, 0, [memoryview(data)])
        return bytes(data)

    def read_into(self, key: str, offset: int, buffers: Buffers) -> None:
        """Fill `buffers` from the blocks that hold the range, fetching those that are missing."""
        size = self._size(key)
        end = offset + wanted_bytes(buffers)
        if size is None or not offset < end <= size:
            self.inner.read_into(key, offset, buffers)
            return
        read = _Read(self._folder, f"{self.url}\0{self._store_id}\0{key}", size, offset, buffers)
        left = read.unread(range(offset // _BLOCK, -(-end // _BLOCK)))
        began = self._environment.monotonic()
        while left and (waited := self._environment.monotonic() - began) < limits.CACHE_WAIT_S:
            with self._folder.claims() as claim:
                mine = [block for block in left if claim(read.place(block))]
                read.fetch(self.inner, key, read.unread(mine))
            left = read.unread([block for block in left if block not in mine])
            if left and not mine:
                self._environment.sleep(max(limits.CACHE_POLL_S, waited * limits.CACHE_POLL_SHARE))
        read.fetch(self.inner, key, left)  # a process that has stopped holds their locks

    def drop(self, key: str, offset: int, end: int) -> None:
        """Remove the blocks of a range from the folder."""
        read = _Read(self._folder, f"{self.url}\0{self._store_id}\0{key}", end, offset, ())
        for block in range(offset // _BLOCK, -(-end // _BLOCK)):
            self._folder.drop(read.name(block))

    def _size(self, key: str) -> int | None:
        """Return the size of an object that may be cached, by asking the storage; else None."""
        if not key.startswith((PACKS_PREFIX, MANIFESTS_PREFIX)):
            return None
        known, now = self._sizes.get(key), self._environment.monotonic()
        if known is None or known[1] < now:
            if len(self._sizes) >= limits.ENCRYPTED_HEADS_MAX:
                self._sizes.clear()
            known = self.inner.stat(key).size_bytes, now + limits.CACHE_STAT_S
            self._sizes[key] = known
        return known[0]


_BLOCK: Final = limits.CACHE_BLOCK_BYTES


class _Read:
    """One range of an object, in blocks."""

    def __init__(
        self, folder: CacheFolder, where: str, size: int, offset: int, buffers: Buffers
    ) -> None:
        self._folder = folder
        self._name = blake3_hex(where.encode())[:32]
        self._size = size
        self._start = offset
        self._end = offset + wanted_bytes(buffers)
        self._buffers = buffers

    def name(self, block: int) -> str:
        """Return the name of a block in the folder."""
        return f"{self._name}-{block:x}"

    def place(self, block: int) -> int:
        """Return the byte of the lock file that stands for a block."""
        return 1 + int(blake3_hex(self.name(block).encode())[:15], 16)

    def unread(self, blocks: Sequence[int]) -> list[int]:
        """Fill the buffers from those of some blocks that are in the folder; return the others."""
        with self._folder.readers.get():  # once for all: a turn for each block costs as much again
            return [block for block in blocks if not self._read(block)]

    def _read(self, block: int) -> bool:
        begin, end = block * _BLOCK, min((block + 1) * _BLOCK, self._size)
        low = max(begin, self._start)
        wanted = _cut(self._buffers, low - self._start, min(end, self._end) - self._start)
        return self._folder.read(self.name(block), end - begin, low - begin, wanted)

    def fetch(self, inner: Backend, key: str, blocks: Sequence[int]) -> None:
        """Fetch blocks from the storage, each run with one request, and add them to the folder."""
        for _, found in groupby(enumerate(blocks), lambda one: one[1] - one[0]):
            run = [block for _, block in found]
            begin, end = run[0] * _BLOCK, min((run[-1] + 1) * _BLOCK, self._size)
            low, high = max(begin, self._start), min(end, self._end)
            parts = [
                memoryview(bytearray(low - begin)),
                *_cut(self._buffers, low - self._start, high - self._start),
                memoryview(bytearray(end - high)),
            ]
            inner.read_into(key, begin, parts)
            starts = {block: block * _BLOCK - begin for block in run}
            self._folder.put(
                {self.name(n): _cut(parts, at, at + _BLOCK) for n, at in starts.items()}
            )


def _cut(buffers: Buffers, start: int, end: int) -> list[memoryview]:
    """Return the parts of consecutive buffers that hold a range of their bytes."""
    found, at = [], 0
    for buffer in buffers:
        if at < end and at + buffer.nbytes > start:
            found.append(buffer[max(0, start - at) : end - at])
        at += buffer.nbytes
    return found


class _PastCache(WrapperBackend):
    """Reads from the storage, and removes what the folder has of that."""

    def __init__(self, cache: SharedCacheBackend) -> None:
        super().__init__(cache.inner)
        self._cache = cache

    def get(self, key: str, *, bytes_max: int) -> bytes:
        data = self.inner.get(key, bytes_max=bytes_max)
        self._cache.drop(key, 0, len(data))
        return data

    def read_into(self, key: str, offset: int, buffers: Buffers) -> None:
        self._cache.drop(key, offset, offset + wanted_bytes(buffers))
        self.inner.read_into(key, offset, buffers)


def with_cache(
    backend: Backend, folder: CacheFolder, store_id: str, environment: Environment
) -> Backend:
    """Return a backend that reads through a cache, below encryption; itself if it is local."""
    if backend.name == "local" or backend.capabilities.private:
        return backend
    if isinstance(backend, EncryptedBackend):
        return backend.over(SharedCacheBackend(backend.inner, folder, store_id, environment))
    return SharedCacheBackend(backend, folder, store_id, environment)
