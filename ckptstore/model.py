"""Public records that all layers share; no torch, no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, Literal

from ckptstore.shown import HtmlTable, Shown, bytes_text

RefKind = Literal["latest", "step", "best", "tag", "back", "id", "valid"]
ReceiptState = Literal[
    "waiting", "staged", "durable", "replicated", "verified", "failed", "cancelled", "skipped"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleBytes:
    """Bytes of one role in one version."""

    logical: int
    """Size of the tensors in memory."""
    new: int
    """Size of the part that no earlier version had."""
    stored: int
    """Encoded size of the new part in packs."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Version(Shown):
    """The catalog's entry of one saved state; immutable and thread-safe.

    Metrics, tags and other facts that can change later are those at the time of the call.
    """

    id: str
    """32 hex digits, never reused."""
    run: str
    step: int
    metrics: Mapping[str, float]
    """May contain NaN and infinities."""
    tags: tuple[str, ...]
    """Sorted."""
    parent: str
    """Id of the version that this one continues; empty for the first."""
    created_at: datetime
    """Time of the commit by the writer's clock, in UTC."""
    metadata: Mapping[str, Any]
    """The user's JSON object."""
    roles: Mapping[str, RoleBytes]
    """Bytes by role: ``weights``, ``optimizer``, ..."""
    content: str
    """Digest of the state, 64 hex digits: equal for equal states."""
    manifest_key: str
    manifest_digest: str
    """BLAKE3-256 of the manifest object, 64 hex digits."""
    manifest_bytes: int
    """Size of the manifest object."""
    receipt: Mapping[str, float]
    """Seconds and bytes of the save by stage; each name ends in its unit."""
    commit: int
    """Number of the commit that made the version visible."""
    level: Literal["full", "weights", "weights-bf16", "weights-int8", "record"] = "full"
    """The part of the version that is kept: everything; the tensors of role ``weights``, exact or
    rounded to fewer bits; or only this record.
    """
    abandoned: bool = False
    """A rollback moved the head of the run to an earlier version; this one can still be loaded."""
    pinned: bool = False
    """The version must not be deleted; see `pinned_for`."""
    verified: bool = False
    """A full verification, recorded in the log, found every byte intact."""
    damaged: bool = False
    """A repair found lost parts; a second store can still restore them."""
    deleted: bool = False
    """The version is deleted; undelete works until a collection condemns its objects."""
    origin: str = ""
    """Id of the store in which the version was first saved; empty if it was this one."""
    replicas: tuple[str, ...] = ()
    """Ids of other stores that hold the version, with every byte read back there."""
    pinned_for: tuple[str, ...] = ()
    """Ids of the stores that evicted the version and rely on this copy."""

    @property
    def state(self) -> ReceiptState:
        """State of the version: ``durable``, ``replicated`` or ``verified``.

        ``durable`` once it is visible, ``replicated`` once another store holds it, ``verified``
        once every byte was read back here.
        """
        if self.verified:
            return "verified"
        return "replicated" if self.replicas else "durable"

    @property
    def label(self) -> str:
        """Its name in messages: run, step and the beginning of its id, ``gpt@300 (#f5f51be0)``."""
        return f"{self.run}@{self.step} (#{self.id[:8]})"

    def __repr__(self) -> str:
        """Return run, step, id and the first metrics: ``<Version gpt@300 #f5f51be0 loss=1>``."""
        metrics = [f" {name}={value:.6g}" for name, value in self.metrics.items()]
        return f"<Version {self.run}@{self.step} #{self.id[:8]}{''.join(metrics[:3])}>"

    def _summary(self) -> HtmlTable:
        return versions_table(self.label, [self])


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedVersion:
    """A version in a report."""

    version: str
    """Id of the version."""
    run: str
    step: int


def naming(version: Version) -> dict[str, Any]:
    """Return the fields with which records of reports name a version."""
    return {"version": version.id, "run": version.run, "step": version.step}


