"""Azure: one typed error for whatever is wrong with an account; as many requests as on S3."""

from __future__ import annotations

import socket
import socketserver
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import faultproxy
import pytest
import torch
from buckets import AzureBucket, S3Bucket
from faultproxy import Fault, FaultProxy, Kind
from local_servers import AZURE_ACCOUNT, AZURE_KEY

import ckptstore
from ckptstore import limits
from ckptstore.backends.base import Backend
from ckptstore.backends.registry import open_backend
from ckptstore.errors import (
    AmbiguousWriteError,
    CkptStoreError,
    ObjectExistsError,
    StorageError,
    StoragePermissionError,
    TransientStorageError,
)

WRONG_KEY = "d3JvbmdzdXAzcnNlY3JldHdyb25nc3VwM3I="


@pytest.fixture
def opened(azure_bucket: AzureBucket) -> Iterator[Callable[..., Backend]]:
    """Return a function that opens the container with options, without retries."""
    made: list[Backend] = []

    def open_it(url: str = azure_bucket.url, **options: Any) -> Backend:  # noqa: ANN401
        made.append(open_backend(url, retry=False, **options))
        return made[-1]

    yield open_it
    for backend in made:
        backend.close()


def _account(bucket: AzureBucket) -> dict[str, Any]:
    host = f"{bucket.endpoint_url}/{AZURE_ACCOUNT}"
    return {"account_name": AZURE_ACCOUNT, "account_host": host}


@pytest.mark.short(sample=2)
@pytest.mark.parametrize(
    ("more", "hint"),
    [
        ({"account_key": WRONG_KEY}, "credentials are wrong"),
        ({"account_key": "sup3rsecretx1"}, "no base64"),
        ({"sas_token": "sv=2024-01-01&ss=b&srt=co&sp=rl&sig=sup3rsecretsup3r"}, "credentials"),
        ({"anon": True}, "credentials"),
    ],
)
def test_wrong_credentials(
    azure_bucket: AzureBucket, opened: Callable[..., Backend], more: dict[str, Any], hint: str
) -> None:
    """Every call says so; neither the error nor its traceback has the key or the token."""
    backend = opened(**_account(azure_bucket), **more)
    for call in (
        lambda: backend.get("a", bytes_max=9),
        lambda: backend.put("a", b"x"),
        lambda: backend.put_if_absent("a", b"x"),
        lambda: list(backend.list("")),
    ):
        with pytest.raises(StoragePermissionError) as caught:
            call()
        assert hint in caught.value.hint
        text = "".join(traceback.format_exception(caught.value))
        assert not any(str(secret) in text for secret in more.values() if secret is not True)
        assert "sup3rsecret" not in text


def test_a_missing_container(azure_bucket: AzureBucket, opened: Callable[..., Backend]) -> None:
    """It is not created, also by a read, and is not taken for a missing object."""
    backend = opened("az://no-such-container/x", **azure_bucket.options())
    for call in (lambda: backend.get("a", bytes_max=9), lambda: backend.delete("a")):
        with pytest.raises(StorageError, match="ContainerNotFound") as caught:
            call()
        assert type(caught.value) is StorageError
        assert "create the bucket or container first" in caught.value.hint


@pytest.mark.parametrize(
    ("rights", "refused"),
    [
        ("rl", {"put", "create", "delete"}),
        ("rw", {"list", "delete"}),
        ("rwl", {"delete"}),
        ("wl", {"get", "delete"}),
    ],
)
def test_tokens_with_few_rights(
    azure_bucket: AzureBucket, opened: Callable[..., Backend], rights: str, refused: set[str]
) -> None:
    """A call without the right is told with the role that has it; the others work."""
    azure_bucket.write("a/old", b"x")
    backend = opened(**azure_bucket.limited(rights))
    calls: dict[str, Callable[[], object]] = {
        "get": lambda: backend.get("a/old", bytes_max=9),
        "put": lambda: backend.put("a/put", b"x"),
        "create": lambda: backend.put_if_absent("a/new", b"x"),
        "list": lambda: list(backend.list("a/")),
        "delete": lambda: backend.delete("a/old"),
    }
    for name, call in calls.items():
        if name not in refused:
            call()
            continue
        with pytest.raises(StoragePermissionError) as caught:
            call()
        assert "Storage Blob Data Contributor" in caught.value.hint, name


@pytest.mark.slow
def test_a_reader_with_a_token(azure_bucket: AzureBucket) -> None:
    """Read and list are enough to load; a save says what is missing."""
    with ckptstore.open(azure_bucket.url, create=True, **azure_bucket.options()) as store:
        store.run("r").save({"w": b"x" * 1000}, step=1)
    with ckptstore.open(azure_bucket.url, **azure_bucket.limited("rl")) as store:
        assert store.load("r@1") == {"w": b"x" * 1000}
        with pytest.raises(StoragePermissionError):
            store.run("r").save({"w": b"y" * 100_000}, step=2)


