"""Typed fields that several records of the format share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

from ckptstore import limits
from ckptstore.format.keys import ID_PATTERN, MANIFEST_KEY_PATTERN

Direction = Literal["min", "max"]
"""Which way a metric gets better."""
NonFinite = Literal["nan", "inf", "-inf"]

Id = Annotated[str, msgspec.Meta(pattern=ID_PATTERN)]
Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
IdOrEmpty = Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{32})?\Z")]
TimeMs = Annotated[int, msgspec.Meta(ge=0, le=limits.TIME_MS_MAX)]
By = Annotated[str, msgspec.Meta(max_length=limits.BY_CHARS_MAX)]
CommitNumber = Annotated[int, msgspec.Meta(ge=1, le=limits.COMMIT_NUMBER_MAX)]
ChunkBytes = Annotated[int, msgspec.Meta(ge=limits.CHUNK_BYTES_MIN, le=limits.CHUNK_RAW_BYTES_MAX)]
EncodingName = Annotated[str, msgspec.Meta(pattern=r"^([a-z][a-z0-9_]{0,31})?\Z")]
"""What tensors were rounded to; empty for what they were saved as."""
Count = Annotated[int, msgspec.Meta(ge=0, le=limits.STEP_MAX)]
Metrics = Annotated[Mapping[str, float | NonFinite], msgspec.Meta(max_length=limits.METRICS_MAX)]
Directions = Annotated[Mapping[str, Direction], msgspec.Meta(max_length=limits.METRICS_MAX)]


class ManifestPointer(msgspec.Struct, frozen=True, kw_only=True):
    """Where a version's manifest lies and what its bytes must be."""

    key: Annotated[str, msgspec.Meta(pattern=MANIFEST_KEY_PATTERN)]
    stored_bytes: Count = msgspec.field(name="bytes")
    """Size of the object, in bytes."""
    digest: Digest = msgspec.field(name="blake3")
    """BLAKE3-256 of the whole object."""


class RoleSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one role in one version."""

    logical: Count
    """What the tensors take in memory."""
    new: Count
    """The part that no earlier version had."""
    stored: Count
    """What the new part takes in packs, encoded."""
