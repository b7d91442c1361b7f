"""No exception of a storage library or of the operating system leaves a backend."""

from __future__ import annotations

import asyncio
import errno
import http.client
import socket
import traceback
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import aiohttp
import azure.core.exceptions as azure
import botocore.exceptions as boto
import fsspec
import fsspec.asyn
import google.auth.exceptions
import pytest
import urllib3.exceptions
from fsspec.exceptions import FSTimeoutError
from fsspec.implementations.memory import MemoryFileSystem

from ckptstore import errors
from ckptstore.backends.azure import open_azure
from ckptstore.backends.base import Backend
from ckptstore.backends.fsspec_backend import Lender, open_fsspec
from ckptstore.backends.fsspec_systems import System
from ckptstore.backends.gcs import open_gcs
from ckptstore.backends.per_process import PerProcess
from ckptstore.backends.s3 import open_s3
from ckptstore.backends.s3_calls import S3Calls
from ckptstore.backends.s3_direct import DirectCalls
from ckptstore.backends.s3_fsspec import S3fsCalls
from ckptstore.repo import open_on


def client_error(status: int, code: str) -> boto.ClientError:
    """Make what botocore raises for an answer."""
    answer = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return boto.ClientError(answer, "AnyCall")


ERRORS: list[Exception] = [
    boto.EndpointConnectionError(endpoint_url="x", error=OSError()),
    boto.EndpointConnectionError(
        endpoint_url="x",
        error=urllib3.exceptions.NewConnectionError(None, "x"),  # type: ignore[arg-type]
    ),
    boto.HTTPClientError(error=OSError()),
    boto.IncompleteReadError(actual_bytes=1, expected_bytes=2), http.client.IncompleteRead(b"x"),
    urllib3.exceptions.ProtocolError("x"), boto.ConnectTimeoutError(endpoint_url="x"),
    boto.ReadTimeoutError(endpoint_url="x"), boto.ConnectionClosedError(endpoint_url="x"),
    boto.SSLError(endpoint_url="x", error="x"), boto.ParamValidationError(report="x"),
    boto.NoCredentialsError(), boto.ProfileNotFound(profile="x"), client_error(400, "BadDigest"),
    boto.CredentialRetrievalError(provider="x", error_msg="x"), client_error(520, ""),
    client_error(403, "AccessDenied"), client_error(404, "NoSuchBucket"),
    client_error(418, "Teapot"), client_error(0, ""), aiohttp.ClientPayloadError(),
    aiohttp.ServerDisconnectedError(), aiohttp.ServerTimeoutError(), aiohttp.InvalidURL("x"),
    google.auth.exceptions.RefreshError("x"),  # type: ignore[no-untyped-call]
    google.auth.exceptions.TransportError("x"),  # type: ignore[no-untyped-call]
    azure.ServiceRequestError("x"), azure.ServiceResponseError("x"),
    azure.ServiceResponseTimeoutError("x"), azure.IncompleteReadError("x"), azure.DecodeError("x"),
    azure.HttpResponseError("x"), azure.ClientAuthenticationError("x"), azure.AzureError("x"),
    FSTimeoutError(), TimeoutError(), socket.gaierror(-2, "x"), OSError(errno.EIO, "x"),
    OSError("no number"), FileNotFoundError("x"), FileExistsError("x"), IsADirectoryError("x"),
    PermissionError("x"), ConnectionResetError("x"), EOFError(), KeyError("x"), TypeError("x"),
    ValueError("x"), RuntimeError("x"), NotImplementedError("x"), ImportError("x"),
    AttributeError("x"), UnicodeDecodeError("utf-8", b"x", 0, 1, "x"),
]  # fmt: skip


class Broken:
    """A client of which everything raises one exception, in the way of all four libraries."""

    def __init__(self, error: Exception) -> None:
        self._error = error
        self.loop = fsspec.asyn.get_loop()
        self._s3 = self._session = None
        self._location = "http://127.0.0.1:1"

    async def _call_s3(self, *_: object, **__: object) -> None:
        raise self._error

    async def _set_session(self) -> None:
        raise self._error

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite") -> None:
        raise self._error

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name == "invalidate_cache":
            return lambda: None

        def call(*_: object, **__: object) -> None:
            raise self._error

        return call


