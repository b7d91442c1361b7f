"""Operations on what is there already: fork, rollback, delete, pin, relocate, condemn, sweep.

Each is one record of a commit's ``ops``; what it does to the catalog is in
:mod:`ckptstore.catalog.fold_lifecycle`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import msgspec

from ckptstore import limits
from ckptstore.format.fields import (
    Digest,
    Directions,
    EncodingName,
    Id,
    ManifestPointer,
    RoleSizes,
)
from ckptstore.format.names import (
    check_metadata_json,
    check_metric_name,
    check_role,
    check_run_name,
)

__all__ = [
    "Condemn",
    "Delete",
    "Fork",
    "Level",
    "LowerLevel",
    "Part",
    "Pin",
    "Quarantine",
    "Relocate",
    "Rollback",
    "SetPolicy",
    "Swept",
    "Undelete",
    "Unpin",
    "Verified",
]

Level = Literal["full", "weights", "weights-bf16", "weights-int8", "record"]
"""How much of a version is kept: everything; the tensors of role ``weights``, as they were saved or
in fewer bits; its record only."""

LowerLevel = Literal["weights", "weights-bf16", "weights-int8", "record"]
"""A level that a version can be aged to."""

Part = Literal["full", "weights", "record"]
"""The same without how the weights are written: what a reader of the first format knows."""

ObjectKey = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^(packs/([0-9a-f]{2})/\2[0-9a-f]{30}\.pack"
        r"|manifests/([0-9a-f]{2})/\3[0-9a-f]{30}\.manifest)\Z"
    ),
]
IdOrEmpty = Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{32})?\Z")]
Ids = Annotated[Sequence[Id], msgspec.Meta(min_length=1, max_length=limits.VERSIONS_PER_OP_MAX)]
Keys = Annotated[Sequence[ObjectKey], msgspec.Meta(min_length=1, max_length=limits.KEYS_PER_OP_MAX)]


class Fork(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag="fork"):
    """A run begins at a version of another; a save of its first version follows in the commit."""

    run: str
    source: Id
    """The version that it begins at, recorded for good."""
    metrics: Directions = {}

    def __post_init__(self) -> None:
        """Check the names."""
        check_run_name(self.run)
        for name in self.metrics:
            check_metric_name(name)


class Rollback(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag="rollback"):
    """The head of a run moves to a version of it; what came after is abandoned, not deleted."""

    run: str
    version: Id
    reason: Annotated[str, msgspec.Meta(max_length=limits.REASON_CHARS_MAX)] = ""
    store: IdOrEmpty = ""
    """Id of the store whose head it follows, in a replica; empty: it was decided here."""

    def __post_init__(self) -> None:
        """Check the name."""
        check_run_name(self.run)


class Delete(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag="delete"):
    """Versions are no longer there; until a collection condemns their objects, they can return."""

    versions: Ids
    reason: Annotated[str, msgspec.Meta(max_length=limits.REASON_CHARS_MAX)] = ""


class Undelete(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag="undelete"):
    """Deleted versions are there again; nothing that they need was condemned."""

    versions: Ids


class Pin(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="op", tag="pin"):
    """A version may not be deleted, by anyone, until it is unpinned."""

    version: Id
    store: IdOrEmpty = ""
    """Id of the store that it is kept for, since only its record is there; empty: somebody wants
    it here."""


class Unpin(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="op", tag="unpin"
):
    """A version may be deleted again, unless pins of others are left."""

    version: Id
    store: IdOrEmpty = ""
    """Whose pin goes; empty: all of them."""


class SetPolicy(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag="set-policy"):
    """The retention policy of a run, or of all runs that have none."""

    run: str
    """Empty for the store's."""
    policy: msgspec.Raw
    """A JSON object of :mod:`ckptstore.catalog.retention`; empty object: none."""

    def __post_init__(self) -> None:
        """Check the name, and that the policy is sound JSON."""
        if self.run:
            check_run_name(self.run)
        check_metadata_json(bytes(self.policy))


class Verified(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag="verified"):
    """Every byte of these versions was read and found sound at this commit."""

    versions: Ids


class Quarantine(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag="quarantine"):
    """Parts of these versions are lost: nothing is shared with them until they are mended."""

    versions: Ids


class Relocate(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag="relocate"):
    """A version's content lies elsewhere now, or less of it is kept."""

    version: Id
    based_on: Digest
    """Digest of the manifest that this one replaces: another change in between is a conflict."""
    level: Part
    """What is kept from now on; never more than before."""
    manifest: ManifestPointer | None = None
    """None exactly at level ``record``."""
    content: Digest
    """Digest of what is kept; at level ``record``, of what was kept last."""
    roles: Annotated[Mapping[str, RoleSizes], msgspec.Meta(max_length=limits.ROLES_MAX)] = {}
    encoding: EncodingName = ""
    """At level ``weights``: what the weights were rounded to when the version was aged, ``bf16`` or
    ``int8``; empty where this is as it was before. A reader takes what it does not know for empty:
    the manifest says by itself how to read it."""

    def __post_init__(self) -> None:
        """Check names, and that manifest, level and encoding agree."""
        for role in self.roles:
            check_role(role)
        if self.encoding and self.level != "weights":
            msg = "only weights are rounded when a version is aged"
            raise ValueError(msg)
        if (self.manifest is None) != (self.level == "record"):
            msg = "a version has a manifest unless only its record is kept"
            raise ValueError(msg)


class Condemn(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag="condemn"):
    """Objects that no live version reaches: they will be deleted, and nobody may share them."""

    keys: Keys


class Swept(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag="swept"):
    """Condemned objects have been deleted."""

    keys: Keys
