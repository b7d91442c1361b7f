"""Any other file system that fsspec knows, by fsspec's public methods alone.

Their promises about atomicity and caching vary, so this backend claims nothing: a store on it
may be shared only where the probe has shown that put-if-absent holds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit, urlunsplit

import fsspec
import fsspec.core
from fsspec.asyn import AsyncFileSystem
from fsspec.exceptions import FSTimeoutError

from ckptstore.backends import bucket
from ckptstore.backends.base import (
    Backend,
    Buffer,
    Capabilities,
    ObjectInfo,
    ObjectWriter,
    check_key,
    check_prefix,
    is_key,
)
from ckptstore.backends.buffered_writer import BufferedWriter
from ckptstore.backends.httperrors import error_for_answer, error_for_silence
from ckptstore.backends.oserrors import translate as translate_os
from ckptstore.backends.per_process import PerProcess
from ckptstore.backends.scatter import Scatter, wanted_bytes
from ckptstore.config import SYSTEM, Environment
from ckptstore.errors import (
    CkptStoreError,
    CorruptObjectError,
    InvalidUrlError,
    MissingDependencyError,
    ObjectExistsError,
    ObjectNotFoundError,
    StorageError,
    StoragePermissionError,
    TransientStorageError,
    UnsafeBackendError,
)

T = TypeVar("T")
Foreign = Any
"""A value of fsspec, which ships no types."""

# As of an object store: pipe_file takes an object whole.
CAPABILITIES: Final = replace(bucket.CAPABILITIES, concurrency=8, lookup_lag_s=10.0)

# Separators of the parts of a connection string or of a query.
_PARTS: Final = re.compile(r"[;&\s]")
_SECRET_CHARS_MIN: Final = 4
_SAID_CHARS_MAX: Final = 300
# Names under which file systems report the modification time in ``info``.
_TIMES: Final = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")


class FsspecBackend(Backend):
    """The files below one path of an fsspec file system.

    Parameters
    ----------
    url
        As fsspec takes it; shown to users without credentials.
    options
        For the file system.
    """

    def __init__(
        self, url: str, options: Mapping[str, object], *, environment: Environment = SYSTEM
    ) -> None:
        self.url = without_credentials(url)
        self.name = "fsspec"
        self._client = PerProcess(_ClientFactory(url, dict(options)))
        self._environment = environment

    @property
    def capabilities(self) -> Capabilities:
        """Return the least that any file system offers."""
        return CAPABILITIES

    def put(self, key: str, data: Buffer) -> None:
        """Write a whole object."""
        self._pipe(check_key(key), bytes(data))

    def put_if_absent(self, key: str, data: Buffer) -> None:
        """Create an object by ``pipe_file(mode="create")``, which some file systems ignore."""
        self._pipe(check_key(key), bytes(data), conditional=True)

    def open_writer(self, key: str) -> ObjectWriter:
        """Return a writer that collects the object in memory."""
        check_key(key)
        return BufferedWriter(lambda body: self._pipe(key, body.getvalue()))

    def get(self, key: str, *, bytes_max: int) -> bytes:
        """Return a whole object, requesting one byte more than is allowed."""
        data = self._cat(key, 0, bytes_max + 1)
        if len(data) > bytes_max:
            msg = f"{key} has more than the {bytes_max} bytes allowed"
            raise CorruptObjectError(msg)
        return data

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill `buffers` from one ranged read."""
        wanted = wanted_bytes(buffers)
        if not wanted:
            self.stat(key)
            return
        data = self._cat(key, offset, offset + wanted)
        if len(data) < wanted:
            msg = f"{key} ends before byte {offset + wanted}"
            raise CorruptObjectError(msg)
        Scatter(buffers).feed(data)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """Yield objects in order; the whole folder of `prefix` is listed first."""
        folder = check_prefix(prefix).rpartition("/")[0]

        def find(fs: Foreign, root: str) -> dict[str, dict[str, object]]:
            """Return the entries of the folder, by key, bypassing caches."""
            top = f"{root}/{folder}".rstrip("/")
            fs.invalidate_cache()
            skip = len(root.strip("/"))
            return {
                path.strip("/")[skip:].strip("/"): info
                for path, info in _files(fs, top).items()
                if info.get("type") == "file"
            }

        infos = self._run(f"list {prefix}", find)
        for key in sorted(infos):
            if key.startswith(prefix) and key > after and is_key(key):
                yield self._info(key, infos[key])

    def stat(self, key: str) -> ObjectInfo:
        """Return size and time of one object, bypassing caches."""
        check_key(key)

        def info(fs: Foreign, root: str) -> dict[str, object]:
            """Return the storage's record of the object, bypassing caches."""
            fs.invalidate_cache()
            found: dict[str, object] = fs.info(f"{root}/{key}")
            if found.get("type") != "file":
                raise FileNotFoundError(key)
            return found

        return self._info(key, self._run(f"stat {key}", info))

    def delete(self, key: str) -> None:
        """Remove one object."""
        check_key(key)

        def remove(fs: Foreign, root: str) -> None:
            with suppress(FileNotFoundError):
                fs.rm_file(f"{root}/{key}")

        self._run(f"delete {key}", remove)

    def close(self) -> None:
        """Release this process's file system object."""
        self._client.take()

    def _cat(self, key: str, start: int, end: int) -> bytes:
        check_key(key)

        def cat(fs: Foreign, root: str) -> bytes:
            return bytes(fs.cat_file(f"{root}/{key}", start=start, end=end))

        return self._run(f"get {key}", cat)

    def _pipe(self, key: str, data: bytes, *, conditional: bool = False) -> None:
        mode = {"mode": "create"} if conditional else {}

        def pipe(fs: Foreign, root: str) -> None:
            """Write the whole object, and make its folders."""
            path = f"{root}/{key}"
            try:
                fs.pipe_file(path, data, **mode)
            except FileNotFoundError:  # file systems with real folders need them made first
                fs.makedirs(path.rpartition("/")[0], exist_ok=True)
                fs.pipe_file(path, data, **mode)

        self._run(f"put {key}", pipe, writing=True, conditional=conditional)

    def _run(
        self,
        what: str,
        call: Callable[[Foreign, str], T],
        *,
        writing: bool = False,
        conditional: bool = False,
    ) -> T:
        """Return ``call(fs, root)``, translating the errors that it raises."""
        opened = False
        try:
            fs, root = self._client.get()
            opened = True
            return call(fs, root)
        except CkptStoreError:
            raise
        except Exception as error:
            if not opened:  # a file system may connect when it is made
                what, writing, conditional = f"open {self.url}", True, False
            raise translate(error, what, writing=writing, conditional=conditional) from error

    def _info(self, key: str, info: Mapping[str, object]) -> ObjectInfo:
        size = info.get("size")
        if not isinstance(size, int):
            msg = f"{key}: the file system does not tell its size"
            raise StorageError(msg)
        return ObjectInfo(key=key, size_bytes=size, modified_at=self._modified_at(info))

    def _modified_at(self, info: Mapping[str, object]) -> float:
        for name in _TIMES:
            value = info.get(name)
            if isinstance(value, str):
                with suppress(ValueError):
                    value = datetime.fromisoformat(value)
            if isinstance(value, datetime):
                return value.timestamp()
            if isinstance(value, int | float):
                return float(value)
        # Not known: "now" keeps everyone from deleting the object for its age.
        return self._environment.now_ms() / 1000

    def __repr__(self) -> str:
        return f"FsspecBackend({self.url!r})"