def versions_table(title: str, versions: Iterable[Version]) -> HtmlTable:
    """Return a table of versions for notebooks."""
    rows = [
        (
            one.step,
            one.id[:8],
            f"{one.created_at:%Y-%m-%d %H:%M:%S} UTC",
            ", ".join(f"{name} {value:.6g}" for name, value in one.metrics.items()),
            bytes_text(sum(part.logical for part in one.roles.values())),
            ", ".join(one.tags),
        )
        for one in versions
    ]
    columns = ("STEP", "ID", "SAVED", "METRICS", "SIZE", "TAGS")
    return HtmlTable(title=title, columns=columns, rows=rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """State and cost of a save. Seconds and bytes are 0 until they are known."""

    state: ReceiptState
    """``waiting`` until the state is copied, ``staged``, then ``durable``; later ``replicated``
    (another store holds the version) or ``verified`` (every byte was read back). Or ``failed``,
    ``cancelled`` or ``skipped``: then there is no version.
    """
    blocked_s: float = 0.0
    """Time for which the save blocked the caller."""
    staging_s: float = 0.0
    """Elapsed time of the copy into host memory."""
    hashing_s: float = 0.0
    """Time spent on digests, summed over all worker threads."""
    encoding_s: float = 0.0
    """Time spent on encoding and compression, summed over all worker threads."""
    writing_s: float = 0.0
    """Time spent on writing packs and waiting until they are durable, summed in the same way."""
    committing_s: float = 0.0
    """Elapsed time of writing manifest and commit; in the catalog, only up to its own commit."""
    logical_bytes: int = 0
    """Size of the tensors in memory."""
    new_bytes: int = 0
    """Size of the part that the previous version did not have."""
    shared_bytes: int = 0
    """Size of the other part."""
    stored_bytes: int = 0
    """Encoded size of the new part in packs."""
    auto: str = ""
    """The choice of ``codec="auto"``: ``"planes"`` or ``"raw"``; empty for other codecs."""

    @classmethod
    def of(cls, numbers: Mapping[str, float], state: ReceiptState) -> Receipt:
        """Return a receipt from the entries of a catalog record."""
        found: dict[str, Any] = {
            one.name: type(one.default)(numbers.get(one.name, 0))
            for one in fields(cls)
            if isinstance(one.default, int | float)
        }
        return cls(state=state, auto=auto_choice(numbers), **found)


def auto_choice(numbers: Mapping[str, float]) -> str:
    """Return the choice of ``codec="auto"`` from a save's receipt; empty for other codecs."""
    if "auto_planes" not in numbers:
        return ""
    return "planes" if numbers["auto_planes"] else "raw"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaInfo:
    """The catalog's entry of a named replica."""

    name: str
    url: str
    """Location of the replica, without credentials."""
    store: str
    """Id of the replica, 32 hex digits; a store with another id at this location is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """The catalog's entry of a run."""

    name: str
    metrics: Mapping[str, Literal["min", "max"]]
    """Declared direction in which each metric is better."""
    head: str
    """Id of the version that the next save continues; empty before the first save."""
    created_at: datetime
    """Time of creation by the writer's clock, in UTC."""
    versions_count: int
    tags: Mapping[str, str]
    """Tag to version id."""
    origin: str = ""
    """Id of the version that the run was forked from; empty if it is not a fork."""
    policy: Mapping[str, Any] | None = None
    """The run's own retention policy; see :mod:`ckptstore.catalog.retention`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ref:
    """A parsed ref: text that names a version. The grammar is in :mod:`ckptstore.catalog.refs`."""

    text: str
    """The ref as the user wrote it, for messages."""
    run: str
    """Name of the run; empty for an id."""
    kind: RefKind
    value: str = ""
    """Metric, tag, or a prefix of an id."""
    number: int = 0
    """Step, or number of versions to go back."""
    step_min: int = 0
    """For ``best``: the first step to consider."""
    step_max: int | None = None
    """For ``best``: the last step to consider; None for no bound."""
