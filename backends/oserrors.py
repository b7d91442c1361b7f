"""Translates the operating system's error numbers to the error tree; never looks at texts."""

from __future__ import annotations

import errno

from ckptstore import errors

ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})
"""There is no such object: no name, a parent that is a file, or a symbolic link."""
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_PERMISSION = frozenset({errno.EACCES, errno.EPERM})
# A network file system while its server restarts or fails over: the same call may succeed a moment
# later.
_LOST_SERVER = frozenset({errno.ESTALE, errno.ETIMEDOUT, errno.ENOLCK, errno.ENOTCONN})
_NO_ROUTE = frozenset({errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH})
_BROKEN_CONNECTION = frozenset(
    {errno.ECONNABORTED, errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE, errno.ESHUTDOWN}
)
# A signal, a lock, or a full table of this machine.
_BUSY = frozenset({errno.EAGAIN, errno.EBUSY, errno.EINTR})
_TABLE_FULL = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_TRANSIENT = _LOST_SERVER | _NO_ROUTE | _BROKEN_CONNECTION | _BUSY | _TABLE_FULL
_HINT_FULL = (
    "free space on the disk that is written to, or raise its quota; if it has the store, delete "
    "versions (ckptstore rm, ckptstore retain), and free their space: ckptstore gc, and once more "
    "after its grace (--grace 0s: at once)"
)


def translate(error: OSError, what: str, *, writing: bool = False) -> errors.CkptStoreError:
    """Return the error of ckptstore's tree for `error`, raised while doing `what`.

    A missing name is a missing object, except when `writing`: then it is a folder that another
    process removed.

    ``EEXIST`` is left to the caller: its meaning depends on the call. An error of ckptstore's tree
    (its storage errors are ``OSError`` too) is returned unchanged.
    """
    if isinstance(error, errors.CkptStoreError):
        return error
    number = error.errno
    name = errno.errorcode.get(number or 0, type(error).__name__)
    msg = f"{what}: {name}" if number is None else f"{what}: {name} ({error.strerror})"
    if number in _PERMISSION | _FULL | {errno.EROFS} and isinstance(error.filename, str):
        msg += f", at {error.filename}"
    if number in ABSENT and not writing:
        return errors.ObjectNotFoundError(msg)
    if number == errno.ENAMETOOLONG:
        hint = "the path of the store is too long for this file system"
        return errors.InvalidUrlError(msg, hint=hint)
    if number in _FULL:
        return errors.StorageFullError(msg, hint=_HINT_FULL)
    if number == errno.EROFS:
        hint = "it is mounted read-only: remount it, or only read"
        return errors.StoragePermissionError(msg, hint=hint)
    if number in _PERMISSION:
        return errors.StoragePermissionError(msg, hint="check the owner and mode of the folder")
    if number in _TRANSIENT:
        return errors.TransientStorageError(msg)
    if number in ABSENT:
        return errors.StorageError(msg, hint="a folder on the way there is missing, or is a file")
    return errors.StorageError(msg)
