"""Catalog snapshots: the folded catalog as one object, a cache that the log can always rebuild.

A binary frame (:mod:`ckptstore.format.framing`) around one MessagePack array. Rows are arrays
too, and what is asked for rarely (manifest, sizes, metadata, receipt) is one opaque field of its
row, decoded when a version is looked at: a row then costs about 650 bytes of memory, and opening
a large catalog does not build millions of small objects.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta

from ckptstore import limits
from ckptstore.errors import CorruptObjectError, LimitError
from ckptstore.format import fields
from ckptstore.format.fields import CommitNumber, Count, Id, IdOrEmpty, TimeMs
from ckptstore.format.framing import UNDECODABLE, decode_frame, encode_frame, parsed
from ckptstore.format.keys import MANIFEST_KEY_PATTERN

T = TypeVar("T")

MAGIC: Final = b"CKPTSNAP"


class Flag:
    """Flags of a version; append-only."""

    DELETED: Final = 1
    ABANDONED: Final = 2
    """A rollback left it beside the line of the run."""
    PINNED: Final = 4
    VERIFIED: Final = 8
    """Every byte was read and found sound, once, since it lies where it lies."""
    WEIGHTS_ONLY: Final = 16
    RECORD_ONLY: Final = 32
    DAMAGED: Final = 64
    """A repair found parts of it lost; until it is mended or found sound."""
    ALL: Final = 127


RawDigest = Annotated[bytes, Meta(min_length=32, max_length=32)]


class Details(msgspec.Struct, frozen=True, array_like=True):
    """The fields of a version that listings and refs do not look at."""

    manifest_key: Annotated[str, Meta(pattern=MANIFEST_KEY_PATTERN)]
    manifest_bytes: Count
    manifest_digest: RawDigest
    content: RawDigest
    roles: Annotated[dict[str, tuple[Count, Count, Count]], Meta(max_length=limits.ROLES_MAX)]
    """Role to logical, new and stored bytes."""
    receipt: Annotated[dict[str, float], Meta(max_length=limits.RECEIPT_ENTRIES_MAX)]
    metadata: Annotated[bytes, Meta(max_length=limits.METADATA_BYTES_MAX)]
    """The user's JSON object."""
    origin: IdOrEmpty = ""
    """Id of the store that it was first saved in; empty for this one."""
    replicas: Annotated[tuple[Id, ...], Meta(max_length=limits.REPLICAS_MAX)] = ()
    """Ids of other stores that have it, in the order in which that was noted."""
    pinned_by: Annotated[tuple[IdOrEmpty, ...], Meta(max_length=limits.REPLICAS_MAX + 1)] = ()
    """With ``PINNED``: ids of the stores that it is kept for, and an empty one if it is pinned for
    this store too. None at all: for this store alone."""


