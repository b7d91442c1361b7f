"""Requests as they are sent to S3, GCS and Azure: a server that only records them tells."""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
from buckets import without_thin_path
from google.oauth2.credentials import Credentials
from google_crc32c import Checksum
from local_servers import AZURE_ACCOUNT, AZURE_KEY
from webserver import WebServer, certificate

from ckptstore import errors, limits
from ckptstore.backends import gcs
from ckptstore.backends.base import Backend
from ckptstore.backends.registry import open_backend
from ckptstore.backends.transfers import operation

_DATA = b"0123456789" * 1000


@dataclass
class Recorder:
    """What was asked, and the answers to come; after those, success."""

    port: int = 0
    asked: list[tuple[str, str, Message, bytes]] = field(default_factory=list)
    answers: list[tuple[int, str]] = field(default_factory=list)
    tls: Path | None = None
    """Certificate and key."""
    closes: bool = False
    """Whether each connection ends with its answer."""

    def backend(self, kind: str, **more: object) -> Backend:
        """Open the backend of a service, without retries."""
        place = f"http{'s' if self.tls else ''}://127.0.0.1:{self.port}"
        key = f"AccountName={AZURE_ACCOUNT};AccountKey={AZURE_KEY}"
        line = f"{key};BlobEndpoint={place}/{AZURE_ACCOUNT}"
        s3 = {"key": "k", "secret": "s", "endpoint_url": place}
        kinds: dict[str, tuple[str, dict[str, Any]]] = {
            "s3": ("s3", s3 | {"client_kwargs": {"region_name": "us-east-1"}, "client": "direct"}),
            "s3fs": ("s3", s3 | {"client_kwargs": {"region_name": "us-east-1"}, "client": "s3fs"}),
            "gcs": ("gs", {"token": "anon", "endpoint_url": place}),
            "azure": ("az", {"connection_string": line}),
            "web": ("", {}),
        }
        scheme, options = kinds[kind]
        if self.tls is not None:
            options["client_kwargs"]["verify"] = str(self.tls)
        url = f"{scheme}://bucket/ü %25+~" if scheme else f"{place}/store"
        return open_backend(url, retry=False, **options | more)


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    recorder: Recorder

    def _any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.recorder.asked.append((self.command, self.path, self.headers, body))
        status, code = self.recorder.answers.pop(0) if self.recorder.answers else (200, "")
        if self.command == "PUT" and status == 200 and "x-ms-version" in self.headers:
            status = 201
        whole = self.command == "GET"
        said = self.headers.get("Range") or self.headers.get("x-ms-range")
        content = b"{}" if self.command == "POST" else b""
        if status == 200 and whole:
            content = _DATA
            if said:
                first, last = map(int, said.removeprefix("bytes=").split("-"))
                content, status = _DATA[first : last + 1], 206
        elif status >= 300:
            content = f"<?xml version='1.0'?><Error><Code>{code}</Code></Error>".encode()
        self.send_response(status)
        if status == 206:
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(_DATA)}")
        for name in ("ETag", "x-ms-error-code"):
            if name == "ETag" or code:
                self.send_header(name, code or '"1"')
        if status == 307:
            self.send_header("Location", self.path)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Last-Modified", "Wed, 01 Jan 2025 00:00:00 GMT")
        if self.recorder.closes:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _any

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def recording(found: Recorder) -> Iterator[Recorder]:
    """Run the server, at its port if it has one."""
    handler = type("Handler", (_Handler,), {"recorder": found})
    with http.server.ThreadingHTTPServer(("127.0.0.1", found.port), handler) as server:
        found.port = server.server_port
        if found.tls is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(found.tls)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield found
        server.shutdown()


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    """Run the server."""
    with recording(Recorder()) as found:
        yield found


def _written(backend: Backend) -> None:
    with backend.open_writer("packs/ab/x") as writer:
        writer.write(_DATA)
        writer.commit()


WRITES: dict[str, Callable[[Backend], object]] = {
    "put": lambda backend: backend.put("a", _DATA),
    "create": lambda backend: backend.put_if_absent("a", _DATA),
    "pack": _written,
}
KINDS = ("s3", "s3fs", "gcs", "azure")


def _checksums(kind: str, headers: Message, body: bytes) -> set[str]:
    """Return the checksums of the content that a request has, as hex."""
    found = [headers.get("Content-MD5", "")]
    if kind == "gcs":
        found = [json.loads(body.split(b"\r\n")[3])[gcs._HASH]]
    said = {base64.b64decode(text).hex() for text in found if text}
    return said | {headers.get("X-Amz-Content-SHA256", "")} - {""}


