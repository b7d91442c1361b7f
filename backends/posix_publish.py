"""The only way to create a file: whole, durable, under a name that was free.

Temporary file in the folder of the final name, write, check the length, fsync, ``link()`` to the
final name, fsync the folder, unlink the temporary name. Reasons for ``link()`` instead of
``O_EXCL`` or a rename: docs/design/0004-posix-durable-writes.md.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import PurePosixPath

from ckptstore import limits
from ckptstore.backends.oserrors import translate
from ckptstore.config import SYSTEM
from ckptstore.errors import (
    AmbiguousWriteError,
    ObjectExistsError,
    StorageError,
    UnsafeBackendError,
)

# Answers of file systems without hard links to link(): link(2), and FUSE's ENOSYS.
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})
# Answers to renameat2() where it is not served, or not with this flag: rename(2).
_NO_FLAGS = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP})
_AT_FDCWD, _RENAME_NOREPLACE = -100, 1
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
"""Flags to open a folder."""
# Answers where folders cannot be synced (some FUSE file systems); those promise no durability of
# names, and the file itself was synced.
_NO_FOLDER_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.ENOSYS})
# Answers to chmod() where modes are options of the mount (vfat, SMB, some FUSE file systems).
_NO_MODES = frozenset({errno.EPERM, errno.ENOTSUP, errno.ENOSYS})


class TempFile:
    """An unpublished file, open for writing, in the folder of its final name.

    Owned by one thread. ``finish`` or ``discard`` closes it.

    Attributes
    ----------
    path
        Its path, ``.tmp-<hex>``: no key begins with a dot, so that listings leave it out.
    descriptor
        Open for writing until ``finish`` or ``discard``; -1 afterwards.
    """

    def __init__(self, folder: str, unique: str) -> None:
        self.path = f"{folder}/.tmp-{unique}"
        # O_EXCL guards against a repeated random name; nothing else relies on it.
        self.descriptor = os.open(
            self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666
        )

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write all of `data` at the end; raises OSError."""
        rest = memoryview(data)
        while rest.nbytes:
            rest = rest[os.write(self.descriptor, rest) :]

    def finish(self, size_bytes: int, *, drop: bool = False) -> None:
        """Make the content durable and close; raises OSError, or StorageError for a wrong length.

        With `drop`, the cache of the operating system forgets it.
        A failed fsync is never tried again: the kernel forgets the pages that it could not write,
        and the second call would succeed without them.
        """
        os.fsync(self.descriptor)
        if drop:
            drop_cache(self.descriptor, 0, 0)
        found = _size(self.descriptor, size_bytes)
        self._close()
        if found != size_bytes:
            msg = f"{found} bytes are in the file, {size_bytes} were written"
            raise StorageError(msg)

    def discard(self) -> None:
        """Close and remove; never raises."""
        with suppress(OSError):  # the only remedy is to leave the file behind
            self._close()
        with suppress(OSError):
            os.unlink(self.path)  # noqa: PTH108 - plain strings on the hot path

    def _close(self) -> None:
        if self.descriptor >= 0:
            descriptor, self.descriptor = self.descriptor, -1
            os.close(descriptor)


