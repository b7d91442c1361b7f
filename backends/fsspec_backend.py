"""Any other file system that fsspec knows, by fsspec's public methods alone.

Their promises about atomicity and caching vary, so this backend claims nothing: a store on it
may be shared only where the probe has shown that put-if-absent holds.
"""

from __future__ import annotations

import errno
import inspect
import queue
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit, urlunsplit

import fsspec
import fsspec.core
from fsspec.archive import AbstractArchiveFileSystem

from ckptstore import errors
from ckptstore.backends import base, bucket
from ckptstore.backends.buffered_writer import BufferedWriter
from ckptstore.backends.fsspec_servers import system_of
from ckptstore.backends.fsspec_systems import System, is_absent, is_answer, number_of, translate
from ckptstore.backends.per_process import PerProcess
from ckptstore.backends.posix_walk import TEMP, WITH_TEMPS
from ckptstore.backends.scatter import Scatter, wanted_bytes
from ckptstore.config import SYSTEM

T = TypeVar("T")
Foreign = Any
"""A value of fsspec, which ships no types."""
Info = Mapping[str, Any]
"""An entry of a folder, as fsspec describes it."""
_Call = Callable[[Foreign, str], T]

# As of an object store: pipe_file takes an object whole.
CAPABILITIES: Final = replace(bucket.CAPABILITIES, concurrency=8)

# Separators of the parts of a connection string or of a query.
_PARTS: Final = re.compile(r"[;&\s]")
_SECRET_CHARS_MIN: Final = 4
_SAID_CHARS_MAX: Final = 300
_CACHES: Final = frozenset({"blockcache", "cached", "filecache", "simplecache"})
_HINT_LISTING: Final = "copy the store to a folder or a bucket, and open it there"
# Names under which file systems report the modification time in ``info``.
_TIMES: Final = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")


