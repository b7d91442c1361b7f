"""The fsspec backend lists little, replaces lost connections, and tells errors apart."""

from __future__ import annotations

import errno
import ftplib
import http.server
import socket
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from webserver import serving

import ckptstore
from ckptstore import limits
from ckptstore.backends.fsspec_backend import open_fsspec
from ckptstore.backends.fsspec_servers import Ftp, Smb, WebDav, system_of
from ckptstore.backends.fsspec_systems import System, is_answer, number_of, translate
from ckptstore.config import SystemEnvironment
from ckptstore.errors import (
    AmbiguousWriteError,
    CkptStoreError,
    InvalidUrlError,
    ObjectExistsError,
    ObjectNotFoundError,
    ReadOnlyError,
    StorageError,
    StorageFullError,
    StoragePermissionError,
    StoreNotFoundError,
    TransientStorageError,
    UnsafeBackendError,
)
from ckptstore.format.keys import pack_key


class Metered(MemoryFileSystem):  # type: ignore[misc]  # fsspec ships no types
    """Counts the entries that it lists."""

    protocol = "metered"
    entries = 0

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:  # noqa: ANN401
        found = super().ls(path, detail=detail, **options)
        type(self).entries += len(found)
        return found

    def find(self, path: str, **options: Any) -> Any:  # noqa: ANN401
        found = super().find(path, **options)
        type(self).entries += len(found)
        return found


def _entries(action: Callable[[], object]) -> int:
    before = Metered.entries
    action()
    return Metered.entries - before


@pytest.mark.slow
def test_listings_do_not_grow_with_the_store() -> None:
    """An open lists the top folder alone; a save lists the last folder of commits at most.

    A folder holds 1,000 commits: the 1,010th save lists as much as the 10th.
    """
    fsspec.register_implementation("metered", Metered, clobber=True)
    url = "metered://listings"
    opened: dict[int, int] = {}
    saved: dict[int, int] = {}
    with ckptstore.open(url, create=True, single_writer=True) as store:
        run = store.run("r")
        for step in range(1, 1011):
            saved[step] = _entries(lambda: run.save({"w": step}, step=step))  # noqa: B023
            if step in {10, 110, 1010}:
                opened[step] = _entries(lambda: ckptstore.open(url).close())
    assert max(opened.values()) <= 6
    assert saved[1010] <= saved[10] + 8
    listings = 4  # of one save with a single writer, which looks before and after
    assert max(saved.values()) <= listings * (limits.COMMITS_PER_FOLDER + 20)


