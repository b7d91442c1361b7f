"""Handling of single fsspec file systems, where fsspec's common methods are not enough.

File servers (SFTP, SMB, WebDAV, FTP) write an object piece by piece under its name. Here they write
it under a temporary name first and rename it, so that a reader, and a writer that dies, never leave
a torn object. A hard link creates a name only if it is absent, which is atomic on the server; a
protocol without hard links serves a single writer.
"""

from __future__ import annotations

import errno
import inspect
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

import fsspec

from ckptstore.backends.fsspec_errors import is_absent, number_of
from ckptstore.errors import ObjectExistsError, UnsafeBackendError

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
            raise UnsafeBackendError(msg, hint="only a single writer can use it")
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
            raise UnsafeBackendError(self.why_single, hint="only a single writer can use it")
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
                raise ObjectExistsError(msg) from error
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
