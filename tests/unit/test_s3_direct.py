"""S3 by botocore alone: which options it takes, and how a body is protected on its way."""

from __future__ import annotations

import base64
import hashlib
import io
import pickle
import zlib
from datetime import UTC, datetime
from functools import partial
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs

import fsspec.config
import pytest
import urllib3
from botocore.auth import AUTH_TYPE_MAPS, S3SigV4Auth
from botocore.awsrequest import AWSResponse
from botocore.exceptions import ClientError, ConnectionClosedError, NoCredentialsError
from simulated_environment import SimulatedEnvironment
from urllib3.exceptions import ProtocolError

from ckptstore.backends import s3_thin
from ckptstore.backends.bucket import parse_bucket_url
from ckptstore.backends.per_process import PerProcess
from ckptstore.backends.receiving import receive_into
from ckptstore.backends.s3 import S3Backend, open_s3
from ckptstore.backends.s3_calls import Settings, code_of, read_settings, translate
from ckptstore.backends.s3_direct import DirectCalls, direct_client
from ckptstore.backends.s3_fsspec import s3fs_client
from ckptstore.config import SYSTEM
from ckptstore.errors import AmbiguousWriteError, InvalidInputError, InvalidUrlError, StorageError
from ckptstore.format.keys import pack_key

KEYS = {"key": "AKID", "secret": "s3cret"}
LARGE = bytes(range(256)) * 8192
SMALL = b"manifest"
UNSIGNED = "UNSIGNED-PAYLOAD"


class Wire:
    """Takes the place of the network: keeps what would be sent, and answers 200."""

    def __init__(self, **options: object) -> None:
        settings = read_settings(KEYS | {"client_kwargs": {"region_name": "us-east-1"}} | options)
        assert settings is not None
        self.calls: DirectCalls = direct_client(settings)
        self.headers: dict[str, str] = {}
        self.body = b""
        self.answers: list[tuple[int, dict[str, str], bytes]] = []
        """Status, headers and body of the next answers; without one, 200."""
        self.by_client = 0
        """Requests that botocore's client built."""
        self.url = ""
        session = self.calls._client._endpoint.http_session
        session.send = self._send
        session._manager.connection_from_url = partial(_Pool, self)
        self.calls._client.meta.events.register("request-created.s3", self._count)

    def _count(self, **_: object) -> None:
        self.by_client += 1

    def _send(self, request: Any) -> AWSResponse:  # noqa: ANN401 - of botocore
        self.url = request.url
        self.headers = {
            name.lower(): value.decode() if isinstance(value, bytes) else value
            for name, value in request.headers.items()
        }
        body = request.body
        if hasattr(body, "read"):
            body.seek(0)
            body = b"".join(bytes(part) for part in iter(lambda: body.read(16384), b""))
        self.body = body
        status, headers, content = self.answer()
        answer = urllib3.HTTPResponse(
            io.BytesIO(content),
            headers,
            status,
            preload_content=False,
            enforce_content_length=False,
        )
        return AWSResponse(request.url, status, answer.headers, answer)

    def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Return the next answer."""
        return self.answers.pop(0) if self.answers else (200, {"content-length": "0"}, b"")

    def put(self, data: bytes) -> dict[str, str]:
        """Return the headers with which `data` would be sent: by the client, and then without."""
        for _ in range(2):
            self.calls.send(
                "put_object",
                {"Bucket": "b", "Key": "k"},
                [memoryview(data[:70]), memoryview(data[70:])],
            )
            assert self.body == data
            assert int(self.headers["content-length"]) == len(data)
        return self.headers


class _Pool:
    """Connections to a server, each of which is its own socket: keeps the bytes of a request."""

    def __init__(self, wire: Wire, origin: str) -> None:
        self.wire, self.origin, self.sent = wire, origin, b""
        self.timeout = SimpleNamespace(connect_timeout=1.0, read_timeout=1.0)
        self.sock = self
        self._get_conn = lambda: self
        self._put_conn = self.settimeout = self.setsockopt = lambda *_: None

    def sendall(self, data: bytes | memoryview, *_: int) -> None:
        """Keep what is sent."""
        self.sent += data

    def send(self, data: memoryview, *_: int) -> int:
        """Take as much as a network might at once: a timeout is for that, not for a whole step."""
        self.sent += data[:300_000]
        return min(len(data), 300_000)

    def makefile(self, mode: str) -> io.BytesIO:
        """Return the answer, and note the request in the client's form."""
        head, _, self.wire.body = self.sent.partition(b"\r\n\r\n")
        self.sent = b""
        start, *lines = head.decode("latin-1").split("\r\n")
        self.wire.url = self.origin + start.split(" ")[1]
        pairs = (line.partition(": ") for line in lines)
        self.wire.headers = {name.lower(): value for name, _, value in pairs}
        status, headers, content = self.wire.answer()
        told = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        return io.BytesIO(f"HTTP/1.1 {status} Said\r\n{told}\r\n".encode() + content)

    def close(self) -> None:
        """Close nothing."""


