"""Records that cross layers and that users see; no torch, no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

__all__ = [
    "Receipt",
    "ReceiptState",
    "Ref",
    "RefKind",
    "ReplicaInfo",
    "RoleBytes",
    "RunInfo",
    "Version",
    "auto_choice",
]

RefKind = Literal["latest", "step", "best", "tag", "back", "id", "valid"]
ReceiptState = Literal[
    "waiting", "staged", "durable", "replicated", "verified", "failed", "cancelled", "skipped"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleBytes:
    """Bytes of one role in one version."""

    logical: int
    """What the tensors take in memory."""
    new: int
    """The part that no earlier version had."""
    stored: int
    """What the new part takes in packs, encoded."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Version:
    """One saved state, as the catalog knows it; immutable, safe to keep and to share.

    Metrics and tags are those at the moment of asking: they may be added to later.
    """

    id: str
    """32 hex digits, never used again."""
    run: str
    step: int
    metrics: Mapping[str, float]
    """May hold NaN and infinities."""
    tags: tuple[str, ...]
    """Sorted."""
    parent: str
    """Id of the version that this one continues; empty for the first."""
    created_at: datetime
    """When it was committed, by the writer's clock, in UTC."""
    metadata: Mapping[str, Any]
    """The user's own JSON object."""
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
    """How the save went: seconds and bytes by stage; each name ends in its unit."""
    commit: int
    """Number of the commit that made it visible."""
    level: Literal["full", "weights", "weights-bf16", "weights-int8", "record"] = "full"
    """How much of it is kept: everything; the tensors of role ``weights``, as they were saved or
    rounded to fewer bits; or this record only."""
    abandoned: bool = False
    """A rollback left it beside the line of its run; it can still be loaded."""
    pinned: bool = False
    """It may not be deleted; see `pinned_for`."""
    verified: bool = False
    """A full verification, recorded in the log, found every byte of it sound."""
    damaged: bool = False
    """A repair found parts of it lost; what it lost can still come back from a second store."""
    deleted: bool = False
    """It can be undeleted until a collection condemns its objects."""
    origin: str = ""
    """Id of the store that it was first saved in, if it came from another; else empty."""
    replicas: tuple[str, ...] = ()
    """Ids of other stores that have it, every byte of it read back there."""
    pinned_for: tuple[str, ...] = ()
    """Ids of the stores that it is pinned for, since they let their content of it go."""

    @property
    def state(self) -> ReceiptState:
        """How far it has come: ``durable``, ``replicated`` or ``verified``.

        ``durable`` once it is visible, ``replicated`` once another store has it, ``verified`` once
        all of it was read back here.
        """
        if self.verified:
            return "verified"
        return "replicated" if self.replicas else "durable"

    @property
    def label(self) -> str:
        """Its name in messages: run, step and the beginning of its id, ``gpt@300 (#f5f51be0)``."""
        return f"{self.run}@{self.step} (#{self.id[:8]})"

    def __repr__(self) -> str:
        """Return which it is, with its first metrics: ``<Version gpt@300 #f5f51be0 loss=1>``."""
        metrics = [f" {name}={value:.6g}" for name, value in self.metrics.items()]
        return f"<Version {self.run}@{self.step} #{self.id[:8]}{''.join(metrics[:3])}>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """How far a save has come, and what it took. Seconds and bytes are 0 until they are known."""

    state: ReceiptState
    """``waiting`` until it is copied, ``staged``, then ``durable``; later perhaps ``replicated``
    (another store holds it) or ``verified`` (read back, every byte). Or ``failed``, ``cancelled``,
    ``skipped``: there is no version then."""
    blocked_s: float = 0.0
    """For how long the caller stood still."""
    staging_s: float = 0.0
    """Copying into host memory, by the clock."""
    hashing_s: float = 0.0
    """Digests, of all worker threads together."""
    encoding_s: float = 0.0
    """As above."""
    writing_s: float = 0.0
    """Handing packs to the storage, as above, and waiting until they are durable."""
    committing_s: float = 0.0
    """Manifest and commit, by the clock. In the catalog up to the commit that holds it."""
    logical_bytes: int = 0
    """What the tensors take in memory."""
    new_bytes: int = 0
    """The part that the version before did not have."""
    shared_bytes: int = 0
    """The rest."""
    stored_bytes: int = 0
    """What the new part takes in packs, encoded."""
    auto: str = ""
    """What ``codec="auto"`` chose, ``"planes"`` or ``"raw"``; empty where it was another codec."""

    @classmethod
    def of(cls, numbers: Mapping[str, float], state: ReceiptState) -> Receipt:
        """Return the receipt that the entries of a catalog's record make."""
        seconds = {name: numbers.get(name, 0.0) for name in _SECONDS}
        sizes = {name: int(numbers.get(name, 0)) for name in _SIZES}
        auto = auto_choice(numbers)
        return cls(state=state, auto=auto, **seconds, **sizes)  # type: ignore[arg-type]  # by name


def auto_choice(numbers: Mapping[str, float]) -> str:
    """Return what ``codec="auto"`` chose in a save, from its receipt; empty for other codecs."""
    if "auto_planes" not in numbers:
        return ""
    return "planes" if numbers["auto_planes"] else "raw"


_SECONDS = ("blocked_s", "staging_s", "hashing_s", "encoding_s", "writing_s", "committing_s")
_SIZES = ("logical_bytes", "new_bytes", "shared_bytes", "stored_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaInfo:
    """Another store that a store has a name for, as the catalog knows it."""

    name: str
    url: str
    """Where it is, without credentials."""
    store: str
    """Its id, 32 hex digits; what is found there with another id is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """A named line of training, as the catalog knows it."""

    name: str
    metrics: Mapping[str, Literal["min", "max"]]
    """Which way each metric gets better, as far as declared."""
    head: str
    """Id of the version that the next save continues; empty before the first save."""
    created_at: datetime
    """By the writer's clock, in UTC."""
    versions_count: int
    tags: Mapping[str, str]
    """Tag to version id."""
    origin: str = ""
    """Id of the version that it was forked from; empty if it was not."""
    policy: Mapping[str, Any] | None = None
    """Its own retention policy; see :mod:`ckptstore.catalog.retention`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ref:
    """Text that names a version, parsed; see :mod:`ckptstore.catalog.refs` for the grammar."""

    text: str
    """As the user wrote it, for messages."""
    run: str
    """Empty for an id."""
    kind: RefKind
    value: str = ""
    """Metric, tag, or the beginning of an id."""
    number: int = 0
    """Step, or how many versions back."""
    step_min: int = 0
    """Of ``best``: the first step that counts."""
    step_max: int | None = None
    """Of ``best``: the last step that counts; None: no bound."""
