"""Translates exceptions of fsspec's file systems and of the libraries below them.

By class, number and status, never by text. The library's own sentence is shown where nothing else
tells the cause, without the values that the user gave.
"""

from __future__ import annotations

import errno
import ftplib
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from fsspec.exceptions import FSTimeoutError

from ckptstore.backends.httperrors import answer_of, error_for_answer, error_for_silence
from ckptstore.backends.oserrors import ABSENT
from ckptstore.backends.oserrors import translate as translate_os
from ckptstore.errors import (
    CkptStoreError,
    ObjectExistsError,
    ObjectNotFoundError,
    StorageError,
    StoragePermissionError,
    TransientStorageError,
    UnsafeBackendError,
)

# Classes of libraries that are not imported here.
_CLASSES: Final[Mapping[str, int]] = {
    name: number
    for number, names in {
        errno.ENOENT: "asyncssh.SFTPNoSuchFile asyncssh.SFTPNoSuchPath webdav4.ResourceNotFound",
        errno.EACCES: "asyncssh.SFTPPermissionDenied smbprotocol.SMBAuthenticationError "
        "asyncssh.PermissionDenied paramiko.AuthenticationException",  # both of a login
        errno.EEXIST: "asyncssh.SFTPFileAlreadyExists",
        errno.ENOSPC: "asyncssh.SFTPNoSpaceOnFilesystem",
        errno.EDQUOT: "asyncssh.SFTPQuotaExceeded",
        errno.EROFS: "asyncssh.SFTPWriteProtect",
        errno.ENOTCONN: "asyncssh.SFTPNoConnection asyncssh.SFTPConnectionLost",
        errno.ECONNREFUSED: "paramiko.NoValidConnectionsError",
        errno.ECONNRESET: "asyncssh.ConnectionLost smbprotocol.SMBConnectionClosed "
        "httpx.NetworkError httpx.RemoteProtocolError",
        errno.ETIMEDOUT: "httpx.TimeoutException",
    }.items()
    for name in names.split()
}
# https://learn.microsoft.com/openspecs/windows_protocols/ms-erref/596a1078-e883-4972-9bbc-49e60bebca55
_NT_STATUS: Final[Mapping[int, int]] = {
    0xC0000022: errno.EACCES,  # ACCESS_DENIED
    0xC0000043: errno.EBUSY,  # SHARING_VIOLATION: open elsewhere, perhaps for a moment
    0xC0000056: errno.ENOENT,  # DELETE_PENDING
    0xC000006D: errno.EACCES,  # LOGON_FAILURE
    0xC000007F: errno.ENOSPC,  # DISK_FULL
    0xC00000A2: errno.EROFS,  # MEDIA_WRITE_PROTECTED
    0xC00000CC: errno.ENOENT,  # BAD_NETWORK_NAME: no such share
    0xC00000C9: errno.ENOTCONN,  # NETWORK_NAME_DELETED
    0xC0000203: errno.ENOTCONN,  # USER_SESSION_DELETED
}
# RFC 959, final refusals. 550 is a file that is absent as well as one that may not be touched.
_FTP_REPLIES: Final[Mapping[int, int]] = {530: errno.EACCES, 532: errno.EACCES, 552: errno.ENOSPC}

_CAUSES_MAX: Final = 5
_ABSENT: Final = ABSENT | {errno.EISDIR}
_ANSWERS: Final = _ABSENT | {errno.EEXIST, errno.EACCES, errno.EPERM}
_HINT_PLACE: Final = "is there such a bucket, container, share or folder, and may you write there?"
_HINT_UNKNOWN: Final = "that is all the library says: check the login, the path, the rights there"
_HINT_LOGIN: Final = "check the user, the password or the key, and what they may do there"


def number_of(error: BaseException) -> int | None:
    """Return the error number of an exception or of its causes, or one that means the same."""
    for found in _causes(error):
        number = _number_by_library(found)
        if number is not None:
            return number
        if isinstance(found, FileNotFoundError):
            return errno.ENOENT
        if isinstance(found, OSError) and found.errno and not isinstance(found, socket.gaierror):
            return found.errno
    return None


def _number_by_library(error: BaseException) -> int | None:
    if isinstance(error, ftplib.Error):
        if isinstance(error, ftplib.error_temp | ftplib.error_proto):
            return errno.EAGAIN
        reply = str(error)[:3]
        return _FTP_REPLIES.get(int(reply)) if reply.isdecimal() else None
    for name in ("ntstatus", "status"):
        status = getattr(error, name, None)
        if isinstance(status, int) and status in _NT_STATUS:
            return _NT_STATUS[status]
    kinds = type(error).__mro__
    names = [f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in kinds]
    return next((_CLASSES[name] for name in names if name in _CLASSES), None)


def is_absent(error: BaseException) -> bool:
    """Return whether an exception says that there is no such file or folder."""
    return number_of(error) in _ABSENT


def is_answer(error: BaseException) -> bool:
    """Return whether a server has answered, so that its session can be used again."""
    return isinstance(error, CkptStoreError | ftplib.error_perm) or number_of(error) in _ANSWERS


def translate(
    error: Exception,
    what: str,
    *,
    writing: bool,
    conditional: bool,
    said: Callable[[Exception], str],
) -> CkptStoreError:
    """Return the error of ckptstore's tree for an exception from an fsspec file system.

    Parameters
    ----------
    said
        Returns the library's sentence without secrets.
    """
    msg = f"{what}: {type(error).__name__}"
    number = number_of(error)
    if conditional and (isinstance(error, FileExistsError) or number == errno.EEXIST):
        return ObjectExistsError(msg)
    if isinstance(error, IsADirectoryError | NotADirectoryError) or number in _ABSENT:
        return StorageError(msg, hint=_HINT_PLACE) if writing else ObjectNotFoundError(msg)
    if (answer := answer_of(error)) is not None:
        status, code = answer
        found = error_for_answer(status, code, what, conditional=conditional)
        if writing and isinstance(found, ObjectNotFoundError):
            return StorageError(found.message, hint=_HINT_PLACE)
        return found
    if conditional and isinstance(error, NotImplementedError):
        return UnsafeBackendError(msg, hint="this file system cannot create a name if absent")
    if isinstance(error, PermissionError) or number in {errno.EACCES, errno.EPERM}:
        return StoragePermissionError(f"{what}: {said(error)}", hint=_HINT_LOGIN)
    if isinstance(error, TimeoutError | FSTimeoutError | ConnectionError | EOFError):
        return error_for_silence(msg, conditional=conditional)
    if number is not None:
        found = translate_os(OSError(number, said(error)), what, writing=writing)
        ambiguous = conditional and type(found) in {StorageError, TransientStorageError}
        return error_for_silence(found.message, conditional=True) if ambiguous else found
    msg = f"{what}: {said(error)}"
    if conditional:
        return error_for_silence(msg, conditional=True)
    return StorageError(msg, hint=_HINT_UNKNOWN)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and what it was raised from; neither library wraps deeper."""
    for _ in range(_CAUSES_MAX):
        if error is None:
            return
        yield error
        error = error.__cause__
