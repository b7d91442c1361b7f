"""Any mounted file system: a local disk, NFS, a parallel file system.

One code for all; the differences are data (:mod:`ckptstore.backends.posix_settings`). The effects
of real file systems on readers and writers, and the consequences drawn:
docs/design/0004-posix-durable-writes.md.

A large object streams into a temporary file. By default the kernel collects written bytes in memory
and writes them out at the final fsync, while the caller waits. So the writer starts write-back of
each window when it is complete, waits for the window ``WRITEBACK_LAG_BYTES`` back, and frees its
pages: the kernel then reuses the same few megabytes, and other programs keep their cache.

A file of random bytes in the root of a store is room for the commits that free a full disk. Its
name begins with a dot, so that listings leave it out. It needs no fsync: after a crash it may be
short or missing, and the next writer makes it up.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from typing import Final, TypeVar
from urllib.parse import unquote, urlsplit

from ckptstore import errors, limits
from ckptstore.backends import base, posix_publish, posix_settings
from ckptstore.backends.oserrors import ABSENT, translate
from ckptstore.backends.posix_publish import Linkless, TempFile
from ckptstore.backends.posix_walk import is_listed, remove_temp_files, walk
from ckptstore.backends.scatter import skip_bytes
from ckptstore.config import SYSTEM, Environment, absolute_path

T = TypeVar("T")

# O_NONBLOCK: a named pipe in a hostile store must not hang its reader; files ignore it.
_READ: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class PosixBackend(base.Backend):
    """The files below one folder. Nothing is created before the first write.

    Parameters
    ----------
    root
        Absolute path of the folder.
    settings
        Settings for this kind of file system.
    fs_type
        Its type in the mount table; shown to users, and decides how names without links are made.
    """

    def __init__(
        self,
        root: str,
        *,
        settings: posix_settings.PosixSettings,
        fs_type: str = "unknown",
        environment: Environment = SYSTEM,
    ) -> None:
        self.url = root
        self.name: str = settings.name
        self.fs_type = fs_type
        self._root = root
        self._settings = settings
        self._environment = environment
        self._folders = posix_publish.Folders(root, self._prepare)

    @property
    def capabilities(self) -> base.Capabilities:
        """Return the properties of this kind of file system."""
        return self._settings.capabilities

    def put(self, key: str, data: base.Buffer) -> None:
        """Write a whole object; the same content again is no error, other content is."""
        try:
            self._create(key, data, Linkless.ALONE)
        except errors.ObjectExistsError:
            # An earlier try of the same call may have succeeded.
            if self.get(key, bytes_max=limits.PACK_BYTES_MAX) != data:
                raise

    def put_if_absent(self, key: str, data: base.Buffer) -> None:
        """Create an object by ``link()``, or on a disk without links by a kernel's rename."""
        one_kernel = self.fs_type in posix_settings.LINKLESS_DISKS
        self._create(key, data, Linkless.KERNEL if one_kernel else Linkless.REFUSE)

    def _create(self, key: str, data: base.Buffer, linkless: Linkless) -> None:
        temp = self._open_temp(base.check_key(key))
        try:
            temp.write(data)
            temp.finish(len(data))
        except BaseException as error:
            temp.discard()
            if isinstance(error, OSError) and not isinstance(error, errors.CkptStoreError):
                raise translate(error, f"write {key}", writing=True) from error
            raise
        no_links = posix_settings.no_links_of(self.fs_type)
        posix_publish.publish(temp.path, self._path(key), f"create {key}", linkless, no_links)

    def open_writer(self, key: str) -> base.ObjectWriter:
        """Return a writer that streams to a temporary file."""
        temp = self._open_temp(base.check_key(key))
        no_links = posix_settings.no_links_of(self.fs_type)
        return PosixWriter(key, temp, self._path(key), no_links=no_links)

    def get(self, key: str, *, bytes_max: int) -> bytes:
        """Return a whole object."""

        def read(descriptor: int, size: int) -> bytes:
            """Return the whole file, if it stays within the bound."""
            base.check_size(key, size, bytes_max)
            data = bytearray(size)
            _fill(descriptor, 0, [memoryview(data)], key)
            return bytes(data)

        return self._with_file(key, read)

    def read_into(self, key: str, offset: int, buffers: base.Buffers) -> None:
        """Read straight into `buffers`."""
        self._with_file(key, lambda descriptor, _: _fill(descriptor, offset, buffers, key))

    def list(self, prefix: str, *, after: str = "") -> Iterator[base.ObjectInfo]:
        """Yield objects in order, reading only the folders that can hold them."""
        return walk(self._root, base.check_prefix(prefix), after, relist=self._settings.relist)

    def stat(self, key: str) -> base.ObjectInfo:
        """Return size and time, from an open file and not from a cache."""

        def info(descriptor: int, size: int) -> base.ObjectInfo:
            modified = os.fstat(descriptor).st_mtime
            return base.ObjectInfo(key=key, size_bytes=size, modified_at=modified)

        return self._with_file(key, info)

    def delete(self, key: str) -> None:
        """Unlink one file."""
        try:
            os.unlink(self._path(base.check_key(key)))  # noqa: PTH108
        except OSError as error:
            if error.errno not in ABSENT:
                raise translate(error, f"delete {key}") from error

    def make_durable(self, keys: Iterable[str]) -> None:
        """Sync the folders: a file is synced before it has its name, the name after."""
        for folder in {os.path.dirname(self._path(base.check_key(key))) for key in keys}:  # noqa: PTH120
            try:
                posix_publish.sync_folder(folder)
            except OSError as error:
                raise translate(error, f"sync {folder}", writing=True) from error

    def remove_leftovers(self, *, modified_before: float, dry_run: bool = False) -> base.Leftovers:
        """Unlink temporary files of writers that died."""
        return remove_temp_files(self._root, modified_before=modified_before, dry_run=dry_run)

    def keep_reserve(self, *, whole: bool = True) -> None:
        """Make up a file in the root to its full size, unless `whole` to what fits; never raises.

        One that is too short is replaced, never appended to: others may have given its name to a
        file of somebody's, to have it changed, and not all file systems count the names of a file.
        """
        path, before = f"{self._root}/{NAME}", 0
        with suppress(OSError):  # no right to write here, or no room for a name: there is none then
            if os.path.lexists(path):
                before = os.lstat(path).st_size
                if before >= limits.RESERVE_BYTES:
                    return
                os.unlink(path)  # noqa: PTH108 - plain strings, as in all of this backend
            descriptor = os.open(path, posix_publish.NEW_FILE, 0o666)
            try:
                keep_bytes = before if whole else limits.RESERVE_BYTES
                _fill_reserve(descriptor, self._environment, keep_bytes=keep_bytes)
            finally:
                os.close(descriptor)

    def drop_reserve(self) -> None:
        """Remove that file."""
        with suppress(OSError):  # none, or no right to remove it
            os.unlink(f"{self._root}/{NAME}")  # noqa: PTH108

    def remarks(self) -> Sequence[str]:
        """Return remarks on a group's rights in the root, and on mounts of buckets."""
        from ckptstore.backends.posix_remarks import find_remarks

        return find_remarks(self._root, self.fs_type)

    def close(self) -> None:
        """Do nothing: no file stays open between calls."""

    def _open_temp(self, key: str) -> TempFile:
        """Return a new temporary file in the folder of `key`, making the folder if it is missing.

        Raises
        ------
        StorageError
            The folder or the file could not be made.
        """
        folder = os.path.dirname(self._path(key))  # noqa: PTH120
        unique = self._environment.random_hex(16)
        try:
            try:
                self._folders.ensure(folder)
                return TempFile(folder, unique)
            except FileNotFoundError:  # another process removed the folder, or one above it
                self._folders.forget()
                self._folders.ensure(folder)
                return TempFile(folder, unique)
        except OSError as error:
            raise translate(error, f"create a file for {key}", writing=True) from error

    def _prepare(self, root: str) -> None:
        if self.fs_type == "lustre":
            posix_settings.stripe_folder(root, self._settings.stripe_count)

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _with_file(self, key: str, use: Callable[[int, int], T]) -> T:
        """Return ``use(descriptor, size)`` for an object, retrying where caches are stale."""
        path = self._path(base.check_key(key))
        for attempt in range(limits.STALE_TRIES):
            if attempt:
                self._environment.sleep(limits.STALE_WAIT_S * 2 ** (attempt - 1))
            try:
                return _use_file(path, key, use)
            except OSError as error:
                cached = error.errno in ABSENT and self._settings.relist and is_listed(path)
                if not cached and error.errno != errno.ESTALE:
                    raise translate(error, f"read {key}") from error
        msg = f"read {key}: the name is there, but opening it keeps failing"
        raise errors.TransientStorageError(msg)

    def __repr__(self) -> str:
        return f"PosixBackend({self.url!r}, name={self.name!r}, fs_type={self.fs_type!r})"