def broken(kind: str, error: Exception) -> Backend:
    """Return a backend of one kind on a broken client."""
    if kind == "fsspec":
        generic = open_fsspec("memory://x")
        generic._client = PerProcess(Lender, lambda: (Broken(error), "/x"), System())
        return generic
    if kind == "azure":
        blobs = open_azure("az://container/x")
        blobs._client = PerProcess(lambda: Broken(error))
        return blobs
    if kind == "gcs":
        gcs = open_gcs("gs://b/x")
        gcs._client = PerProcess(lambda: Broken(error))
        return gcs
    s3 = open_s3("s3://b/x")
    client = Broken(error)
    calls: S3Calls = S3fsCalls(client) if kind == "s3fs" else DirectCalls(client, {})
    s3._client = PerProcess(lambda: calls)
    return s3


def write(backend: Backend) -> None:
    """Write by a writer."""
    with backend.open_writer("a") as writer:
        writer.write(b"x")
        writer.commit()


OPERATIONS: dict[str, Callable[[Backend], object]] = {
    "put": lambda b: b.put("a", b"x"), "put_if_absent": lambda b: b.put_if_absent("a", b"x"),
    "open_writer": write, "get": lambda b: b.get("a", bytes_max=9),
    "read_into": lambda b: b.read_into("a", 0, [memoryview(bytearray(1))]),
    "list": lambda b: list(b.list("")), "stat": lambda b: b.stat("a"),
    "delete": lambda b: b.delete("a"),
}  # fmt: skip


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("kind", ["s3", "s3fs", "gcs", "azure", "fsspec"])
def test_nothing_foreign_leaks(kind: str, operation: str) -> None:
    """Whatever a library raises, in whatever call, comes out as our error, or not at all."""
    for error in ERRORS:
        backend = broken(kind, error)
        # What is not there lists as empty, and deletes without an error.
        absent = kind == "fsspec" and isinstance(error, FileNotFoundError)
        if absent and operation in {"list", "delete"}:
            OPERATIONS[operation](backend)
            continue
        with pytest.raises(errors.CkptStoreError) as caught:
            OPERATIONS[operation](backend)
        cause = caught.value.__cause__
        assert error in {cause, getattr(cause, "__cause__", None)}
        assert str(caught.value)


@pytest.mark.parametrize("kind", ["s3", "s3fs", "gcs", "azure", "fsspec"])
def test_no_false_answer_to_a_create(kind: str) -> None:
    """Only the storage's own word says "exists"; silence is never called a plain failure."""
    silent = (
        boto.ReadTimeoutError, boto.ConnectionClosedError, aiohttp.ClientPayloadError,
        aiohttp.ServerDisconnectedError, azure.ServiceResponseError, azure.IncompleteReadError,
        FSTimeoutError, asyncio.TimeoutError, ConnectionResetError, EOFError, RuntimeError,
    )  # fmt: skip
    for error in ERRORS:
        with pytest.raises(errors.CkptStoreError) as caught:
            broken(kind, error).put_if_absent("a", b"x")
        if isinstance(error, silent) and not isinstance(error, NotImplementedError):
            assert isinstance(caught.value, errors.AmbiguousWriteError), repr(error)
        if isinstance(caught.value, errors.ObjectExistsError):
            assert kind == "fsspec"
            assert isinstance(error, FileExistsError)


SECRET = "sup3r/secret+key=="  # noqa: S105 - of no one


class Answered(Exception):
    """Carries status and code the way of Azure's library."""

    def __init__(self, status: int, code: object = None) -> None:
        super().__init__("the server's words, which nobody reads")
        self.status_code = status
        self.error_code = code


class Code(Enum):
    """Codes are an enumeration in some versions of it."""

    AUTHENTICATION_FAILED = "AuthenticationFailed"


class OfRequests(Exception):
    """Carries the status the way of requests and httpx."""

    def __init__(self, status: int) -> None:
        super().__init__("x")
        self.response = Answered(status)


def _aiohttp_error(status: int) -> aiohttp.ClientResponseError:
    return aiohttp.ClientResponseError(None, (), status=status)  # type: ignore[arg-type]


