"""Any mounted file system: a local disk, NFS, a parallel file system.

One code for all; the differences are data (:mod:`ckptstore.backends.posix_settings`). The effects
of real file systems on readers and writers, and the consequences drawn:
docs/design/0004-posix-durable-writes.md.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeVar
from urllib.parse import unquote, urlsplit

from ckptstore import errors, limits
from ckptstore.backends import base, posix_settings
from ckptstore.backends.oserrors import ABSENT, translate
from ckptstore.backends.posix_publish import Folders, Linkless, TempFile, publish, sync_folder
from ckptstore.backends.posix_reserve import drop_reserve, keep_reserve
from ckptstore.backends.posix_stream import IOV_MAX, PosixWriter
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
        self._folders = Folders(root, self._prepare)

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
        publish(temp.path, self._path(key), f"create {key}", linkless, no_links)

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
                sync_folder(folder)
            except OSError as error:
                raise translate(error, f"sync {folder}", writing=True) from error

    def remove_leftovers(self, *, modified_before: float, dry_run: bool = False) -> base.Leftovers:
        """Unlink temporary files of writers that died."""
        return remove_temp_files(self._root, modified_before=modified_before, dry_run=dry_run)

    def keep_reserve(self, *, whole: bool = True) -> None:
        """Keep a file in the root that takes up room."""
        keep_reserve(self._root, self._environment, whole=whole)

    def drop_reserve(self) -> None:
        """Remove that file."""
        drop_reserve(self._root)

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
