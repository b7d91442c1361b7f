"""Handling of single fsspec file systems, where fsspec's common methods are not enough.

File servers (SFTP, SMB, WebDAV, FTP) write an object piece by piece under its name. Here they write
it under a temporary name first and rename it, so that a reader, and a writer that dies, never leave
a torn object. A hard link creates a name only if it is absent, which is atomic on the server; a
protocol without hard links serves a single writer.
"""

from __future__ import annotations

import errno
import ftplib
import inspect
import socket
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Final

import fsspec
from fsspec.exceptions import FSTimeoutError

from ckptstore import errors
from ckptstore.backends.httperrors import answer_of, error_for_answer, error_for_silence
from ckptstore.backends.oserrors import ABSENT
from ckptstore.backends.oserrors import translate as translate_os

Foreign = Any
"""A value of fsspec, which ships no types."""
Info = dict[str, Any]

_FOLDER_TRIES: Final = 3


class System:
    """Any file system, by fsspec's common methods; a write is one request, as of object stores."""

    connections = 0
    """File system objects, each used by one thread at a time; 0 for one that all threads share."""
    lookup_lag_s = 10.0
    keeps_temps = False
    """Whether a writer that dies leaves a file with a temporary name."""
    defaults: Mapping[str, object] = {}
    """Options that the user did not give."""
    strict = False
    """Whether options that the constructor does not name are mistakes; others pass them on."""

    def opened(self, fs: Foreign, root: str) -> None:
        """Prepare a new file system object, for a store at `root`."""

    def close(self, fs: Foreign) -> None:
        """End the connections of a file system object."""

    def lost(self, fs: Foreign) -> bool:
        """Return whether the connection is gone, so that the object is of no use any more."""
        return fs is None

    def ls(self, fs: Foreign, folder: str) -> list[Info]:
        """Return the entries of one folder."""
        return list(fs.ls(folder, detail=True))

    def info(self, fs: Foreign, path: str) -> Info:
        """Return the entry of one file."""
        return dict(fs.info(path))

    def read(self, fs: Foreign, path: str, start: int, end: int) -> bytes:
        """Return a range of a file, or less at its end."""
        return bytes(fs.cat_file(path, start=start, end=end))

    def write(self, fs: Foreign, path: str, data: bytes, temp: str, *, conditional: bool) -> None:
        """Write a whole file and make its folders; `temp` is a free name beside it.

        Raises
        ------
        FileExistsError
            With `conditional`, if the name is taken.
        UnsafeBackendError
            With `conditional`, if the file system has no atomic way to find that out.
        """
        del temp
        if conditional and not _creates(type(fs)):
            msg = f"{type(fs).__name__} looks whether a name is free, and writes then"
            raise errors.UnsafeBackendError(msg, hint="only a single writer can use it")
        mode = {"mode": "create"} if conditional else {}
        try:
            fs.pipe_file(path, data, **mode)
        except Exception as error:
            if not is_absent(error):
                raise
            fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            fs.pipe_file(path, data, **mode)


def _creates(kind: type) -> bool:
    """Return whether a class has a ``pipe_file`` of its own that takes a mode.

    That of fsspec's base class looks first and opens then; others swallow the mode.
    """
    common = fsspec.AbstractFileSystem.pipe_file
    own = getattr(kind, "_pipe_file", None) or getattr(kind, "pipe_file", common)
    return own is not common and "mode" in inspect.signature(own).parameters