def _caused(cause: Exception) -> OSError:
    error = OSError("as a wrapper has it")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "expected", "said", "hint"),
    [
        (Answered(403, Code.AUTHENTICATION_FAILED), errors.StoragePermissionError,
         "HTTP 403 AuthenticationFailed", "credentials"),
        (Answered(404, "ContainerNotFound"), errors.StorageError, "ContainerNotFound", "create"),
        (Answered(404, "BlobNotFound"), errors.ObjectNotFoundError, "HTTP 404 BlobNotFound", ""),
        (Answered(416, "InvalidRange"), errors.CorruptObjectError, "HTTP 416", ""),
        (Answered(503, "ServerBusy"), errors.TransientStorageError, "HTTP 503 ServerBusy", ""),
        (Answered(507), errors.StorageFullError, "HTTP 507", "quota"),
        (OfRequests(401), errors.StoragePermissionError, "HTTP 401", "credentials"),
        (_aiohttp_error(403), errors.StoragePermissionError, "HTTP 403", "credentials"),
        (_caused(Answered(403, "AuthorizationFailure")), errors.StoragePermissionError,
         "HTTP 403 AuthorizationFailure", "credentials"),
        (Answered(200), errors.StorageError, "Answered", ""),
        (Answered(0), errors.StorageError, "Answered", ""),
    ],
)  # fmt: skip
def test_answers_of_other_file_systems(
    error: Exception, expected: type[errors.CkptStoreError], said: str, hint: str
) -> None:
    """Status and code of a library that we do not know decide, and are told with a hint."""
    for operation in ("get", "stat", "list"):
        with pytest.raises(errors.CkptStoreError) as caught:
            OPERATIONS[operation](broken("fsspec", error))
        assert type(caught.value) is expected
        assert said in caught.value.message
        assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (409, "BlobAlreadyExists", errors.ObjectExistsError),
        (412, "ConditionNotMet", errors.ObjectExistsError),
        (501, "", errors.UnsafeBackendError),
        (500, "InternalError", errors.AmbiguousWriteError),
        (404, "", errors.StorageError),
    ],
)
def test_answers_to_a_create(status: int, code: str, expected: type[errors.CkptStoreError]) -> None:
    """A name that is taken, a condition that is refused, and silence are told apart by code."""
    with pytest.raises(expected) as caught:
        broken("fsspec", Answered(status, code)).put_if_absent("a", b"x")
    assert type(caught.value) is expected
    with pytest.raises(errors.StorageError) as plain:
        broken("fsspec", Answered(404)).put("a", b"x")
    assert not isinstance(plain.value, errors.ObjectNotFoundError)


class Picky(MemoryFileSystem):  # type: ignore[misc]  # fsspec ships no types
    """Fails when it is made, as its options say."""

    protocol = "picky"

    def __init__(self, error: Exception | None = None, **options: Any) -> None:  # noqa: ANN401
        if error is not None:
            raise error
        super().__init__(**options)


@pytest.mark.parametrize(
    ("error", "expected", "said"),
    [
        (
            ValueError("give connection_string or account_name"),
            errors.InvalidUrlError,
            "account_name",
        ),
        (TypeError("unexpected keyword argument 'acount'"), errors.InvalidUrlError, "'acount'"),
        (AttributeError("no attribute 'host'"), errors.InvalidUrlError, "'host'"),
        (ImportError("No module named 'pyarrow'"), errors.MissingDependencyError, "'pyarrow'"),
        (ConnectionRefusedError("x"), errors.TransientStorageError, "picky://here"),
        (FileNotFoundError("x"), errors.StorageError, "picky://here"),
        (Answered(403), errors.StoragePermissionError, "HTTP 403"),
        (
            ValueError(f"bad {SECRET} in AccountKey={SECRET};x"),
            errors.InvalidUrlError,
            "bad *** in",
        ),
        (ImportError(f"no {SECRET!r}"), errors.MissingDependencyError, "no '***'"),
    ],
)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_file_system_that_cannot_be_made(
    operation: str, error: Exception, expected: type[errors.CkptStoreError], said: str
) -> None:
    """The library's own sentence is told, without any secret; also where a create is asked for."""
    fsspec.register_implementation("picky", Picky, clobber=True)
    options: dict[str, object] = {
        "error": error,
        "connection_string": f"AccountName=me;AccountKey={SECRET};Suffix=x",
        "client": {"headers": ["x", f"Bearer {SECRET}"]},
    }
    backend = open_fsspec("picky://here", **options)
    with pytest.raises(errors.CkptStoreError) as caught:
        OPERATIONS[operation](backend)
    assert type(caught.value) is expected
    assert said in str(caught.value)
    assert SECRET not in str(caught.value)
    if SECRET in str(error):
        assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_a_server_that_is_down_is_no_empty_place() -> None:
    """Over HTTP a refused connection is an error of the storage: not "no store", no empty list."""
    with socket.socket() as taken:  # bound and not listening: connections are refused
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/store"
        backend = open_fsspec(url)
        with pytest.raises(errors.StorageError):
            list(backend.list(""))
        with pytest.raises(errors.StorageError) as caught:
            open_on(backend)
        backend.close()

    assert not isinstance(caught.value, errors.ObjectNotFoundError)


