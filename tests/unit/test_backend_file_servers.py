"""File servers do not take a failure for absence or for the end, and replace no other content."""

from __future__ import annotations

import errno
import ftplib
import socket
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, BinaryIO

import pytest
from fsspec.dircache import DirCache
from fsspec.implementations.ftp import FTPFileSystem

from ckptstore.backends.fsspec_backend import FsspecBackend, Lender
from ckptstore.backends.fsspec_servers import Ftp, Sftp, Smb, SshFs, WebDav
from ckptstore.backends.fsspec_systems import FileServer
from ckptstore.backends.per_process import PerProcess
from ckptstore.errors import ObjectExistsError, ObjectNotFoundError, TransientStorageError


def _reply(name: str, reply: str) -> Exception:
    error: Exception = getattr(ftplib, name)(reply)
    return error


class Server:
    """An FTP server without MLSD as ftplib shows it, with one dictionary for its files."""

    def __init__(self, *, sizes: bool = True) -> None:
        self.files: dict[str, bytes] = {}
        self.folders = {"", "/store"}
        self.sizes = sizes
        self.list_fails: dict[str, str] = {}
        """Replies to LIST by folder."""
        self.cut = -1
        """Bytes after which a transfer fails; -1 for none."""

    def mlsd(self, _path: str) -> Iterator[Any]:
        raise _reply("error_perm", "500 unknown command")

    def dir(self, path: str, callback: Callable[[str], None]) -> None:
        path = path.rstrip("/")
        if reply := self.list_fails.get(path):
            raise _reply("error_temp", reply)
        if path not in self.folders:
            raise _reply("error_perm", "550 no such folder")
        kinds = {**dict.fromkeys(self.folders - {""}, "d"), **dict.fromkeys(self.files, "-")}
        for name, kind in kinds.items():
            if name.rpartition("/")[0] == path:
                size = len(self.files.get(name, b""))
                base = name.rpartition("/")[2]
                callback(f"{kind}rw-r--r-- 1 u g {size} Nov 23 07:55 {base}")

    def voidcmd(self, _command: str) -> str:
        return "200 ok"

    def size(self, path: str) -> int:
        if not self.sizes:
            raise _reply("error_perm", "502 not implemented")
        if path not in self.files:
            raise _reply("error_perm", "550 no such file")
        return len(self.files[path])

    def transfercmd(self, command: str, rest: int | None = None) -> socket.socket:
        path = command.removeprefix("RETR ")
        if path not in self.files:
            raise _reply("error_perm", "550 no such file")
        ours, theirs = socket.socketpair()
        data = self.files[path][rest or 0 :]
        with theirs:
            theirs.sendall(data if self.cut < 0 else data[: self.cut])
        return ours

    def voidresp(self) -> str:
        if self.cut >= 0:
            raise _reply("error_temp", "426 aborted")
        return "226 done"

    def storbinary(self, command: str, file: BinaryIO) -> None:
        path = command.removeprefix("STOR ")
        if path.rpartition("/")[0] not in self.folders:
            raise _reply("error_perm", "553 no such folder")
        self.files[path] = file.read()

    def rename(self, old: str, new: str) -> None:
        self.files[new] = self.files.pop(old)

    def delete(self, path: str) -> None:
        del self.files[path]

    def mkd(self, path: str) -> None:
        self.folders.add(path)

    def close(self) -> None:
        """Hang up."""


def _ftp(server: Server) -> FsspecBackend:
    backend = FsspecBackend("ftp://127.0.0.1:1/store", {}, Ftp())

    def make() -> tuple[FTPFileSystem, str]:
        fs = FTPFileSystem.__new__(FTPFileSystem)
        fs.ftp, fs.dircache, fs._intrans = server, DirCache(use_listings_cache=False), False
        return fs, "/store/"

    backend._client = PerProcess(Lender, make, Ftp())
    return backend


def _keys(backend: FsspecBackend) -> list[str]:
    return [info.key for info in backend.list("commits/")]


def test_a_session_that_was_interrupted_is_not_used_again() -> None:
    """After Ctrl-C the rest of an answer may still come, which the next call would take for its."""
    closed, made = list[object](), iter("ab")

    class Noted(Ftp):
        def close(self, fs: object) -> None:
            closed.append(fs)

    lender = Lender(lambda: (next(made), "/"), Noted())
    with pytest.raises(KeyboardInterrupt), lender.lent():
        raise KeyboardInterrupt
    assert closed == ["a"]
    for _ in range(2):
        with lender.lent() as lent:
            assert lent == ("b", "/")


@pytest.mark.parametrize("reply", ["425 no data connection", "426 closed", "450 busy"])
def test_a_failed_list_is_no_empty_folder(reply: str) -> None:
    """A temporary refusal of LIST is transient, for listings and for single names."""
    server = Server()
    backend = _ftp(server)
    backend.put("commits/000000/1.json", b"one")
    assert _keys(backend) == ["commits/000000/1.json"]
    folder = "/store/commits/000000"
    server.list_fails = {folder: reply}
    with pytest.raises(TransientStorageError):
        _keys(backend)
    with pytest.raises(TransientStorageError):
        backend.stat("commits/000000/1.json")
    with pytest.raises(TransientStorageError):
        backend.get("commits/000000/2.json", bytes_max=10)
    server.list_fails = {}
    assert backend.stat("commits/000000/1.json").size_bytes == 3
    with pytest.raises(ObjectNotFoundError):
        backend.get("commits/000000/2.json", bytes_max=10)


