"""Commits: the numbered records of the log, and the operations that they hold.

A commit is one JSON envelope (:mod:`ckptstore.format.framing`) around::

    {"magic":"ckptstore-commit","format":1,"number":42,"previous":"<digest of commit 41's body>",
     "write_id":"<32 hex>","at_ms":1760000000000,"by":"ana@node7 4711","ops":[{"op":"save",...}]}

An operation of an unknown name, or a higher format, is refused: what it would do to the catalog
is not known. Unknown *fields* are ignored, so that later versions may add what older ones need
not know; a field that changes what a record means comes with a new operation, format or feature.
Metrics that are not finite are the texts ``nan``, ``inf`` and ``-inf`` in JSON, and floats here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, get_args

import msgspec

from ckptstore import limits
from ckptstore.errors import (
    CkptStoreError,
    CorruptObjectError,
    InvalidInputError,
    LimitError,
    UnsupportedFeatureError,
)
from ckptstore.format.fields import (
    Count,
    Digest,
    Direction,
    Directions,
    Id,
    ManifestPointer,
    Metrics,
    RoleSizes,
)
from ckptstore.format.framing import decode_envelope, encode_envelope
from ckptstore.format.keys import commit_key
from ckptstore.format.lifecycle_ops import (
    Condemn,
    Delete,
    Fork,
    Pin,
    Quarantine,
    Relocate,
    Rollback,
    SetPolicy,
    Swept,
    Undelete,
    Unpin,
    Verified,
)
from ckptstore.format.names import (
    check_metadata_json,
    check_metric_name,
    check_role,
    check_run_name,
    check_tag,
)
from ckptstore.format.replica_ops import Replicate, Replicated
from ckptstore.format.tier_ops import NameReplica, UnnameReplica

__all__ = [
    "Annotate",
    "Commit",
    "CreateRun",
    "Declare",
    "Direction",
    "ManifestPointer",
    "Op",
    "RoleSizes",
    "Save",
    "Tag",
    "Untag",
    "decode_commit",
    "encode_commit",
]

MAGIC: Final = "ckptstore-commit"
FORMAT: Final = 1


class CreateRun(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag="create-run"):
    """A run begins; its name must not be taken."""

    run: str
    metrics: Directions = {}

    def __post_init__(self) -> None:
        """Check the names."""
        check_run_name(self.run)
        _check_metric_names(self.metrics)


class Declare(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag="declare"):
    """A run learns directions of further metrics; what it knows must not change."""

    run: str
    metrics: Directions

    def __post_init__(self) -> None:
        """Check the names."""
        check_run_name(self.run)
        _check_metric_names(self.metrics)


class Save(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag="save"):
    """A version appears and becomes the head of its run."""

    version: Id
    run: str
    step: Count
    parent: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{32})?\Z")]
    """Id of the version that it continues, or empty."""
    manifest: ManifestPointer
    content: Digest
    """Digest of the state: equal for equal states, wherever they lie."""
    metrics: Metrics = {}
    tags: Annotated[Sequence[str], msgspec.Meta(max_length=limits.TAGS_PER_VERSION_MAX)] = ()
    metadata: msgspec.Raw = msgspec.Raw(b"{}")
    """The user's JSON object as :func:`ckptstore.format.names.encode_metadata` made it."""
    roles: Annotated[Mapping[str, RoleSizes], msgspec.Meta(max_length=limits.ROLES_MAX)] = {}
    receipt: Annotated[
        Mapping[str, float], msgspec.Meta(max_length=limits.RECEIPT_ENTRIES_MAX)
    ] = {}
    """Seconds and bytes of the save's stages; each name ends in its unit."""

    def __post_init__(self) -> None:
        """Check the names, and that what is only passed on is sound."""
        check_run_name(self.run)
        _check_metric_names(self.metrics)
        _floats(self)
        for tag in self.tags:
            check_tag(tag)
        for role in self.roles:
            check_role(role)
        for name, value in self.receipt.items():
            if not (check_metric_name(name) and math.isfinite(value)):
                msg = f"receipt: {name} is {value}"
                raise InvalidInputError(msg)
        check_metadata_json(bytes(self.metadata))


class Annotate(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag="annotate"):
    """Metrics arrive for a version; later values replace earlier ones."""

    version: Id
    metrics: Metrics

    def __post_init__(self) -> None:
        """Check the names."""
        _check_metric_names(self.metrics)
        _floats(self)


class Tag(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag="tag"):
    """A tag of a run points to a version of it; it may have pointed to another."""

    run: str
    tag: str
    version: Id

    def __post_init__(self) -> None:
        """Check the names."""
        check_run_name(self.run)
        check_tag(self.tag)


class Untag(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag="untag"):
    """A tag of a run is taken away."""

    run: str
    tag: str

    def __post_init__(self) -> None:
        """Check the names."""
        check_run_name(self.run)
        check_tag(self.tag)


Op = (
    CreateRun
    | Declare
    | Save
    | Annotate
    | Tag
    | Untag
    | Fork
    | Rollback
    | Delete
    | Undelete
    | Pin
    | Unpin
    | SetPolicy
    | Verified
    | Quarantine
    | Relocate
    | Condemn
    | Swept
    | Replicate
    | Replicated
    | NameReplica
    | UnnameReplica
)
"""Every operation of this format; each has one entry in :mod:`ckptstore.catalog.fold`."""

