"""The web backend keeps the contract for reads; its writes are refused before anything is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from buckets import without_thin_path
from doors import FolderDoor
from webserver import WebServer

from ckptstore.backends.base import Backend, ObjectInfo
from ckptstore.backends.posix import open_posix
from ckptstore.backends.registry import open_backend
from ckptstore.backends.web import open_web
from ckptstore.backends.wrapper import WrapperBackend
from ckptstore.errors import CkptStoreError, ReadOnlyError, StorageError
from ckptstore.testing.answers import ANSWERS
from ckptstore.testing.conformance import ObjectConformance, ProcessConformance


class _Served(WrapperBackend):
    """Writes to a folder, and reads it through a web server."""

    def __init__(self, folder: Backend, web: Backend) -> None:
        super().__init__(folder)
        self.web = web
        self.name = web.name

    def get(self, key: str, *, bytes_max: int) -> bytes:
        """Read through the server."""
        return self.web.get(key, bytes_max=bytes_max)

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Read through the server."""
        self.web.read_into(key, offset, buffers)

    def stat(self, key: str) -> ObjectInfo:
        """Ask the server."""
        return self.web.stat(key)

    def close(self) -> None:
        """Close both."""
        super().close()
        self.web.close()


class TestWeb(FolderDoor, ObjectConformance):
    """Reads by GET, HEAD and ranges."""

    backend_name = "web"
    thin = True

    @pytest.fixture
    def backend(self, tmp_path: Path) -> Iterator[Backend]:
        """Return a folder that is read through a server."""
        self.root = tmp_path / "store"
        self.root.mkdir()
        with WebServer(tmp_path) as server:
            backend = _Served(open_posix(str(self.root)), open_web(f"{server.url}/store"))
            if not self.thin:
                without_thin_path(backend.web)
            yield backend
            backend.close()

    test_used_in_a_child = ProcessConformance.test_used_in_a_child


class TestWebByLibrary(TestWeb):
    """By urllib3 alone, as through a proxy."""

    thin = False


WRITES: dict[str, Callable[[Backend], object]] = {
    "put": lambda backend: backend.put("a/b", b"x"),
    "put_if_absent": lambda backend: backend.put_if_absent("a/b", b"x"),
    "open_writer": lambda backend: backend.open_writer("a/b"),
    "delete": lambda backend: backend.delete("a/b"),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_are_refused(tmp_path: Path, name: str) -> None:
    """Every write raises ReadOnlyError, with and without retries, and sends nothing."""
    with WebServer(tmp_path) as server:
        for retry in (False, True):
            with pytest.raises(ReadOnlyError, match="read-only"):
                WRITES[name](open_backend(server.url, retry=retry))
        assert server.requests == []


def test_listing_is_refused(tmp_path: Path) -> None:
    """A listing raises an error that says so, and sends nothing."""
    with WebServer(tmp_path) as server:
        with pytest.raises(StorageError, match="lists no objects"):
            list(open_backend(server.url).list("packs/"))
        assert server.requests == []


@pytest.mark.parametrize("status", ANSWERS)
def test_an_answer_is_one_error(tmp_path: Path, status: int) -> None:
    """Each read raises the error that backends raise for this status, and repeats nothing."""
    calls: list[Callable[[Backend], object]] = [
        lambda backend: backend.get("a/b", bytes_max=9),
        lambda backend: backend.read_into("a/b", 0, [memoryview(bytearray(1))]),
        lambda backend: backend.stat("a/b"),
    ]
    with WebServer(tmp_path) as server:
        server.change = lambda _, reply: type(reply)(status=status)
        for call in calls:
            server.requests.clear()
            with pytest.raises(CkptStoreError) as caught:
                call(open_web(server.url))
            assert type(caught.value) is ANSWERS[status][1]
            assert f"HTTP {status}" in caught.value.message
            assert len(server.requests) == 1
