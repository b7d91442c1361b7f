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
from enum import Enum
from pathlib import PurePosixPath

from ckptstore import errors, limits
from ckptstore.backends.oserrors import translate
from ckptstore.config import SYSTEM

# Answers of file systems without hard links to link(): link(2), and FUSE's ENOSYS.
NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})
# Answers to renameat2() where it is not served, or not with this flag: rename(2).
_NO_FLAGS = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP})
_AT_FDCWD, _RENAME_NOREPLACE = -100, 1
NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
"""Flags to create a file under a name that must be free."""
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
"""Flags to open a folder."""
# Answers where folders cannot be synced (some FUSE file systems); those promise no durability of
# names, and the file itself was synced.
_NO_FOLDER_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.ENOSYS})
# Answers to chmod() where modes are options of the mount (vfat, SMB, some FUSE file systems).
_NO_MODES = frozenset({errno.EPERM, errno.ENOTSUP, errno.ENOSYS})
_HINT_BUCKET = "if it is the mount of a bucket, open the bucket by its URL (s3://, gs://, az://)"


class Linkless(Enum):
    """The way to create a name on a file system that turns out to have no hard links."""

    REFUSE = "refuse"
    """None is safe: other machines may create the name, too."""
    KERNEL = "kernel"
    """``renameat2`` with RENAME_NOREPLACE: all creators use this kernel."""
    ALONE = "alone"
    """That, or else a look and a rename: nobody else creates this name."""


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
        self.descriptor = os.open(self.path, NEW_FILE, 0o666)

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
            raise errors.StorageError(f"{found} bytes are in the file, {size_bytes} were written")

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
    temp: str, final: str, what: str, linkless: Linkless, no_links: frozenset[int] = NO_LINKS
) -> None:
    """Give the finished file `temp` the name `final` if that is free, and remove `temp`.

    Durable on return. After any error `temp` is gone or unused.

    Parameters
    ----------
    linkless
        The way to go where there are no hard links.
    no_links
        Answers to link() that say so.

    Raises
    ------
    ObjectExistsError
        The name is taken by another file.
    UnsafeBackendError
        The file system has no hard links, and a rename would not be safe.
    AmbiguousWriteError
        Whether the name was created could not be determined.
    StorageError
        The name was not created and cannot appear later; or it was, but the folder could
        not be synced: then the object is visible and may vanish in a power cut.
    """
    try:
        os.link(temp, final, follow_symlinks=False)
    except OSError as error:
        if not _linked_after(error, temp, final, what, no_links):
            _rename(temp, final, what, linkless)
    try:
        sync_folder(os.path.dirname(final))  # noqa: PTH120
    except OSError as error:
        msg = f"{what}: written, but its folder could not be synced ({error.strerror})"
        hint = "it is visible, but may vanish in a power cut"
        raise errors.StorageError(msg, hint=hint) from error
    finally:
        with suppress(OSError):  # a leftover name does no harm: listings leave it out
            os.unlink(temp)  # noqa: PTH108


def _linked_after(
    error: OSError, temp: str, final: str, what: str, no_links: frozenset[int]
) -> bool:
    """Return True if the link was made although its reply was lost; False if there are no links.

    Raises the true error otherwise.
    """
    links = _link_count(temp)
    if links == 2 and _is_same(temp, final):  # a backup of hard links may have made the second
        return True
    # SFTP has one code for every failure; sshfs makes it EPERM, even where a name is taken.
    taken = error.errno == errno.EEXIST or (error.errno == errno.EPERM and _link_count(final) > 0)
    if taken and links == 1:
        _remove(temp)
        raise errors.ObjectExistsError(f"{what}: exists") from error
    if error.errno in no_links:
        return False
    # Once the temporary name is gone, a request still in flight cannot link it.
    if links != 1 or not _remove(temp) or _exists(final) is not False:
        msg = f"{what}: link gave {errno.errorcode.get(error.errno or 0, error.errno)}"
        raise errors.AmbiguousWriteError(msg) from error
    raise translate(error, what, writing=True) from error


