"""S3 and storage that speaks its protocol.

Every request is one plain call of the S3 API, sent once, since retries belong to the retry
wrapper. Two clients can send it: botocore alone (``s3_direct``), which moves a byte for half of
the processor time, and s3fs (``s3_fsspec``), which knows every option of s3fs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

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
from ckptstore.backends.cold import ColdStorage, check_pack_class, is_classed
from ckptstore.backends.object_url import BucketLocation, parse_bucket_url
from ckptstore.backends.per_process import PerProcess
from ckptstore.backends.pooled_writer import BufferPool, PooledWriter
from ckptstore.backends.s3_calls import Foreign, S3Calls
from ckptstore.backends.s3_cold import S3ColdStorage
from ckptstore.backends.s3_direct import DirectFactory
from ckptstore.backends.s3_errors import translate
from ckptstore.backends.s3_settings import read_settings
from ckptstore.backends.scatter import wanted_bytes
from ckptstore.backends.storage_classes import STANDARD
from ckptstore.errors import (
    CkptStoreError,
    CorruptObjectError,
    InvalidUrlError,
    MissingDependencyError,
    StorageError,
    TransientStorageError,
)
from ckptstore.limits import MIB

T = TypeVar("T")

_CLIENTS: Final = ("auto", "direct", "s3fs")

CAPABILITIES: Final = Capabilities(
    # AWS's behaviour since August 2024; others ignore or refuse the condition: the probe decides.
    put_if_absent=PutIfAbsent.UNKNOWN,
    pack_bytes=64 * MIB,  # one PUT, held in memory; AWS advises multipart above 100 MB
    part_bytes=64 * MIB,
    read_gap_bytes=1 * MIB,  # a request's latency of 20 ms at 50 MB/s a connection
    read_bytes_max=16 * MIB,  # AWS's performance guide: ranges of 8-16 MB
    concurrency=16,
    scatter_read=False,
    lookup_lag_s=0.0,  # strongly consistent since December 2020
)

# A pack and the chunk that closes it. An open store keeps some buffers: while a write fills and
# sends them few are free, and kept ones take memory besides that of a load.
_BUFFER_BYTES: Final = CAPABILITIES.pack_bytes + limits.CHUNK_BYTES_DEFAULT + limits.MIB
_KEPT_BYTES: Final = limits.HOST_BYTES_DEFAULT // 4
_BUFFERS_KEPT: Final = _KEPT_BYTES // limits.PACK_BYTES_MIN


class S3Backend(Backend):
    """The objects below one prefix of a bucket.

    Parameters
    ----------
    location
        Bucket and prefix; the bucket is never created.
    factory
        Makes the client of a process; picklable.
    scatter_read
        Whether the client receives straight into the caller's buffers.
    pack_class
        Storage class of new packs; empty for the bucket's own.
    """

    def __init__(
        self,
        location: BucketLocation,
        factory: Callable[[], S3Calls],
        *,
        scatter_read: bool,
        pack_class: str = "",
    ) -> None:
        self.url = location.url
        self.name = "s3"
        self._location = location
        self._pack_class = pack_class
        self._capabilities = replace(CAPABILITIES, scatter_read=scatter_read)
        self._client = PerProcess(factory)
        self._pool = BufferPool(
            buffer_bytes=_BUFFER_BYTES,
            kept_max=_BUFFERS_KEPT,
            kept_bytes=_KEPT_BYTES,
        )

    @property
    def capabilities(self) -> Capabilities:
        """Return the properties of S3."""
        return self._capabilities

    def put(self, key: str, data: Buffer) -> None:
        """Write a whole object by one PUT."""
        self._put(key, memoryview(data).cast("B"))

    def put_if_absent(self, key: str, data: Buffer) -> None:
        """Create an object by one PUT with ``If-None-Match: *``."""
        self._put(key, memoryview(data).cast("B"), conditional=True)

    def open_writer(self, key: str) -> ObjectWriter:
        """Return a writer that collects in memory and sends one PUT."""
        self._location.object_name(key)
        name = self._pack_class if is_classed(key) else ""
        return PooledWriter(lambda body: self._put(key, body, storage_class=name), self._pool)

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

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill `buffers` from one ranged GET."""
        wanted = wanted_bytes(buffers)
        if not wanted:
            self.stat(key)
            return

        def accept(answer: Mapping[str, Any]) -> None:
            """Refuse an answer with another range."""
            if not answer.get("ContentRange", "").startswith(f"bytes {offset}-"):
                msg = f"get {key}: the storage ignores ranges"
                raise StorageError(msg)
            if answer["ContentLength"] < wanted:
                msg = f"{key} ends before byte {offset + wanted}"
                raise CorruptObjectError(msg)

        request = self._object(key) | {"Range": f"bytes={offset}-{offset + wanted - 1}"}
        what = f"get {key}"
        if self._run(what, lambda calls: calls.read_into(request, buffers, accept)):
            msg = f"{what}: the answer was cut short"
            raise TransientStorageError(msg)

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
                yield ObjectInfo(
                    key=key,
                    size_bytes=item["Size"],
                    modified_at=item["LastModified"].timestamp(),
                    storage_class=item.get("StorageClass") or STANDARD,
                )
            if not page.get("IsTruncated"):
                return
            query["ContinuationToken"] = page["NextContinuationToken"]

    def stat(self, key: str) -> ObjectInfo:
        """Return size and time by a HEAD."""
        head = self._call(f"stat {key}", "head_object", self._object(key))
        return ObjectInfo(
            key=key,
            size_bytes=head["ContentLength"],
            modified_at=head["LastModified"].timestamp(),
            storage_class=head.get("StorageClass") or STANDARD,
        )

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

    def _put(
        self, key: str, body: memoryview, *, conditional: bool = False, storage_class: str = ""
    ) -> None:
        request = self._object(key)
        if storage_class:
            request["StorageClass"] = storage_class
        if conditional:
            request["IfNoneMatch"] = "*"
        what = f"{'create' if conditional else 'put'} {key}"
        self._run(what, lambda calls: calls.put(request, body), conditional=conditional)

    def _object(self, key: str) -> dict[str, Any]:
        return {"Bucket": self._location.bucket, "Key": self._location.object_name(key)}

    def _call(self, what: str, method: str, request: dict[str, Any]) -> Foreign:
        """Return the answer of one call of the S3 API."""
        return self._run(what, lambda calls: calls.call(method, request))

    def _run(self, what: str, work: Callable[[S3Calls], T], *, conditional: bool = False) -> T:
        """Return ``work(client)``, translating the errors that it raises."""
        try:
            return work(self._client.get())
        except CkptStoreError:
            raise
        except Exception as error:
            raise translate(error, what, conditional=conditional) from error

    def __repr__(self) -> str:
        return f"S3Backend({self.url!r})"


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
        factory = DirectFactory(settings)
        return S3Backend(location, factory, scatter_read=True, pack_class=name)
    if client == "direct":
        msg = "only s3fs knows one of the storage options"
        raise InvalidUrlError(msg, hint='leave out client="direct", or that option')
    try:
        from ckptstore.backends.s3_fsspec import S3fsFactory  # s3fs takes half a second to import
    except ImportError as error:
        msg = f"one of the storage options needs a package that is not installed ({error.name})"
        raise MissingDependencyError(msg, hint="pip install 'ckptstore[s3]'") from error
    return S3Backend(location, S3fsFactory(options), scatter_read=False, pack_class=name)