def sha256(data: bytes) -> str:
    """Return the digest as signatures have it."""
    return hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize(
    "endpoint",
    ["https://s3.lab:9000", "http://127.0.0.1:1", "http://[::1]:1", "http://localhost:1"],
)
def test_large_bodies_are_not_signed_where_nothing_can_happen_to_them(endpoint: str) -> None:
    """Under TLS and on the loopback interface a pack costs no SHA-256; a small body is signed."""
    wire = Wire(endpoint_url=endpoint)

    assert wire.put(LARGE)["x-amz-content-sha256"] == UNSIGNED
    assert wire.put(SMALL)["x-amz-content-sha256"] == sha256(SMALL)
    assert wire.put(LARGE)["x-amz-content-sha256"] == UNSIGNED


def test_large_bodies_are_signed_in_the_clear() -> None:
    """Over HTTP to another machine every body is signed, so that what is damaged is refused."""
    wire = Wire(endpoint_url="http://10.0.0.7:7480")

    assert wire.put(LARGE)["x-amz-content-sha256"] == sha256(LARGE)
    assert wire.put(SMALL)["x-amz-content-sha256"] == sha256(SMALL)


def test_large_bodies_have_a_checksum_under_tls() -> None:
    """Servers that know it compare it: behind what ends TLS, too. Never as a trailer."""
    sent = Wire().put(LARGE)  # AWS itself

    expected = base64.b64encode(zlib.crc32(LARGE).to_bytes(4, "big")).decode()
    assert sent["x-amz-checksum-crc32"] == expected
    assert "x-amz-trailer" not in sent
    assert "x-amz-sdk-checksum-algorithm" not in sent


def test_the_user_decides_about_signing() -> None:
    """What botocore is told stands."""
    for signed in (True, False):
        config = {"s3": {"payload_signing_enabled": signed}}
        wire = Wire(endpoint_url="http://127.0.0.1:1", config_kwargs=config)
        expected = sha256(LARGE) if signed else UNSIGNED
        assert wire.put(LARGE)["x-amz-content-sha256"] == expected


def test_anonymous_requests_have_no_signature() -> None:
    """``anon=True``, as with s3fs."""
    sent = Wire(anon=True, endpoint_url="https://s3.lab").put(LARGE)

    assert "authorization" not in sent


@pytest.mark.parametrize("status", [102, 103])
def test_an_answer_that_announces_another_is_no_success(status: int) -> None:
    """A proxy may say first that it has begun: whether the object was written is not known."""
    wire = Wire(endpoint_url="http://127.0.0.1:1")
    for body in (SMALL, LARGE):
        wire.answers = [(status, {}, b"")] * 2
        with pytest.raises(ConnectionClosedError) as caught:
            wire.put(body)
        assert isinstance(translate(caught.value, "put", conditional=True), AmbiguousWriteError)


def test_a_body_that_drips_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """However steadily it comes: a byte each 25 s; and the connection is closed."""
    clock, closed = iter(range(0, 100_000, 25)), []
    monkeypatch.setattr(SYSTEM, "monotonic", lambda: float(next(clock)))
    answer = SimpleNamespace(readinto=lambda _: 1, close=lambda: closed.append(True))
    with pytest.raises(TimeoutError, match="too slow"):
        receive_into(answer, [memoryview(bytearray(100))])
    assert closed == [True]