@pytest.mark.parametrize(
    ("kind", "of_gcs"), [*((one, "crc32c") for one in KINDS), ("gcs", "md5Hash")]
)
@pytest.mark.parametrize("write", WRITES)
def test_a_write_is_one_request_that_can_be_checked(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, kind: str, of_gcs: str, write: str
) -> None:
    """It has the content, its length and a digest of it; the condition if it is to create."""
    monkeypatch.setattr(gcs, "_HASH", of_gcs)
    WRITES[write](recorder.backend(kind))
    ((method, path, headers, body),) = recorder.asked
    assert method == ("POST" if kind == "gcs" else "PUT")
    assert _DATA in body
    assert int(headers["Content-Length"]) == len(body)
    md5, sha256 = hashlib.md5(_DATA).hexdigest(), hashlib.sha256(_DATA).hexdigest()  # noqa: S324
    meant = {"s3": {sha256}, "s3fs": {md5, sha256}, "azure": {md5}}
    meant["gcs"] = {md5 if of_gcs == "md5Hash" else Checksum(_DATA).digest().hex()}  # type: ignore[no-untyped-call]
    assert _checksums(kind, headers, body) == meant[kind]
    condition = {headers.get("If-None-Match", ""), *path.split("&")} & {"*", "ifGenerationMatch=0"}
    assert bool(condition) == (write == "create")


@pytest.mark.parametrize("kind", KINDS)
def test_a_read_asks_for_its_bytes_alone(recorder: Recorder, kind: str) -> None:
    """A range from its first to its last byte, of the content as it is stored; a whole is one."""
    backend, part = recorder.backend(kind), bytearray(50)
    backend.read_into("a", 101, [memoryview(part)[:20], memoryview(part)[20:]])
    ((_, _, headers, _),) = recorder.asked
    assert (headers.get("Range") or headers["x-ms-range"]) == "bytes=101-150"
    assert kind == "azure" or headers["Accept-Encoding"] == "identity"  # Azure compresses nothing
    assert bytes(part) == _DATA[101:151]
    assert backend.get("a", bytes_max=len(_DATA)) == _DATA
    assert len(recorder.asked) == 2


@pytest.mark.parametrize(
    ("kind", "thin"), [("s3", 5), ("s3fs", 0), ("gcs", 6), ("azure", 0), ("web", 3)]
)
def test_requests_of_the_short_path_are_counted(recorder: Recorder, kind: str, thin: int) -> None:
    """All large bodies and ranges; of S3 the first goes by the client, which knows the way."""
    backend, large = recorder.backend(kind), bytes(limits.SIGNED_BODY_BYTES_MAX)
    with operation("test") as ledger:
        for key in "abc":
            if kind != "web":
                backend.put(key, large)
            backend.read_into(key, 0, [memoryview(bytearray(10))])
    figures = ledger.figures()
    assert sum(one.thin_count for one in figures.values()) == thin
    assert sum(one.requests_count for one in figures.values()) == len(recorder.asked)
    assert len(recorder.asked) == (3 if kind == "web" else 6)