def test_a_transfer_that_fails_is_no_short_file() -> None:
    """A 4xx after fewer bytes than asked is transient; after all of them it is the hanging up."""
    server = Server()
    backend = _ftp(server)
    backend.put("packs/a", bytes(1000))
    assert backend.get("packs/a", bytes_max=5000) == bytes(1000)
    server.cut = 100
    with pytest.raises(TransientStorageError):
        backend.get("packs/a", bytes_max=5000)
    with pytest.raises(TransientStorageError):
        backend.read_into("packs/a", 0, [memoryview(bytearray(1000))])
    backend.read_into("packs/a", 0, [memoryview(bytearray(100))])


@pytest.mark.parametrize("sizes", [True, False])
def test_ftp_replaces_no_other_content(*, sizes: bool) -> None:
    """A taken name is refused, by its size or in the listing; the same content is no error."""
    server = Server(sizes=sizes)
    backend = _ftp(server)
    for _ in range(2):
        backend.put("commits/a", b"one")
    for other in (b"two", b"", b"one more"):
        with pytest.raises(ObjectExistsError, match="other content"):
            backend.put("commits/a", other)
    assert server.files == {"/store/commits/a": b"one"}


class Fs:
    """A file system, and the client below it: renames, but never over another file."""

    def __init__(self, failure: Exception) -> None:
        self.files: dict[str, bytes] = {}
        self.failure = failure
        self.client = SimpleNamespace(move=self.move)
        self.ftp = SimpleNamespace(
            putfo=self.putfo, rename=self.rename, posix_rename=self.posix_rename
        )

    def pipe_file(self, path: str, data: bytes) -> None:
        self.files[path] = data

    def putfo(self, file: BinaryIO, path: str) -> None:
        self.files[path] = file.read()

    def move(self, old: str, new: str, *, overwrite: bool) -> None:
        if overwrite:
            self.files.pop(new, None)
        self.rename(old, new)

    def rename(self, old: str, new: str) -> None:
        if new in self.files:
            raise self.failure
        self.files[new] = self.files.pop(old)

    def posix_rename(self, old: str, new: str) -> None:
        self.files[new] = self.files.pop(old)

    def exists(self, path: str) -> bool:
        return path in self.files

    def rm_file(self, path: str) -> None:
        del self.files[path]

    def cat_file(self, path: str, start: int, end: int) -> bytes:
        return self.files[path][start:end]


class Shared(SshFs):
    """Calls the fake in place of asyncssh."""

    def _call(self, fs: Any, name: str, temp: str, path: str) -> None:  # noqa: ANN401
        getattr(fs, name)(temp, path)

    def read(self, fs: Any, path: str, start: int, end: int) -> bytes:  # noqa: ANN401
        return bytes(fs.cat_file(path, start, end))


class Paramiko(Sftp):
    """Reads from the fake in place of a channel."""

    def read(self, fs: Any, path: str, start: int, end: int) -> bytes:  # noqa: ANN401
        return bytes(fs.cat_file(path, start, end))


@pytest.mark.parametrize(
    "system", [WebDav(), Shared(), Paramiko()], ids=lambda it: type(it).__name__
)
@pytest.mark.parametrize("failure", [OSError("Failure"), FileExistsError(errno.EEXIST, "x")])
def test_a_single_writer_replaces_no_other_content(system: FileServer, failure: Exception) -> None:
    """The server's rename refuses a taken name; writing the same content again is no error."""
    fs = Fs(failure)
    for temp in ("/.t1", "/.t2"):
        system.write(fs, "/a", b"one", temp, conditional=False)
    for other in (b"two", b"", b"one more"):
        with pytest.raises(ObjectExistsError, match="other content"):
            system.write(fs, "/a", other, "/.t3", conditional=False)
    assert fs.files == {"/a": b"one"}


def test_smb_renames_and_does_not_replace(monkeypatch: pytest.MonkeyPatch) -> None:
    """SMB has one call for each; the one that replaces is not used."""
    called: list[str] = []
    client = ModuleType("smbclient")  # the client itself is installed with the lab only
    for name in ("rename", "replace"):
        monkeypatch.setattr(
            client, name, lambda *_a, name=name, **_k: called.append(name), raising=False
        )
    monkeypatch.setitem(sys.modules, "smbclient", client)
    Smb().rename(SimpleNamespace(host="h", _port=445), "/s/t", "/s/a")
    assert called == ["rename"]


def test_a_lost_connection_is_not_asked_again() -> None:
    """After silence the session may be in the middle of an answer: nothing is concluded from it."""
    fs = Fs(ConnectionResetError(errno.ECONNRESET, "x"))
    fs.files["/a"] = b"one"
    with pytest.raises(ConnectionResetError):
        WebDav().write(fs, "/a", b"two", "/.t", conditional=False)
    assert fs.files == {"/a": b"one"}
