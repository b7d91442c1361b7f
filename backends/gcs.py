"""Google Cloud Storage, through gcsfs: its sessions, credentials and event loop.

Requests are plain calls of the JSON API, each sent once. gcsfs's ``pipe_file`` is not used, since
it repeats failed requests up to six times by itself, drops the HTTP status of some errors, and
ends an upload at the first ``--==0==`` in the data.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final
from urllib.parse import quote

import aiohttp
import google.auth.exceptions
from fsspec.asyn import sync
from fsspec.exceptions import FSTimeoutError
from gcsfs.core import GCSFileSystem

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
from ckptstore.backends.cold import ColdStorage, check_pack_class, is_classed
from ckptstore.backends.gcs_cold import GcsColdStorage
from ckptstore.backends.httperrors import error_for_answer, error_for_silence
from ckptstore.backends.object_url import BucketLocation, parse_bucket_url
from ckptstore.backends.per_process import PerProcess
from ckptstore.backends.scatter import Scatter, wanted_bytes
from ckptstore.config import SYSTEM
from ckptstore.errors import (
    CkptStoreError,
    CorruptObjectError,
    StorageError,
    StoragePermissionError,
    TransientStorageError,
)
from ckptstore.limits import MIB

Foreign = Any
"""A value of gcsfs or aiohttp's session, which ship no types for it."""

CAPABILITIES: Final = Capabilities(
    # Google's documentation promises ifGenerationMatch=0; emulators differ: the probe knows.
    put_if_absent=PutIfAbsent.UNKNOWN,
    pack_bytes=64 * MIB,  # one request, held in memory
    part_bytes=64 * MIB,
    read_gap_bytes=1 * MIB,  # a request's latency of 20-50 ms at 50 MB/s a connection
    read_bytes_max=16 * MIB,
    concurrency=16,
    scatter_read=False,
    lookup_lag_s=0.0,  # strongly consistent, listings too
)

# Drawn once: only code that can read this process could put it into a data stream.
_BOUNDARY: Final = SYSTEM.random_hex(16)
_NOT_SENT = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)


