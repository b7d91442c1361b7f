"""S3 and storage that speaks its protocol.

Every request is one plain call of the S3 API, sent once, since retries belong to the retry
wrapper. Two clients can send it: botocore alone (``s3_direct``), which moves a byte for half of
the processor time, and s3fs (``s3_fsspec``), which knows every option of s3fs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final

from ckptstore import errors, limits
from ckptstore.argument_checks import check_among
from ckptstore.backends import base, bucket, storage_classes
from ckptstore.backends.bucket import Foreign, Wait
from ckptstore.backends.buffers import BufferPool
from ckptstore.backends.parted_writer import PartedWriter, gone
from ckptstore.backends.per_process import PerProcess
from ckptstore.backends.s3_calls import Request, S3Calls, code_of, read_settings, translate
from ckptstore.backends.s3_direct import direct_client
from ckptstore.backends.scatter import wanted_bytes
from ckptstore.errors import ColdObjectError, LimitError, StorageError, TransientStorageError
from ckptstore.format.keys import PACKS_PREFIX

_CLIENTS: Final = ("auto", "direct", "s3fs")
# Endings that AWS reserves: directory buckets (S3 Express One Zone), and access points to them.
_DIRECTORY: Final = ("--x-s3", "--xa-s3")


class S3Backend(bucket.BucketBackend[S3Calls]):
    """The objects below one prefix of a bucket.

    Parameters
    ----------
    scatter_read
        Whether the client receives straight into the caller's buffers.
    requests
        Most requests on their way at once.
    """

    name = "s3"

    def __init__(
        self,
        location: bucket.BucketLocation,
        client: PerProcess[S3Calls],
        *,
        scatter_read: bool,
        pack_class: object = None,
        requests: object = limits.REQUESTS_AT_ONCE_MAX,
    ) -> None:
        copies = 1 if scatter_read else 2
        super().__init__(location, client, pack_class=pack_class, requests=requests, copies=copies)
        self._scatter_read = scatter_read

    @property
    def capabilities(self) -> base.Capabilities:
        """Return the properties of S3 with this client."""
        return replace(
            super().capabilities, scatter_read=self._scatter_read, part_bytes=limits.PART_BYTES
        )

    def staging(self) -> BufferPool:
        """Return the memory of parts."""
        return self._sender.get().pool

    def open_writer(self, key: str) -> base.ObjectWriter:
        """Return a writer that sends a multipart upload, or one PUT if it is small."""
        return PartedWriter(_Upload(self, key, self._class_of_new(key)), self._sender.get())

    def get(self, key: str, *, bytes_max: int) -> bytes:
        """Return a whole object."""

        def accept(answer: Mapping[str, Any]) -> None:
            """Refuse a body that is larger than allowed."""
            base.check_size(key, _length(answer), bytes_max)

        return self._run(f"get {key}", lambda calls: calls.read(self._object(key), accept))

    def stat(self, key: str) -> base.ObjectInfo:
        """Return size and time by a HEAD."""
        return self._info(key, self._call(f"stat {key}", "head_object", self._object(key)))

    def delete(self, key: str) -> None:
        """Delete an object; S3 accepts a missing one, servers like it may answer 404."""
        with suppress(errors.ObjectNotFoundError):
            self._call(f"delete {key}", "delete_object", self._object(key))

    def cold_storage(self) -> storage_classes.ColdStorage:
        """Return access to the storage classes of these objects."""
        return S3ColdStorage(self._object, self._run)

    def remove_leftovers(self, *, modified_before: float, dry_run: bool = False) -> base.Leftovers:
        """Abort the multipart uploads that writers left behind; their sizes are not told.

        None are found where the storage does not list them, or not with these credentials: then a
        rule of the bucket has to abort old ones.
        """
        prefix = self._location.prefix + PACKS_PREFIX  # other programs may use what is beside
        query: dict[str, Any] = {"Bucket": self._location.bucket, "Prefix": prefix}
        count = 0
        while True:
            try:
                page = self._call("list uploads", "list_multipart_uploads", query)
            except errors.TransientStorageError:
                raise
            except errors.StorageError:
                return base.Leftovers(count=count)
            for item in page.get("Uploads", ()):
                if item["Initiated"].timestamp() >= modified_before:
                    continue
                count += 1
                if not dry_run:
                    one = {name: item[name] for name in ("Key", "UploadId")}
                    what, one = f"abort {item['Key']}", {"Bucket": self._location.bucket, **one}
                    with suppress(errors.ObjectNotFoundError):  # completed, or aborted, meanwhile
                        self._call(what, "abort_multipart_upload", one)
            if not page.get("IsTruncated"):
                return base.Leftovers(count=count)
            query["KeyMarker"] = page["NextKeyMarker"]
            query["UploadIdMarker"] = page["NextUploadIdMarker"]

    def _body(self, key: str, data: base.Buffer) -> base.Buffers:
        return [memoryview(data).cast("B")]

    def _upload(
        self, key: str, body: bucket.Foreign, *, conditional: bool = False, storage_class: str = ""
    ) -> None:
        """Send one PUT; its condition is ``If-None-Match: *``."""
        request = self._object(key)
        if storage_class:
            request["StorageClass"] = storage_class
        if conditional:
            request["IfNoneMatch"] = "*"
        if key.endswith(".html"):
            request["ContentType"] = "text/html"
        what = f"{'create' if conditional else 'put'} {key}"
        self._send(what, "put_object", request, body, conditional=conditional)

    def _receive(
        self, key: str, span: str, buffers: base.Buffers, check: bucket.CheckRange, wait: Wait
    ) -> int:
        request = self._object(key) | {"Range": span}

        def accept(answer: Mapping[str, Any]) -> None:
            """Look at the head of the answer."""
            wait.begun()
            check(answer.get("ContentRange", ""), answer.get("ContentLength"))

        def receive(calls: S3Calls) -> int:
            """Send the request."""
            return calls.read_into(request, buffers, accept, wait.sent())

        return self._run(f"get {key}", receive, size_bytes=wanted_bytes(buffers))

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
            raise errors.StorageError(msg)
        return items, following if page.get("IsTruncated") else ""

    def _info(self, key: str, item: Mapping[str, Any]) -> base.ObjectInfo:
        """Return the facts in an entry of a listing, or in the answer to a HEAD."""
        return base.ObjectInfo(
            key=key,
            size_bytes=item["Size"] if "Size" in item else _length(item),
            modified_at=item["LastModified"].timestamp(),
            storage_class=item.get("StorageClass") or storage_classes.STANDARD,
        )

    _translate = staticmethod(translate)

    def _object(self, key: str) -> Request:
        return {"Bucket": self._location.bucket, "Key": self._location.object_name(key)}

    def _send(
        self, what: str, method: str, request: Request, body: base.Buffers, **condition: bool
    ) -> bucket.Foreign:
        """Send a request with a body."""
        size = sum(map(len, body))
        return self._run(
            what, lambda calls: calls.send(method, request, body), size_bytes=size, **condition
        )

    def _call(self, what: str, method: str, request: Request) -> bucket.Foreign:
        """Return the answer of one call of the S3 API."""
        return self._run(what, lambda calls: calls.call(method, request))


@dataclass(slots=True)
class _Upload:
    """The requests of one object; see :class:`ckptstore.backends.parted_writer.Upload`."""

    backend: S3Backend
    key: str
    storage_class: str
    upload_id: str = ""
    _object: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self._object = self.backend._object(self.key)

    def whole(self, body: base.Buffers) -> None:
        """Send all of the object by one PUT."""
        self.backend._upload(self.key, body, storage_class=self.storage_class)

    def begin(self) -> None:
        """Begin a multipart upload."""
        request = dict(self._object)
        if self.storage_class:
            request["StorageClass"] = self.storage_class
        self.upload_id = self._call("begin", "create_multipart_upload", request)["UploadId"]

    def part(self, number: int, body: base.Buffers) -> dict[str, Any]:
        """Send a part; return what :meth:`complete` needs of it."""
        request = self._uploaded() | {"PartNumber": number}
        try:
            what = f"put part {number} of {self.key}"
            answer = self.backend._send(what, "upload_part", request, body)
        except errors.ObjectNotFoundError as error:
            raise gone(self.key) from error
        return {"PartNumber": number, "ETag": answer["ETag"]}

    def complete(self, receipts: Sequence[Any], size_bytes: int) -> None:
        """Make an object of the parts."""
        request = self._uploaded() | {"MultipartUpload": {"Parts": list(receipts)}}
        try:
            self._call("put", "complete_multipart_upload", request)
        except errors.ObjectNotFoundError:
            # No such upload: this was done by a try whose answer was lost.
            try:
                found = self.backend.stat(self.key).size_bytes
            except errors.ObjectNotFoundError:
                found = -1
            if found != size_bytes:
                raise gone(self.key) from None

    def abandon(self) -> None:
        self._call("abort", "abort_multipart_upload", self._uploaded())

    def _uploaded(self) -> dict[str, Any]:
        return self._object | {"UploadId": self.upload_id}

    def _call(self, what: str, method: str, request: Request) -> bucket.Foreign:
        return self.backend._call(f"{what} {self.key}", method, request)


def open_s3(
    url: str,
    *,
    client: str = "auto",
    pack_class: object = None,
    requests: object = limits.REQUESTS_AT_ONCE_MAX,
    **options: object,
) -> S3Backend:
    """Return the backend of ``s3://bucket/prefix``.

    Parameters
    ----------
    client
        ``direct``: botocore alone; ``s3fs``; ``auto``: direct if it knows all options.
    pack_class
        Storage class of new packs, such as ``STANDARD_IA``; other objects are never written in it.
    requests
        Most requests on their way at once, of all that is done with the store.
    options
        Those of ``s3fs.S3FileSystem``.

    Raises
    ------
    InvalidUrlError
        If the URL names no bucket, or a directory bucket, or carries credentials; or for another
        `client`.
    InvalidInputError
        `pack_class` names no class whose objects can always be read; `requests` is no number.
    MissingDependencyError
        s3fs is needed, and is not installed.
    """
    location = bucket.parse_bucket_url(url)
    if location.bucket.endswith(_DIRECTORY):
        msg = f"{location.bucket} is a directory bucket (S3 Express One Zone), which lists unsorted"
        raise errors.InvalidUrlError(msg, hint="take a general purpose bucket, and hot tiers")
    check_among("client", client, _CLIENTS)
    common: dict[str, Any] = {"pack_class": pack_class, "requests": requests}
    settings = None if client == "s3fs" else read_settings(options)
    if settings is not None:
        direct = PerProcess[S3Calls](direct_client, settings)
        return S3Backend(location, direct, scatter_read=True, **common)
    if client == "direct":
        msg = "only s3fs knows one of the storage options"
        raise errors.InvalidUrlError(msg, hint='leave out client="direct", or that option')
    try:
        from ckptstore.backends.s3_fsspec import s3fs_client  # s3fs takes half a second to import
    except ImportError as error:
        msg = f"one of the storage options needs a package that is not installed ({error.name})"
        raise errors.MissingDependencyError(msg, hint="pip install 'ckptstore[s3]'") from error
    by_s3fs = PerProcess[S3Calls](s3fs_client, options)
    return S3Backend(location, by_s3fs, scatter_read=False, **common)


_CLASSES: Final = (
    *(storage_classes.STANDARD, "STANDARD_IA", "ONEZONE_IA", "INTELLIGENT_TIERING"),
    *("GLACIER_IR", "GLACIER", "DEEP_ARCHIVE"),
)
_RESTORE = re.compile(r'ongoing-request="(true|false)"(?:,\s*expiry-date="([^"]*)")?')


Sender = Callable[[str, Callable[[S3Calls], Any]], Any]
"""The backend's way to send: ``send(what, work)`` is ``work(client)``, errors translated."""