ANSWERS: list[tuple[int, str, type[CkptStoreError], type[CkptStoreError]]] = [
    # status, code, put_if_absent, get
    (503, "ServerBusy", TransientStorageError, TransientStorageError),
    (429, "TooManyRequests", TransientStorageError, TransientStorageError),
    (500, "OperationTimedOut", AmbiguousWriteError, TransientStorageError),
    (503, "OperationTimedOut", AmbiguousWriteError, TransientStorageError),
    (500, "InternalError", AmbiguousWriteError, TransientStorageError),
    (400, "Md5Mismatch", TransientStorageError, TransientStorageError),
    (409, "BlobAlreadyExists", ObjectExistsError, TransientStorageError),
    (403, "UnauthorizedBlobOverwrite", ObjectExistsError, StoragePermissionError),
    (412, "ConditionNotMet", ObjectExistsError, StorageError),
    (409, "BlobImmutableDueToPolicy", StorageError, StorageError),
    (409, "PublicAccessNotPermitted", StoragePermissionError, StoragePermissionError),
    (403, "AuthenticationFailed", StoragePermissionError, StoragePermissionError),
    (403, "KeyBasedAuthenticationNotPermitted", StoragePermissionError, StoragePermissionError),
    (409, "ContainerBeingDeleted", StorageError, StorageError),
    (400, "InvalidHeaderValue", StorageError, StorageError),
]


@pytest.mark.parametrize(("status", "code", "create", "get"), ANSWERS)
@pytest.mark.short(sample=5)
def test_codes(
    azure_bucket: AzureBucket,
    azure_proxy: FaultProxy,
    opened: Callable[..., Backend],
    status: int,
    code: str,
    create: type[CkptStoreError],
    get: type[CkptStoreError],
) -> None:
    """Azure's own code decides where it says more than the status; one request is sent."""
    backend = opened(**azure_bucket.options(f"http://127.0.0.1:{azure_proxy.port}"))
    calls: list[tuple[Callable[[], object], type[CkptStoreError]]] = [
        (lambda: backend.put_if_absent("a", b"x"), create),
        (lambda: backend.get("a", bytes_max=9), get),
    ]
    for call, expected in calls:
        fault = Fault(kind=Kind.STATUS, status=status, code=code, times=0)
        azure_proxy.set(fault)
        with pytest.raises(expected) as caught:
            call()
        assert type(caught.value) is expected
        assert f"HTTP {status} " in caught.value.message
        assert fault.hits == 1


def _answering(head: str, body: bytes) -> tuple[socketserver.TCPServer, str]:
    """Start a server that gives every request one answer; return it with its address."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while self.rfile.readline() not in {b"\r\n", b""}:
                pass
            self.wfile.write(head.replace("\n", "\r\n").encode() + b"\r\n\r\n" + body)

    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,)).start()
    return server, f"http://127.0.0.1:{server.server_address[1]}/{AZURE_ACCOUNT}"


@pytest.mark.parametrize(
    ("head", "expected", "said"),
    [
        ("HTTP/1.1 200 OK\nContent-Length: 10", StorageError, "ignores ranges"),
        ("HTTP/1.1 206 Partial Content\nContent-Length: 4\nContent-Range: bytes 7-10/99",
         StorageError, "ignores ranges"),
        ("HTTP/1.1 206 Partial Content\nContent-Length: 9\nContent-Range: bytes 5-8/99",
         TransientStorageError, "cut short"),
        ("HTTP/1.1 206 Partial Content\nContent-Range: bytes 5-8/99", StorageError, "length"),
    ],
)  # fmt: skip
def test_answers_that_no_storage_should_give(
    opened: Callable[..., Backend], head: str, expected: type[CkptStoreError], said: str
) -> None:
    """Another range than the one asked for is an error; half a body may be tried again."""
    server, host = _answering(head, b"123")
    try:
        backend = opened(account_host=host, account_name=AZURE_ACCOUNT, account_key=AZURE_KEY)
        with pytest.raises(expected, match=said) as caught:
            backend.read_into("a", 5, [memoryview(bytearray(4))])
        assert type(caught.value) is expected
    finally:
        server.shutdown()
        server.server_close()


def test_an_upload_that_is_damaged_on_its_way(
    azure_bucket: AzureBucket,
    azure_proxy: FaultProxy,
    opened: Callable[..., Backend],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server compares the MD5 and refuses; sent again it is stored as it was meant."""
    backend = opened(**azure_bucket.options(f"http://127.0.0.1:{azure_proxy.port}"))
    receive = faultproxy._receive
    damaged: list[Any] = []

    def damage_once(stream: Any, client: Any, **more: Any) -> Any:  # noqa: ANN401 - passed on
        message = receive(stream, client, **more)
        if client is not None and message is not None and message.body and not damaged:
            damaged.append(message)
            message.body = message.body[:-1] + b"!"
        return message

    monkeypatch.setattr(faultproxy, "_receive", damage_once)
    with backend.open_writer("a") as writer:
        writer.write(b"data" * 1000)
        with pytest.raises(TransientStorageError, match="Md5Mismatch"):
            writer.commit()
        assert azure_bucket.read("a") is None
        writer.commit()
    assert azure_bucket.read("a") == b"data" * 1000


