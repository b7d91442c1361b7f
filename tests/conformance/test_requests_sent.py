"""Requests as they are sent to S3, GCS and Azure: a server that only records them tells."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from azure.core.credentials import AccessToken
from buckets import without_thin_path
from google.oauth2.credentials import Credentials
from google_crc32c import Checksum
from local_servers import AZURE_ACCOUNT, AZURE_KEY
from webserver import Reply, Request, WebServer, certificate

from ckptstore import errors, limits
from ckptstore.backends import azure, gcs
from ckptstore.backends.base import Backend
from ckptstore.backends.registry import open_backend
from ckptstore.backends.transfers import operation

_DATA = b"0123456789" * 1000


class Service(WebServer):
    """Answers with success, or as it is told, to whatever it is asked; each object is `_DATA`."""

    def __init__(self, folder: Path, **more: Any) -> None:  # noqa: ANN401 - of a web server
        (folder / "x").write_bytes(_DATA)
        super().__init__(folder, **more)
        self.answers: list[tuple[int, str]] = []
        """Status and code of the answers to come; after those, success."""

    def honest(self, request: Request) -> Reply:
        """Return the next answer."""
        status, code = self.answers.pop(0) if self.answers else (200, "")
        reply = super().honest(replace(request, path="/x"))
        if request.method != "GET" or status != 200:
            reply = replace(reply, status=status, body=b"{}" if request.method == "POST" else b"")
        if status >= 300:
            content = f"<?xml version='1.0'?><Error><Code>{code}</Code></Error>".encode()
            reply = replace(reply, body=content).having(Location=request.path * (status == 307))
        elif request.method == "PUT" and "x-ms-version" in request.headers:
            reply = replace(reply, status=201)
        return reply.having(ETag=code or '"1"', x_ms_error_code=code)

    def backend(self, kind: str, **more: object) -> Backend:
        """Open the backend of a service, without retries."""
        key = f"AccountName={AZURE_ACCOUNT};AccountKey={AZURE_KEY}"
        line = f"{key};BlobEndpoint={self.url}/{AZURE_ACCOUNT}"
        region = {"client_kwargs": {"region_name": "us-east-1"}}
        s3 = {"key": "k", "secret": "s", "endpoint_url": self.url} | region
        kinds: dict[str, tuple[str, dict[str, Any]]] = {
            "s3": ("s3", s3 | {"client": "direct"}),
            "s3fs": ("s3", s3 | {"client": "s3fs"}),
            "gcs": ("gs", {"token": "anon", "endpoint_url": self.url}),
            "azure": ("az", {"connection_string": line}),
            "web": ("", {}),
        }
        scheme, options = kinds[kind]
        url = f"{scheme}://bucket/ü %25+~" if scheme else f"{self.url}/store"
        return open_backend(url, retry=False, **options | more)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    """Run the server."""
    with Service(tmp_path) as found:
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


def _checksums(kind: str, sent: Request) -> set[str]:
    """Return the checksums of the content that a request has, as hex."""
    found = [sent.headers.get("Content-MD5", "")]
    if kind == "gcs":
        found = [json.loads(sent.body.split(b"\r\n")[3])[gcs._HASH]]
    said = {base64.b64decode(text).hex() for text in found if text}
    return said | {sent.headers.get("X-Amz-Content-SHA256", "")} - {""}


@pytest.mark.parametrize(
    ("kind", "of_gcs"), [*((one, "crc32c") for one in KINDS), ("gcs", "md5Hash")]
)
@pytest.mark.parametrize("write", WRITES)
def test_a_write_is_one_request_that_can_be_checked(
    service: Service, monkeypatch: pytest.MonkeyPatch, kind: str, of_gcs: str, write: str
) -> None:
    """It has the content, its length and a digest of it; the condition if it is to create."""
    monkeypatch.setattr(gcs, "_HASH", of_gcs)
    WRITES[write](service.backend(kind))
    (sent,) = service.requests
    assert sent.method == ("POST" if kind == "gcs" else "PUT")
    assert _DATA in sent.body
    assert int(sent.headers["Content-Length"]) == len(sent.body)
    md5, sha256 = hashlib.md5(_DATA).hexdigest(), hashlib.sha256(_DATA).hexdigest()  # noqa: S324
    meant = {"s3": {sha256}, "s3fs": {md5, sha256}, "azure": {md5}}
    meant["gcs"] = {md5 if of_gcs == "md5Hash" else Checksum(_DATA).digest().hex()}  # type: ignore[no-untyped-call]
    assert _checksums(kind, sent) == meant[kind]
    conditions = {sent.headers.get("If-None-Match", ""), *sent.path.split("&")}
    assert bool(conditions & {"*", "ifGenerationMatch=0"}) == (write == "create")


@pytest.mark.parametrize("kind", KINDS)
def test_a_read_asks_for_its_bytes_alone(service: Service, kind: str) -> None:
    """A range from its first to its last byte, of the content as it is stored; a whole is one."""
    backend, part = service.backend(kind), bytearray(50)
    backend.read_into("a", 101, [memoryview(part)[:20], memoryview(part)[20:]])
    headers = service.requests[0].headers
    assert len(service.requests) == 1
    assert (headers.get("Range") or headers["x-ms-range"]) == "bytes=101-150"
    assert kind == "azure" or headers["Accept-Encoding"] == "identity"  # Azure compresses nothing
    assert bytes(part) == _DATA[101:151]
    assert backend.get("a", bytes_max=len(_DATA)) == _DATA
    assert len(service.requests) == 2


@pytest.mark.parametrize(
    ("kind", "thin"), [("s3", 5), ("s3fs", 0), ("gcs", 6), ("azure", 5), ("web", 3)]
)
def test_requests_of_the_short_path_are_counted(service: Service, kind: str, thin: int) -> None:
    """All large bodies and ranges; of S3 the first goes by the client, which knows the way."""
    backend, large = service.backend(kind), bytes(limits.SIGNED_BODY_BYTES_MAX)
    with operation("test") as ledger:
        for key in "abc":
            if kind != "web":
                backend.put(key, large)
            backend.read_into(key, 0, [memoryview(bytearray(10))])
    figures = ledger.figures()
    assert sum(one.thin_count for one in figures.values()) == thin
    assert sum(one.requests_count for one in figures.values()) == len(service.requests)
    assert len(service.requests) == (3 if kind == "web" else 6)


def test_each_connection_of_the_short_path_checks_the_certificate(tmp_path: Path) -> None:
    """It trusts the bundle that the user names, and no server in the place of the first."""
    pems = [certificate(tmp_path / name) for name in ("trusted", "other")]
    own = {"client_kwargs": {"region_name": "us-east-1", "verify": str(pems[0])}}
    large, part = bytes(range(256)) * (limits.SIGNED_BODY_BYTES_MAX // 256), bytearray(9000)
    with Service(tmp_path, tls=pems[0]) as first, operation("test") as ledger:
        first.change = lambda _, reply: reply.having(Connection="close")
        backend = first.backend("s3", **own)
        for key in "ab":
            backend.put(key, large)
        backend.read_into("a", 500, [memoryview(part)])
    assert [one.body for one in first.requests if one.method == "PUT"] == [large] * 2
    assert bytes(part) == _DATA[500:9500]
    assert sum(one.thin_count for one in ledger.figures().values()) == 2

    error = pytest.raises(errors.TransientStorageError, match="put c: SSLError")
    with Service(tmp_path, tls=pems[1], port=first.port) as second, error:
        backend.put("c", large)
    assert not second.requests


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
def test_the_short_path_sends_what_gcsfs_sends(service: Service, options: str) -> None:
    """Address, parameters, headers with credentials, and body are the same; as is the answer."""
    make, thin = OF_GCS[options]
    sent = []
    for expected in (thin, 0):
        service.requests.clear()
        backend = service.backend("gcs", **make(service.url))
        if not expected:
            without_thin_path(backend)
        with operation("test") as ledger:
            backend.put("a", _DATA)
            backend.read_into("a", 1, [memoryview(bytearray(10))])
        assert sum(one.thin_count for one in ledger.figures().values()) == expected
        for one in service.requests:
            del one.headers["Accept"], one.headers["Accept-Encoding"]
        sent.append(
            [(x.method, x.path, sorted(x.headers.items()), x.body) for x in service.requests]
        )
    assert sent[0] == sent[1]
    assert len(sent[0]) == 2


def test_azures_short_path_checks_the_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It trusts the bundle that the user names, and no server in the place of the first."""
    pems = [certificate(tmp_path / name) for name in ("trusted", "other")]
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(pems[0]))
    with Service(tmp_path, tls=pems[0]) as first, operation("test") as ledger:
        first.change = lambda _, reply: reply.having(Connection="close")
        backend = first.backend("azure")
        backend.get("a", bytes_max=1 << 20)
        backend.put("a", _DATA)
        assert len(first.requests) == 2
    assert sum(one.thin_count for one in ledger.figures().values()) == 1

    error = pytest.raises(errors.TransientStorageError, match="put c: SSLError")
    with Service(tmp_path, tls=pems[1], port=first.port) as second, error:
        backend.put("c", _DATA)
    assert not second.requests