class S3ColdStorage:
    """The classes of the objects below one prefix of a bucket.

    Parameters
    ----------
    location
        Bucket and prefix of the objects.
    send
        The backend's function for one request.
    """

    def __init__(self, name: Callable[[str], Request], send: Sender) -> None:
        self._object, self._send = name, send

    def restore_state(self, key: str) -> storage_classes.ObjectState:
        """Return class and state by a HEAD."""
        return _state(self._head(key))

    def set_class(self, key: str, name: str) -> bool:
        """Copy an object onto itself, into another class.

        Only if it has not changed since its class was read: a second caller, or a retry after a
        lost answer, must not copy it within one class. (Some releases of Ceph then delete the
        copy: https://tracker.ceph.com/issues/70746) Two concurrent callers may both copy it from
        its old class; the later copy stands.
        """
        head = self._head(key)
        before = _state(head)
        if before.storage_class == name:
            return False
        if not before.is_readable:
            msg = f"{key} is in {before.storage_class}, and cannot be moved unless it is restored"
            raise ColdObjectError(msg, hint="ckptstore thaw restores it for some days")
        if before.size_bytes > limits.S3_COPY_BYTES_MAX:
            most = limits.S3_COPY_BYTES_MAX
            msg = f"{key} has {before.size_bytes} bytes; S3 moves {most} at most"
            raise LimitError(msg, hint="a lifecycle rule of the bucket can move it")
        request = self._object(key) | {
            "CopySource": self._object(key),
            "CopySourceIfUnmodifiedSince": head["LastModified"],
            "StorageClass": name,
        }
        what = f"move {key} to {name}"

        def copy(calls: S3Calls) -> Exception | None:
            """Return the refusal if another client may have moved the object meanwhile."""
            try:
                calls.call("copy_object", request)
            except Exception as error:
                code = code_of(error)
                if code == "InvalidStorageClass":
                    msg = f"{what}: this storage has no such class"
                    raise StorageError(msg, hint="AWS has " + ", ".join(_CLASSES)) from error
                # Another client was quicker: its copy is newer than the object that was looked at.
                # Ceph tells times by the second, and refuses a copy within one class by itself.
                if code not in {"InvalidRequest", "PreconditionFailed"}:
                    raise
                return error
            return None

        refusal: Exception | None = self._send(what, copy)
        after = self.restore_state(key).storage_class
        if after == name:
            return refusal is None
        if refusal is not None and code_of(refusal) == "InvalidRequest":
            raise StorageError(f"{what}: {refusal}") from refusal
        if refusal is not None:
            msg = f"{what}: another client moved it to {after} at the same time"
            raise TransientStorageError(msg)
        msg = f"{what}: the object is in {after} afterwards"
        raise StorageError(msg, hint="does this storage have the class?")

    def request_restore(self, key: str, *, days: int, tier: str) -> bool:
        """Send a RestoreObject."""
        wanted: dict[str, Any] = {"GlacierJobParameters": {"Tier": tier}, "Days": days}
        if self.restore_state(key).storage_class == storage_classes.TIERING:
            del wanted["Days"]  # it is restored for good
        request = self._object(key) | {"RestoreRequest": wanted}

        def ask(calls: S3Calls) -> bool:
            """Return False if a restore is under way already."""
            try:
                calls.call("restore_object", request)
            except Exception as error:
                code = code_of(error)
                if code == "RestoreAlreadyInProgress":
                    return False
                if code == "GlacierExpeditedRetrievalNotAvailable":
                    msg = f"restore {key}: no capacity for tier {tier} at the moment"
                    raise StorageError(msg, hint="take --tier Standard, or try later") from error
                raise
            return True

        sent: bool = self._send(f"restore {key}", ask)
        return sent

    def _head(self, key: str) -> Foreign:
        request = self._object(key)
        return self._send(f"stat {key}", lambda calls: calls.call("head_object", request))


def _length(head: Mapping[str, Any]) -> int:
    """Return the size of an object from the answer to a GET or HEAD."""
    if "ContentLength" not in head:
        raise errors.StorageError("the storage answers without a length; look at its proxy")
    return int(head["ContentLength"])


def _state(head: Mapping[str, Any]) -> storage_classes.ObjectState:
    """Return class and state from the answer to a HEAD."""
    name = head.get("StorageClass") or storage_classes.STANDARD
    access, until = _access(name, head)
    return storage_classes.ObjectState(
        storage_class=name,
        size_bytes=_length(head),
        modified_at=head["LastModified"].timestamp(),
        access=access,
        restored_until=None if until is None else until.timestamp(),
    )


def _access(name: str, head: Mapping[str, Any]) -> tuple[storage_classes.Access, datetime | None]:
    if not (storage_classes.class_named(name).is_archive or head.get("ArchiveStatus")):
        return "readable", None
    told = _RESTORE.search(head.get("Restore") or "")
    if told is None:
        return "cold", None
    if told[1] == "true":
        return "restoring", None
    return "restored", parsedate_to_datetime(told[2]) if told[2] else None