def drop_cache(descriptor: int, offset: int, count: int) -> None:
    """Advise the kernel to drop a range that is on disk from its cache; 0 bytes: to the end."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):  # only advice
            os.posix_fadvise(descriptor, offset, count, os.POSIX_FADV_DONTNEED)


def _size(descriptor: int, expected_bytes: int) -> int:
    """Return the size of an open file, waiting for caches of a smaller one to expire.

    A dispersed GlusterFS volume reports size 0 for 1.04 s after a write and fsync, if the same
    client lists the folder in between (measured: 37 of 40 times).
    """
    found = os.fstat(descriptor).st_size
    for attempt in range(limits.STALE_TRIES - 1):
        if found >= expected_bytes:
            break
        SYSTEM.sleep(limits.STALE_WAIT_S * 2**attempt)
        found = os.fstat(descriptor).st_size
    return found


def publish(
    temp: str, final: str, what: str, *, alone: bool = False, one_machine: bool = False
) -> None:
    """Give the finished file `temp` the name `final` if that is free, and remove `temp`.

    Durable on return. After any error `temp` is gone or unused. Where the file system has no hard
    links, the file is renamed, if one of these holds.

    Parameters
    ----------
    alone
        Nobody else creates this name: look whether it is free, then rename.
    one_machine
        Only this machine has the file system mounted: its kernel can rename without replacing.

    Raises
    ------
    ObjectExistsError
        The name is taken by another file.
    UnsafeBackendError
        The file system has no hard links, and a rename would not be safe.
    AmbiguousWriteError
        Whether the link was made could not be determined.
    StorageError
        The link was not made and cannot appear later; or it was made, but the folder could
        not be synced: then the object is visible and may vanish in a power cut.
    """
    try:
        os.link(temp, final, follow_symlinks=False)
    except OSError as error:
        if not _linked_after(error, temp, final, what):
            _rename(temp, final, what, alone=alone, one_machine=one_machine)
    try:
        sync_folder(os.path.dirname(final))  # noqa: PTH120
    except OSError as error:
        msg = f"{what}: written, but its folder could not be synced ({error.strerror})"
        raise StorageError(msg, hint="it is visible, but may vanish in a power cut") from error
    finally:
        with suppress(OSError):  # a leftover name does no harm: listings leave it out
            os.unlink(temp)  # noqa: PTH108


def _linked_after(error: OSError, temp: str, final: str, what: str) -> bool:
    """Return True if the link was made although its reply was lost; False if there are no links.

    Raises the true error otherwise.
    """
    links = _link_count(temp)
    if links == 2:
        return True
    # SFTP has one code for every failure; sshfs makes it EPERM, even where a name is taken.
    taken = error.errno == errno.EEXIST or (error.errno == errno.EPERM and _link_count(final) > 0)
    if taken and links == 1:
        _remove(temp)
        msg = f"{what}: exists"
        raise ObjectExistsError(msg) from error
    if error.errno in _NO_LINKS:
        return False
    # Once the temporary name is gone, a request still in flight cannot link it.
    if links != 1 or not _remove(temp) or _exists(final) is not False:
        msg = f"{what}: link gave {errno.errorcode.get(error.errno or 0, error.errno)}"
        raise AmbiguousWriteError(msg) from error
    raise translate(error, what, writing=True) from error


def _rename(temp: str, final: str, what: str, *, alone: bool, one_machine: bool) -> None:
    """Create a name where there are no hard links; raises as :func:`publish`."""
    try:
        if not ((alone or one_machine) and _rename_if_absent(temp, final)):
            if not alone:
                _remove(temp)
                msg = f"{what}: this file system has no hard links"
                raise UnsafeBackendError(msg)
            if _exists(final) is not False:
                raise FileExistsError(errno.EEXIST, "exists", final)
            os.rename(temp, final)  # noqa: PTH104
    except FileExistsError as error:
        _remove(temp)
        msg = f"{what}: exists"
        raise ObjectExistsError(msg) from error
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        if not _remove(temp):  # it was renamed, although the answer says no, or may yet be
            msg = f"{what}: rename gave {errno.errorcode.get(error.errno or 0, error.errno)}"
            raise AmbiguousWriteError(msg) from error
        raise translate(error, what, writing=True) from error


def _rename_if_absent(temp: str, final: str) -> bool:
    """Rename unless the name is taken (FileExistsError); False where that is not to be had.

    By ``renameat2`` with RENAME_NOREPLACE (rename(2), Linux 3.15), which Python lacks.
    """
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    names = [os.fsencode(path) for path in (temp, final)]
    if not libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_NOREPLACE):
        return True
    number = ctypes.get_errno()
    if number in _NO_FLAGS:
        return False
    raise OSError(number, os.strerror(number), final)


def _link_count(path: str) -> int:
    """Return the number of a file's names, 0 if unknown; opens the file, bypassing stale caches."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return 0
    try:
        return os.fstat(descriptor).st_nlink
    except OSError:
        return 0
    finally:
        os.close(descriptor)


def _remove(path: str) -> bool:
    try:
        os.unlink(path)  # noqa: PTH108
    except OSError:
        return False
    return True


def _exists(path: str) -> bool | None:
    try:
        os.lstat(path)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    return True


def sync_folder(path: str) -> None:
    """Make the names in a folder durable; raises OSError.

    The folder is opened again at the end: if a file system shuts down (a failed disk, a forced
    shutdown) during the fsync of a folder, XFS may report success for a name that is lost; opening
    then fails. Measured on Linux 6.18: names lost in 5 of 60 shutdowns, in none with this.
    """
    path = path or "."
    descriptor = os.open(path, FOLDER)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(descriptor)
    os.close(os.open(path, FOLDER))


class Folders:
    """Makes folders durably, and remembers the ones that are done.

    Safe from any thread: two threads may make the same folder, which does no harm. `prepare` is
    called with the root after that was made.
    """

    def __init__(self, root: str, prepare: Callable[[str], None] = lambda _root: None) -> None:
        self._root = root
        self._prepare = prepare
        self._durable: set[str] = set()

    def ensure(self, folder: str) -> None:
        """Make `folder` and its parents; on return their names are durable. Raises OSError.

        A folder that another process made is synced too: that process may not have done so yet.
        """
        if folder in self._durable:
            return
        if folder == self._root:
            self._ensure_root()
        else:
            parent = os.path.dirname(folder)  # noqa: PTH120
            self.ensure(parent)
            with suppress(FileExistsError):
                os.mkdir(folder)  # noqa: PTH102
                self._open_as_root(folder)
            sync_folder(parent)
        self._durable.add(folder)

    def _open_as_root(self, folder: str) -> None:
        """Let those write in a new folder who may write in the root, whatever our umask is."""
        mode = stat.S_IMODE(os.stat(folder).st_mode)  # noqa: PTH116
        wanted = mode | stat.S_IMODE(os.stat(self._root).st_mode) & 0o777  # noqa: PTH116
        if wanted != mode:
            try:
                os.chmod(folder, wanted)  # noqa: PTH101
            except OSError as error:
                if error.errno not in _NO_MODES:
                    raise

    def forget(self) -> None:
        """Forget all folders: one of them was found missing."""
        self._durable.clear()

    def _ensure_root(self) -> None:
        missing = []
        path = PurePosixPath(self._root)
        while not os.path.isdir(path):  # noqa: PTH112
            missing.append(path)
            path = path.parent
        for folder in reversed(missing):
            with suppress(FileExistsError):
                os.mkdir(folder)  # noqa: PTH102
            sync_folder(str(folder.parent))
        if missing:
            self._prepare(self._root)
