"""The web backend takes no answer that is not the object, and gives no secret away."""

from __future__ import annotations

import gzip
import pickle
import socket
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from webserver import Change, Reply, Request, WebServer, certificate

from ckptstore import errors, limits
from ckptstore.backends.base import Backend
from ckptstore.backends.bucket import ANSWERS
from ckptstore.backends.registry import open_backend
from ckptstore.backends.web import open_web
from ckptstore.config import SYSTEM, SystemEnvironment

DATA = bytes(range(200))
SECRET = "hunter2hunter2"  # noqa: S105 - of servers that live for one test


@pytest.fixture
def server(tmp_path: Path) -> Iterator[WebServer]:
    """Return a server of one object, ``a/b``."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_bytes(DATA)
    with WebServer(tmp_path) as made:
        yield made


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the proxies of this machine out."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def read(backend: Backend, offset: int = 10, size: int = 20) -> bytes:
    """Return a range of the object."""
    buffer = bytearray(size)
    backend.read_into("a/b", offset, [memoryview(buffer)])
    return bytes(buffer)


def _gzipped(_: Request, reply: Reply) -> Reply:
    return replace(reply, body=gzip.compress(reply.body)).having(Content_Encoding="gzip")


def _whole(_: Request, reply: Reply) -> Reply:
    return Reply(status=200, body=DATA)


def _elsewhere(_: Request, reply: Reply) -> Reply:
    return reply.having(Content_Range="bytes 11-30/200")


def _unnamed(_: Request, reply: Reply) -> Reply:
    return reply.having(Content_Range="")


def _shorter(_: Request, reply: Reply) -> Reply:
    return replace(reply, body=reply.body[:-1]).having(Content_Range="bytes 10-28/200")


def _cut(_: Request, reply: Reply) -> Reply:
    return replace(reply, cut=len(reply.body) // 2)


def _page(_: Request, reply: Reply) -> Reply:
    return replace(reply, body=b"<!doctype html>").having(Content_Type="text/html; charset=utf-8")


RANGED: dict[str, tuple[Change, type[errors.CkptStoreError], str]] = {
    "compressed": (_gzipped, errors.StorageError, "compresses"),
    "ranges ignored": (_whole, errors.StorageError, "ignores ranges"),
    "another range": (_elsewhere, errors.StorageError, "ignores ranges"),
    "no range named": (_unnamed, errors.StorageError, "ignores ranges"),
    "a shorter range": (_shorter, errors.CorruptObjectError, "ends before byte 30"),
    "cut": (_cut, errors.TransientStorageError, "cut short"),
    "a web page": (_page, errors.StorageError, "web page instead"),
}


@pytest.mark.parametrize("lie", RANGED)
def test_a_range_is_that_range(server: WebServer, lie: str) -> None:
    """An answer to a range that is not exactly it raises an error that says how."""
    server.change, kind, text = RANGED[lie]
    with pytest.raises(kind, match=text) as caught:
        read(open_web(server.url))
    assert type(caught.value) is kind


@pytest.mark.parametrize("lie", ["compressed", "cut", "a web page"])
def test_an_object_is_that_object(server: WebServer, lie: str) -> None:
    """An answer to a whole object that is not it raises an error that says how."""
    server.change, kind, text = RANGED[lie]
    with pytest.raises(kind, match=text):
        open_web(server.url).get("a/b", bytes_max=1000)


@pytest.mark.parametrize("length", ["", "200"])
def test_get_holds_no_more_than_its_limit(server: WebServer, length: str) -> None:
    """An object over the limit is refused, whether its length is told or found by reading."""
    server.change = lambda _, reply: replace(reply, cut=200).having(Content_Length=length)
    with pytest.raises(errors.CorruptObjectError, match="more than the 199 bytes"):
        open_web(server.url).get("a/b", bytes_max=199)


@pytest.mark.parametrize("length", ["", "-1", "x", "9" * 20, "9" * 9000])
def test_a_size_that_is_not_told(server: WebServer, length: str) -> None:
    """``stat`` of an answer without a proper length is an error, and not a size of 0."""
    server.change = lambda _, reply: replace(reply, cut=0).having(Content_Length=length)
    with pytest.raises(errors.StorageError, match="does not tell its size"):
        open_web(server.url).stat("a/b")


@pytest.mark.parametrize("date", ["", "yesterday", "Mon, 99 Foo 2026 00:00:00 GMT"])
def test_a_time_that_is_not_told(
    server: WebServer, date: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing or nonsensical time is the present: no version counts as old for it."""
    monkeypatch.setattr(SystemEnvironment, "now_ms", lambda _: 5_000_500)
    server.change = lambda _, reply: reply.having(Last_Modified=date)
    assert open_web(server.url).stat("a/b").modified_at == 5_000.5


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize(
    "head",
    [
        {"Content_Length": "200"},
        {"Content_Length": "", "Transfer_Encoding": "chunked"},
        {"Content_Length": ""},
    ],
    ids=["length", "chunked", "open"],
)
@pytest.mark.parametrize("call", ["get", "read"])
def test_a_server_that_drips(
    server: WebServer, monkeypatch: pytest.MonkeyPatch, call: str, head: dict[str, str], tls: bool
) -> None:
    """An answer that arrives below the least rate is given up, however steadily it comes."""
    pem, times = certificate(server.folder), iter(range(0, 100_000, 25))
    monkeypatch.setenv("SSL_CERT_FILE", str(pem))
    monkeypatch.setattr(SYSTEM, "monotonic", lambda: float(next(times)))
    drip = b"1\r\nx\r\n" if "Transfer_Encoding" in head else b"x"
    with WebServer(server.folder, tls=pem if tls else None) as dripping:
        dripping.change = lambda _, reply: replace(reply, body=b"", drip=drip).having(**head)
        backend = open_web(dripping.url)
        monkeypatch.setattr(limits, "READ_TIMEOUT_S", 1.0)
        with pytest.raises(errors.TransientStorageError, match="too slow"):
            read(backend) if call == "read" else backend.get("a/b", bytes_max=1000)