class _ClientFactory:
    """Makes the file system object of one process; picklable.

    A class, so that a traceback with local variables shows neither URL nor options.
    """

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        self._url = url
        self._options = options

    def __call__(self) -> tuple[Foreign, str]:
        """Return the file system object and the root below which the store lies.

        Raises
        ------
        InvalidUrlError
            The file system rejects the URL or an option.
        MissingDependencyError
            The file system needs a package that is not installed.
        """
        try:
            fs, root = fsspec.core.url_to_fs(
                self._url, **self._options, use_listings_cache=False, skip_instance_cache=True
            )
        except ImportError as error:
            raise _not_served(self._url, self._without_secrets(error)) from None
        except (TypeError, ValueError, AttributeError, KeyError) as error:
            msg = f"{without_credentials(self._url)} does not open: {self._without_secrets(error)}"
            hint = "check the URL and the storage options; use_listings_cache is given by ckptstore"
            raise InvalidUrlError(msg, hint=hint) from None
        return fs, root.rstrip("/")

    def _without_secrets(self, error: Exception) -> str:
        """Return a library's message with the user's values removed."""
        text = str(error)
        parts = urlsplit("x://" + self._url.rpartition("://")[2])
        given = {*_texts(self._options), parts.username or "", parts.password or ""}
        for part in _PARTS.split(" ".join((*given, parts.query))):
            given.add(part.partition("=")[2] or part)
        for secret in sorted(given, key=len, reverse=True):
            if len(secret) >= _SECRET_CHARS_MIN:
                text = text.replace(secret, "***")
        return f"{type(error).__name__}: {text[:_SAID_CHARS_MAX]}"


