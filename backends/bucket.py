"""Object stores: everything that S3, GCS and Azure have in common.

The objects of a store lie below one prefix of a bucket, ``scheme://bucket/prefix``. The backend of
an object store sends plain requests, each once, since retries belong to the retry wrapper.

A few of many reads take much longer than the others, and the last one decides when a load ends: a
read that waits too long is sent again, as AWS's performance guide advises for the slowest 5 %.
"""

from __future__ import annotations

import statistics
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, TypeVar

from ckptstore import errors, limits
from ckptstore.backends import base
from ckptstore.backends.part_sender import PartSender
from ckptstore.backends.per_process import PerProcess
from ckptstore.backends.scatter import wanted_bytes
from ckptstore.backends.storage_classes import check_pack_class, is_classed
from ckptstore.backends.transfers import Recorder
from ckptstore.backends.width import check_requests
from ckptstore.config import SYSTEM
from ckptstore.limits import MIB

C = TypeVar("C")
T = TypeVar("T")
Foreign = Any
"""A value of a client library, which ship no types."""

CAPABILITIES: Final = base.Capabilities(
    # AWS keeps the condition since August 2024, Google promises ifGenerationMatch=0; other servers
    # and emulators ignore or refuse it: the probe decides.
    put_if_absent=base.PutIfAbsent.UNKNOWN,
    pack_bytes=64 * MIB,
    part_bytes=64 * MIB,
    read_gap_bytes=1 * MIB,  # a request's latency of 20-50 ms at 50 MB/s a connection
    read_bytes_max=8 * MIB,  # AWS's performance guide: ranges of 8-16 MB
    concurrency=limits.REQUESTS_AT_ONCE_MAX,
    scatter_read=False,
    lookup_lag_s=0.0,  # strongly consistent, listings too; S3 since December 2020
)
"""Properties of S3, GCS and Azure."""

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
        return self.prefix + base.check_key(key)


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
        raise errors.InvalidUrlError(msg, hint="give them as storage options (key=, endpoint_url=)")
    if "?" in rest or "#" in rest:
        hint = "give settings as options: ckptstore.open(url, requests=16), or --option requests=16"
        raise errors.InvalidUrlError(f"a URL of {scheme}:// with a query or fragment", hint=hint)
    path = path.rstrip("/")
    if not bucket or "//" in f"/{path}":
        msg = f"not a bucket and a path: {url!r}"
        raise errors.InvalidUrlError(msg, hint=f"write {scheme}://bucket/path")
    return BucketLocation(url=url.rstrip("/"), bucket=bucket, prefix=f"{path}/" if path else "")


