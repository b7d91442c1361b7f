"""Azure Blob Storage, through Microsoft's library, one request a call.

Every object is one block blob, written by one Put Blob, or a large one in blocks, which Azure drops
after a week if they are not committed. The library's own retries are off. It would
repeat a download three times if its body is cut, with a second's pause each; so the body is
received in its hook for answers, which is also what saves a copy.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from typing import Any, Final
from urllib.parse import quote
from xml.etree import ElementTree as ET

from azure.core.exceptions import ClientAuthenticationError, ServiceRequestError
from azure.storage.blob import BlobBlock, ContentSettings, StandardBlobTier
from urllib3.exceptions import ConnectTimeoutError, NewConnectionError

from ckptstore import errors, limits
from ckptstore.backends import azure_thin, base
from ckptstore.backends.azure_settings import NO_CREDENTIALS, open_container, read_settings
from ckptstore.backends.bucket import BucketBackend, BucketLocation, CheckRange, Foreign, Wait
from ckptstore.backends.buffers import BufferPool
from ckptstore.backends.httperrors import answer_of, error_for_answer, error_for_silence
from ckptstore.backends.parted_writer import PartedWriter
from ckptstore.backends.per_process import PerProcess
from ckptstore.backends.receiving import receive_into, wait_for_body
from ckptstore.backends.scatter import wanted_bytes
from ckptstore.backends.storage_classes import STANDARD, ColdStorage, ObjectState

_NOT_SENT: Final = (NewConnectionError, ConnectTimeoutError)
_FOLDER: Final = "hdi_isfolder"
"""Metadata of a directory, which accounts with a hierarchical namespace list as an empty blob."""


class AzureBackend(BucketBackend[Foreign]):
    """The blobs below one prefix of a container."""

    name = "azure"

    def __init__(
        self,
        location: BucketLocation,
        client: PerProcess[Foreign],
        *,
        pack_class: object = None,
        requests: object = limits.REQUESTS_AT_ONCE_MAX,
    ) -> None:
        super().__init__(location, client, pack_class=pack_class, requests=requests, copies=2)
        if self._pack_class:
            tier_of(self._pack_class)  # raises if Azure has no such tier
        self._long: set[str] = set()
        """Prefixes that have more than a page of names before those that were asked for."""

    @property
    def capabilities(self) -> base.Capabilities:
        """Return the properties of an object store; ranges are received in place."""
        return replace(super().capabilities, scatter_read=True, part_bytes=limits.PART_BYTES)

    def staging(self) -> BufferPool:
        """Return the memory of parts."""
        return self._sender.get().pool

    def open_writer(self, key: str) -> base.ObjectWriter:
        """Return a writer that sends blocks, or one Put Blob if it is small."""
        upload = _Upload(self, base.check_key(key), self._class_of_new(key))
        return PartedWriter(upload, self._sender.get())

    def get(self, key: str, *, bytes_max: int) -> bytes:
        """Return a whole object."""
        found: list[bytearray] = []

        def take(headers: Mapping[str, str], answer: Foreign) -> None:
            """Refuse an object that is too large before receiving any of it."""
            size = _length(headers, key)
            base.check_size(key, size, bytes_max)
            body = bytearray(size)
            if receive_into(answer, [memoryview(body)]):
                raise errors.TransientStorageError(f"get {key}: the answer was cut short")
            found[:] = [body]

        self._download(key, take)
        return bytes(found[0])

    def stat(self, key: str) -> base.ObjectInfo:
        """Return size and time by a HEAD."""
        found = self._properties(key)
        if _FOLDER in map(str.lower, found.metadata or ()):
            raise errors.ObjectNotFoundError(f"stat {key}: it is a directory")
        return base.ObjectInfo(
            key=key,
            size_bytes=found.size,
            modified_at=found.last_modified.timestamp(),
            storage_class=class_of(found.blob_tier),
        )

    def delete(self, key: str) -> None:
        """Delete a blob; one that is not there is no error."""
        name = self._location.object_name(key)
        with suppress(errors.ObjectNotFoundError):
            self._run(f"delete {key}", lambda container: container.delete_blob(name))

    def cold_storage(self) -> ColdStorage:
        """Return access to the access tiers of these blobs."""
        return AzureColdStorage(self._properties, self._set_tier)

    def _body(self, key: str, data: base.Buffer) -> bytes:
        return bytes(data)

    def _upload(
        self, key: str, body: Foreign, *, conditional: bool = False, storage_class: str = ""
    ) -> None:
        """Send one Put Blob; its condition is ``If-None-Match: *``."""
        name = self._location.object_name(key)
        what = f"{'create' if conditional else 'put'} {key}"
        options = {"overwrite": not conditional, **_tier_option(storage_class)}
        page = key.endswith(".html")
        if page:
            options["content_settings"] = ContentSettings(content_type="text/html")
        headers = {"x-ms-blob-type": "BlockBlob"}
        if storage_class:
            headers["x-ms-access-tier"] = tier_of(storage_class)

        def upload(container: Foreign) -> None:
            """Send the blob; the server compares an MD5, which is no protection from malice."""
            short = not (conditional or page)
            if not (short and azure_thin.put(container, what, name, [memoryview(body)], headers)):
                container.upload_blob(name, body, validate_content=True, **options)

        self._run(what, upload, conditional=conditional, size_bytes=len(body))

    def _receive(
        self, key: str, span: str, buffers: base.Buffers, check: CheckRange, wait: Wait
    ) -> int:
        left = [wanted_bytes(buffers)]

        def take(headers: Mapping[str, str], answer: Foreign) -> None:
            """Fill the buffers from the body."""
            wait.begun()
            check(headers.get("Content-Range", ""), _length(headers, key))
            left[0] = receive_into(answer, buffers)

        self._download(key, take, wait, span=span, length=left[0])
        return left[0]

    def _download(
        self,
        key: str,
        take: Callable[[Mapping[str, str], Foreign], None],
        wait: Wait | None = None,
        span: str = "",
        length: int | None = None,
    ) -> None:
        """Send one GET, and pass headers and body of its answer, if it is a success, to `take`."""
        name, what = self._location.object_name(key), f"get {key}"

        def hook(response: Foreign) -> None:
            """Take the body before the library does."""
            answer = response.http_response
            if answer.status_code >= 300:
                answer.body()  # raises if it was cut: a refusal counts once it is there whole
                return
            try:
                wait_for_body(answer.internal_response.raw)
                take(answer.headers, answer.internal_response.raw)
            except BaseException:
                answer.internal_response.close()
                raise

        def download(container: Foreign) -> None:
            """Send the request; its answer has as long to begin as `wait` gives."""
            limit_s = (wait.sent() if wait else 0) or limits.READ_TIMEOUT_S
            if span:
                head = {"x-ms-range": span}
                short = azure_thin.send(container, what, name, head, limit_s=limit_s)
                if short is not None:
                    with closing(short):
                        return take(short.headers, short)
            at = int(span.removeprefix("bytes=").partition("-")[0]) if span else None
            how = {"raw_response_hook": hook, "read_timeout": limit_s}
            container.download_blob(name, offset=at, length=length, **how)
            return None

        self._run(what, download)

    def _page(
        self, what: str, prefix: str, after: str, token: str
    ) -> tuple[Iterable[tuple[str, Foreign]], str]:
        """Return a page; see the base class. Tokens are a part of the listing and Azure's marker.

        Azure begins each listing with the first name. If that is more than a page before `after`,
        the listing goes on with the folder of `after`, then with that folder's next neighbour.
        """
        folder = after[: after.rfind("/") + 1]
        skips = folder.startswith(prefix) and folder != prefix
        part, _, marker = token.rpartition("\n")
        if not token:
            part = folder if skips and prefix in self._long else prefix
        names, marker = self._part(what, part, marker)
        if marker and skips and part == prefix and (not names or names[-1][0] < after):
            self._long.add(prefix)
            return (), f"{folder}\n"
        if marker:
            return names, f"{part}\n{marker}"
        following = "" if part == prefix else self._neighbour(what, prefix, part)
        return names, f"{following}\n" if following else ""

    def _part(self, what: str, prefix: str, marker: str) -> tuple[list[tuple[str, Foreign]], str]:
        """Return one page of all blobs below a prefix, without directories, and the next marker."""

        def page(container: Foreign) -> tuple[list[tuple[str, Foreign]], str]:
            """Send one List Blobs, and take its answer before the library does.

            Of a thousand blobs the library makes objects in 0.24 s of processor time (measured),
            while training waits; reading what is needed takes a tenth.
            """
            found: list[tuple[str, Foreign]] = []

            def take(response: Foreign) -> None:
                """Find the names in a page of the listing."""
                if response.http_response.status_code < 300:
                    answer = ET.fromstring(response.http_response.body())  # noqa: S314
                    blobs = (blob for blob in answer.iter("Blob") if not _is_folder(blob))
                    found[:] = [(blob.findtext("Name", ""), blob) for blob in blobs]

            pages = container.list_blob_names(
                name_starts_with=prefix,
                results_per_page=limits.LIST_PAGE_OBJECTS,
                include=["metadata"],
                raw_response_hook=take,
            ).by_page(continuation_token=marker or None)
            next(pages)
            return found, pages.continuation_token or ""

        return self._run(what, page)

    def _neighbour(self, what: str, prefix: str, part: str) -> str:
        """Return what follows a part of a listing, within `prefix`: a folder or a name, or ""."""
        folder = part

        def first(container: Foreign) -> str:
            """Return the first entry of the folder that follows."""
            entries = container.walk_blobs(
                name_starts_with=max(folder, prefix), results_per_page=limits.LIST_PAGE_OBJECTS
            )
            later = (e.name for e in entries if e.name > part and not e.name.startswith(part))
            return min(later, default="")

        while folder.startswith(prefix) and folder != prefix:
            folder = folder[: folder.rstrip("/").rfind("/") + 1]
            if found := self._run(what, first):
                return found
        return ""

    def _info(self, key: str, item: Foreign) -> base.ObjectInfo:
        """Return the facts in an entry of a listing."""
        try:
            modified = parsedate_to_datetime(item.findtext("Properties/Last-Modified"))
            return base.ObjectInfo(
                key=key,
                size_bytes=int(item.findtext("Properties/Content-Length")),
                modified_at=modified.timestamp(),
                storage_class=class_of(item.findtext("Properties/AccessTier")),
            )
        except (TypeError, ValueError) as error:
            msg = f"list {key}: the storage does not tell its size and time"
            raise errors.StorageError(msg) from error

    def _properties(self, key: str) -> Foreign:
        return self._blob(f"stat {key}", key, lambda blob: blob.get_blob_properties())

    def _set_tier(self, what: str, key: str, tier: str, options: Mapping[str, str]) -> None:
        self._blob(what, key, lambda blob: blob.set_standard_blob_tier(tier, **options))

    def _blob(self, what: str, key: str, work: Callable[[Foreign], Foreign]) -> Foreign:
        """Send a request that names one object, by Azure's client of it."""
        name = self._location.object_name(key)
        return self._run(what, lambda container: work(container.get_blob_client(name)))

    @staticmethod
    def _translate(error: Exception, what: str, *, conditional: bool) -> errors.CkptStoreError:
        """Return the error of ckptstore's tree for an error of Azure's libraries."""
        if (answer := answer_of(error)) is not None:
            return error_for_answer(*answer, what, conditional=conditional)
        msg = f"{what}: {type(error).__name__}"
        if isinstance(error, ClientAuthenticationError):
            malformed = isinstance(error.__cause__, ValueError)  # seen when a request is signed
            hint = "the account key is no base64" if malformed else NO_CREDENTIALS
            return errors.StoragePermissionError(msg, hint=hint)
        if isinstance(error, ServiceRequestError) and isinstance(error.inner_exception, _NOT_SENT):
            hint = "nothing answers: check the account's name, the network and the proxy"
            return errors.TransientStorageError(msg, hint=hint)
        if isinstance(error, TypeError | ValueError | LookupError | ImportError):
            return errors.StorageError(msg, hint="check the storage options")
        return error_for_silence(msg, conditional=conditional)