def _use_file(path: str, key: str, use: Callable[[int, int], T]) -> T:
    descriptor = os.open(path, _READ)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise errors.ObjectNotFoundError(f"{key} is not a regular file")
        return use(descriptor, found.st_size)
    finally:
        os.close(descriptor)


def _fill(descriptor: int, offset: int, buffers: base.Buffers, key: str) -> None:
    """Fill all of `buffers` from `offset` on; raises OSError or CorruptObjectError."""
    left = [buffer for buffer in buffers if buffer.nbytes]
    while left:
        count = os.preadv(descriptor, left[:IOV_MAX], offset)
        if not count:
            msg = f"{key} ends at byte {offset}, before the range that was asked for"
            raise errors.CorruptObjectError(msg)
        offset += count
        skip_bytes(left, count)


def open_posix(url: str, *, kind: str = "", **options: object) -> PosixBackend:
    """Return the backend of a path or a ``file://`` URL.

    Parameters
    ----------
    kind
        ``local``, ``nfs`` or ``parallel`` if the mount table is wrong; empty to read that.

    Raises
    ------
    InvalidUrlError
        For a URL with a host, a file, an unknown `kind`, or any other option.
    """
    if options:
        msg = f"a path takes no storage options, but got {', '.join(sorted(options))}"
        hint = "leave it out, or write a URL such as s3://bucket/ckpts"
        raise errors.InvalidUrlError(msg, hint=hint)
    path = url
    if "://" in url:
        parts = urlsplit(url)
        if parts.netloc not in {"", "localhost"} or not parts.path:
            msg = f"not a path of this machine: {url!r}"
            raise errors.InvalidUrlError(msg, hint="write file:///absolute/path")
        path = unquote(parts.path)
    if not path or "\0" in path or (kind and kind not in posix_settings.SETTINGS):
        msg = f"no such location or kind: {path!r} {kind!r}"
        raise errors.InvalidUrlError(msg, hint=f"kinds are {', '.join(posix_settings.SETTINGS)}")
    root = str(absolute_path(path))
    if root == "/" or os.path.isfile(root):  # noqa: PTH113 - False where it may not be looked at
        hint = "name the folder of a store, or one that is not there yet"
        what = "the root of a file system" if root == "/" else "a file"
        raise errors.InvalidUrlError(f"{root} is {what}, not a folder for a store", hint=hint)
    fs_type = posix_settings.find_fs_type(root)
    settings = posix_settings.SETTINGS[kind] if kind else posix_settings.settings_for(fs_type)
    return PosixBackend(root, settings=settings, fs_type=fs_type)