class BucketBackend(base.Backend, Generic[C]):
    """The objects below one prefix of a bucket. A subclass sends the requests.

    Parameters
    ----------
    location
        Bucket and prefix; the bucket is never created.
    client
        Holds the client of each process.
    pack_class
        Storage class of new packs; empty for the bucket's own.
    requests
        Most requests on their way at once.
    copies
        How often the memory of a part is taken while it is sent: twice by clients that copy it.
    """

    def __init__(
        self,
        location: BucketLocation,
        client: PerProcess[C],
        *,
        pack_class: object = None,
        requests: object = limits.REQUESTS_AT_ONCE_MAX,
        copies: int = 1,
    ) -> None:
        self.url: str = location.url
        self._location = location
        self._client = client
        self._patience = PerProcess(Patience)
        self._pack_class = check_pack_class(pack_class)
        self._requests = most = check_requests(requests)
        self.transfers: PerProcess[Recorder] = PerProcess(Recorder, most)
        held_bytes = limits.PARTS_HELD_MAX * limits.PART_BYTES // copies
        self._sender = PerProcess(PartSender, most, held_bytes)

    @property
    def capabilities(self) -> base.Capabilities:
        """Return the properties of this storage."""
        return replace(CAPABILITIES, concurrency=self._requests)

    def put(self, key: str, data: base.Buffer) -> None:
        """Write a whole object by one request."""
        self._upload(key, self._body(key, data))

    def put_if_absent(self, key: str, data: base.Buffer) -> None:
        """Create an object by one request with a condition."""
        self._upload(key, self._body(key, data), conditional=True)

    def read_into(self, key: str, offset: int, buffers: base.Buffers) -> None:
        """Fill `buffers` from one ranged GET."""
        wanted = wanted_bytes(buffers)
        if not wanted:
            self.stat(key)
            return

        def check(span: str, size: int | None) -> None:
            """Refuse an answer with another range, and one that is too short."""
            if not span.startswith(f"bytes {offset}-"):
                hint = "use a server that answers range requests: docs/howto/publish.md"
                raise errors.StorageError(f"get {key}: the storage ignores ranges", hint=hint)
            if size is not None and size < wanted:
                raise errors.CorruptObjectError(f"{key} ends before byte {offset + wanted}")

        span = f"bytes={offset}-{offset + wanted - 1}"
        if self._receive_in_time(key, span, buffers, check):
            raise errors.TransientStorageError(f"get {key}: the answer was cut short")

    def _receive_in_time(
        self, key: str, span: str, buffers: base.Buffers, check: CheckRange
    ) -> int:
        """Send one GET; a second one if the answer to the first does not begin for long."""
        patience = self._patience.get()
        wait = Wait(patience, patience.limit_s())
        try:
            return self._receive(key, span, buffers, check, wait)
        except errors.TransientStorageError:
            if not wait.is_over:
                raise
        patience.over()
        self.transfers.get().late()
        return self._receive(key, span, buffers, check, Wait(patience))

    def list(self, prefix: str, *, after: str = "") -> Iterator[base.ObjectInfo]:
        """Yield objects page by page, each page fresh from the storage."""
        root = self._location.prefix
        what, first = f"list {prefix}", root + after if after else ""
        last = token = ""
        while True:
            items, token = self._page(what, root + base.check_prefix(prefix), first, token)
            for name, item in items:
                key = name[len(root) :]
                if key <= after or not base.is_key(key):
                    continue
                if key <= last:
                    msg = f"{what}: the storage does not list in order"
                    raise errors.StorageError(msg, hint="docs/howto/s3-and-gcs.md#requirements")
                last = key
                yield self._info(key, item)
            if not token:
                return

    def close(self) -> None:
        """Wait for parts on their way; close this process's connections, release its buffers."""
        client: Foreign = self._client.take()
        for held in (self._sender.take(), client):
            if held is not None:
                held.close()

    @abstractmethod
    def _body(self, key: str, data: base.Buffer) -> Foreign:
        """Return an object in the form that :meth:`_upload` takes."""

    @abstractmethod
    def _upload(
        self, key: str, body: Foreign, *, conditional: bool = False, storage_class: str = ""
    ) -> None:
        """Send an object; with `conditional` only if its name is free."""

    @abstractmethod
    def _receive(
        self, key: str, span: str, buffers: base.Buffers, check: CheckRange, wait: Wait
    ) -> int:
        """Fill `buffers` by a GET of a range; return the number of bytes that are missing.

        `wait` is told when the request is sent and when its answer begins; if that is later than
        its limit, the request fails with :class:`TransientStorageError`.
        """

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
    def _info(self, key: str, item: Mapping[str, Any]) -> base.ObjectInfo:
        """Return the facts in the storage's record of an object."""

    @staticmethod
    @abstractmethod
    def _translate(error: Exception, what: str, *, conditional: bool) -> errors.CkptStoreError:
        """Return the error of ckptstore's tree for an error of the client."""

    def _class_of_new(self, key: str) -> str:
        """Return the storage class in which to write a large object; empty for the bucket's own."""
        return self._pack_class if is_classed(key) else ""

    def _run(
        self, what: str, work: Callable[[C], T], *, conditional: bool = False, size_bytes: int = 0
    ) -> T:
        """Return ``work(client)``, which sends one request; waits until it may be sent.

        Parameters
        ----------
        what
            Name of the request, for errors; those that begin with ``get``, ``list`` or ``stat``
            count as reads (:mod:`ckptstore.backends.transfers`).
        size_bytes
            Bytes that the request moves, for the width of the requests at once.

        Raises
        ------
        CkptStoreError
            For what `work` raises.
        """
        recorder = self.transfers.get()
        width, call = recorder.width, what.partition(" ")[0]
        with width.request(size_bytes) as passing, recorder.request(call) as sent:
            try:
                result = work(self._client.get())
            except Exception as error:
                found = error
                if not isinstance(error, errors.CkptStoreError):
                    found = self._translate(error, what, conditional=conditional)
                if isinstance(found, errors.TransientStorageError) and found.slow_down:
                    width.refused()
                if found is error:
                    raise
                raise found from error
            sent["thin_count"] = int(passing.thin)
            whole = len(result) if isinstance(result, bytes) else 0
            sent["requests_bytes"] = max(size_bytes, passing.moved_bytes, whole)
            return result


ANSWERS: Final = 64
"""Recent answers to judge by."""
MEDIANS: Final = 5
"""An answer is late after so many of their medians. Source: the spread of usual answers."""
MIN_S: Final = 0.25
"""None is late before. Source: some times the 20 to 50 ms that an object store takes."""
SHARE: Final = 0.05
"""Of all requests that may be replaced. Source: AWS's performance guide."""


class Patience:
    """Learns from each answer how long the next may take. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._recent: deque[float] = deque(maxlen=ANSWERS)
        self._asked = 0
        self.replaced = 0
        """Requests that were given up for another."""

    def limit_s(self) -> float:
        """Return the seconds until the answer to the next request must begin; 0 for no limit.

        A multiple of the median of recent answers. None before there are some, nor while more
        than one of 20 requests was replaced: then all are slow, and more would not help.
        """
        with self._lock:
            self._asked += 1
            known = len(self._recent) * 2 >= ANSWERS
            if not known or self.replaced > self._asked * SHARE:
                return 0.0
            median = statistics.median(self._recent)
        return max(MIN_S, MEDIANS * median)

    def begun(self, seconds: float) -> None:
        """Note how long an answer took to begin."""
        with self._lock:
            self._recent.append(seconds)

    def over(self) -> None:
        """Note that a request is replaced."""
        with self._lock:
            self.replaced += 1


class Wait:
    """One request and the seconds until its answer must begin; of one thread.

    Parameters
    ----------
    limit_s
        Zero: as long as it takes.
    """

    def __init__(self, patience: Patience, limit_s: float = 0.0) -> None:
        self._patience = patience
        self.limit_s: Final = limit_s
        self._sent_at = 0.0
        self._answered = False

    def sent(self) -> float:
        """Note that the request is sent now; return the seconds that it has, 0 for no limit."""
        self._sent_at = SYSTEM.monotonic()
        return self.limit_s

    def begun(self) -> None:
        """Note that its answer begins."""
        self._answered = True
        self._patience.begun(SYSTEM.monotonic() - self._sent_at)

    @property
    def is_over(self) -> bool:
        """True if the request failed since its answer did not begin in time."""
        waited_s = SYSTEM.monotonic() - self._sent_at
        return bool(self.limit_s) and not self._answered and waited_s >= self.limit_s