def test_a_read_that_gets_no_answer_is_sent_again(server: WebServer) -> None:
    """One of many is held up: another takes its place, and brings the bytes."""
    backend, over, asked = open_web(server.url), threading.Event(), []
    for _ in range(ANSWERS // 2):
        read(backend)

    def hold(_: Request, reply: Reply) -> Reply:
        asked.append(reply)
        if len(asked) == 1:
            over.wait(limits.READ_TIMEOUT_S)
        return reply

    server.change = hold
    try:
        assert read(backend) == DATA[10:30]
        assert len(asked) == 2
    finally:
        over.set()


def test_no_server(server: WebServer) -> None:
    """A server that never answered is reported at once; one that did is tried again."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: a connection is refused
        port = taken.getsockname()[1]
        with pytest.raises(errors.StorageError, match=r"refused.*server up") as caught:
            open_web(f"http://127.0.0.1:{port}").get("a/b", bytes_max=9)
        assert not isinstance(caught.value, errors.TransientStorageError)
        backend = open_web(server.url)
        assert read(backend) == DATA[10:30]
        backend.url = f"http://127.0.0.1:{port}"
        with pytest.raises(errors.TransientStorageError):
            read(backend)


def test_missing_on_s3(server: WebServer) -> None:
    """S3 answers 403 for a missing object of a bucket that may not be listed: it is missing."""
    server.change = lambda _, reply: Reply(status=403)
    with pytest.raises(errors.StoragePermissionError, match="username, password, token"):
        open_web(server.url).stat("a/b")
    for name, value in (("Server", "AmazonS3"), ("x-amz-request-id", "7")):
        headers = {name: value}
        server.change = lambda _, reply, headers=headers: Reply(status=403, headers=headers)  # type: ignore[misc]
        with pytest.raises(errors.ObjectNotFoundError):
            open_web(server.url).stat("a/b")


def test_small_objects_are_asked_for_past_caches(server: WebServer) -> None:
    """Caches must revalidate names and records; ranges of packs they may answer."""
    backend = open_web(server.url)
    backend.get("a/b", bytes_max=1000)
    backend.stat("a/b")
    read(backend)
    asked = [one.headers.get("Cache-Control") for one in server.requests]
    assert asked == ["no-cache", "no-cache", None]


# --- redirects -----------------------------------------------------------------------------------
def _to(place: str) -> Change:
    def change(request: Request, reply: Reply) -> Reply:
        if request.path.startswith("/old/"):
            return Reply(status=302).having(Location=place)
        return reply

    return change


def test_a_redirect_is_followed_without_credentials(server: WebServer, tmp_path: Path) -> None:
    """Within a server credentials go along, to another one they do not; the range does."""
    options = {"username": "reader", "password": SECRET}
    with WebServer(tmp_path) as other:
        for place, target in (("/a/b", server), (f"{other.url}/a/b?sig=1", other)):
            server.change = _to(place)
            if target is other:
                other.change = lambda request, _: other.honest(
                    replace(request, path=request.path.partition("?")[0])
                )
            assert read(open_web(f"{server.url}/old", **options)) == DATA[10:30]
            last = target.requests[-1]
            assert ("Authorization" in last.headers) is (target is server)
            assert last.headers["Range"] == "bytes=10-29"
    assert SECRET not in str(server.requests)


def test_redirects_end(server: WebServer) -> None:
    """A circle of redirects is an error after a few."""
    server.change = _to("/old/a/b")
    with pytest.raises(errors.StorageError, match="more than 5 redirects"):
        read(open_web(f"{server.url}/old"))
    assert len(server.requests) == 6


@pytest.mark.parametrize(
    "place", ["", "ftp://host/a/b", "file:///etc/passwd", "http://u:p@host/", "http://["]
)
def test_redirects_that_are_not_followed(server: WebServer, place: str) -> None:
    """A redirect to another kind of place, or with credentials in it, is an error."""
    server.change = _to(place)
    with pytest.raises(errors.StorageError, match="redirects from http") as caught:
        read(open_web(f"{server.url}/old"))
    assert "u:p" not in str(caught.value)


def test_tls(server: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A certificate that nobody vouches for is refused; one that is trusted is accepted.

    From there no redirect leads to a server without TLS.
    """
    pem = certificate(tmp_path)
    with WebServer(tmp_path, tls=pem) as sealed:
        with pytest.raises(
            errors.StorageError, match=r"SSLError: self.signed.*SSL_CERT_FILE"
        ) as caught:
            read(open_web(sealed.url))
        assert not isinstance(caught.value, errors.TransientStorageError)
        monkeypatch.setenv("SSL_CERT_FILE", str(pem))
        assert read(open_web(sealed.url)) == DATA[10:30]
        sealed.change = _to(f"{server.url}/a/b")
        with pytest.raises(errors.StorageError, match="redirects from https to http"):
            read(open_web(f"{sealed.url}/old"))
        server.change = _to(f"{sealed.url}/a/b")
        assert read(open_web(f"{server.url}/old")) == DATA[10:30]


# --- URLs, credentials, proxies ------------------------------------------------------------------
@pytest.mark.parametrize(
    "url",
    [
        f"https://me:{SECRET}@host/store", f"https://host/store?token={SECRET}",
        f"https://host/store#{SECRET}", f"https:///{SECRET}", f"https://host:port/{SECRET}",
        f"https://[host/{SECRET}", f"https://host/\n{SECRET}",
    ],
)  # fmt: skip
def test_urls_that_are_refused(url: str) -> None:
    """A URL with credentials, a query or no host is refused, and not repeated."""
    with pytest.raises(errors.InvalidUrlError, match="https://host/path") as caught:
        open_backend(url)
    assert SECRET not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    "option",
    [{"verify": False}, {"token": f"{SECRET}\r\nX: y"}, {"token": 5}, {"password": "pässword"}],
)
def test_options_that_are_refused(option: dict[str, object]) -> None:
    """Unknown options and texts that no header can hold are refused by name, not by value."""
    with pytest.raises(errors.InvalidInputError, match=f"'{next(iter(option))}'") as caught:
        open_web("https://host/store", **option)
    assert SECRET not in str(caught.value)