class FsspecBackend(base.Backend):
    """The files below one path of an fsspec file system.

    Parameters
    ----------
    url
        As fsspec takes it; shown to users without credentials.
    options
        For the file system.
    system
        Handling of its class.
    """

    def __init__(self, url: str, options: Mapping[str, object], system: System) -> None:
        self.url: str = without_credentials(url)
        self.name = "fsspec"
        self._chained = "::" in url
        self._system = system
        self._make = _ClientFactory(url, dict(options), system)
        self._client = PerProcess(Lender, self._make, system)

    @property
    def capabilities(self) -> base.Capabilities:
        """Return the least that any file system offers."""
        lag_s = self._system.lookup_lag_s
        concurrency = self._system.connections or CAPABILITIES.concurrency
        return replace(
            CAPABILITIES, concurrency=concurrency, lookup_lag_s=lag_s, read_only=self._chained
        )

    def put(self, key: str, data: base.Buffer) -> None:
        """Write a whole object."""
        self._pipe(base.check_key(key), bytes(data))

    def put_if_absent(self, key: str, data: base.Buffer) -> None:
        """Create an object as far as the file system can; see :mod:`fsspec_systems`."""
        self._pipe(base.check_key(key), bytes(data), conditional=True)

    def open_writer(self, key: str) -> base.ObjectWriter:
        """Return a writer that collects the object in memory."""
        base.check_key(key)
        return BufferedWriter(lambda body: self._pipe(key, body.getvalue()))

    def get(self, key: str, *, bytes_max: int) -> bytes:
        """Return a whole object, requesting one byte more than is allowed."""
        data = self._cat(key, 0, bytes_max + 1)
        base.check_size(key, len(data), bytes_max)
        return data

    def read_into(self, key: str, offset: int, buffers: base.Buffers) -> None:
        """Fill `buffers` from one ranged read."""
        wanted = wanted_bytes(buffers)
        if not wanted:
            self.stat(key)
            return
        data = self._cat(key, offset, offset + wanted)
        if len(data) < wanted:
            raise errors.CorruptObjectError(f"{key} ends before byte {offset + wanted}")
        Scatter(buffers).feed(data)

    def list(self, prefix: str, *, after: str = "") -> Iterator[base.ObjectInfo]:
        """Yield objects in order; lists each folder when the listing reaches it, and no other."""
        folder, mark, _ = base.check_prefix(prefix).rpartition("/")
        for key, info in self._walk(folder + mark, prefix, after):
            yield self._info(key, info)

    def _walk(self, above: str, prefix: str, after: str) -> Iterator[tuple[str, Info]]:
        for name, info in sorted(self._entries(above).items()):
            key = above + name
            if not base.is_key(name.rstrip("/")):
                continue
            if not name.endswith("/"):
                if key > after and key.startswith(prefix) and base.is_key(key):
                    yield key, info
            # All keys below a folder begin with `key`: skip it when none can qualify.
            elif (key.startswith(prefix) or prefix.startswith(key)) and (
                after < key or after.startswith(key)
            ):
                yield from self._walk(key, prefix, after)

    def _entries(self, above: str) -> dict[str, Info]:
        """Return files and folders of one folder by name; the names of folders end in ``/``."""

        def ls(fs: Foreign, root: str) -> dict[str, Info]:
            """List, bypassing caches. A file is listed as itself by some file systems."""
            folder = f"{root}{above}".rstrip("/")
            found: dict[str, Info] = {}
            itself = False
            try:
                listed = self._system.ls(fs, folder)
            except Exception as error:
                if not is_absent(error):
                    raise
                return found
            for info in listed:
                path = str(info["name"]).rstrip("/")
                kind, name = info.get("type"), path.rpartition("/")[2]
                if path.lstrip("/") != folder.lstrip("/") and kind in {"file", "directory"}:
                    found[name if kind == "file" else f"{name}/"] = info
                elif kind == "directory":
                    itself = True
            if itself and not found:  # it holds nothing, or the file system took it for a file
                msg = f"the file system lists nothing in {folder} but the folder itself"
                raise errors.StorageError(msg, hint=_HINT_LISTING)
            return found

        return self._run(f"list {above}", ls)

    def stat(self, key: str) -> base.ObjectInfo:
        """Return size and time of one object, bypassing caches."""
        base.check_key(key)

        def info(fs: Foreign, root: str) -> Info:
            """Return the storage's record of the object, bypassing caches."""
            found = self._system.info(fs, f"{root}{key}")
            if found.get("type") != "file":
                raise FileNotFoundError(key)
            return found

        return self._info(key, self._run(f"stat {key}", info))

    def delete(self, key: str) -> None:
        """Remove one object."""
        base.check_key(key)
        self._check_writable()
        self._remove(key)

    def _remove(self, name: str) -> None:
        def remove(fs: Foreign, root: str) -> None:
            """Remove a file that may be absent."""
            path = f"{root}{name}"
            try:
                fs.rm_file(path)
            except Exception as error:
                unclear = number_of(error) is None
                if not is_absent(error) and not (unclear and not self._is_file(fs, path)):
                    raise

        self._run(f"delete {name}", remove)

    def remove_leftovers(self, *, modified_before: float, dry_run: bool = False) -> base.Leftovers:
        """Remove temporary files; none are left where a write is one request."""
        count = size = 0
        waiting = ["", *(f"{name}/" for name in WITH_TEMPS)] if self._system.keeps_temps else []
        for above in waiting:
            for name, info in self._entries(above).items():
                if above and name.endswith("/") and base.is_key(name[:-1]):
                    waiting.append(above + name)
                elif TEMP.match(name) and self._modified_at(info) < modified_before:
                    count, size = count + 1, size + self._info(above + name, info).size_bytes
                    if not dry_run:
                        self._remove(above + name)
        return base.Leftovers(count=count, size_bytes=size)

    def close(self) -> None:
        """Release this process's file system objects."""
        if (lender := self._client.take()) is not None:
            lender.close()

    def _cat(self, key: str, start: int, end: int) -> bytes:
        base.check_key(key)

        def cat(fs: Foreign, root: str) -> bytes:
            """Return the bytes, or raise for an object that is not there."""
            path = f"{root}{key}"
            try:
                return self._system.read(fs, path, start, end)
            except Exception as error:
                if number_of(error) is None and not self._is_file(fs, path):
                    raise FileNotFoundError(path) from error  # servers do not say why
                raise

        return self._run(f"get {key}", cat)

    def _is_file(self, fs: Foreign, path: str) -> bool:
        try:
            return self._system.info(fs, path).get("type") == "file"
        except Exception as error:
            if is_absent(error):
                return False
            raise

    def _pipe(self, key: str, data: bytes, *, conditional: bool = False) -> None:
        temp = f"{key.rpartition('/')[0]}/.tmp-{SYSTEM.random_hex(16)}".lstrip("/")

        def pipe(fs: Foreign, root: str) -> None:
            """Write the whole object, and make its folders."""
            path = f"{root}{key}"
            self._system.write(fs, path, data, f"{root}{temp}", conditional=conditional)

        self._check_writable()
        self._run(f"put {key}", pipe, writing=True, conditional=conditional)

    def _check_writable(self) -> None:
        if self._chained:
            raise base.read_only_error(self.url)

    def _run(
        self, what: str, call: _Call[T], *, writing: bool = False, conditional: bool = False
    ) -> T:
        """Return ``call(fs, root)``, bypassing caches and translating the errors that it raises."""
        opened = False
        try:
            with self._client.get().lent() as (fs, root):
                opened = True
                fs.invalidate_cache()
                return call(fs, root)
        except errors.CkptStoreError:
            raise
        except Exception as error:
            if not opened:  # a file system may connect when it is made
                what, writing, conditional = f"open {self.url}", True, False
            said = self._make.without_secrets
            found = translate(error, what, writing=writing, conditional=conditional, said=said)
            raise found from error

    def _info(self, key: str, info: Info) -> base.ObjectInfo:
        size = info.get("size")
        if not isinstance(size, int):
            msg = f"{key}: the file system does not tell its size"
            hint = f"{_HINT_LISTING}; a web server by its https:// URL"
            raise errors.StorageError(msg, hint=hint)
        return base.ObjectInfo(key=key, size_bytes=size, modified_at=self._modified_at(info))

    def _modified_at(self, info: Info) -> float:
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
        return SYSTEM.now_ms() / 1000


