"""S3 and storage that speaks its protocol.

Every request is one plain call of the S3 API, sent once, since retries belong to the retry
wrapper. Two clients can send it: botocore alone (``s3_direct``), which moves a byte for half of
the processor time, and s3fs (``s3_fsspec``), which knows every option of s3fs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from ckptstore import limits
from ckptstore.backends.base import Buffer, Capabilities, ObjectInfo, ObjectWriter
from ckptstore.backends.bucket import (
    CAPABILITIES,
    BucketBackend,
    BucketLocation,
    CheckRange,
    Foreign,
    parse_bucket_url,
)
from ckptstore.backends.per_process import PerProcess
from ckptstore.backends.pooled_writer import BufferPool, PooledWriter
from ckptstore.backends.s3_calls import S3Calls, translate
from ckptstore.backends.s3_cold import S3ColdStorage
from ckptstore.backends.s3_direct import direct_client
from ckptstore.backends.s3_settings import read_settings
from ckptstore.backends.storage_classes import STANDARD, ColdStorage, check_pack_class
from ckptstore.errors import (
    CorruptObjectError,
    InvalidUrlError,
    MissingDependencyError,
    StorageError,
)

_CLIENTS: Final = ("auto", "direct", "s3fs")

# A pack and the chunk that closes it. An open store keeps some buffers: while a write fills and
# sends them few are free, and kept ones take memory besides that of a load.
_BUFFER_BYTES: Final = CAPABILITIES.pack_bytes + limits.CHUNK_BYTES_DEFAULT + limits.MIB
_KEPT_BYTES: Final = limits.HOST_BYTES_DEFAULT // 4
_BUFFERS_KEPT: Final = _KEPT_BYTES // limits.PACK_BYTES_MIN


class S3Backend(BucketBackend[S3Calls]):
    """The objects below one prefix of a bucket.

    Parameters
    ----------
    scatter_read
        Whether the client receives straight into the caller's buffers.
    """

    name = "s3"

    def __init__(
        self,
        location: BucketLocation,
        client: PerProcess[S3Calls],
        *,
        scatter_read: bool,
        pack_class: str = "",
    ) -> None:
        super().__init__(location, client, pack_class=pack_class)
        self._scatter_read = scatter_read
        self._pool = BufferPool(
            buffer_bytes=_BUFFER_BYTES,
            kept_max=_BUFFERS_KEPT,
            kept_bytes=_KEPT_BYTES,
        )

    @property
    def capabilities(self) -> Capabilities:
        """Return the properties of S3 with this client."""
        return replace(CAPABILITIES, scatter_read=self._scatter_read)

    def open_writer(self, key: str) -> ObjectWriter:
        """Return a writer that collects in memory and sends one PUT."""
        self._location.object_name(key)
        name = self._class_of_new(key)
        return PooledWriter(lambda body: self._upload(key, body, storage_class=name), self._pool)

    def get(self, key: str, *, bytes_max: int) -> bytes:
        """Return a whole object."""

        def accept(answer: Mapping[str, Any]) -> None:
            """Refuse an object that is too large before receiving any of it."""
            size: int = answer["ContentLength"]
            if size > bytes_max:
                msg = f"{key} has {size} bytes, more than the {bytes_max} allowed"
                raise CorruptObjectError(msg)

        request = self._object(key)
        return self._run(f"get {key}", lambda calls: calls.read(request, accept))

    def stat(self, key: str) -> ObjectInfo:
        """Return size and time by a HEAD."""
        return self._info(key, self._call(f"stat {key}", "head_object", self._object(key)))

    def delete(self, key: str) -> None:
        """Delete an object; S3 accepts a missing one."""
        self._call(f"delete {key}", "delete_object", self._object(key))

    def cold_storage(self) -> ColdStorage:
        """Return access to the storage classes of these objects."""
        return S3ColdStorage(self._location, self._run)

    def close(self) -> None:
        """Close this process's connections, and release its buffers."""
        self._pool.clear()
        calls = self._client.take()
        if calls is not None:
            calls.close()

    def _body(self, key: str, data: Buffer) -> memoryview:
        return memoryview(data).cast("B")

    def _upload(
        self, key: str, body: Foreign, *, conditional: bool = False, storage_class: str = ""
    ) -> None:
        """Send one PUT; its condition is ``If-None-Match: *``."""
        request = self._object(key)
        if storage_class:
            request["StorageClass"] = storage_class
        if conditional:
            request["IfNoneMatch"] = "*"
        what = f"{'create' if conditional else 'put'} {key}"
        self._run(what, lambda calls: calls.put(request, body), conditional=conditional)

    def _receive(
        self, key: str, span: str, buffers: Sequence[memoryview], check: CheckRange
    ) -> int:
        def accept(answer: Mapping[str, Any]) -> None:
            check(answer.get("ContentRange", ""), answer["ContentLength"])

        request = self._object(key) | {"Range": span}
        return self._run(f"get {key}", lambda calls: calls.read_into(request, buffers, accept))

    def _page(
        self, what: str, prefix: str, after: str, token: str
    ) -> tuple[list[tuple[str, Mapping[str, Any]]], str]:
        query: dict[str, Any] = {
            "Bucket": self._location.bucket,
            "Prefix": prefix,
            "MaxKeys": limits.LIST_PAGE_OBJECTS,
        }
        if after:
            query["StartAfter"] = after
        if token:
            query["ContinuationToken"] = token
        page = self._call(what, "list_objects_v2", query)
        items = [(item["Key"], item) for item in page.get("Contents", ())]
        following: str = page.get("NextContinuationToken") or ""
        if page.get("IsTruncated") and not following:  # never a part of a listing for the whole
            msg = f"{what}: the storage cuts the listing short, and says not where it goes on"
            raise StorageError(msg)
        return items, following if page.get("IsTruncated") else ""

    def _info(self, key: str, item: Mapping[str, Any]) -> ObjectInfo:
        """Return the facts in an entry of a listing, or in the answer to a HEAD."""
        return ObjectInfo(
            key=key,
            size_bytes=item["Size"] if "Size" in item else item["ContentLength"],
            modified_at=item["LastModified"].timestamp(),
            storage_class=item.get("StorageClass") or STANDARD,
        )

    _translate = staticmethod(translate)

    def _object(self, key: str) -> dict[str, Any]:
        return {"Bucket": self._location.bucket, "Key": self._location.object_name(key)}

    def _call(self, what: str, method: str, request: dict[str, Any]) -> Foreign:
        """Return the answer of one call of the S3 API."""
        return self._run(what, lambda calls: calls.call(method, request))