def test_credentials_show_nowhere(server: WebServer) -> None:
    """Credentials go into a header; neither repr nor errors have them."""
    for options, expected in (
        ({"username": "reader", "password": "open"}, "Basic cmVhZGVyOm9wZW4="),
        ({"token": SECRET}, f"Bearer {SECRET}"),
    ):
        backend = open_web(server.url, **options)
        read(backend)
        assert server.requests[-1].headers["Authorization"] == expected
        server.change = lambda _, reply: Reply(status=401)
        with pytest.raises(errors.StoragePermissionError) as caught:
            read(backend)
        server.change = lambda _, reply: reply
        shown = f"{backend!r} {vars(backend)!r} {caught.value} {caught.value!r}"
        assert expected not in shown
        assert SECRET not in shown


def test_the_page_stands_for_its_folder(server: WebServer) -> None:
    """The address of the page, and one with a slash at its end, are that of the folder."""
    for end in ("", "/", "/index.html"):
        assert read(open_web(f"{server.url}{end}")) == DATA[10:30]


def test_the_environment_names_a_proxy(server: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests go to the proxy of the environment, with its credentials; not past ``no_proxy``."""
    monkeypatch.setenv("http_proxy", server.url.replace("//", "//me:pass%20word@"))

    def proxied(request: Request, _: Reply) -> Reply:
        return server.honest(replace(request, path=request.path.removeprefix("http://far.example")))

    server.change = proxied
    assert read(open_web("http://far.example")) == DATA[10:30]
    assert server.requests[-1].path == "http://far.example/a/b"
    assert server.requests[-1].headers["Proxy-Authorization"] == "Basic bWU6cGFzcyB3b3Jk"
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert read(open_web(server.url)) == DATA[10:30]
    assert server.requests[-1].path == "/a/b"


def test_it_travels(server: WebServer) -> None:
    """A pickled backend reads in the process that unpickles it, and a closed one is idempotent."""
    backend = open_web(server.url, token=SECRET)
    read(backend)
    again = pickle.loads(pickle.dumps(backend))  # noqa: S301 - made here
    assert read(again) == DATA[10:30]
    calls: list[Callable[[], None]] = [again.close, again.close, backend.close]
    for call in calls:
        call()