class Lender:
    """File system objects of one process: one for all threads, or several for one thread each.

    Few file systems connect again by themselves, and a session may be left in the middle of an
    answer: after a failure that is no answer of the server the object is replaced.
    """

    def __init__(self, make: Callable[[], tuple[Foreign, str]], system: System) -> None:
        self._make, self._system = make, system
        self._idle: queue.LifoQueue[tuple[Foreign, str] | None] = queue.LifoQueue()
        for _ in range(system.connections or 1):
            self._idle.put(None)

    @contextmanager
    def lent(self) -> Iterator[tuple[Foreign, str]]:
        """Lend an object; waits for one where all are in use."""
        shared = not self._system.connections
        held = self._idle.get()
        try:
            held = lent = held or self._make()
        finally:
            if shared or held is None:
                self._idle.put(held)
        try:
            yield lent
        except BaseException as error:
            lost = self._system.lost(lent[0])
            if lost and shared:
                with suppress(queue.Empty):  # another thread may be replacing it
                    found = self._idle.get_nowait()
                    self._idle.put(None if found is lent else found)
            if not shared and (lost or not is_answer(error)):
                self._system.close(lent[0])
                held = None
            if lost:
                raise ConnectionResetError(errno.ECONNRESET, "the connection is gone") from error
            raise
        finally:
            if not shared:
                self._idle.put(held)

    def close(self) -> None:
        """Release the objects that no thread uses."""
        with suppress(queue.Empty):
            while True:
                held = self._idle.get_nowait()
                if held is not None:
                    self._system.close(held[0])