def open_s3(
    url: str, *, client: str = "auto", pack_class: object = None, **options: object
) -> S3Backend:
    """Return the backend of ``s3://bucket/prefix``.

    Parameters
    ----------
    client
        ``direct``: botocore alone; ``s3fs``; ``auto``: direct if it knows all options.
    pack_class
        Storage class of new packs, such as ``STANDARD_IA``; other objects are never written in it.
    options
        Those of ``s3fs.S3FileSystem``.

    Raises
    ------
    InvalidUrlError
        If the URL names no bucket, or carries credentials; or for another `client`.
    InvalidInputError
        `pack_class` names no class whose objects can always be read.
    MissingDependencyError
        s3fs is needed, and is not installed.
    """
    location = parse_bucket_url(url)
    if client not in _CLIENTS:
        msg = f"no S3 client is called {client!r:.40}"
        raise InvalidUrlError(msg, hint=f"one of {', '.join(_CLIENTS)}")
    name = check_pack_class(pack_class)
    settings = None if client == "s3fs" else read_settings(options)
    if settings is not None:
        direct = PerProcess[S3Calls](direct_client, settings)
        return S3Backend(location, direct, scatter_read=True, pack_class=name)
    if client == "direct":
        msg = "only s3fs knows one of the storage options"
        raise InvalidUrlError(msg, hint='leave out client="direct", or that option')
    try:
        from ckptstore.backends.s3_fsspec import s3fs_client  # s3fs takes half a second to import
    except ImportError as error:
        msg = f"one of the storage options needs a package that is not installed ({error.name})"
        raise MissingDependencyError(msg, hint="pip install 'ckptstore[s3]'") from error
    by_s3fs = PerProcess[S3Calls](s3fs_client, options)
    return S3Backend(location, by_s3fs, scatter_read=False, pack_class=name)