def test_each_connection_of_the_short_path_checks_the_certificate(tmp_path: Path) -> None:
    """It trusts the bundle that the user names, and no server in the place of the first."""
    for name in ("trusted", "other"):
        (tmp_path / name).mkdir()
    found = Recorder(tls=certificate(tmp_path / "trusted"), closes=True)
    large, part = bytes(range(256)) * (limits.SIGNED_BODY_BYTES_MAX // 256), bytearray(9000)
    with recording(found), operation("test") as ledger:
        backend = found.backend("s3")
        for key in "ab":
            backend.put(key, large)
        backend.read_into("a", 500, [memoryview(part)])
    assert [body for method, *_, body in found.asked if method == "PUT"] == [large] * 2
    assert bytes(part) == _DATA[500:9500]
    assert sum(one.thin_count for one in ledger.figures().values()) == 2

    found.asked.clear()
    found.tls = certificate(tmp_path / "other")
    with recording(found), pytest.raises(errors.TransientStorageError, match="put c: SSLError"):
        backend.put("c", large)
    assert not found.asked


class _Renewed(Credentials):
    """Ends so soon that each request needs a new token."""

    def __init__(self, token: str) -> None:
        super().__init__(token)  # type: ignore[no-untyped-call]
        self.expiry = datetime.fromisoformat("2000-01-01")

    def refresh(self, _: object) -> None:
        """Make the next token."""
        self.token = f"{self.token}x"
        self.expiry = datetime.now(UTC).replace(tzinfo=None) + timedelta(seconds=200)


OF_GCS: dict[str, tuple[Callable[[str], dict[str, Any]], int]] = {
    # options at an address, and how many of two requests go by the short path
    "nothing": (lambda _: {}, 2),
    "a payer": (lambda _: {"requester_pays": "else"}, 2),
    "tokens that end": (lambda _: {"token": _Renewed("t")}, 2),
    "a path": (lambda place: {"endpoint_url": f"{place}/be~low"}, 2),
    "a login": (lambda place: {"endpoint_url": place.replace("//", "//me:word@")}, 0),
    "a session": (lambda _: {"session_kwargs": {"headers": {"X-Own": "1"}}}, 0),
}


@pytest.mark.parametrize("options", OF_GCS)
def test_the_short_path_sends_what_gcsfs_sends(recorder: Recorder, options: str) -> None:
    """Address, parameters, headers with credentials, and body are the same; as is the answer."""
    make, thin = OF_GCS[options]
    sent = []
    for expected in (thin, 0):
        recorder.asked.clear()
        backend = recorder.backend("gcs", **make(f"http://127.0.0.1:{recorder.port}"))
        if not expected:
            without_thin_path(backend)
        with operation("test") as ledger:
            backend.put("a", _DATA)
            backend.read_into("a", 1, [memoryview(bytearray(10))])
        assert sum(one.thin_count for one in ledger.figures().values()) == expected
        for _, _, headers, _ in recorder.asked:
            del headers["Accept"], headers["Accept-Encoding"]
        sent.append([(*one[:2], sorted(one[2].items()), one[3]) for one in recorder.asked])
    assert sent[0] == sent[1]
    assert len(sent[0]) == 2


@pytest.mark.parametrize("status", [103, 307])
def test_answers_that_lead_elsewhere_are_left_to_gcsfs(recorder: Recorder, status: int) -> None:
    """It follows, and the request succeeds."""
    backend, part = recorder.backend("gcs"), bytearray(10)
    for call in (WRITES["put"], lambda one: one.read_into("a", 1, [memoryview(part)])):
        recorder.answers[:] = [(status, "")]
        with operation("test") as ledger:
            call(backend)
        assert [one.thin_count for one in ledger.figures().values()] == [0]
    assert part == _DATA[1:11]
    assert len(recorder.asked) == 4


def test_certificates_are_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is sent to a server of GCS that nobody vouches for; the user's authorities count."""
    pem, part = certificate(tmp_path), bytearray(10)
    (tmp_path / "x").write_bytes(_DATA)
    with WebServer(tmp_path, tls=pem) as sealed:
        sealed.change = lambda request, _: sealed.honest(replace(request, path="/x"))
        for error in (errors.TransientStorageError, None):
            backend = Recorder().backend("gcs", endpoint_url=sealed.url)
            with pytest.raises(error, match="SSLError") if error else nullcontext():
                backend.read_into("a", 1, [memoryview(part)])
            monkeypatch.setenv("SSL_CERT_FILE", str(pem))
        assert len(sealed.requests) == 1
    assert part == _DATA[1:11]


_BUSY, _UNCLEAR = errors.TransientStorageError, errors.AmbiguousWriteError
ANSWERS: dict[tuple[int, str], tuple[type[Exception], type[Exception], type[Exception]]] = {
    # to a create, a put, a get
    (409, "ConditionalRequestConflict"): (_BUSY, _BUSY, _BUSY),
    (412, "PreconditionFailed"): (
        errors.ObjectExistsError, errors.StorageError, errors.StorageError,
    ),
    (503, "SlowDown"): (_BUSY, _BUSY, _BUSY),
    (500, "InternalError"): (_UNCLEAR, _BUSY, _BUSY),
    (403, "AccessDenied"): (errors.StoragePermissionError,) * 3,
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("status", "code"), ANSWERS)
def test_nothing_is_sent_twice(recorder: Recorder, kind: str, status: int, code: str) -> None:
    """Each refusal has its error at once: only the retry wrapper sends again."""
    backend = recorder.backend(kind)
    reading: Callable[[Backend], object] = lambda one: one.get("a", bytes_max=1 << 20)  # noqa: E731
    calls = (WRITES["create"], WRITES["put"], reading)
    for call, error in zip(calls, ANSWERS[status, code], strict=True):
        recorder.asked.clear()
        recorder.answers[:] = [(status, code)] * 3
        with pytest.raises(errors.CkptStoreError) as caught:
            call(backend)
        assert type(caught.value) is error
        assert len(recorder.asked) == 1
