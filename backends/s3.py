"""S3 and what speaks its protocol, through s3fs: its sessions, credentials and event loop.

Every request is one plain call of the S3 API; s3fs and botocore try it once, since retries belong
to the retry wrapper. Below them, aiohttp sends a request again when a kept-alive connection turns
out to be broken: a create whose answer was lost then finds its own object and is told that it
exists, which the contract allows.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import aiohttp
import botocore.exceptions as boto
import s3fs
from botocore.config import Config
from fsspec.asyn import sync
from fsspec.exceptions import FSTimeoutError

from ckptstore import limits
from ckptstore.backends.base import (
    Backend,
    Buffer,
    Capabilities,
    ObjectInfo,
    ObjectWriter,
    PutIfAbsent,
    check_prefix,
)
from ckptstore.backends.buffered_writer import Body, BufferedWriter
from ckptstore.backends.httperrors import error_for_answer, error_for_silence
from ckptstore.backends.object_url import BucketLocation, parse_bucket_url
from ckptstore.backends.per_process import PerProcess
from ckptstore.backends.scatter import Scatter, wanted_bytes
from ckptstore.errors import (
    CkptStoreError,
    CorruptObjectError,
    StorageError,
    StoragePermissionError,
    TransientStorageError,
)
from ckptstore.limits import MIB

__all__ = ["S3Backend", "open_s3"]

Foreign = Any
"""A value of s3fs or botocore, which ship no types."""

CAPABILITIES: Final = Capabilities(
    # What AWS has done since August 2024; others ignore or refuse it: only the probe knows.
    put_if_absent=PutIfAbsent.UNKNOWN,
    pack_bytes=64 * MIB,  # one PUT, held in memory; AWS advises multipart above 100 MB
    part_bytes=64 * MIB,
    read_gap_bytes=1 * MIB,  # a request's latency of 20 ms at 50 MB/s a connection
    read_bytes_max=16 * MIB,  # AWS's performance guide: ranges of 8-16 MB
    concurrency=16,
    scatter_read=False,
    lookup_lag_s=0.0,  # strongly consistent since December 2020
)

_NO_CREDENTIALS = (
    boto.NoCredentialsError,
    boto.PartialCredentialsError,
    boto.CredentialRetrievalError,
    boto.TokenRetrievalError,
    boto.ProfileNotFound,
)


class S3Backend(Backend):
    """The objects below one prefix of a bucket.

    Parameters
    ----------
    location
        The bucket is never created.
    options
        For ``s3fs.S3FileSystem``.
    """

    def __init__(self, location: BucketLocation, options: Mapping[str, object]) -> None:
        self.url = location.url
        self.name = "s3"
        self._location = location
        self._client = PerProcess(_ClientFactory(dict(options)))

    @property
    def capabilities(self) -> Capabilities:
        """Return what S3 can do."""
        return CAPABILITIES

    def put(self, key: str, data: Buffer) -> None:
        """Write a whole object by one PUT."""
        self._put(key, Body(data))

    def put_if_absent(self, key: str, data: Buffer) -> None:
        """Create an object by one PUT with ``If-None-Match: *``."""
        self._put(key, Body(data), conditional=True)

    def open_writer(self, key: str) -> ObjectWriter:
        """Return a writer that collects in memory and sends one PUT."""
        self._location.object_name(key)
        return BufferedWriter(lambda body: self._put(key, body))

    def get(self, key: str, *, bytes_max: int) -> bytes:
        """Return a whole object."""

        async def fetch(fs: Foreign, request: dict[str, Any]) -> bytes:
            answer = await fs._call_s3("get_object", **request)
            async with answer["Body"] as body:
                size: int = answer["ContentLength"]
                if size > bytes_max:
                    msg = f"{key} has {size} bytes, more than the {bytes_max} allowed"
                    raise CorruptObjectError(msg)
                data: bytes = await body.read()
            return data

        data: bytes = self._run(f"get {key}", fetch, self._object(key))
        return data

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill `buffers` from one ranged GET."""
        wanted = wanted_bytes(buffers)
        if not wanted:
            self.stat(key)
            return

        async def fetch(fs: Foreign, request: dict[str, Any]) -> None:
            answer = await fs._call_s3("get_object", **request)
            scatter = Scatter(buffers)
            async with answer["Body"] as body:
                if not answer.get("ContentRange", "").startswith(f"bytes {offset}-"):
                    msg = f"get {key}: the storage ignores ranges"
                    raise StorageError(msg)
                if answer["ContentLength"] < wanted:
                    msg = f"{key} ends before byte {offset + wanted}"
                    raise CorruptObjectError(msg)
                while scatter.left and (data := await body.read(limits.STREAM_BYTES)):
                    scatter.feed(data)
            if scatter.left:
                msg = f"get {key}: the answer was cut short"
                raise TransientStorageError(msg)

        request = self._object(key) | {"Range": f"bytes={offset}-{offset + wanted - 1}"}
        self._run(f"get {key}", fetch, request)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """Yield objects page by page, each page fresh from the storage."""
        root = self._location.prefix
        query: dict[str, Any] = {
            "Bucket": self._location.bucket,
            "Prefix": root + check_prefix(prefix),
            "MaxKeys": limits.LIST_PAGE_OBJECTS,
        }
        if after:
            query["StartAfter"] = root + after
        last = ""
        while True:
            page = self._call(f"list {prefix}", "list_objects_v2", query)
            for item in page.get("Contents", ()):
                key = self._location.key_of(item["Key"])
                if key is None or key <= after:
                    continue
                if key <= last:
                    msg = f"list {prefix}: the storage does not list in order"
                    raise StorageError(msg)
                last = key
                modified = item["LastModified"].timestamp()
                yield ObjectInfo(key=key, size_bytes=item["Size"], modified_at=modified)
            if not page.get("IsTruncated"):
                return
            query["ContinuationToken"] = page["NextContinuationToken"]

    def stat(self, key: str) -> ObjectInfo:
        """Return size and time by a HEAD."""
        head = self._call(f"stat {key}", "head_object", self._object(key))
        modified = head["LastModified"].timestamp()
        return ObjectInfo(key=key, size_bytes=head["ContentLength"], modified_at=modified)

    def delete(self, key: str) -> None:
        """Delete an object; S3 does not mind if there is none."""
        self._call(f"delete {key}", "delete_object", self._object(key))

    def close(self) -> None:
        """Close this process's connections."""
        fs = self._client.take()
        if fs is not None and fs._s3 is not None:
            fs.close_session(fs.loop, fs._s3creator)
            fs._s3 = None

    def _put(self, key: str, body: Body, *, conditional: bool = False) -> None:
        view = body.getbuffer()
        # So that a body damaged on its way is refused; not against anybody's malice.
        digest = hashlib.md5(view, usedforsecurity=False).digest()
        view.release()
        body.seek(0)
        request = self._object(key) | {
            "Body": body,
            "ContentMD5": base64.b64encode(digest).decode(),
        }
        if conditional:
            request["IfNoneMatch"] = "*"
        what = f"{'create' if conditional else 'put'} {key}"
        self._call(what, "put_object", request, conditional=conditional)

    def _object(self, key: str) -> dict[str, Any]:
        return {"Bucket": self._location.bucket, "Key": self._location.object_name(key)}

    def _call(
        self, what: str, method: str, request: dict[str, Any], *, conditional: bool = False
    ) -> Foreign:
        """Return the answer of one call of the S3 API."""

        async def call(fs: Foreign) -> Foreign:
            return await fs._call_s3(method, **request)

        return self._run(what, call, conditional=conditional)

    def _run(
        self, what: str, coroutine: Foreign, *args: object, conditional: bool = False
    ) -> Foreign:
        """Run a coroutine function with the client, and translate what it raises."""
        try:
            fs = self._client.get()
            return sync(fs.loop, coroutine, fs, *args)
        except CkptStoreError:
            raise
        except Exception as error:
            raise translate(error, what, conditional=conditional) from error

    def __repr__(self) -> str:
        return f"S3Backend({self.url!r})"