def test_a_folder_that_cannot_be_listed_is_no_empty_one(tmp_path: Path) -> None:
    """Below the top, too: what fsspec's own walk leaves out without a word."""
    backend = open_fsspec(f"local://{tmp_path}")
    backend.put("a/b", b"x")
    backend.put("c/d", b"x")
    with backend._client.get().lent() as (fs, root):
        listed = fs.ls

    def ls(path: str, **options: bool) -> Any:  # noqa: ANN401 - as fsspec has it
        if path.endswith("/c"):
            raise OSError(errno.EIO, "x")
        return listed(path, **options)

    backend._client = PerProcess(Lender, lambda: (fs, root), System())
    assert [info.key for info in backend.list("")] == ["a/b", "c/d"]
    fs.ls = ls
    with pytest.raises(errors.StorageError):
        list(backend.list(""))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (boto.NoCredentialsError(), errors.StoragePermissionError),
        (boto.CredentialRetrievalError(provider="x", error_msg="x"), errors.TransientStorageError),
        (client_error(403, "AccessDenied"), errors.StoragePermissionError),
        (client_error(400, "ExpiredToken"), errors.StoragePermissionError),
        (client_error(404, "NoSuchKey"), errors.ObjectNotFoundError),
        (client_error(404, "NoSuchBucket"), errors.StorageError),
        (client_error(403, "InvalidObjectState"), errors.ColdObjectError),
        (client_error(403, "ObjectNotInActiveTierError"), errors.ColdObjectError),
        (client_error(400, "BadDigest"), errors.TransientStorageError),
        (client_error(400, "RequestTimeout"), errors.TransientStorageError),
        (client_error(301, "PermanentRedirect"), errors.StorageError),
        (boto.ParamValidationError(report="x"), errors.StorageError),
        (boto.ReadTimeoutError(endpoint_url="x"), errors.TransientStorageError),
    ],
)
def test_s3_codes(error: Exception, expected: type[errors.CkptStoreError]) -> None:
    """Codes and statuses of S3 become exactly these errors on a read."""
    for kind in ("s3", "s3fs"):
        with pytest.raises(expected) as caught:
            broken(kind, error).get("a", bytes_max=1)
        assert type(caught.value) is expected
    wrapped = OSError("as s3fs wraps it")
    wrapped.__cause__ = error
    with pytest.raises(expected if isinstance(error, boto.ClientError) else errors.CkptStoreError):
        broken("s3fs", wrapped).get("a", bytes_max=1)


@pytest.mark.parametrize("kind", ["s3", "s3fs"])
def test_an_option_that_s3_does_not_know_is_named(kind: str) -> None:
    """Its name alone: the rest of what the library says may hold a secret."""
    error = TypeError(f"made({SECRET}) got an unexpected keyword argument 'endpoint_ulr'")
    with pytest.raises(errors.StorageError, match="no option is called 'endpoint_ulr'") as caught:
        broken(kind, error).get("a", bytes_max=1)
    assert SECRET not in str(caught.value)
    assert "requests" in caught.value.hint