def test_a_client_that_found_no_credentials_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The service that gives them may be busy for a moment: the next request looks again."""
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, "/nowhere")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    settings = read_settings({"endpoint_url": "http://127.0.0.1:1"})
    assert settings is not None
    client = PerProcess(direct_client, settings)
    with pytest.raises(NoCredentialsError):
        client.get()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKID")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3cret")
    assert isinstance(client.get(), DirectCalls)


def test_requester_pays_goes_with_every_request() -> None:
    """As with s3fs."""
    assert Wire(requester_pays=True).put(SMALL)["x-amz-request-payer"] == "requester"


def test_the_client_is_made_in_another_process() -> None:
    """It is pickled with a backend that a saver's process takes over."""
    settings = read_settings({**KEYS, "anon": True, "endpoint_url": "http://127.0.0.1:1"})
    assert settings is not None

    again = pickle.loads(pickle.dumps(PerProcess(direct_client, settings)))  # noqa: S301

    assert isinstance(again.get(), DirectCalls)


def test_settings_show_no_credentials() -> None:
    """Neither in a ``repr`` nor in that of the backend."""
    settings = read_settings({**KEYS, "token": "t0ken"})

    client = direct_client(Settings(anonymous=True))
    shown = repr(settings) + repr(open_s3("s3://b/x", **KEYS)) + repr(client)
    assert not any(text in shown for text in ("AKID", "s3cret", "t0ken"))


# Headers of the client that say nothing about the object, or differ from request to request.
_ITS_OWN = {"amz-sdk-invocation-id", "amz-sdk-request", "expect", "host", "user-agent"}
_ENDPOINTS: list[dict[str, Any]] = [
    {},
    {"client_kwargs": {"region_name": "eu-west-1"}},
    {
        "client_kwargs": {"region_name": "us-gov-west-1"},
        "config_kwargs": {"use_fips_endpoint": True},
    },
    {"config_kwargs": {"use_dualstack_endpoint": True}},
    {"config_kwargs": {"s3": {"use_accelerate_endpoint": True}}},
    {"config_kwargs": {"s3": {"addressing_style": "path"}}},
    {"endpoint_url": "http://[::1]:9000"},
    {"endpoint_url": "https://s3.lab/below"},
    {"endpoint_url": "https://s3.lab", "config_kwargs": {"s3": {"addressing_style": "virtual"}}},
    {"endpoint_url": "https://s3.lab", "anon": True},
    {"endpoint_url": "https://s3.lab", "token": "t0ken", "requester_pays": True},
    {"use_ssl": False},
]
_REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("put_object", {"Key": "a/k"}),
    ("put_object", {"Key": "ä b+c~d%20e/f", "StorageClass": "STANDARD_IA"}),
    ("put_object", {"Key": "index.html", "ContentType": "text/html"}),
    ("upload_part", {"Key": "a/k", "UploadId": "x/y+z==", "PartNumber": 7}),
    ("get_object", {"Key": "a/k", "Range": "bytes=5-9"}),
    ("get_object", {"Key": "a b/?&=", "Range": "bytes=0-0"}),
]