class GcsBackend(Backend):
    """The objects below one prefix of a bucket.

    Parameters
    ----------
    location
        Bucket and prefix; the bucket is never created.
    options
        For ``gcsfs.GCSFileSystem``.
    pack_class
        Storage class of new packs; empty for the bucket's own.
    """

    def __init__(
        self, location: BucketLocation, options: Mapping[str, object], *, pack_class: str = ""
    ) -> None:
        self.url = location.url
        self.name = "gcs"
        self._location = location
        self._pack_class = pack_class
        self._bucket = quote(location.bucket, safe="")
        self._client = PerProcess(_ClientFactory(dict(options)))

    @property
    def capabilities(self) -> Capabilities:
        """Return the properties of GCS."""
        return CAPABILITIES

    def put(self, key: str, data: Buffer) -> None:
        """Write a whole object by one multipart upload."""
        self._put(key, self._framed(key, data))

    def put_if_absent(self, key: str, data: Buffer) -> None:
        """Create an object by one multipart upload with ``ifGenerationMatch=0``."""
        self._put(key, self._framed(key, data), conditional=True)

    def open_writer(self, key: str) -> ObjectWriter:
        """Return a writer that collects in memory and sends one multipart upload."""
        name = self._pack_class if is_classed(key) else ""
        head = _head(self._location.object_name(key), "", name)
        return BufferedWriter(
            lambda body: self._put(key, body, storage_class=name), reserve_bytes=len(head)
        )

    def get(self, key: str, *, bytes_max: int) -> bytes:
        """Return a whole object."""

        async def fetch(answer: Foreign) -> bytes:
            """Return the whole body, as long as it stays within the bound."""
            data = bytearray()
            while part := await answer.content.read(limits.STREAM_BYTES):
                data += part
                if len(data) > bytes_max:
                    msg = f"{key} has more than the {bytes_max} bytes allowed"
                    raise CorruptObjectError(msg)
            return bytes(data)

        data: bytes = self._media(key, fetch)
        return data

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill `buffers` from one ranged GET."""
        wanted = wanted_bytes(buffers)
        if not wanted:
            self.stat(key)
            return

        async def fetch(answer: Foreign) -> None:
            """Fill the buffers from the body; refuse another range, and one that is truncated."""
            if not answer.headers.get("Content-Range", "").startswith(f"bytes {offset}-"):
                msg = f"get {key}: the storage ignores ranges"
                raise StorageError(msg)
            if answer.content_length is not None and answer.content_length < wanted:
                msg = f"{key} ends before byte {offset + wanted}"
                raise CorruptObjectError(msg)
            scatter = Scatter(buffers)
            while scatter.left and (data := await answer.content.read(limits.STREAM_BYTES)):
                scatter.feed(data)
            if scatter.left:
                msg = f"get {key}: the answer was cut short"
                raise TransientStorageError(msg)

        self._media(key, fetch, span=f"bytes={offset}-{offset + wanted - 1}")

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """Yield objects page by page, each page fresh from the storage."""
        root = self._location.prefix
        query = {
            "prefix": root + check_prefix(prefix),
            "maxResults": str(limits.LIST_PAGE_OBJECTS),
            "fields": "nextPageToken,items(name,size,updated,storageClass)",
        }
        if after:
            query["startOffset"] = root + after  # inclusive, unlike `after`
        last = ""
        while True:
            path = f"/storage/v1/b/{self._bucket}/o"
            page = self._send(f"list {prefix}", "GET", path, _json, params=query)
            for item in page.get("items", ()):
                key = self._location.key_of(item["name"])
                if key is None or key <= after:
                    continue
                if key <= last:
                    msg = f"list {prefix}: the storage does not list in order"
                    raise StorageError(msg)
                last = key
                yield _info(key, item)
            if not page.get("nextPageToken"):
                return
            query["pageToken"] = page["nextPageToken"]

    def stat(self, key: str) -> ObjectInfo:
        """Return size and time from the object's metadata."""
        return _info(key, self._send(f"stat {key}", "GET", self._object(key), _json))

    def delete(self, key: str) -> None:
        """Delete an object."""
        self._send(f"delete {key}", "DELETE", self._object(key), _nothing, absent_ok=True)

    def cold_storage(self) -> ColdStorage:
        """Return access to the storage classes of these objects."""
        return GcsColdStorage(self.stat, self._rewrite)

    def close(self) -> None:
        """Close this process's connections."""
        fs = self._client.take()
        if fs is not None and fs._session is not None:
            fs.close_session(fs.loop, fs._session)
            fs._session = None

    def _media(self, key: str, use: Foreign, *, span: str = "") -> Foreign:
        """Return ``use(answer)`` for an object's content, which is never compressed in transit."""
        headers = {"Accept-Encoding": "identity", **({"Range": span} if span else {})}
        return self._send(
            f"get {key}", "GET", self._object(key), use, params={"alt": "media"}, headers=headers
        )

    def _rewrite(self, key: str, name: str, token: str) -> Mapping[str, Any]:
        """Send one request of a rewrite in place."""
        path = self._object(key)
        query = {"fields": "done,rewriteToken"} | ({"rewriteToken": token} if token else {})
        answer: Mapping[str, Any] = self._send(
            f"move {key} to {name}",
            "POST",
            f"{path}/rewriteTo{path.removeprefix('/storage/v1')}",
            _json,
            params=query,
            json={"storageClass": name},
        )
        return answer

    def _object(self, key: str) -> str:
        name = quote(self._location.object_name(key), safe="")
        return f"/storage/v1/b/{self._bucket}/o/{name}"

    def _framed(self, key: str, data: Buffer) -> Body:
        head = _head(self._location.object_name(key), "")
        return Body(b"".join((bytes(len(head)), data)))

    def _put(
        self, key: str, body: Body, *, conditional: bool = False, storage_class: str = ""
    ) -> None:
        """Send `body`: room for the head, then the data."""
        name = self._location.object_name(key)
        size = len(_head(name, "", storage_class))
        tail = f"\r\n--{_BOUNDARY}--\r\n".encode()
        end = body.seek(0, 2)
        with body.getbuffer() as view:
            # For errors in transit: the server refuses a damaged body. No protection from malice.
            digest = hashlib.md5(view[size:end], usedforsecurity=False).digest()
            view[:size] = _head(name, base64.b64encode(digest).decode(), storage_class)
        body.write(tail)
        body.seek(0)
        query = {"uploadType": "multipart", "fields": "generation"}
        if conditional:
            query["ifGenerationMatch"] = "0"
        try:
            self._send(
                f"{'create' if conditional else 'put'} {key}",
                "POST",
                f"/upload/storage/v1/b/{self._bucket}/o",
                _nothing,
                conditional=conditional,
                params=query,
                headers={"Content-Type": f'multipart/related; boundary="{_BOUNDARY}"'},
                data=body,
            )
        finally:
            body.truncate(end)  # as before, in case it is sent again

    def _send(
        self,
        what: str,
        method: str,
        path: str,
        use: Foreign,
        *,
        conditional: bool = False,
        absent_ok: bool = False,
        **request: object,
    ) -> Foreign:
        """Return the result of the coroutine function `use` on the answer to one request."""

        async def send(fs: Foreign) -> Foreign:
            """Send the request once, and pass its answer to `use`."""
            await fs._set_session()
            timeout = aiohttp.ClientTimeout(
                total=None,
                sock_connect=limits.CONNECT_TIMEOUT_S,
                sock_read=limits.READ_TIMEOUT_S,
            )
            request["headers"] = fs._get_headers(request.get("headers"))
            request["params"] = fs._get_params(request.get("params", {}))
            url = fs._location + path
            async with fs.session.request(method, url, timeout=timeout, **request) as answer:
                if answer.status < 300:
                    return await use(answer)
                if answer.status == 404 and absent_ok:
                    return None
                # Only a missing bucket makes a request that names no object fail like this.
                missing = answer.status == 404 and "/o/" not in path
                code = "NoSuchBucket" if missing else await _code(answer)
                raise error_for_answer(answer.status, code, what, conditional=conditional)

        try:
            fs = self._client.get()
            return sync(fs.loop, send, fs)
        except CkptStoreError:
            raise
        except Exception as error:
            raise translate(error, what, conditional=conditional) from error

    def __repr__(self) -> str:
        return f"GcsBackend({self.url!r})"