class FileServer(System):
    """Folders and files of a server, which has no cache between it and its clients."""

    lookup_lag_s = 0.0
    keeps_temps = True
    why_single = ""
    """Reason that names cannot be created atomically; empty if they can."""

    def write(self, fs: Foreign, path: str, data: bytes, temp: str, *, conditional: bool) -> None:
        """Write the temporary file, then give it its name."""
        if conditional and self.why_single:
            raise errors.UnsafeBackendError(self.why_single, hint="only a single writer can use it")
        try:
            self.send(fs, temp, data)
        except Exception as error:
            if not is_absent(error) and number_of(error) is not None:
                raise
            _make_folders(fs, path.rpartition("/")[0])
            self.send(fs, temp, data)
        try:
            if conditional:
                self._create(fs, temp, path)
            else:
                self._name(fs, temp, path, data)
        except Exception:
            with suppress(Exception):  # it may have got its name; otherwise a collection removes it
                fs.rm_file(temp)
            raise

    def _create(self, fs: Foreign, temp: str, path: str) -> None:
        try:
            self.link(fs, temp, path)
        except Exception as error:
            if not fs.exists(path):
                raise
            raise FileExistsError(errno.EEXIST, "taken") from error
        with suppress(Exception):  # the object is there; a collection removes the temporary name
            fs.rm_file(temp)

    def _name(self, fs: Foreign, temp: str, path: str, data: bytes) -> None:
        """Rename to a name that is free, or has the same content: of an earlier try, say."""
        try:
            self.rename(fs, temp, path)
        except (TimeoutError, ConnectionError, EOFError):
            raise
        except Exception as error:
            if number_of(error) != errno.EEXIST and not fs.exists(path):
                raise
            if self.read(fs, path, 0, len(data) + 1) != data:
                msg = f"{path.rpartition('/')[2]} is taken by other content, which stays"
                raise errors.ObjectExistsError(msg) from error
            with suppress(Exception):  # a collection removes it otherwise
                fs.rm_file(temp)

    def send(self, fs: Foreign, path: str, data: bytes) -> None:
        """Write a file in place."""
        fs.pipe_file(path, data)

    @abstractmethod
    def rename(self, fs: Foreign, temp: str, path: str) -> None:
        """Rename a file on the server, or raise if the name is taken."""

    def link(self, fs: Foreign, temp: str, path: str) -> None:
        """Give a file a second name, or raise if that is taken."""
        raise NotImplementedError


def _make_folders(fs: Foreign, folder: str) -> None:
    """Make a folder and those above it, which other processes may be making too."""
    for left in reversed(range(_FOLDER_TRIES)):
        try:
            fs.makedirs(folder, exist_ok=True)
        except Exception:
            if not left and not fs.isdir(folder):
                raise


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
    known = isinstance(error, errors.CkptStoreError | ftplib.error_perm)
    return known or number_of(error) in _ANSWERS


def translate(
    error: Exception, what: str, writing: bool, conditional: bool, said: Callable[[Exception], str]
) -> errors.CkptStoreError:
    """Return the error of ckptstore's tree for an exception from an fsspec file system.

    Parameters
    ----------
    said
        Returns the library's sentence without secrets.
    """
    msg = f"{what}: {type(error).__name__}"
    number = number_of(error)
    if conditional and (isinstance(error, FileExistsError) or number == errno.EEXIST):
        return errors.ObjectExistsError(msg)
    if isinstance(error, IsADirectoryError | NotADirectoryError) or number in _ABSENT:
        absent = errors.ObjectNotFoundError(msg)
        return errors.StorageError(msg, hint=_HINT_PLACE) if writing else absent
    if (answer := answer_of(error)) is not None:
        status, code = answer
        found = error_for_answer(status, code, what, conditional=conditional)
        if writing and isinstance(found, errors.ObjectNotFoundError):
            return errors.StorageError(found.message, hint=_HINT_PLACE)
        return found
    if conditional and isinstance(error, NotImplementedError):
        hint = "this file system cannot create a name if absent"
        return errors.UnsafeBackendError(msg, hint=hint)
    if isinstance(error, PermissionError) or number in {errno.EACCES, errno.EPERM}:
        return errors.StoragePermissionError(f"{what}: {said(error)}", hint=_HINT_LOGIN)
    if isinstance(error, TimeoutError | FSTimeoutError | ConnectionError | EOFError):
        return error_for_silence(msg, conditional=conditional)
    if number is not None:
        found = translate_os(OSError(number, said(error)), what, writing=writing)
        ambiguous = conditional and type(found) in {
            errors.StorageError,
            errors.TransientStorageError,
        }
        return error_for_silence(found.message, conditional=True) if ambiguous else found
    msg = f"{what}: {said(error)}"
    if conditional:
        return error_for_silence(msg, conditional=True)
    return errors.StorageError(msg, hint=_HINT_UNKNOWN)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and what it was raised from; neither library wraps deeper."""
    for _ in range(_CAUSES_MAX):
        if error is None:
            return
        yield error
        error = error.__cause__