def _length(headers: Mapping[str, str], key: str) -> int:
    """Return the length of an answer's body."""
    said = headers.get("Content-Length") or ""
    if not said.isdecimal():
        raise errors.StorageError(f"get {key}: the storage does not tell the length of its answer")
    return int(said)


def _is_folder(blob: Foreign) -> bool:
    """Return whether an entry of a listing is a directory."""
    return any(item.tag.lower() == _FOLDER for item in blob.iterfind("Metadata/*"))


@dataclass(slots=True)
class _Upload:
    """The requests of one blob; see :class:`ckptstore.backends.parted_writer.Upload`."""

    backend: AzureBackend
    key: str
    storage_class: str

    def whole(self, body: base.Buffers) -> None:
        """Send the blob."""
        self.backend._upload(self.key, b"".join(body), storage_class=self.storage_class)

    def begin(self) -> None:
        """Do nothing: the first block begins the blob."""

    def part(self, number: int, body: base.Buffers) -> str:
        """Send a block; return its id."""
        block = f"{number:06d}"  # ids of one blob have one length
        what = f"put block {number} of {self.key}"
        name = self.backend._location.object_name(self.key)
        query = f"comp=block&blockid={quote(base64.b64encode(block.encode()), safe='')}"

        def stage(container: Foreign) -> None:
            """Send the block, with an MD5."""
            if not azure_thin.put(container, what, name, body, query=query):
                blob = container.get_blob_client(name)
                blob.stage_block(block, b"".join(body), validate_content=True)

        self.backend._run(what, stage, size_bytes=sum(map(len, body)))
        return block

    def complete(self, receipts: Sequence[Any], size_bytes: int) -> None:
        """Make the blob of its blocks."""
        blocks = [BlobBlock(block) for block in receipts]
        tier = _tier_option(self.storage_class)
        what = f"put {self.key}"
        self.backend._blob(what, self.key, lambda blob: blob.commit_block_list(blocks, **tier))

    def abandon(self) -> None:
        """Do nothing: no request would drop blocks of a blob that is not there."""