_OPS_KNOWN: Final = frozenset(str(op.__struct_config__.tag) for op in get_args(Op))


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a commit as it is stored."""

    magic: Literal["ckptstore-commit"]
    format: Annotated[int, msgspec.Meta(ge=1, le=FORMAT)]
    number: Annotated[int, msgspec.Meta(ge=1, le=limits.COMMIT_NUMBER_MAX)]
    previous: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{64})?\Z")]
    """Digest of the body of the commit before, empty for the first."""
    write_id: Id
    """Random, one per attempt: tells one's own commit from another's of the same number."""
    at_ms: Annotated[int, msgspec.Meta(ge=0, le=limits.TIME_MS_MAX)]
    """The writer's wall clock, in milliseconds since 1970; for people, nothing depends on it."""
    by: Annotated[str, msgspec.Meta(max_length=limits.BY_CHARS_MAX)]
    ops: Annotated[tuple[Op, ...], msgspec.Meta(min_length=1, max_length=limits.COMMIT_OPS_MAX)]


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """A commit with the digest that the next one names as ``previous``."""

    body: Body
    digest: str
    """BLAKE3-256 of the stored body, 64 hex digits."""

    @property
    def number(self) -> int:
        """Position in the log; the first is 1."""
        return self.body.number

    @property
    def ops(self) -> tuple[Op, ...]:
        """What it does, in order."""
        return self.body.ops

    @property
    def key(self) -> str:
        """The object that holds it."""
        return commit_key(self.body.number)


_DECODER: Final = msgspec.json.Decoder(Body)


def encode_commit(body: Body) -> tuple[bytes, Commit]:
    """Return the object for `body` and the commit as a reader will see it.

    What was encoded is decoded again: nothing is ever written that this version would refuse.

    Raises
    ------
    InvalidInputError
        If an operation breaks a rule of its record.
    LimitError
        If the commit passes ``COMMIT_BYTES_MAX``.
    """
    ops = [_wire(op) for op in body.ops]
    raw = msgspec.json.encode({**_fields(body), "ops": ops})
    data = encode_envelope(raw)
    if len(data) > limits.COMMIT_BYTES_MAX:
        msg = f"the commit takes {len(data)} bytes, more than {limits.COMMIT_BYTES_MAX}"
        raise LimitError(msg, hint="use less metadata")
    try:
        return data, decode_commit(data, where="the commit")
    except CorruptObjectError as error:
        msg = f"this cannot be committed: {error.message}"
        raise InvalidInputError(msg) from error


def decode_commit(data: bytes, *, where: str) -> Commit:
    """Check and parse one object of the log.

    Parameters
    ----------
    data
        The whole object, at most ``COMMIT_BYTES_MAX``.
    where
        The object's key, for errors. The caller compares the number in it.

    Raises
    ------
    CorruptObjectError
        If the digest, a type, a limit or a name is wrong.
    UnsupportedFeatureError
        If the format or an operation is not known to this version.
    """
    if len(data) > limits.COMMIT_BYTES_MAX:
        msg = f"{where} has {len(data)} bytes, more than {limits.COMMIT_BYTES_MAX}"
        raise CorruptObjectError(msg)
    raw, digest = decode_envelope(data, where=where)
    try:
        return Commit(body=_DECODER.decode(raw), digest=digest)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise _decode_problem(raw, where, error) from error


def _decode_problem(raw: bytes, where: str, error: Exception) -> CkptStoreError:
    """Tell a record of a newer version from a damaged one."""
    try:
        loose = msgspec.json.decode(raw)
        version = loose["format"]
        unknown = sorted({str(op["op"])[:40] for op in loose["ops"]} - _OPS_KNOWN)
    except (msgspec.DecodeError, RecursionError, UnicodeError, KeyError, TypeError):
        return CorruptObjectError(f"{where} is not a commit: {error}")
    if isinstance(version, int) and version > FORMAT:
        what = f"{where} has format {version}"
    elif unknown:
        what = f"{where} holds the operation {unknown[0]!r}"
    else:
        return CorruptObjectError(f"{where} is not a commit: {error}")
    return UnsupportedFeatureError(what, hint="a newer ckptstore wrote it: upgrade")


def _check_metric_names(metrics: Mapping[str, object]) -> None:
    for name in metrics:
        check_metric_name(name)


def _floats(op: Save | Annotate) -> None:
    """Turn the texts that stand for numbers that are not finite into floats, in place."""
    if any(isinstance(value, str) for value in op.metrics.values()):
        floats = {name: float(value) for name, value in op.metrics.items()}
        msgspec.structs.force_setattr(op, "metrics", floats)


def _wire(op: Op) -> Any:  # noqa: ANN401 - one of the operations, or a dict that stands for it
    """Return what JSON can hold in place of `op`: metrics that are not finite become texts."""
    if not isinstance(op, Save | Annotate | Replicate):
        return op
    floats = {name: float(value) for name, value in op.metrics.items()}
    if all(map(math.isfinite, floats.values())):
        return op
    metrics = {name: x if math.isfinite(x) else str(x) for name, x in floats.items()}
    return {"op": type(op).__struct_config__.tag, **_wire_fields(op), "metrics": metrics}


def _fields(struct: msgspec.Struct) -> dict[str, Any]:
    return {name: getattr(struct, name) for name in struct.__struct_fields__}


def _wire_fields(struct: msgspec.Struct) -> dict[str, Any]:
    pairs = zip(struct.__struct_encode_fields__, struct.__struct_fields__, strict=True)
    return {wire: getattr(struct, name) for wire, name in pairs}