def _files(fs: Foreign, top: str) -> dict[str, dict[str, object]]:
    """Return the entries below a folder; none if it is absent.

    fsspec's generic ``find`` silently leaves out folders that it could not list: a server that is
    down would look like an empty folder.
    """
    inherited = (fsspec.AbstractFileSystem.find, AsyncFileSystem._find)
    kind = type(fs)
    if getattr(kind, "_find", getattr(kind, "find", None)) not in inherited:
        with suppress(FileNotFoundError):
            return dict(fs.find(top, detail=True))
        return {}
    found: dict[str, dict[str, object]] = {}
    waiting, seen = [top], {top.strip("/")}
    while waiting:
        try:
            listing = fs.ls(waiting.pop(), detail=True)
        except FileNotFoundError:
            continue  # absent, or removed since its folder was listed
        for info in listing:
            path = str(info["name"]).rstrip("/")
            if info.get("type") != "directory":
                found[path] = info
            elif path.strip("/") not in seen:
                seen.add(path.strip("/"))
                waiting.append(path)
    return found


def _not_served(url: str, said: str) -> MissingDependencyError:
    scheme = url.partition("://")[0].partition("::")[0]
    msg = f"{scheme}:// needs a package that is not installed, or another version of it"
    return MissingDependencyError(msg, hint=said)


def _texts(value: object) -> Iterator[str]:
    """Yield all texts in options, which may be nested."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _answer(error: BaseException | None) -> tuple[int, str] | None:
    """Return HTTP status and code of a library's error or of its cause, or None without them."""
    for found in (error, getattr(error, "__cause__", None)):
        for holder in (found, getattr(found, "response", None)):
            for name in ("status_code", "status"):
                status = getattr(holder, name, None)
                if isinstance(status, int) and 300 <= status < 600:
                    code = getattr(found, "error_code", None)
                    return status, str(getattr(code, "value", code) or "")
    return None


def without_credentials(url: str) -> str:
    """Return `url` without user, password, query and fragment, for display."""
    scheme, mark, rest = url.rpartition("://")
    parts = urlsplit("x://" + rest)
    host = parts.netloc.rpartition("@")[2]
    clean = urlunsplit(("x", host, parts.path, "", ""))
    return f"{scheme}{mark}{clean.removeprefix('x://').removeprefix('x:')}"


def translate(error: Exception, what: str, *, writing: bool, conditional: bool) -> CkptStoreError:
    """Return the error of ckptstore's tree for an exception from an fsspec file system."""
    msg = f"{what}: {type(error).__name__}"
    if isinstance(error, FileExistsError) and conditional:
        return ObjectExistsError(msg)
    if isinstance(error, FileNotFoundError | IsADirectoryError | NotADirectoryError):
        return StorageError(msg) if writing else ObjectNotFoundError(msg)
    if isinstance(error, PermissionError):
        return StoragePermissionError(msg)
    if (answer := _answer(error)) is not None:
        status, code = answer
        found = error_for_answer(status, code, what, conditional=conditional)
        if writing and isinstance(found, ObjectNotFoundError):
            return StorageError(found.message, hint="is there such a bucket, container or host?")
        return found
    if conditional and isinstance(error, NotImplementedError | TypeError):
        return UnsafeBackendError(msg, hint="this file system cannot create a name if absent")
    if isinstance(error, TimeoutError | FSTimeoutError | ConnectionError | EOFError):
        return error_for_silence(msg, conditional=conditional)
    if isinstance(error, OSError) and error.errno is not None:
        found = translate_os(error, what, writing=writing)
        ambiguous = conditional and type(found) in {StorageError, TransientStorageError}
        return error_for_silence(msg, conditional=True) if ambiguous else found
    return error_for_silence(msg, conditional=True) if conditional else StorageError(msg)


def open_fsspec(url: str, **options: object) -> FsspecBackend:
    """Return the backend of any URL that fsspec knows; `options` are the file system's.

    Raises
    ------
    InvalidUrlError
        fsspec knows no such scheme.
    MissingDependencyError
        fsspec knows it, but the package that serves it is not installed.
    """
    scheme = url.partition("://")[0].partition("::")[0]
    try:
        fsspec.get_filesystem_class(scheme)
    except ValueError as error:
        msg = f"no backend serves {scheme}://"
        raise InvalidUrlError(msg, hint="a path, or a URL that fsspec knows") from error
    except (ImportError, AttributeError) as error:
        raise _not_served(url, str(error)) from error
    return FsspecBackend(url, options)