class _ManifestKey(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The first field of :class:`Details`; the others are skipped."""

    manifest_key: str


class VersionRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One version in the catalog, in memory as in a snapshot."""

    id: str
    """32 hex digits. Checked by the catalog, for all rows at once: a tenth of the time."""
    run: str
    step: Count
    parent: str
    """Id of a row before it; empty if it has none."""
    at_ms: TimeMs
    commit: CommitNumber
    metrics: bytes
    """MessagePack map of name to float, see :func:`decode_metrics`."""
    details: bytes
    """MessagePack of :class:`Details`, see :func:`decode_details`."""
    flags: Annotated[int, Meta(ge=0, le=Flag.ALL)] = 0
    """What has become of it: ``DELETED``, ``ABANDONED`` and so on."""
    encoding: fields.EncodingName = ""
    """With ``WEIGHTS_ONLY``: what the weights were rounded to, if they were."""


class RunRow(msgspec.Struct, array_like=True):
    """One run in a snapshot."""

    name: str
    created_at_ms: TimeMs
    metrics: dict[str, fields.Direction]
    head: IdOrEmpty
    tags: dict[str, Id]
    origin: IdOrEmpty = ""
    """The version that it was forked from."""
    policy: Annotated[bytes, Meta(max_length=limits.METADATA_BYTES_MAX)] = b""
    """JSON, or empty."""
    held: bool = False
    """A rollback that was decided here moved its head last."""


class SnapshotBody(msgspec.Struct, frozen=True, array_like=True):
    """The catalog after a commit."""

    number: CommitNumber
    digest: fields.Digest
    """Of the body of that commit."""
    runs: Annotated[list[RunRow], Meta(max_length=limits.SNAPSHOT_RUNS_MAX)]
    """In the order of their creation."""
    versions: Annotated[list[VersionRow], Meta(max_length=limits.SNAPSHOT_VERSIONS_MAX)]
    """In the order of their commits."""
    condemned: dict[str, CommitNumber] = {}
    """Keys of objects that are to be deleted, and the commit that condemned each."""
    policy: Annotated[bytes, Meta(max_length=limits.METADATA_BYTES_MAX)] = b""
    """JSON, or empty: for runs that have none."""
    replicas: Annotated[dict[str, tuple[str, Id]], Meta(max_length=limits.REPLICAS_MAX)] = {}
    """Name of a replica to where it is and the id of its store, in the order of their naming."""


_SNAPSHOT: Final = msgspec.msgpack.Decoder(SnapshotBody)
_DETAILS: Final = msgspec.msgpack.Decoder(Details)
_MANIFEST_KEY: Final = msgspec.msgpack.Decoder(_ManifestKey)
_METRICS: Final[msgspec.msgpack.Decoder[dict[str, float]]] = msgspec.msgpack.Decoder(
    Annotated[dict[str, float], Meta(max_length=limits.METRICS_MAX)]
)


def encode_snapshot(body: SnapshotBody) -> bytes:
    """Return the object that holds `body`.

    Raises
    ------
    LimitError
        If a reader would refuse it for its rows.
    """
    versions, runs = len(body.versions), len(body.runs)
    if versions > limits.SNAPSHOT_VERSIONS_MAX or runs > limits.SNAPSHOT_RUNS_MAX:
        msg = f"a catalog snapshot of {versions} versions in {runs} runs is over the limit"
        raise LimitError(msg)
    return encode_frame(MAGIC, msgspec.msgpack.encode(body))


def decode_snapshot(data: bytes, *, where: str) -> SnapshotBody:
    """Check and parse a snapshot; how its rows hang together is checked by the catalog.

    Raises
    ------
    CorruptObjectError
        If the frame, a type or a limit is wrong.
    UnsupportedFeatureError
        If it has a newer format.
    """
    raw = decode_frame(MAGIC, data, where=where, raw_bytes_max=limits.SNAPSHOT_RAW_BYTES_MAX)
    return parsed(_SNAPSHOT.decode, raw, f"{where} is not a catalog snapshot")


def encode_metrics(metrics: dict[str, float]) -> bytes:
    """Pack metrics for a row; NaN and infinities are kept."""
    return msgspec.msgpack.encode(metrics)


def decode_metrics(row: VersionRow) -> dict[str, float]:
    """Return the metrics of a row.

    Raises
    ------
    CorruptObjectError
        If the snapshot that the row came from holds something else there.
    """
    return decoded(_METRICS.decode, row.metrics, "metrics", row)


def decode_manifest_key(row: VersionRow) -> str:
    """Return the manifest's key alone: many times as fast as all details, which are not checked.

    Raises
    ------
    CorruptObjectError
        If the snapshot that the row came from holds something else there.
    """
    return decoded(_MANIFEST_KEY.decode, row.details, "details", row).manifest_key


def decode_details(row: VersionRow) -> Details:
    """Return the rarely used fields of a row.

    Raises
    ------
    CorruptObjectError
        If the snapshot that the row came from holds something else there.
    """
    return decoded(_DETAILS.decode, row.details, "details", row)


def decoded(decode: Callable[[bytes], T], data: bytes, what: str, row: VersionRow) -> T:
    """Return what a decoder makes of a part of a row; raise CorruptObjectError if it refuses it."""
    try:
        return decode(data)
    except UNDECODABLE as error:
        msg = f"the catalog snapshot has damaged {what} for version {row.id}: {error}"
        raise CorruptObjectError(msg) from error


def with_details(row: VersionRow, **changes: object) -> VersionRow:
    """Return a row some of whose details are others.

    Raises
    ------
    CorruptObjectError
        As for :func:`decode_details`.
    """
    details = msgspec.structs.replace(decode_details(row), **changes)
    return msgspec.structs.replace(row, details=msgspec.msgpack.encode(details))
