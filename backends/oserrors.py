"""Translates the operating system's error numbers to the error tree; never looks at texts."""

from __future__ import annotations

import errno

from ckptstore.errors import (
    CkptStoreError,
    InvalidKeyError,
    ObjectNotFoundError,
    StorageError,
    StorageFullError,
    StoragePermissionError,
    TransientStorageError,
)

ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})
"""There is no such object: no name, a parent that is a file, or a symbolic link."""
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_PERMISSION = frozenset({errno.EACCES, errno.EPERM})
# Errors of network file systems while a server restarts or fails over, and of a signal or a full
# table: the same call may succeed a moment later.
_TRANSIENT = frozenset(
    {
        errno.EAGAIN,
        errno.EBUSY,
        errno.ECONNABORTED,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.EINTR,
        errno.EMFILE,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.ENFILE,
        errno.ENOBUFS,
        errno.ENOLCK,
        errno.ENOMEM,
        errno.ENOTCONN,
        errno.EPIPE,
        errno.ESHUTDOWN,
        errno.ESTALE,
        errno.ETIMEDOUT,
    }
)


def translate(error: OSError, what: str, *, writing: bool = False) -> CkptStoreError:
    """Return the error of ckptstore's tree for `error`, raised while doing `what`.

    A missing name is a missing object, except when `writing`: then it is a folder that another
    process removed.

    ``EEXIST`` is left to the caller: its meaning depends on the call. An error of ckptstore's tree
    (its storage errors are ``OSError`` too) is returned unchanged.
    """
    if isinstance(error, CkptStoreError):
        return error
    number = error.errno
    name = errno.errorcode.get(number or 0, type(error).__name__)
    msg = f"{what}: {name}" if number is None else f"{what}: {name} ({error.strerror})"
    if number in ABSENT and not writing:
        return ObjectNotFoundError(msg)
    if number == errno.ENAMETOOLONG:
        return InvalidKeyError(msg)
    if number in _FULL:
        return StorageFullError(msg, hint="free space, raise the quota, or delete old versions")
    if number == errno.EROFS:
        return StoragePermissionError(msg, hint="it is mounted read-only: remount it, or only read")
    if number in _PERMISSION:
        return StoragePermissionError(msg, hint="check the owner and mode of the folder")
    if number in _TRANSIENT:
        return TransientStorageError(msg)
    if number in ABSENT:
        return StorageError(msg, hint="a folder on the way there is missing, or is a file")
    return StorageError(msg)