class _ClientFactory:
    """Makes the s3fs object of one process; picklable."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options

    def __call__(self) -> Foreign:
        options = dict(self._options)
        config: dict[str, Any] = {
            "connect_timeout": limits.CONNECT_TIMEOUT_S,
            "read_timeout": limits.READ_TIMEOUT_S,
            "max_pool_connections": limits.CONNECTIONS_MAX,
            "retries": {"total_max_attempts": 1},
        }
        # Trailing checksums, botocore's default since 1.36, break S3-compatible servers; a
        # Content-MD5 is understood by all of them.
        for option in ("request_checksum_calculation", "response_checksum_validation"):
            if option in Config.OPTION_DEFAULTS:
                config[option] = "when_required"
        config.update(options.pop("config_kwargs", {}))
        fs = s3fs.S3FileSystem(
            **options, config_kwargs=config, use_listings_cache=False, skip_instance_cache=True
        )
        fs.retries = 1
        return fs


def translate(error: Exception, what: str, *, conditional: bool) -> CkptStoreError:
    """Return the error of our tree for anything that s3fs raised.

    s3fs turns botocore's errors into Python's and loses their status; it is found again in the
    cause.
    """
    for cause in (error, error.__cause__):
        if isinstance(cause, boto.ClientError):
            answer = cause.response
            status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            code = str(answer.get("Error", {}).get("Code", ""))
            # A HEAD has no body, and botocore gives the status for a code.
            code = "" if code.isdigit() else code
            return error_for_answer(status, code, what, conditional=conditional)
    if isinstance(error, FSTimeoutError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # fsspec's cover over any timeout
    msg = f"{what}: {type(error).__name__}"
    if isinstance(error, _NO_CREDENTIALS):
        return StoragePermissionError(msg, hint="no usable credentials were found")
    if _not_sent(error):
        return TransientStorageError(msg)
    if isinstance(error, boto.ParamValidationError | TypeError | ValueError | ImportError):
        return StorageError(msg, hint="check the storage options")
    return error_for_silence(msg, conditional=conditional)


def _not_sent(error: Exception) -> bool:
    """Tell whether no connection was made, so that the outcome is not even ambiguous.

    aiobotocore calls any broken connection an ``EndpointConnectionError``; what aiohttp said is
    inside.
    """
    if isinstance(error, boto.EndpointConnectionError):
        return isinstance(error.kwargs.get("error"), aiohttp.ClientConnectorError)
    return isinstance(error, boto.ConnectTimeoutError | boto.ProxyConnectionError)


def open_s3(url: str, **options: object) -> S3Backend:
    """Return the backend of ``s3://bucket/prefix``; `options` are s3fs's.

    Raises
    ------
    InvalidUrlError
        If the URL names no bucket, or carries credentials.
    """
    return S3Backend(parse_bucket_url(url), options)