def test_a_server_that_is_away_is_told_at_once(opened: Callable[..., Backend]) -> None:
    """One connection is tried; retries belong to the wrapper."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        host = f"http://127.0.0.1:{taken.getsockname()[1]}/{AZURE_ACCOUNT}"
        backend = opened(account_host=host, account_name=AZURE_ACCOUNT, sas_token="sig=sup3rsecret")  # noqa: S106
        with pytest.raises(TransientStorageError) as caught:
            backend.put_if_absent("a", b"x")
    assert "network" in caught.value.hint
    assert "sup3rsecret" not in "".join(traceback.format_exception(caught.value))


_STATE = {"w": torch.arange(100_000.0)}


class Counted:
    """A store behind a proxy; each step tells its requests by method."""

    def __init__(self, bucket: S3Bucket | AzureBucket, proxy: FaultProxy) -> None:
        options = bucket.options(f"http://127.0.0.1:{proxy.port}")
        methods = ("GET", "HEAD", "PUT", "POST", "DELETE")
        faults = [Fault(kind=Kind.DELAY, method=method, times=0) for method in methods]
        self._faults = dict(zip(methods, faults, strict=True))
        proxy.set(*faults)
        self._proxy = proxy
        self._opening = {"location": bucket.url, **options}
        self.steps: dict[str, dict[str, int]] = {}

    def open(self, **more: Any) -> ckptstore.Store:  # noqa: ANN401 - options
        """Open the store."""
        words = {**self._opening, **more}
        return ckptstore.open(words.pop("location"), codec="raw", **words)

    def note(self, step: str) -> None:
        """Keep the requests since the last note."""
        self.steps[step] = {name: f.seen for name, f in self._faults.items() if f.seen}
        for fault in self._faults.values():
            fault.seen = 0

    def total(self, step: str) -> int:
        """Return the requests of a step."""
        return Counter(self.steps[step]).total()


def _life(place: Counted) -> dict[str, dict[str, int]]:
    with place.open(create=True):
        place.note("create")
    with place.open() as store:
        place.note("open")
        run = store.run("r")
        run.save(_STATE, step=1)
        place.note("first save")
        run.save({"w": _STATE["w"] + 1}, step=2)
        place.note("next save")
        run.save({"w": _STATE["w"] + 1}, step=3)
        place.note("unchanged")
        run.load("latest")
        place.note("load")
        store.version("r@1")["w"][:10]
        place.note("a slice")
    with place.open() as store:
        store.versions()
        place.note("open and list")
        assert store.verify().ok
        place.note("verify")
        store.gc()
        place.note("gc")
    return place.steps


@pytest.mark.slow
def test_as_many_requests_as_on_s3(
    s3_bucket: S3Bucket, s3_proxy: FaultProxy, azure_bucket: AzureBucket, azure_proxy: FaultProxy
) -> None:
    """Step by step, and method by method but for creating a store, where threads race.

    A collection on S3 asks for uploads that dead writers left; Azure drops such by itself.
    """
    theirs = _life(Counted(s3_bucket, s3_proxy))
    ours = _life(Counted(azure_bucket, azure_proxy))
    created = [Counter(steps.pop("create")).total() for steps in (theirs, ours)]
    assert abs(created[0] - created[1]) <= 5
    ours["gc"]["GET"] += 1
    assert ours == theirs


@pytest.mark.slow
def test_a_long_log_takes_one_listing_more(
    azure_bucket: AzureBucket, azure_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Azure lists from the first name: beyond a page, the last folder and its successor are listed.

    Pages of 6 names here, and 4 commits in a folder. A save lists twice, whatever the length of the
    log; the first one after a new folder was begun lists that one too.
    """
    monkeypatch.setattr(limits, "LIST_PAGE_OBJECTS", 6)
    monkeypatch.setattr(limits, "COMMITS_PER_FOLDER", 4)
    place = Counted(azure_bucket, azure_proxy)
    with place.open(create=True) as store:
        run = store.run("r")
        for step in range(1, 18):
            run.save({"w": step}, step=step)
            place.note(f"save {step}")
        assert [version.step for version in run.versions()] == list(range(1, 18))
    listings = [place.steps[f"save {step}"]["GET"] for step in range(2, 18)]
    within_a_page, later = listings[:6], listings[8:]
    assert within_a_page == [2] * 6  # as on S3
    assert later == [4, 4, 4, 8] * 2  # eight where a folder was begun
    assert max(listings) == 9  # where the log has just outgrown a page
