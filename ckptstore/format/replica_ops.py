"""Operations of replication: a version arrives from another store; another store has it too.

Each is one record of a commit's ``ops``; what it does to the catalog is in
:mod:`ckptstore.catalog.fold_replicas`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec

from ckptstore import limits
from ckptstore.errors import InvalidInputError
from ckptstore.format.fields import (
    Count,
    Digest,
    EncodingName,
    Id,
    ManifestPointer,
    Metrics,
    RoleSizes,
)
from ckptstore.format.lifecycle_ops import Part
from ckptstore.format.names import (
    check_metadata_json,
    check_metric_name,
    check_role,
    check_run_name,
)

__all__ = ["Replicate", "Replicated"]


class Replicate(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag="replicate"):
    """A version of another store appears, under the id, step and parent that it has there.

    Where only its record is here, its content arrives.
    """

    version: Id
    run: str
    step: Count
    parent: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{32})?\Z")]
    created_at_ms: Annotated[int, msgspec.Meta(ge=0, le=limits.TIME_MS_MAX)]
    """When it was first saved, by the writer's clock."""
    store: Id
    """Id of the store that it was first saved in."""
    level: Part
    """What of it arrives. A record is what lineage needs of a version that is not copied."""
    manifest: ManifestPointer | None = None
    """None exactly at level ``record``."""
    content: Digest
    metrics: Metrics = {}
    metadata: msgspec.Raw = msgspec.Raw(b"{}")
    roles: Annotated[Mapping[str, RoleSizes], msgspec.Meta(max_length=limits.ROLES_MAX)] = {}
    receipt: Annotated[
        Mapping[str, float], msgspec.Meta(max_length=limits.RECEIPT_ENTRIES_MAX)
    ] = {}
    """That of the save, as it was; and what the copy took."""
    encoding: EncodingName = ""
    """At level ``weights``: what the weights were rounded to, if they were."""
    abandoned: bool = False
    """A rollback left it beside the line of its run."""
    head: bool = False
    """It becomes the head of its run."""

    def __post_init__(self) -> None:
        """Check names, and that manifest and level agree."""
        check_run_name(self.run)
        for name in self.metrics:
            check_metric_name(name)
        if any(isinstance(value, str) for value in self.metrics.values()):
            floats = {name: float(value) for name, value in self.metrics.items()}
            msgspec.structs.force_setattr(self, "metrics", floats)
        for role in self.roles:
            check_role(role)
        for name, value in self.receipt.items():
            if not (check_metric_name(name) and math.isfinite(value)):
                msg = f"receipt: {name} is {value}"
                raise InvalidInputError(msg)
        check_metadata_json(bytes(self.metadata))
        if self.encoding and self.level != "weights":
            msg = "only weights are rounded when a version is aged"
            raise ValueError(msg)
        if (self.manifest is None) != (self.level == "record"):
            msg = "a version has a manifest unless only its record is kept"
            raise ValueError(msg)


class Replicated(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag="replicated"):
    """Another store has these versions, and every byte of them was read back there."""

    versions: Annotated[
        Sequence[Id], msgspec.Meta(min_length=1, max_length=limits.VERSIONS_PER_OP_MAX)
    ]
    store: Id
    """Id of the other store."""