def test_a_file_system_with_a_plain_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the Hugging Face Hub keeps listings in a dict."""
    plain = property(lambda _fs: {}, lambda _fs, _made: None)
    monkeypatch.setattr(Metered, "dircache", plain, raising=False)
    fsspec.register_implementation("metered", Metered, clobber=True)
    with ckptstore.open("metered://plain", create=True, single_writer=True) as store:
        assert store.run("r").save({"w": 1}, step=1).step == 1


class Timed(MemoryFileSystem):  # type: ignore[misc]  # fsspec ships no types
    """Tells some time of each file, under some name."""

    protocol = "timed"
    times: ClassVar[dict[str, object]] = {}

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:  # noqa: ANN401
        found = super().ls(path, detail=True, **options)
        bare = [{key: row[key] for key in ("name", "size", "type")} for row in found]
        return [row | self.times for row in bare] if detail else [row["name"] for row in bare]

    def info(self, path: str, **options: Any) -> Any:  # noqa: ANN401
        found = super().info(path, **options)
        return {key: found[key] for key in ("name", "size", "type")} | self.times


_OLD = datetime(2020, 1, 2, tzinfo=UTC)


@pytest.mark.parametrize(
    ("times", "old"),
    [
        ({}, False),
        ({"mtime": None, "created": "a while ago"}, False),
        ({"LastModified": _OLD.isoformat()}, True),
        ({"last_modified": _OLD}, True),
        ({"mtime": _OLD.timestamp()}, True),
        ({"modified": "a while ago", "created": int(_OLD.timestamp())}, True),
    ],
)
def test_an_object_of_unknown_age_is_young(
    monkeypatch: pytest.MonkeyPatch, times: dict[str, object], old: bool
) -> None:
    """A collection leaves an orphan whose time the file system does not tell."""
    fsspec.register_implementation("timed", Timed, clobber=True)
    monkeypatch.setattr("ckptstore.maintenance.collect.gc.storage_now", lambda _: 2e9)
    monkeypatch.setattr(SystemEnvironment, "now_ms", lambda _: 2_000_000_000_000)
    with ckptstore.open(f"timed://{id(times)}", create=True, single_writer=True) as store:
        backend = store.repo.backend
        monkeypatch.setattr(Timed, "times", times)
        orphan = pack_key("ab" * 16)
        backend.put(orphan, b"x")
        assert backend.stat(orphan).modified_at == (_OLD.timestamp() if old else 2e9)
        store.gc(grace_s=0)
        assert [info.key for info in backend.list("packs/")] == ([] if old else [orphan])


class Rivalled(MemoryFileSystem):  # type: ignore[misc]  # fsspec ships no types
    """Needs folders; while one is made, another client creates the file."""

    protocol = "rivalled"

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite") -> None:
        """Write a file into a folder that is there."""
        if not self.exists(path.rpartition("/")[0]):
            raise FileNotFoundError(path)
        super().pipe_file(path, value, mode=mode)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        super().makedirs(path, exist_ok=exist_ok)
        super().pipe_file(f"{path}/1", b"rival", mode="create")


@pytest.mark.parametrize("conditional", [True, False])
def test_both_tries_of_a_write_have_its_condition(conditional: bool) -> None:
    """A create whose folder was missing does not overwrite what came while it was made."""
    system, fs, top = System(), Rivalled(), f"/rivalled-{conditional}"
    fs.mkdir(top)
    with pytest.raises(FileExistsError) if conditional else nullcontext():
        system.write(fs, f"{top}/commits/1", b"mine", f"{top}/.tmp", conditional=conditional)
    assert fs.cat_file(f"{top}/commits/1") == (b"rival" if conditional else b"mine")


def test_the_listing_skips_what_lies_before(tmp_path: Path) -> None:
    """With `after`, folders that sort before it are not listed, nor are those beside the prefix."""
    fsspec.register_implementation("metered", Metered, clobber=True)
    backend = open_fsspec("metered://skipping")
    for folder in range(5):
        for name in range(10):
            backend.put(f"commits/{folder}/{name}", b"x")
        backend.put(f"packs/{folder}/x", b"x")
    listed = partial(lambda after: [info.key for info in backend.list("commits/", after=after)])
    assert _entries(lambda: listed("commits/4/7")) == 5 + 10
    assert listed("commits/4/7") == ["commits/4/8", "commits/4/9"]
    assert _entries(lambda: list(backend.list("packs/"))) == 5 + 5
    assert _entries(lambda: list(backend.list("store.json"))) == 2


def _sftp_error(name: str) -> Exception:
    kind = type(name, (Exception,), {"__module__": "asyncssh.sftp"})
    error: Exception = kind("x")
    return error


def _ftp_error(name: str, reply: str) -> Exception:
    error: Exception = getattr(ftplib, name)(reply)
    return error


class NtError(OSError):
    """Has the status of SMB beside a number that says less, as smbprotocol does."""

    def __init__(self, ntstatus: int, number: int = 0) -> None:
        super().__init__(number, "x")
        self.ntstatus = ntstatus


def _caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "reading", "creating"),
    [
        (NtError(0xC0000043, errno.EPERM), TransientStorageError, AmbiguousWriteError),
        (NtError(0xC0000022), StoragePermissionError, StoragePermissionError),
        (NtError(0xC000007F), StorageFullError, StorageFullError),
        (NtError(0xC0000034, errno.ENOENT), ObjectNotFoundError, StorageError),
        (NtError(0xC0000035, errno.EEXIST), StorageError, ObjectExistsError),
        (NtError(0xC00000BA, errno.EISDIR), ObjectNotFoundError, StorageError),
        (_sftp_error("SFTPNoSuchFile"), ObjectNotFoundError, StorageError),
        (_sftp_error("SFTPPermissionDenied"), StoragePermissionError, StoragePermissionError),
        (_sftp_error("SFTPConnectionLost"), TransientStorageError, AmbiguousWriteError),
        (_sftp_error("SFTPFailure"), StorageError, AmbiguousWriteError),
        (_ftp_error("error_perm", "530 x"), StoragePermissionError, StoragePermissionError),
        (_ftp_error("error_perm", "552 x"), StorageFullError, StorageFullError),
        (_ftp_error("error_perm", "550 x"), StorageError, AmbiguousWriteError),
        (_ftp_error("error_temp", "421 x"), TransientStorageError, AmbiguousWriteError),
        (_caused(ValueError("x"), ConnectionRefusedError(errno.ECONNREFUSED, "x")),
         TransientStorageError, AmbiguousWriteError),
        (socket.gaierror(-2, "x"), StorageError, AmbiguousWriteError),
    ],
)  # fmt: skip
def test_errors_by_class_and_number(
    error: Exception, reading: type[CkptStoreError], creating: type[CkptStoreError]
) -> None:
    """Exists, absent, forbidden, full, busy and lost are told apart; what is not known says so."""
    told = translate(error, "get a", writing=False, conditional=False, said=str)
    assert type(told) is reading
    told = translate(error, "put a", writing=True, conditional=True, said=str)
    assert type(told) is creating


def test_answers_keep_the_session() -> None:
    """A session is used again after an answer, not after silence or an unknown failure."""
    assert is_answer(FileNotFoundError("x"))
    assert is_answer(_ftp_error("error_perm", "550 x"))
    assert is_answer(NtError(0xC0000022))
    assert not is_answer(TimeoutError())
    assert not is_answer(OSError("Socket is closed"))
    assert number_of(OSError("Socket is closed")) is None


class Fragile(System):
    """One session for one thread each, which some calls break."""

    connections = 2

    def __init__(self) -> None:
        self.made = 0
        self.closed = 0
        self.broken = False

    def opened(self, fs: Any, root: str) -> None:  # noqa: ANN401
        self.made += 1

    def close(self, fs: Any) -> None:  # noqa: ANN401
        self.closed += 1

    def lost(self, fs: Any) -> bool:  # noqa: ANN401
        return self.broken

    def info(self, fs: Any, path: str) -> dict[str, Any]:  # noqa: ANN401
        """Fail like a library that has neither class nor number for it."""
        if self.broken:
            raise OSError("Socket is closed")
        return super().info(fs, path)


def test_lost_sessions_are_replaced() -> None:
    """A lost connection is transient, and the next call has a new one; an absent file keeps it."""
    from ckptstore.backends.fsspec_backend import FsspecBackend

    system = Fragile()
    backend = FsspecBackend("memory://sessions", {}, system)
    backend.put("a", b"1")
    with pytest.raises(ObjectNotFoundError):
        backend.stat("b")
    assert system.made == 1
    system.broken = True
    with pytest.raises(TransientStorageError):
        backend.stat("a")
    system.broken = False
    assert backend.stat("a").size_bytes == 1
    assert (system.made, system.closed) == (2, 1)
    backend.close()
    assert system.closed == 2


def test_file_servers_are_known_by_their_class() -> None:
    """The handling of a class is found without an import of its package; others are generic."""
    smb = type("SMBFileSystem", (), {"__module__": "fsspec.implementations.smb"})
    webdav = type("WebdavFileSystem", (), {"__module__": "webdav4.fsspec"})
    assert type(system_of(smb)) is Smb
    assert type(system_of(type("Mine", (webdav,), {}))) is WebDav
    assert type(system_of(MemoryFileSystem)) is System
    for system in (WebDav(), Ftp()):
        with pytest.raises(UnsafeBackendError, match=system.why_single):
            system.write(None, "/a", b"", "/.tmp", conditional=True)


def test_a_misspelt_option_that_would_be_swallowed() -> None:
    """It is named together with those that there are, and no value is shown."""
    with pytest.raises(InvalidUrlError, match=r"'pasword'.* password") as caught:
        open_fsspec("ftp://127.0.0.1:1/x", pasword="secret")  # noqa: S106
    assert "secret" not in str(caught.value)


@pytest.fixture
def store_folder(tmp_path: Path) -> Path:
    """Return the folder of a store with one version."""
    with ckptstore.open(tmp_path / "st", create=True) as store:
        store.run("r").save({"w": list(range(1000)), "b": b"x" * 200_000}, step=1)
    return tmp_path / "st"


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    """Serve the folder for tests by HTTP, with ranges left out, as the simplest servers do."""
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with serving(handler) as address:
        yield address


@pytest.mark.parametrize(
    "url",
    [
        "zip://st::file://{0}/st.zip",
        "tar://st::file://{0}/st.tar",
        "dir://st::file://{0}",
        "zip://st::simplecache::{1}/st.zip",
    ],
)
def test_chains_are_read_only(store_folder: Path, web: str, url: str) -> None:
    """A store is read through a chain; saves, deletions and new stores name the reason."""
    top = store_folder.parent
    with zipfile.ZipFile(top / "st.zip", "w") as archive:
        for path in store_folder.rglob("*"):
            archive.write(path, path.relative_to(top))
    with tarfile.open(top / "st.tar", "w") as archive:
        archive.add(store_folder, "st")
    location = url.format(top, web)
    with ckptstore.open(location) as store:
        assert store.load("r@1") == {"w": list(range(1000)), "b": b"x" * 200_000}
        assert store.verify().ok
        with pytest.raises(ReadOnlyError, match="only reads"):
            store.run("r").save({"w": 1}, step=2)
        with pytest.raises(ReadOnlyError, match="only reads"):
            store.repo.backend.delete("a")
    with pytest.raises(ReadOnlyError, match="only reads"):
        ckptstore.open(f"simplecache::memory://{store_folder.name}-none", create=True)


def _archive(kind: str, folder: Path, prefix: str) -> Path:
    """Return an archive of all below `folder`, whose names begin with `prefix`."""
    file = folder.with_name(f"packed.{kind}")
    members = [(path, prefix + str(path.relative_to(folder))) for path in folder.rglob("*")]
    if kind == "zip":
        with zipfile.ZipFile(file, "w") as archive:
            for path, name in members:
                archive.write(path, name)
    else:
        with tarfile.open(file, "w") as archive:
            for path, name in members:
                archive.add(path, name, recursive=False)
    return file


@pytest.mark.parametrize(
    ("inside", "prefix"), [("", ""), ("", "./"), ("st", "st/"), ("st", "./st/"), ("a/b", "a/b/")]
)
@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_archives_hold_what_was_packed(
    store_folder: Path, kind: str, inside: str, prefix: str
) -> None:
    """A store at the root or below, under names as tar and zip write them, has its versions."""
    with ckptstore.open(store_folder) as store:
        packed = [version.id for version in store.run("r").versions()]
    file = _archive(kind, store_folder, prefix)
    with ckptstore.open(f"{kind}://{inside}::file://{file}") as store:
        assert [version.id for version in store.run("r").versions()] == packed
        assert store.load("r@1") == {"w": list(range(1000)), "b": b"x" * 200_000}
        report = store.verify()
    assert report.ok
    assert report.versions_count == 1


def test_folders_that_list_themselves(store_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store whose folders are listed as themselves is refused: it would look empty, and sound."""
    top = f"{store_folder}-itself"
    for path in store_folder.rglob("*"):
        if path.is_file():
            name = f"{top}/{path.relative_to(store_folder)}"
            fsspec.filesystem("memory").pipe_file(name, path.read_bytes())
    honest = MemoryFileSystem.ls

    def listed(self: MemoryFileSystem, path: str, **options: object) -> list[dict[str, object]]:
        if path.endswith("-itself"):
            return list(honest(self, path, **options))
        return [{"name": path.lstrip("/"), "size": 0, "type": "directory"}]

    monkeypatch.setattr(MemoryFileSystem, "ls", listed)
    with (
        pytest.raises(StorageError, match="the folder itself") as caught,
        ckptstore.open(f"simplecache::memory:/{top}") as store,
    ):
        store.runs()
    assert "copy the store" in caught.value.hint


@pytest.mark.parametrize("cache", ["simplecache", "filecache", "blockcache"])
def test_a_cache_over_a_web_server(cache: str) -> None:
    """The URL that works is named, without credentials."""
    with pytest.raises(InvalidUrlError, match="cannot list") as caught:
        ckptstore.open(f"{cache}::https://user:secret@127.0.0.1:9/st")
    assert caught.value.hint.startswith("open https://127.0.0.1:9/st itself")


@pytest.mark.parametrize("url", ["zip://no::file://{0}/packed.zip", "dir://::file://{0}/st"])
def test_a_chain_without_a_store(store_folder: Path, url: str) -> None:
    """The hint says where the folder is named, and not to create a store in a chain."""
    _archive("zip", store_folder, "st/")
    with pytest.raises(StoreNotFoundError) as caught:
        ckptstore.open(url.format(store_folder.parent))
    assert "before ::" in caught.value.hint


def test_a_file_system_without_sizes(web: str, store_folder: Path) -> None:
    """The error says what to do instead."""
    with pytest.raises(StorageError, match="does not tell its size") as caught:
        ckptstore.open(f"dir://st::{web}")
    assert "https:// URL" in caught.value.hint