class _Identity:
    """Gives each request a token of its own, since they end at once."""

    def __init__(self) -> None:
        self.given = 0

    def get_token(self, *_: str, **__: object) -> AccessToken:
        """Return the next token."""
        self.given += 1
        return AccessToken(f"token {self.given}", 0)


OF_AZURE: dict[str, dict[str, Any]] = {
    "key": {"account_key": AZURE_KEY},
    "sas": {"sas_token": "?sv=2024-01-01&sig=a%2Bb%3D"},
    "nothing": {"anon": True},
    "identity": {"credential": _Identity()},
}
_OWN_HEADERS = {"accept", "accept-encoding", "connection", "x-ms-client-request-id", "x-ms-date"}


@pytest.mark.parametrize("way", OF_AZURE)
def test_the_short_path_sends_what_azures_library_sends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Address, parameters, headers and body are the same; by TLS, with the user's bundle.

    Signatures differ by date; azurite compares them in the suite of conformance.
    """
    pem, sent = certificate(tmp_path), []
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(pem))
    with Service(tmp_path, tls=pem) as service:
        for thin in (True, False):
            names: dict[str, Any] = {
                "account_host": f"{service.url}/{AZURE_ACCOUNT}",
                "account_name": AZURE_ACCOUNT,
            }
            backend = open_backend("az://bucket/ü %25+~", retry=False, **names, **OF_AZURE[way])
            backend.get("a", bytes_max=1 << 20)  # the library goes first
            if not thin:
                without_thin_path(backend)
            service.requests.clear()
            with operation("test") as ledger:
                backend.put("a", _DATA)
                backend.read_into("a", 1, [memoryview(bytearray(10))])
                assert isinstance(backend, azure.AzureBackend)
                azure._Upload(backend, "a", "").part(3, [memoryview(_DATA)])
            assert sum(x.thin_count for x in ledger.figures().values()) == 3 * thin
            found = []
            for one in service.requests:
                headers = {k.lower(): v for k, v in one.headers.items()}
                headers["authorization"] = re.sub(
                    ":.*|token.*", "", headers.get("authorization", "")
                )
                kept = sorted((k, v) for k, v in headers.items() if k not in _OWN_HEADERS)
                place, _, query = one.path.partition("?")
                found.append((one.method, place, sorted(query.split("&")), kept, one.body))
            sent.append(found)
            backend.close()
    assert sent[0] == sent[1]


@pytest.mark.parametrize("status", [103, 307])
def test_answers_that_lead_elsewhere_are_left_to_gcsfs(service: Service, status: int) -> None:
    """It follows, and the request succeeds."""
    backend, part = service.backend("gcs"), bytearray(10)
    for call in (WRITES["put"], lambda one: one.read_into("a", 1, [memoryview(part)])):
        service.answers[:] = [(status, "")]
        with operation("test") as ledger:
            call(backend)
        assert [one.thin_count for one in ledger.figures().values()] == [0]
    assert part == _DATA[1:11]
    assert len(service.requests) == 4


def test_certificates_are_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is sent to a server of GCS that nobody vouches for; the user's authorities count."""
    pem, part = certificate(tmp_path), bytearray(10)
    with Service(tmp_path, tls=pem) as sealed:
        for error in (errors.TransientStorageError, None):
            backend = sealed.backend("gcs")
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
def test_nothing_is_sent_twice(service: Service, kind: str, status: int, code: str) -> None:
    """Each refusal has its error at once: only the retry wrapper sends again."""
    backend = service.backend(kind)
    reading: Callable[[Backend], object] = lambda one: one.get("a", bytes_max=1 << 20)  # noqa: E731
    calls = (WRITES["create"], WRITES["put"], reading)
    for call, error in zip(calls, ANSWERS[status, code], strict=True):
        service.requests.clear()
        service.answers[:] = [(status, code)] * 3
        with pytest.raises(errors.CkptStoreError) as caught:
            call(backend)
        assert type(caught.value) is error
        assert len(service.requests) == 1