def open_azure(
    url: str,
    *,
    pack_class: object = None,
    requests: object = limits.REQUESTS_AT_ONCE_MAX,
    **options: object,
) -> AzureBackend:
    """Return the backend of ``az://container/prefix``.

    Parameters
    ----------
    url
        Also ``abfs[s]://container@account.dfs.core.windows.net/prefix``.
    pack_class
        Access tier of new packs, ``Cool`` or ``Cold``; other objects are never written in it.
    requests
        Most requests on their way at once, of all that is done with the store.
    options
        As adlfs names them: ``account_name``, ``account_key``, ``connection_string``,
        ``sas_token``, ``credential``, ``anon`` ...

    Raises
    ------
    InvalidUrlError
        The URL names no container or has credentials; or an option is unknown.
    InvalidInputError
        `pack_class` names no class whose objects can always be read; `requests` is no number.
    """
    location, settings = read_settings(url, options)
    client = PerProcess[Foreign](open_container, settings)
    return AzureBackend(location, client, pack_class=pack_class, requests=requests)


_HOT: Final = "Hot"
_ARCHIVE: Final = "Archive"
_TIERS: Final = {STANDARD: _HOT, "Cool": "Cool", "Cold": "Cold", _ARCHIVE: _ARCHIVE}
"""Storage class -> access tier."""