class _ClientFactory:
    """Makes the file system object of one process; picklable.

    A class, so that a traceback with local variables shows neither URL nor options.
    """

    def __init__(self, url: str, options: dict[str, Any], system: System) -> None:
        self._url, self._options, self._system = url, options, system

    def __call__(self) -> tuple[Foreign, str]:
        """Return the file system object and what precedes the store's keys, in its paths.

        Raises
        ------
        InvalidUrlError
            The file system rejects the URL or an option.
        MissingDependencyError
            The file system needs a package that is not installed.
        """
        options = {**self._system.defaults, **self._options}
        try:
            fs, root = fsspec.core.url_to_fs(self._url, **options, skip_instance_cache=True)
        except ImportError as error:
            raise _not_served(self._url, self.without_secrets(error)) from None
        except (TypeError, ValueError, AttributeError, KeyError) as error:
            if number_of(error) is not None:  # smbprotocol's word for a refused connection
                raise
            msg = f"{without_credentials(self._url)} does not open: {self.without_secrets(error)}"
            hint = "check the URL and the storage options"
            raise errors.InvalidUrlError(msg, hint=hint) from None
        inner = fs
        while inner is not None:  # those below a chained one too
            with suppress(AttributeError):  # none, or a plain dict, which each call empties
                inner.dircache.use_listings_cache = False
            inner = getattr(inner, "fs", None)
        self._system.opened(fs, root)
        folder = f"{root.rstrip('/')}/"
        if isinstance(fs, AbstractArchiveFileSystem):  # whose names begin without a slash
            folder = folder.lstrip("/")
            if not (folder and fs.exists(folder)) and fs.isdir(f"./{folder}"):
                folder = f"./{folder}"  # tar names so what lies in "."
        return fs, folder

    def without_secrets(self, error: Exception) -> str:
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


def _not_served(url: str, said: str) -> errors.MissingDependencyError:
    scheme = url.partition("://")[0].partition("::")[0]
    msg = f"{scheme}:// needs a package that is not installed, or another version of it"
    return errors.MissingDependencyError(msg, hint=said)


def _texts(value: object) -> Iterator[str]:
    """Yield all texts in options, which may be nested."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def without_credentials(url: str) -> str:
    """Return `url` without user, password, query and fragment, for display."""
    scheme, mark, rest = url.rpartition("://")
    parts = urlsplit("x://" + rest)
    host = parts.netloc.rpartition("@")[2]
    clean = urlunsplit(("x", host, parts.path, "", ""))
    return f"{scheme}{mark}{clean.removeprefix('x://').removeprefix('x:')}"


def open_fsspec(url: str, **options: object) -> FsspecBackend:
    """Return the backend of any URL that fsspec knows; `options` are the file system's.

    Raises
    ------
    InvalidUrlError
        fsspec knows no such scheme; or it is a cache in front of a web server.
    MissingDependencyError
        fsspec knows it, but the package that serves it is not installed.
    """
    scheme = url.partition("://")[0].partition("::")[0]
    *caches, last = url.split("::")
    if caches and _CACHES.issuperset(caches) and last.startswith(("http://", "https://")):
        plain = without_credentials(last)
        hint = f"open {plain} itself; to keep what was loaded: ckptstore replicate"
        raise errors.InvalidUrlError(f"{scheme} cannot list what lies at {plain}", hint=hint)
    try:
        kind = fsspec.get_filesystem_class(scheme)
    except ValueError as error:
        hint = "a path, s3://, gs://, az://, https:// or another URL that fsspec knows"
        raise errors.InvalidUrlError(f"no backend serves {scheme}://", hint=hint) from error
    except (ImportError, AttributeError) as error:
        raise _not_served(url, str(error)) from error
    if issubclass(kind, AbstractArchiveFileSystem) and "::" not in url and "fo" not in options:
        hint = f"write {scheme}://::FILE, or {scheme}://FOLDER::FILE for a folder in it"
        raise errors.InvalidUrlError(f"{without_credentials(url)} names no archive", hint=hint)
    system = system_of(kind)
    names = inspect.signature(kind.__init__).parameters
    known = [name for name in names if name not in {"self", "kwargs"}]
    if system.strict and (unknown := sorted(options.keys() - set(known))):
        msg = f"{scheme}:// has no option {unknown[0]!r}"
        raise errors.InvalidUrlError(msg, hint=f"it has {', '.join(known)}")
    return FsspecBackend(url, options, system)
