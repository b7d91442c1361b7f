"""Google Cloud Storage, through gcsfs: its sessions, credentials and event loop.

Requests are plain calls of the JSON API, each sent once. gcsfs's ``pipe_file`` is not used, since
it repeats failed requests up to six times by itself, drops the HTTP status of some errors, and
ends an upload at the first ``--==0==`` in the data.

Its loop copies each byte several times. So :mod:`ckptstore.backends.wire` sends uploads without a
condition, and receives ranges, with gcsfs's address, parameters and headers. gcsfs does so where
its session has settings of its own, and for answers that lead elsewhere.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import inspect
import json
import re
import ssl
from collections.abc import Callable, Mapping
from contextlib import closing
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlencode

import aiohttp
import google.auth.exceptions
import google_crc32c
import urllib3
from fsspec.asyn import sync
from fsspec.dircache import DirCache
from fsspec.exceptions import FSTimeoutError
from gcsfs.core import GCSFileSystem
from urllib3.exceptions import LocationValueError

from ckptstore import errors, limits
from ckptstore.backends import wire
from ckptstore.backends.base import Buffer, Buffers, ObjectInfo, ObjectWriter, check_size
from ckptstore.backends.bucket import BucketBackend, CheckRange, Foreign, Wait, parse_bucket_url
from ckptstore.backends.buffered_writer import Body, BufferedWriter
from ckptstore.backends.httperrors import error_for_answer, error_for_silence
from ckptstore.backends.per_process import PerProcess
from ckptstore.backends.receiving import receive_into
from ckptstore.backends.scatter import Scatter
from ckptstore.backends.storage_classes import STANDARD, ColdStorage, ObjectState
from ckptstore.backends.width import served_thin
from ckptstore.config import SYSTEM
from ckptstore.suggestions import did_you_mean

# Drawn once: only code that can read this process could put it into a data stream.
_BOUNDARY: Final = SYSTEM.random_hex(16)
_TAIL: Final = f"\r\n--{_BOUNDARY}--\r\n".encode()
_HASHES: Final[dict[str, Callable[[], Foreign]]] = {
    "crc32c": google_crc32c.Checksum,
    "md5Hash": partial(hashlib.md5, usedforsecurity=False),
}
_HASH: Final = "crc32c" if google_crc32c.implementation == "c" else "md5Hash"
"""Digest of an upload, which the server compares: CRC32C takes a tenth of the time of MD5."""
_CREDENTIALS_HINT: Final = (
    "run `gcloud auth application-default login`, or give token= a key file; a public bucket is"
    ' read with token="anon"'
)
_PLACE: Final = re.compile(r"(https?://([\w.:\[\]-]+))([\w./~-]*)", re.ASCII)
"""Address of a service: its origin, its host with the port, and the beginning of all paths."""
_NOT_SENT = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)


class GcsBackend(BucketBackend[Foreign]):
    """The objects below one prefix of a bucket."""

    name = "gcs"

    def __init__(self, *given: Any, **options: Any) -> None:  # noqa: ANN401 - of the class above
        super().__init__(*given, **options)
        self._pools = PerProcess(_pools)
        """Connections of the short path."""

    def open_writer(self, key: str) -> ObjectWriter:
        """Return a writer that collects in memory and sends one multipart upload."""
        name = self._class_of_new(key)
        head = _head(self._location.object_name(key), b"", name)
        return BufferedWriter(
            lambda body: self._upload(key, body, storage_class=name), reserve_bytes=len(head)
        )

    def get(self, key: str, *, bytes_max: int) -> bytes:
        """Return a whole object."""

        async def fetch(answer: Foreign) -> bytes:
            """Return the whole body, as long as it stays within the bound."""
            data = bytearray()
            while part := await answer.content.read(limits.STREAM_BYTES):
                data += part
                check_size(key, len(data), bytes_max)
            return bytes(data)

        data: bytes = self._media(key, fetch)
        return data

    def stat(self, key: str) -> ObjectInfo:
        """Return size and time from the object's metadata."""
        return self._info(key, self._send(f"stat {key}", "GET", self._object(key), _json))

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
        pools = self._pools.take()
        if pools is not None:
            pools.clear()
        super().close()

    def _media(self, key: str, use: Foreign, *, span: str = "", **how: Any) -> Foreign:  # noqa: ANN401 - of _send
        """Return ``use(answer)`` for an object's content, which is never compressed in transit."""
        headers = {"Accept-Encoding": "identity", **({"Range": span} if span else {})}
        query = {"alt": "media"}
        path, what = self._object(key), f"get {key}"
        return self._send(what, "GET", path, use, headers=headers, params=query, **how)

    def _receive(self, key: str, span: str, buffers: Buffers, check: CheckRange, wait: Wait) -> int:
        scatter = Scatter(buffers)

        def begin(answer: Foreign) -> None:
            """Look at the head of the answer."""
            wait.begun()
            check(answer.headers.get("Content-Range", ""), answer.content_length)

        async def fetch(answer: Foreign) -> int:
            """Fill the buffers from the body."""
            begin(answer)
            while scatter.left and (data := await answer.content.read(limits.STREAM_BYTES)):
                scatter.feed(data)
            return scatter.left

        def fill(answer: wire.HttpAnswer) -> int:
            """Receive the body into the buffers."""
            begin(answer)
            return receive_into(answer, buffers)

        how = {"thin": fill, "size_bytes": scatter.left, "wait": wait}
        with closing(scatter):  # after a failure the event loop may still be receiving
            left: int = self._media(key, fetch, span=span, **how)
        return left

    def _page(
        self, what: str, prefix: str, after: str, token: str
    ) -> tuple[list[tuple[str, Mapping[str, Any]]], str]:
        query = {
            "prefix": prefix,
            "maxResults": str(limits.LIST_PAGE_OBJECTS),
            "fields": "nextPageToken,items(name,size,updated,storageClass)",
        }
        if after:
            query["startOffset"] = after  # inclusive
        if token:
            query["pageToken"] = token
        page = self._send(what, "GET", self._objects, _json, params=query)
        items = [(item["name"], item) for item in page.get("items", ())]
        return items, page.get("nextPageToken", "")

    def _info(self, key: str, item: Mapping[str, Any]) -> ObjectInfo:
        return ObjectInfo(
            key=key,
            size_bytes=int(item["size"]),
            modified_at=datetime.fromisoformat(item["updated"]).timestamp(),
            storage_class=item.get("storageClass", ""),
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

    @property
    def _objects(self) -> str:
        return f"/storage/v1/b/{quote(self._location.bucket, safe='')}/o"

    def _object(self, key: str) -> str:
        return f"{self._objects}/{quote(self._location.object_name(key), safe='')}"

    def _body(self, key: str, data: Buffer) -> Body:
        head = _head(self._location.object_name(key), b"")
        return Body(b"".join((bytes(len(head)), data)))

    def _upload(
        self, key: str, body: Foreign, *, conditional: bool = False, storage_class: str = ""
    ) -> None:
        """Send `body`, which has room for its head; the condition is a generation of 0."""
        name = self._location.object_name(key)
        size = len(_head(name, b"", storage_class))
        # For errors in transit: the server refuses a damaged body. No protection from malice.
        with body.getbuffer() as view:
            sent_before = view[-len(_TAIL) :] == _TAIL
        if not sent_before:  # memory that was sent may not grow
            body.seek(0, 2)
            body.write(_TAIL)
        check = _HASHES[_HASH]()
        with body.getbuffer() as view, view[size : -len(_TAIL)] as data:
            for at in range(0, len(data), limits.STREAM_BYTES):
                check.update(bytes(data[at : at + limits.STREAM_BYTES]))  # it takes nothing else
            view[:size] = _head(name, check.digest(), storage_class)
            end = view.nbytes
        body.seek(0)
        query = {"uploadType": "multipart", "fields": "generation"}
        if conditional:
            query["ifGenerationMatch"] = "0"
        self._send(
            f"{'create' if conditional else 'put'} {key}",
            "POST",
            f"/upload{self._objects}",
            _nothing,
            thin=None if conditional else wire.HttpAnswer.content,
            conditional=conditional,
            size_bytes=end,
            params=query,
            headers={"Content-Type": f'multipart/related; boundary="{_BOUNDARY}"'},
            data=body,
        )

    def _send(
        self,
        what: str,
        method: str,
        path: str,
        use: Foreign,
        *,
        conditional: bool = False,
        absent_ok: bool = False,
        size_bytes: int = 0,
        wait: Wait | None = None,
        thin: Callable[[wire.HttpAnswer], object] | None = None,
        **request: Any,  # noqa: ANN401 - of aiohttp
    ) -> Foreign:
        """Return the result of the coroutine function `use` on the answer to one request.

        With `thin` the short path is tried first; it is called on that path's answer instead.
        """

        async def send(fs: Foreign) -> Foreign:
            """Send the request once, and pass its answer to `use`."""
            await fs._set_session()
            timeout = aiohttp.ClientTimeout(
                total=None, sock_connect=limits.CONNECT_TIMEOUT_S, sock_read=limits.READ_TIMEOUT_S
            )
            request["headers"] = fs._get_headers(request.get("headers"))
            request["params"] = fs._get_params(request.get("params", {}))
            url = fs._location + path
            request["allow_redirects"] = method == "GET"  # a POST would become a GET without a body
            call = fs.session.request(method, url, timeout=timeout, **request)
            limit_s = wait.sent() if wait else None
            async with asyncio.timeout(limit_s or None) as head, call as answer:
                head.reschedule(None)
                if answer.status < 300:
                    return await use(answer)
                if answer.status == 404 and absent_ok:
                    return None
                code = _code(answer.status, await answer.read(), path)
                raise error_for_answer(answer.status, code, what, conditional=conditional)

        def work(fs: Foreign) -> Foreign:
            """Send the request by the short path, or by gcsfs."""
            answer = self._send_thin(fs, method, path, wait, request) if thin else None
            if thin is None or answer is None:
                return sync(fs.loop, send, fs)
            with closing(answer):
                if answer.status < 400:
                    return thin(answer)
                code = _code(answer.status, answer.content(), path)
            raise error_for_answer(answer.status, code, what, conditional=conditional)

        return self._run(what, work, conditional=conditional, size_bytes=size_bytes)

    def _send_thin(
        self, fs: Foreign, method: str, path: str, wait: Wait | None, request: Mapping[str, Any]
    ) -> wire.HttpAnswer | None:
        """Return the answer to a request, or None if gcsfs has to send it."""
        secured = getattr(fs, "_use_client_cert", False)
        if type(fs) is not GCSFileSystem or fs.session_kwargs or secured:
            return None
        at, query = _PLACE.fullmatch(fs._location), fs._get_params(request["params"])
        if at is None or None in query.values():
            return None
        answer = wire.send(
            self._pools.get().connection_from_url(at[1]),
            method,
            f"{at[3]}{path}?{urlencode(query, quote_via=quote)}",
            {"Host": at[2], **fs._get_headers(request["headers"])},
            [request["data"].getbuffer()] if "data" in request else (),
            wait.sent() if wait else 0.0,
        )
        plain = 200 <= answer.status < 300 and "Content-Encoding" not in answer.headers
        if plain or answer.status >= 400:
            return answer
        answer.close()
        served_thin(thin=False)
        return None

    @staticmethod
    def _translate(error: Exception, what: str, *, conditional: bool) -> errors.CkptStoreError:
        """Return the error of ckptstore's tree for an error of gcsfs, aiohttp or google.auth."""
        if isinstance(error, FSTimeoutError) and isinstance(error.__cause__, Exception):
            error = error.__cause__  # fsspec's wrapper of any timeout
        msg = f"{what}: {type(error).__name__}"
        if isinstance(error, google.auth.exceptions.TransportError):
            return errors.TransientStorageError(msg)
        if isinstance(error, google.auth.exceptions.GoogleAuthError):
            return errors.StoragePermissionError(msg, hint=_CREDENTIALS_HINT)
        if isinstance(error, _NOT_SENT):
            return errors.TransientStorageError(msg)
        wrong = aiohttp.InvalidURL | LocationValueError | TypeError | LookupError | ImportError
        if isinstance(error, wrong):
            return errors.StorageError(msg, hint="check the storage options")
        return error_for_silence(msg, conditional=conditional)


def _gcs_client(options: Mapping[str, Any]) -> Foreign:
    """Return a new client.

    It is the class of gcsfs.core: the "extended" one that the package exports asks each bucket for
    its layout by gRPC, and waits for a minute where there is none.
    """
    return GCSFileSystem(**options, use_listings_cache=False, skip_instance_cache=True)


def _pools() -> urllib3.PoolManager:
    """Return new connections, whose certificates are verified as by aiohttp."""
    return urllib3.PoolManager(
        maxsize=limits.CONNECTIONS_MAX,
        timeout=urllib3.Timeout(connect=limits.CONNECT_TIMEOUT_S, read=limits.READ_TIMEOUT_S),
        ssl_context=ssl.create_default_context(),
    )


Rewrite = Callable[[str, str, str], Mapping[str, Any]]
"""Moves an object: its key, the class, and the token that the last answer gave."""


class GcsColdStorage:
    """The storage classes of GCS: an object is rewritten in place; all can be read at any time.

    The colder classes charge for reading and for a minimum storage duration. No object ever needs a
    restore, so a request for one does nothing.

    Parameters
    ----------
    stat
        The backend's ``stat``.
    rewrite
        Sends one request of a rewrite of a key into a class, with the token of the answer before.
    """

    def __init__(self, stat: Callable[[str], ObjectInfo], rewrite: Rewrite) -> None:
        self._stat, self._rewrite = stat, rewrite

    def restore_state(self, key: str) -> ObjectState:
        """Return the class; it can be read at any time."""
        info = self._stat(key)
        return ObjectState(
            storage_class=info.storage_class or STANDARD,
            size_bytes=info.size_bytes,
            modified_at=info.modified_at,
            access="readable",
        )

    def set_class(self, key: str, name: str) -> bool:
        """Rewrite an object in place; a large one takes several requests."""
        if self.restore_state(key).storage_class == name:
            return False
        token = ""
        while True:
            answer = self._rewrite(key, name, token)
            token = answer.get("rewriteToken", "")
            if answer.get("done", True) or not token:
                break
        after = self.restore_state(key).storage_class
        if after != name:
            msg = f"move {key} to {name}: the object is in {after} afterwards"
            raise errors.StorageError(msg, hint="does this storage have the class?")
        return True

    def request_restore(self, key: str, *, days: int, tier: str) -> bool:
        """Do nothing, since every object can be read already; returns False."""
        return False


def _head(name: str, digest: bytes, storage_class: str = "") -> bytes:
    """Return the part of an upload before the data; its length does not depend on `digest`."""
    chosen = {"storageClass": storage_class} if storage_class else {}
    said = base64.b64encode(digest or _HASHES[_HASH]().digest()).decode()
    meta = json.dumps({"name": name, _HASH: said, **chosen})
    kind = "text/html" if name.endswith(".html") else "application/octet-stream"
    return (
        f"--{_BOUNDARY}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{meta}\r\n"
        f"--{_BOUNDARY}\r\nContent-Type: {kind}\r\n\r\n"
    ).encode()


async def _json(answer: Foreign) -> Foreign:
    return json.loads(await answer.read())


async def _nothing(answer: Foreign) -> None:
    await answer.read()


def _code(status: int, data: bytes, path: str) -> str:
    """Return the reason code of a failed answer, empty where there is none."""
    if status == 404 and "/o/" not in path:
        return "NoSuchBucket"  # that alone makes a request which names no object fail like this
    try:
        return str(json.loads(data)["error"]["errors"][0]["reason"])
    except (ValueError, LookupError, TypeError):
        return ""


def _check_options(options: Mapping[str, object]) -> None:
    """Refuse what gcsfs would take in silence: unknown options, and a missing key file."""
    known: set[str] = set()
    for kind in (*GCSFileSystem.__mro__, DirCache):
        known |= inspect.signature(kind.__init__).parameters.keys()
    unknown = options.keys() - known
    if unknown:
        msg = f"no option is called {min(unknown)!r}"
        hint = did_you_mean(f"{min(unknown)}=", [f"{name}=" for name in known])
        raise errors.InvalidUrlError(msg, hint=hint)
    token = options.get("token")
    if isinstance(token, str) and token.endswith(".json") and not Path(token).exists():
        msg = "the key file that token= names is not there"
        raise errors.InvalidUrlError(msg, hint="give the path of an existing file")


def open_gcs(
    url: str,
    *,
    pack_class: object = None,
    requests: object = limits.REQUESTS_AT_ONCE_MAX,
    **options: object,
) -> GcsBackend:
    """Return the backend of ``gs://bucket/prefix``; `options` are gcsfs's.

    Parameters
    ----------
    pack_class
        Storage class of new packs, such as ``NEARLINE``; other objects are never written in it.
    requests
        Most requests on their way at once, of all that is done with the store.

    Raises
    ------
    InvalidUrlError
        If the URL names no bucket, or carries credentials; gcsfs has no such option; or `token`
        names a file that is not there.
    InvalidInputError
        `pack_class` names no class whose objects can always be read; `requests` is no number.
    """
    _check_options(options)
    client = PerProcess(_gcs_client, options)
    return GcsBackend(parse_bucket_url(url), client, pack_class=pack_class, requests=requests)
