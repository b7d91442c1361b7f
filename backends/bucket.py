"""Object stores: everything that S3, GCS and their like have in common.

The objects of a store lie below one prefix of a bucket, ``scheme://bucket/prefix``. The backend of
an object store sends plain requests, each once, since retries belong to the retry wrapper.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from ckptstore.backends.base import (
    Backend,
    Buffer,
    Capabilities,
    ObjectInfo,
    PutIfAbsent,
    check_key,
    check_prefix,
    is_key,
)
from ckptstore.backends.per_process import PerProcess
from ckptstore.backends.scatter import wanted_bytes
from ckptstore.backends.storage_classes import is_classed
from ckptstore.errors import (
    CkptStoreError,
    CorruptObjectError,
    InvalidUrlError,
    StorageError,
    TransientStorageError,
)
from ckptstore.limits import MIB

C = TypeVar("C")
T = TypeVar("T")
Foreign = Any
"""A value of a client library, which ship no types."""

CAPABILITIES: Final = Capabilities(
    # AWS keeps the condition since August 2024, Google promises ifGenerationMatch=0; other servers
    # and emulators ignore or refuse it: the probe decides.
    put_if_absent=PutIfAbsent.UNKNOWN,
    pack_bytes=64 * MIB,  # one request, held in memory; AWS advises multipart above 100 MB
    part_bytes=64 * MIB,
    read_gap_bytes=1 * MIB,  # a request's latency of 20-50 ms at 50 MB/s a connection
    read_bytes_max=16 * MIB,  # AWS's performance guide: ranges of 8-16 MB
    concurrency=16,
    scatter_read=False,
    lookup_lag_s=0.0,  # strongly consistent, listings too; S3 since December 2020
)
"""Properties of S3 and of GCS."""

CheckRange = Callable[[str, int | None], None]
"""Takes an answer's ``Content-Range`` and its length, if known; raises to refuse its body."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketLocation:
    """Bucket and prefix below which the keys of one store lie."""

    url: str
    """As the user would write it."""
    bucket: str
    prefix: str
    """Prefix of the object name of every key: empty, or ending in ``/``."""

    def object_name(self, key: str) -> str:
        """Return the object name of `key` within the bucket."""
        return self.prefix + check_key(key)


def parse_bucket_url(url: str) -> BucketLocation:
    """Return the bucket and prefix of a URL.

    Raises
    ------
    InvalidUrlError
        It has no bucket, or parts that such a URL must not have. A URL with credentials is
        refused without being repeated.
    """
    scheme, _, rest = url.partition("://")
    bucket, _, path = rest.partition("/")
    if "@" in bucket or ":" in bucket:
        msg = f"a {scheme}:// URL with credentials or a port"
        raise InvalidUrlError(msg, hint="give them as storage options (key=, endpoint_url=)")
    if "?" in rest or "#" in rest:
        msg = f"a {scheme}:// URL with a query or fragment"
        raise InvalidUrlError(msg, hint="give settings as storage options")
    path = path.rstrip("/")
    if not bucket or "//" in f"/{path}" or ".." in path.split("/"):
        msg = f"not a bucket and a path: {url!r}"
        raise InvalidUrlError(msg, hint=f"write {scheme}://bucket/path")
    return BucketLocation(url=url.rstrip("/"), bucket=bucket, prefix=f"{path}/" if path else "")


class BucketBackend(Backend, Generic[C]):
    """The objects below one prefix of a bucket. A subclass sends the requests.

    Parameters
    ----------
    location
        Bucket and prefix; the bucket is never created.
    client
        Holds the client of each process.
    pack_class
        Storage class of new packs; empty for the bucket's own.
    """

    def __init__(
        self,
        location: BucketLocation,
        client: PerProcess[C],
        *,
        pack_class: str = "",
    ) -> None:
        self.url = location.url
        self._location = location
        self._client = client
        self._pack_class = pack_class

    @property
    def capabilities(self) -> Capabilities:
        """Return the properties of this storage."""
        return CAPABILITIES

    def put(self, key: str, data: Buffer) -> None:
        """Write a whole object by one request."""
        self._upload(key, self._body(key, data))

    def put_if_absent(self, key: str, data: Buffer) -> None:
        """Create an object by one request with a condition."""
        self._upload(key, self._body(key, data), conditional=True)

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill `buffers` from one ranged GET."""
        wanted = wanted_bytes(buffers)
        if not wanted:
            self.stat(key)
            return

        def check(span: str, size: int | None) -> None:
            """Refuse an answer with another range, and one that is too short."""
            if not span.startswith(f"bytes {offset}-"):
                msg = f"get {key}: the storage ignores ranges"
                raise StorageError(msg)
            if size is not None and size < wanted:
                msg = f"{key} ends before byte {offset + wanted}"
                raise CorruptObjectError(msg)

        if self._receive(key, f"bytes={offset}-{offset + wanted - 1}", buffers, check):
            msg = f"get {key}: the answer was cut short"
            raise TransientStorageError(msg)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """Yield objects page by page, each page fresh from the storage."""
        root = self._location.prefix
        what, first = f"list {prefix}", root + after if after else ""
        last = token = ""
        while True:
            items, token = self._page(what, root + check_prefix(prefix), first, token)
            for name, item in items:
                key = name[len(root) :]
                if key <= after or not is_key(key):
                    continue
                if key <= last:
                    msg = f"{what}: the storage does not list in order"
                    raise StorageError(msg)
                last = key
                yield self._info(key, item)
            if not token:
                return

    @abstractmethod
    def _body(self, key: str, data: Buffer) -> Foreign:
        """Return an object in the form that :meth:`_upload` takes."""

    @abstractmethod
    def _upload(
        self, key: str, body: Foreign, *, conditional: bool = False, storage_class: str = ""
    ) -> None:
        """Send an object; with `conditional` only if its name is free."""

    @abstractmethod
    def _receive(
        self, key: str, span: str, buffers: Sequence[memoryview], check: CheckRange
    ) -> int:
        """Fill `buffers` by a GET of a range; return the number of bytes that are missing."""

    @abstractmethod
    def _page(
        self, what: str, prefix: str, after: str, token: str
    ) -> tuple[Iterable[tuple[str, Mapping[str, Any]]], str]:
        """Return a page of a listing: names and records of objects; and the next page's token.

        Parameters
        ----------
        prefix
            Beginning of the names.
        after
            Name to begin after, or with; empty for the first.
        token
            Of the page before; empty for the first page.
        """

    @abstractmethod
    def _info(self, key: str, item: Mapping[str, Any]) -> ObjectInfo:
        """Return the facts in the storage's record of an object."""

    @staticmethod
    @abstractmethod
    def _translate(error: Exception, what: str, *, conditional: bool) -> CkptStoreError:
        """Return the error of ckptstore's tree for an error of the client."""

    def _class_of_new(self, key: str) -> str:
        """Return the storage class in which to write a large object; empty for the bucket's own."""
        return self._pack_class if is_classed(key) else ""

    def _run(self, what: str, work: Callable[[C], T], *, conditional: bool = False) -> T:
        """Return ``work(client)``, translating the errors that it raises."""
        try:
            return work(self._client.get())
        except CkptStoreError:
            raise
        except Exception as error:
            raise self._translate(error, what, conditional=conditional) from error

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"