def class_of(tier: str | None) -> str:
    """Return the storage class of an access tier; accounts without tiers tell none."""
    return STANDARD if tier in {None, "", _HOT} else str(getattr(tier, "value", tier))


def tier_of(name: str) -> str:
    """Return the access tier of a storage class.

    Raises
    ------
    InvalidInputError
        Azure has no such class.
    """
    if name not in _TIERS:
        msg = f"Azure has no access tier {name}"
        raise errors.InvalidInputError(msg, hint="Hot (STANDARD), Cool, Cold or Archive")
    return _TIERS[name]


def _tier_option(storage_class: str) -> dict[str, Any]:
    """Return the option of an upload that names the tier; empty for the account's own."""
    if not storage_class:
        return {}
    return {"standard_blob_tier": StandardBlobTier(tier_of(storage_class))}


@dataclass(frozen=True, slots=True)
class AzureColdStorage:
    """The access tiers of the blobs below one prefix of a container.

    Parameters
    ----------
    properties
        Returns the properties of a key's blob, by a HEAD.
    set_tier
        Sends one Set Blob Tier: operation, key, tier, further options.
    """

    properties: Callable[[str], Foreign]
    set_tier: Callable[[str, str, str, Mapping[str, str]], None]

    def restore_state(self, key: str) -> ObjectState:
        """Return class and state by a HEAD."""
        found = self.properties(key)
        name = class_of(found.blob_tier)
        pending = str(found.archive_status or "").startswith("rehydrate-pending")
        return ObjectState(
            storage_class=name,
            size_bytes=found.size,
            modified_at=found.last_modified.timestamp(),
            access="restoring" if pending else "cold" if name == _ARCHIVE else "readable",
        )

    def set_class(self, key: str, name: str) -> bool:
        """Set the tier, which moves no byte."""
        tier, before = tier_of(name), self.restore_state(key)
        if before.storage_class == name:
            return False
        if not before.is_readable:
            msg = f"{key} is in {before.storage_class}, and cannot be moved unless it is restored"
            raise errors.ColdObjectError(msg, hint="ckptstore thaw brings it back to Hot, in hours")
        self.set_tier(f"move {key} to {name}", key, tier, {})
        after = self.restore_state(key).storage_class
        if after != name:
            msg = f"move {key} to {name}: the object is in {after} afterwards"
            raise errors.StorageError(msg, hint="does this account have access tiers?")
        return True

    def request_restore(self, key: str, *, days: int, tier: str) -> bool:
        """Rehydrate to Hot, for good; `tier` is the priority, ``Standard`` or ``High``."""
        if self.restore_state(key).access != "cold":
            return False
        try:
            self.set_tier(f"restore {key}", key, _HOT, {"rehydrate_priority": tier})
        except errors.ColdObjectError:  # another request came first
            return False
        return True