def _rename(temp: str, final: str, what: str, linkless: Linkless) -> None:
    """Create a name where there are no hard links; raises as :func:`publish`."""
    number = errno.ENOSYS if linkless is Linkless.REFUSE else _rename_if_absent(temp, final)
    if number in _NO_FLAGS and linkless is Linkless.ALONE:
        number = _look_and_rename(temp, final)
    if not number:
        return
    # Once the temporary name is gone, a request still in flight cannot rename it.
    removed = _remove(temp)
    if number in _NO_FLAGS and linkless is not Linkless.ALONE:
        msg = f"{what}: this file system has no hard links"
        raise errors.UnsafeBackendError(msg, hint=_HINT_BUCKET)
    if number == errno.EEXIST:
        raise errors.ObjectExistsError(f"{what}: exists")
    msg = f"{what}: rename gave {errno.errorcode.get(number, number)}"
    if not removed:  # it was renamed, although the answer says no, or may yet be
        raise errors.AmbiguousWriteError(msg, hint=_HINT_BUCKET)
    if number in _NO_FLAGS:
        raise errors.StorageError(msg, hint=_HINT_BUCKET)
    raise translate(OSError(number, os.strerror(number)), what, writing=True)


def _rename_if_absent(temp: str, final: str) -> int:
    """Rename unless the name is taken; return the error number, 0 for success.

    By ``renameat2`` with RENAME_NOREPLACE (rename(2), Linux 3.15), which Python lacks.
    """
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return errno.ENOSYS
    names = [os.fsencode(path) for path in (temp, final)]
    failed = libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_NOREPLACE)
    return ctypes.get_errno() if failed else 0


def _look_and_rename(temp: str, final: str) -> int:
    """Rename if no such name is seen; return the error number, 0 for success."""
    try:
        os.lstat(final)
    except FileNotFoundError:
        pass
    except OSError as error:
        return error.errno or errno.EIO
    else:
        return errno.EEXIST
    try:
        os.rename(temp, final)  # noqa: PTH104
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def _link_count(path: str) -> int:
    """Return the number of a file's names, 0 if unknown."""
    found = _status(path)
    return 0 if found is None else found.st_nlink


def _is_same(one: str, other: str) -> bool:
    """Return whether two names are known to be of one file."""
    found, there = _status(one), _status(other)
    return found is not None and there is not None and os.path.samestat(found, there)


def _status(path: str) -> os.stat_result | None:
    """Return a file's status, None if unknown; opens the file, bypassing stale caches."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        return os.fstat(descriptor)
    except OSError:
        return None
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
                self._share(folder)
            sync_folder(parent)
        self._durable.add(folder)

    def _share(self, folder: str) -> None:
        """Give the group of a new folder the rights that it has in the root, whatever our umask is.

        Only if it is the root's group. The sticky bit comes with them: who may not delete others'
        files in the root may not do so below. A group that this process is not in would lose its
        setgid bit by ``chmod``, so that its folders stay as they come.
        """
        root = os.stat(self._root)  # noqa: PTH116
        # Others who may write here may have put a link or a folder of theirs in its place.
        descriptor = os.open(folder, FOLDER | os.O_NOFOLLOW)
        try:
            made = os.fstat(descriptor)
            mode = stat.S_IMODE(made.st_mode)
            wanted = mode | root.st_mode & (stat.S_IRWXG | stat.S_ISVTX)
            groups = {os.getegid(), *os.getgroups()}
            ours = made.st_uid == os.geteuid() and (not made.st_uid or made.st_gid in groups)
            if wanted != mode and made.st_gid == root.st_gid and ours:
                os.fchmod(descriptor, wanted)
        except OSError as error:
            if error.errno not in _NO_MODES:
                raise
        finally:
            os.close(descriptor)

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