class _ClientFactory:
    """Makes the gcsfs object of one process; picklable."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options

    def __call__(self) -> Foreign:
        # The class of gcsfs.core: the "extended" one that the package exports asks each bucket
        # for its layout by gRPC, and waits for a minute where there is none.
        return GCSFileSystem(**self._options, use_listings_cache=False, skip_instance_cache=True)


def _head(name: str, md5: str, storage_class: str = "") -> bytes:
    """Return the part of an upload before the data; its length does not depend on `md5`."""
    chosen = {"storageClass": storage_class} if storage_class else {}
    meta = json.dumps({"name": name, "md5Hash": md5.ljust(24, "="), **chosen})
    return (
        f"--{_BOUNDARY}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{meta}\r\n"
        f"--{_BOUNDARY}\r\nContent-Type: application/octet-stream\r\n\r\n"
    ).encode()


async def _json(answer: Foreign) -> Foreign:
    return json.loads(await answer.read())


async def _nothing(answer: Foreign) -> None:
    await answer.read()


async def _code(answer: Foreign) -> str:
    """Return the reason code of a failed answer, empty where there is none."""
    try:
        detail = json.loads(await answer.read())["error"]
        return str(detail["errors"][0]["reason"])
    except (ValueError, LookupError, TypeError):
        return ""


def _info(key: str, item: Mapping[str, str]) -> ObjectInfo:
    modified = datetime.fromisoformat(item["updated"]).timestamp()
    return ObjectInfo(
        key=key,
        size_bytes=int(item["size"]),
        modified_at=modified,
        storage_class=item.get("storageClass", ""),
    )


def translate(error: Exception, what: str, *, conditional: bool) -> CkptStoreError:
    """Return the error of ckptstore's tree for an error of gcsfs, aiohttp or google.auth."""
    if isinstance(error, FSTimeoutError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # fsspec's wrapper of any timeout
    msg = f"{what}: {type(error).__name__}"
    if isinstance(error, google.auth.exceptions.TransportError):
        return TransientStorageError(msg)
    if isinstance(error, google.auth.exceptions.GoogleAuthError):
        return StoragePermissionError(msg, hint="no usable credentials were found")
    if isinstance(error, _NOT_SENT):
        return TransientStorageError(msg)
    if isinstance(error, aiohttp.InvalidURL | TypeError | LookupError | ImportError):
        return StorageError(msg, hint="check the storage options")
    return error_for_silence(msg, conditional=conditional)


def open_gcs(url: str, *, pack_class: object = None, **options: object) -> GcsBackend:
    """Return the backend of ``gs://bucket/prefix``; `options` are gcsfs's.

    Parameters
    ----------
    pack_class
        Storage class of new packs, such as ``NEARLINE``; other objects are never written in it.

    Raises
    ------
    InvalidUrlError
        If the URL names no bucket, or carries credentials.
    InvalidInputError
        `pack_class` names no class whose objects can always be read.
    """
    name = check_pack_class(pack_class)
    return GcsBackend(parse_bucket_url(url), options, pack_class=name)