IOV_MAX: Final = os.sysconf("SC_IOV_MAX")
"""Most buffers of one system call."""
# Flags of sync_file_range(2), from linux/fs.h.
_WAIT_BEFORE: Final = 1
_START: Final = 2
_WAIT_AFTER: Final = 4
# The file system does not support the call; then the final fsync does all the work.
_NOT_THERE: Final = frozenset({errno.ENOSYS, errno.EINVAL, errno.ESPIPE, errno.EOPNOTSUPP})

SyncRange = Callable[[int, int, int, int], int]
"""``(descriptor, offset, bytes, flags) -> errno``, 0 for success."""


@cache
def sync_range() -> SyncRange | None:
    """Return Linux's sync_file_range, or None where the C library has none.

    The call only starts the work of the final fsync earlier, which still follows and decides; but
    a write error that it reports is reported only once, so the caller must not drop it.
    """
    import ctypes

    try:
        function = ctypes.CDLL(None, use_errno=True).sync_file_range
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    function.restype = ctypes.c_int

    def call(descriptor: int, offset: int, count: int, flags: int) -> int:
        """Call it until no signal interrupts; return the error number."""
        while function(descriptor, offset, count, flags):
            number = ctypes.get_errno()
            if number != errno.EINTR:
                return number
        return 0

    return call