@pytest.mark.parametrize("options", _ENDPOINTS, ids=str)
def test_a_thin_request_is_that_of_the_client(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Address, headers, body and signature are equal; the client builds the first."""
    now = datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC)
    monkeypatch.setattr("botocore.auth.get_current_datetime", lambda: now)
    monkeypatch.setattr(type(SYSTEM), "now_ms", lambda _: int(now.timestamp() * 1000))
    for method, request in _REQUESTS:
        wire = Wire(**options)
        found = []
        for _ in range(2):
            if method == "get_object":
                wire.calls.read_into({"Bucket": "bucket"} | request, [], lambda _: None)
            else:
                wire.calls.send(method, {"Bucket": "bucket"} | request, [memoryview(LARGE)])
            headers = {name: wire.headers[name] for name in wire.headers.keys() - _ITS_OWN}
            address, _, query = wire.url.partition("?")
            found.append((address, parse_qs(query), wire.body or b"", headers))
        assert found[0] == found[1]
        assert wire.by_client == 1


@pytest.mark.parametrize(
    "request_",
    [{"IfNoneMatch": "*"}, {"ServerSideEncryption": "AES256"}, {"Bucket": "another"}],
    ids=str,
)
def test_an_unknown_request_is_left_to_the_client(request_: dict[str, Any]) -> None:
    """So are conditions, and objects of a bucket whose place is not known."""
    wire = Wire()
    wire.put(LARGE)
    wire.calls.send("put_object", {"Bucket": "b", "Key": "k"} | request_, [memoryview(LARGE)])
    assert wire.by_client == 2


@pytest.mark.parametrize(("place", "by_client"), [("botocore.crt.auth", 1), ("elsewhere", 2)])
def test_signers(place: str, by_client: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """AWS's CRT, if it is installed, signs as botocore does; another signer is the client's."""
    signer = type("CrtS3SigV4Auth", (S3SigV4Auth,), {"__module__": place})
    monkeypatch.setitem(AUTH_TYPE_MAPS, "s3v4", signer)
    wire = Wire(endpoint_url="http://127.0.0.1:1")
    assert "authorization" in wire.put(LARGE)
    assert wire.by_client == by_client


def test_checksums_that_the_user_asks_for_are_the_clients() -> None:
    """No request is built without it."""
    wire = Wire(config_kwargs={"request_checksum_calculation": "when_supported"})
    wire.put(LARGE)
    assert wire.by_client == 2


def _error(code: str) -> bytes:
    return f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>m</Message></Error>".encode()


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (403, _error("RequestTimeTooSkewed")), (400, _error("ExpiredToken")),
        (404, _error("NoSuchUpload")), (404, b""), (409, _error("OperationAborted")),
        (416, _error("InvalidRange")), (500, b"<html>"), (503, _error("SlowDown")),
        (429, b"no XML"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("method", ["upload_part", "get_object"])
def test_an_error_of_a_thin_request_is_that_of_the_client(
    method: str, status: int, body: bytes
) -> None:
    """Type, text and retry are equal; one request is sent."""
    wire, told = Wire(), []
    wire.put(LARGE)
    for thin in (True, False):
        wire.answers = [(status, {"content-length": str(len(body))}, body)]
        at: dict[str, Any] = {"Bucket": "b", "Key": "k"}
        at |= {"UploadId": "u", "PartNumber": 1} if method == "upload_part" else {}
        if not thin:
            wire.calls._thin = None
        send = partial(wire.calls.send, method, at, [memoryview(LARGE)])
        if method == "get_object":
            send = partial(wire.calls.read_into, at, [memoryview(bytearray(4))], lambda _: None)
        with pytest.raises(ClientError) as raised:
            send()
        error = translate(raised.value, "x", conditional=False)
        told.append((type(error), str(error), code_of(raised.value)))
        assert wire.answers == []
        assert wire.by_client == 1 + (not thin)
    assert told[0] == told[1]


@pytest.mark.parametrize(
    ("status", "body"),
    [(301, _error("PermanentRedirect")), (307, b""), (400, _error("AuthorizationHeaderMalformed"))],
)
def test_an_answer_that_leads_elsewhere_is_left_to_the_client(status: int, body: bytes) -> None:
    """It sends the whole body again, and finds the region."""
    wire = Wire()
    wire.put(LARGE)
    wire.answers = [(status, {"content-length": str(len(body))}, body)]
    wire.calls.send("put_object", {"Bucket": "b", "Key": "k"}, [memoryview(LARGE)])
    assert wire.body == LARGE
    assert wire.by_client == 2


def test_after_a_refusal_the_client_sends_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks before it sends one; reads, and bodies ten seconds later, take the short path."""
    clock = SimulatedEnvironment()
    monkeypatch.setattr(s3_thin, "SYSTEM", clock)
    wire, at = Wire(), {"Bucket": "b", "Key": "k"}
    wire.put(LARGE)
    wire.answers = [(503, {"content-length": "0"}, b"")]
    with pytest.raises(ClientError):
        wire.calls.send("put_object", at, [memoryview(LARGE)])
    for later_s, by_client in ((9.0, 2), (2.0, 2)):
        clock.sleep(later_s)
        wire.calls.read_into(at, [memoryview(bytearray(4))], lambda _: None)
        wire.calls.send("put_object", at, [memoryview(LARGE)])
        assert wire.by_client == by_client


def test_a_truncated_error_is_no_answer() -> None:
    """The status alone would mistake a busy server for missing rights."""
    wire = Wire()
    wire.put(LARGE)
    wire.answers = [(403, {"content-length": "500"}, _error("SlowDown")[:20])]
    with pytest.raises(ProtocolError):
        wire.calls.send("put_object", {"Bucket": "b", "Key": "k"}, [memoryview(LARGE)])


@pytest.mark.parametrize(
    "options",
    [
        {"s3_additional_kwargs": {"ServerSideEncryption": "AES256"}}, {"session": object()},
        {"cache_regions": True}, {"anon": "true"}, {"client_kwargs": {"config": object()}},
        {"client_kwargs": "region"}, {"something_new": 1}, {"key": "a", "username": "b"},
    ],
)  # fmt: skip
def test_what_only_s3fs_knows_goes_to_s3fs(options: dict[str, Any]) -> None:
    """An option that is not surely understood is s3fs's; asking for botocore alone is refused."""
    assert read_settings(options) is None
    assert open_s3("s3://b/x", **options)._client._factory is s3fs_client
    with pytest.raises(InvalidUrlError):
        open_s3("s3://b/x", client="direct", **options)


def test_clients_can_be_chosen() -> None:
    """By the option ``client``; another word is an error."""
    factory = open_s3("s3://b/x", client="s3fs")._client._factory
    assert factory is s3fs_client
    assert open_s3("s3://b/x")._client._factory is direct_client
    with pytest.raises(InvalidInputError, match="curl"):
        open_s3("s3://b/x", client="curl")


def test_fsspecs_configuration_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the user configured for s3fs holds here, and what is given stands above it."""
    conf = {"endpoint_url": "https://conf", "key": "from-conf", "max_concurrency": 3}
    monkeypatch.setitem(fsspec.config.conf, "s3", conf)
    settings = read_settings({"key": "given", "profile": "lab", "use_ssl": False})

    assert settings is not None
    assert settings.profile == "lab"
    assert settings.client["aws_access_key_id"] == "given"
    assert settings.client["endpoint_url"] == "https://conf"
    assert settings.client["use_ssl"] is False


def _answered(*answers: dict[str, Any] | Exception) -> S3Backend:
    """Return a backend whose calls have these answers, one after the other."""
    left = list(answers)

    def call(*_: object) -> dict[str, Any]:
        answer = left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def read(request: object, accept: Any) -> bytes:  # noqa: ANN401 - of the backend
        accept(call(request))
        raise AssertionError

    calls = SimpleNamespace(call=call, read=read)
    client: PerProcess[Any] = PerProcess(lambda: calls)
    return S3Backend(parse_bucket_url("s3://bucket/p"), client, scatter_read=True)


def test_an_answer_without_a_length_is_told() -> None:
    """As a proxy gives it that sends bodies in chunks: nothing is made up, or repeated."""
    key, head = pack_key("0" * 32), {"LastModified": datetime.now(UTC)}
    backend = _answered(head, head, head)
    with pytest.raises(StorageError, match="without a length"):
        backend.stat(key)
    with pytest.raises(StorageError, match="without a length"):
        backend.cold_storage().restore_state(key)
    with pytest.raises(StorageError, match="without a length"):
        backend.get(key, bytes_max=10)


def test_a_deleted_object_may_be_gone_before() -> None:
    """Amazon answers 204, servers like it 404: neither is an error; a missing bucket is."""

    def refusal(code: str) -> ClientError:
        about = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": 404}}
        return ClientError(about, "DeleteObject")

    backend = _answered(refusal("NoSuchKey"), refusal("NoSuchBucket"))
    backend.delete(pack_key("0" * 32))
    with pytest.raises(StorageError, match="NoSuchBucket"):
        backend.delete(pack_key("0" * 32))


@pytest.mark.parametrize("more", [{"NextContinuationToken": ""}, {}], ids=["empty", "missing"])
def test_a_listing_that_is_cut_short_without_a_token_is_refused(more: dict[str, Any]) -> None:
    """A part of a listing never counts as the whole: a collection would delete what it lacks."""
    backend = _answered({"Contents": [], "IsTruncated": True, **more})
    with pytest.raises(StorageError, match="cuts the listing short"):
        list(backend.list("commits/"))