class PosixWriter(base.ObjectWriter):
    """Writes bytes to a temporary file as they come; holds none of them itself."""

    def __init__(self, key: str, temp: TempFile, path: str, *, no_links: frozenset[int]) -> None:
        self._key = key
        self._no_links = no_links
        self._path = path
        self._size = 0
        self._started = 0
        self._waited = 0
        self._sync = sync_range()
        self._temp = temp

    def write(self, data: base.Buffer | Sequence[base.Buffer]) -> None:
        """Append by as few system calls as possible."""
        left = [view.cast("B") for part in base.parts_of(data) if (view := memoryview(part)).nbytes]
        try:
            while left:
                count = os.writev(self._temp.descriptor, left[:IOV_MAX])
                self._size += count
                skip_bytes(left, count)
                self._write_back()
        except OSError as error:
            raise translate(error, f"write {self._key}", writing=True) from error

    def commit(self) -> None:
        """Make the object durable, then visible; a failed commit cannot be repeated."""
        try:
            self._temp.finish(self._size, drop=self._waited > 0)
            what = f"create {self._key}"
            posix_publish.publish(self._temp.path, self._path, what, Linkless.ALONE, self._no_links)
        except OSError as error:
            self._temp.discard()
            found = translate(error, f"write {self._key}", writing=True)
            if isinstance(found, errors.TransientStorageError):
                # The file is gone, and after a failed fsync its content would be unreliable.
                hint = "the save has to be repeated"
                raise errors.StorageError(found.message, hint=hint) from error
            if isinstance(error, errors.StorageError):
                raise
            raise found from error

    def abort(self) -> None:
        """Remove the temporary file."""
        self._temp.discard()

    def _write_back(self) -> None:
        """Start write-back of complete windows, and wait for those far enough back."""
        window = limits.WRITEBACK_WINDOW_BYTES
        whole = self._size // window * window
        if whole > self._started:
            self._call_sync(self._started, whole - self._started, _START)
            self._started = whole
        behind = whole - limits.WRITEBACK_LAG_BYTES
        if behind > self._waited:
            flags = _WAIT_BEFORE | _START | _WAIT_AFTER
            self._call_sync(self._waited, behind - self._waited, flags)
            posix_publish.drop_cache(self._temp.descriptor, self._waited, behind - self._waited)
            self._waited = behind

    def _call_sync(self, offset: int, count: int, flags: int) -> None:
        if self._sync is None:
            return
        number = self._sync(self._temp.descriptor, offset, count, flags)
        if number in _NOT_THERE:
            self._sync = None
        elif number:
            raise OSError(number, os.strerror(number))


NAME: Final = ".ckptstore-reserve"
# Not all file systems write a part of what does not fit as a whole. Source: a block of ext4.
_STEP_BYTES: Final = 4 * limits.KIB


def _fill_reserve(descriptor: int, environment: Environment, *, keep_bytes: int) -> None:
    """Write the reserve; if it does not fit, keep at most `keep_bytes` of it."""
    try:
        for _ in range(0, limits.RESERVE_BYTES, _STEP_BYTES):
            # Random, so that a file system that compresses keeps it at its size.
            os.write(descriptor, bytes.fromhex(environment.random_hex(_STEP_BYTES)))
    except OSError:
        os.ftruncate(descriptor, min(keep_bytes, os.fstat(descriptor).st_size))
