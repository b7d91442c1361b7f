"""Operations on what is stored: where it lies, how much is kept, whether it is sound, what goes.

As in :mod:`ckptstore.catalog.run_ops`: the method ``apply`` of a record changes the catalog, and
functions return the operations for what a caller wants.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from sys import intern
from typing import Annotated

import msgspec

from ckptstore import limits
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.levels import LEVEL_FLAGS, LEVELS, STORED, Level, Part, level_of
from ckptstore.catalog.lifecycle_ops import Ids, pinned_error
from ckptstore.catalog.run_ops import check_not_condemned, pack_roles, sizes
from ckptstore.catalog.state import Fold, Op
from ckptstore.chunking import batches
from ckptstore.errors import CommitConflictError
from ckptstore.format.fields import Count, Digest, EncodingName, Id, ManifestPointer, RoleSizes
from ckptstore.format.snapshot import Flag, decode_details, with_details
from ckptstore.model import RoleBytes, Version

ObjectKey = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^(packs/([0-9a-f]{2})/\2[0-9a-f]{30}\.pack"
        r"|manifests/([0-9a-f]{2})/\3[0-9a-f]{30}\.manifest)\Z"
    ),
]
Keys = Annotated[Sequence[ObjectKey], msgspec.Meta(min_length=1, max_length=limits.KEYS_PER_OP_MAX)]


class Verified(Op, frozen=True, kw_only=True, tag="verified"):
    """Every byte of these versions was read and found sound at this commit."""

    versions: Ids

    def apply(self, fold: Fold) -> None:
        """Mark the versions as sound."""
        fold.mark(self.versions, add=Flag.VERIFIED, remove=Flag.DAMAGED)


class Quarantine(Op, frozen=True, kw_only=True, tag="quarantine"):
    """Parts of these versions are lost: nothing is shared with them until they are mended."""

    versions: Ids

    def apply(self, fold: Fold) -> None:
        """Mark the versions as damaged."""
        fold.mark(self.versions, add=Flag.DAMAGED, remove=Flag.VERIFIED)


class SetAside(Op, frozen=True, kw_only=True, tag="set-aside"):
    """Records between this commit and the one that it follows do not count: they were damaged.

    The first operation of its commit. Those after it may restate what such a record held.
    """

    follows: Annotated[int, msgspec.Meta(ge=0, le=limits.COMMIT_NUMBER_MAX)]
    """Number of the commit before, whose digest this one bears; 0 for none."""
    reason: Annotated[str, msgspec.Meta(max_length=limits.REASON_CHARS_MAX)] = ""

    def apply(self, fold: Fold) -> None:
        """Change nothing: the place of the commit says it all."""


class Relocate(Op, frozen=True, kw_only=True, tag="relocate"):
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
    dropped: Annotated[Mapping[str, Count], msgspec.Meta(max_length=limits.ROLES_MAX)] = {}
    """The largest parts of the state that go, by name: bytes in memory."""

    def __post_init__(self) -> None:
        """Check names, and that manifest, level and encoding agree."""
        super().__post_init__()
        check_kept(self.level, self.encoding, self.manifest)

    def apply(self, fold: Fold) -> None:
        """Replace the place of the content, and what of it is kept."""
        row = fold.version(self.version)
        if row.flags & Flag.DELETED or decode_details(row).manifest_digest.hex() != self.based_on:
            raise fold.broken(f"version {row.id} changed before it was relocated")
        flags = row.flags & ~(Flag.WEIGHTS_ONLY | Flag.RECORD_ONLY | Flag.VERIFIED | Flag.DAMAGED)
        flags |= LEVEL_FLAGS[self.level]
        # A writer that does not know the field moves a version about and says nothing of it.
        encoding = self.encoding or (row.encoding if self.level == "weights" else "")
        after = msgspec.structs.replace(row, flags=flags, encoding=intern(encoding))
        if LEVELS.index(level_of(after)) > LEVELS.index(level_of(row)):
            raise fold.broken(f"version {row.id} cannot have more than it has")
        changes: dict[str, object] = {
            "content": bytes.fromhex(self.content),
            "roles": pack_roles(self.roles),
        }
        if self.manifest is not None:
            if self.manifest.key in fold.gone:
                raise fold.broken(f"{self.manifest.key} was condemned")
            changes |= {
                "manifest_key": self.manifest.key,
                "manifest_bytes": self.manifest.stored_bytes,
                "manifest_digest": bytes.fromhex(self.manifest.digest),
            }
        fold.versions[row.id] = with_details(after, **changes)


class Condemn(Op, frozen=True, kw_only=True, tag="condemn"):
    """Objects that no live version reaches: they will be deleted, and nobody may share them."""

    keys: Keys

    def apply(self, fold: Fold) -> None:
        """Add the objects to those that go."""
        fold.condemned = {**fold.condemned, **dict.fromkeys(self.keys, fold.number)}
        fold.gone = fold.gone.union(self.keys)


class Swept(Op, frozen=True, kw_only=True, tag="swept"):
    """Condemned objects have been deleted."""

    keys: Keys

    def apply(self, fold: Fold) -> None:
        """Remove the objects from those that go."""
        done = set(self.keys)
        if not done <= fold.condemned.keys():
            raise fold.broken("an object was swept that is not condemned")
        fold.condemned = {key: at for key, at in fold.condemned.items() if key not in done}


def check_kept(level: Part, encoding: str, manifest: ManifestPointer | None) -> None:
    """Check that level, encoding and manifest of a version agree; raises ValueError."""
    if encoding and level != "weights":
        raise ValueError("only weights are rounded when a version is aged")
    if (manifest is None) != (level == "record"):
        raise ValueError("a version has a manifest unless only its record is kept")


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """The change of one version that gets another place, or is reduced."""

    version: str
    based_on: str
    """Digest of the manifest that it was made from, 64 hex digits."""
    level: Level
    manifest: ManifestPointer | None
    """None at level ``record``."""
    content: str
    roles: Mapping[str, RoleBytes] = field(default_factory=dict)
    relies_on: Collection[str] = ()
    """Keys of the new manifest and of all packs that it names."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    damaged: bool = False
    """Parts of it stay lost."""


def verified(catalog: Catalog, sound: Mapping[str, str], known: Collection[str]) -> list[Op]:
    """Return the operations that record that versions were found sound, byte for byte.

    Parameters
    ----------
    sound
        Version id to the digest of the manifest that was read.
    known
        Ids of versions that were known to be damaged before they were read: what others found since
        stays.
    """
    ids = [v.id for v in _as_read(catalog, sound) if v.id in known or not (v.damaged or v.verified)]
    return [Verified(versions=part) for part in batches(ids, limits.VERSIONS_PER_OP_MAX)]


def quarantine(catalog: Catalog, lost: Mapping[str, str]) -> list[Quarantine]:
    """Return the operations that record that parts of versions are lost.

    Parameters
    ----------
    lost
        Version id to the digest of its manifest then.
    """
    ids = [version.id for version in _as_read(catalog, lost) if not version.damaged]
    return [Quarantine(versions=part) for part in batches(ids, limits.VERSIONS_PER_OP_MAX)]


def _as_read(catalog: Catalog, digests: Mapping[str, str]) -> Iterator[Version]:
    """Yield versions that have the manifest that was read: neither deleted nor relocated since."""
    there = {version.id: version for version in catalog.versions()}
    for version_id, digest in digests.items():
        if version_id in there and there[version_id].manifest_digest == digest:
            yield there[version_id]


def relocate(catalog: Catalog, moves: Sequence[Move]) -> list[Op]:
    """Return the operations that move versions, or reduce them.

    Raises
    ------
    CommitConflictError
        If one was deleted, relocated or pinned to its content meanwhile: look again.
    CondemnedError
        If something that a new manifest names was condemned.
    PolicyError
        If a pinned version would lose content.
    """
    ops: list[Op] = []
    for move in moves:
        version = catalog.version(move.version)
        if version.deleted or version.manifest_digest != move.based_on:
            raise CommitConflictError(f"{version.label} changed meanwhile", hint="try again")
        if LEVELS.index(move.level) > LEVELS.index(version.level):
            msg = f"{version.run}@{version.step} is kept as {version.level}, not {move.level}"
            raise CommitConflictError(msg)
        if version.pinned and move.level != version.level:
            raise pinned_error(version)
        if version.damaged and move.level not in (version.level, "record"):
            raise CommitConflictError(f"parts of {version.label} are lost", hint="repair it")
        check_not_condemned(catalog, move.relies_on)
        part, encoding = STORED[move.level]
        ops.append(
            Relocate(
                version=move.version,
                based_on=move.based_on,
                level=part,
                encoding=encoding,
                manifest=move.manifest,
                content=move.content,
                roles=sizes(move.roles),
                dropped=move.dropped,
            )
        )
        if move.damaged:  # in this commit: no save may share with it in between
            ops.append(Quarantine(versions=[move.version]))
    return ops


def condemn(catalog: Catalog, keys: Iterable[str]) -> list[Op]:
    """Return the operations that condemn objects; those that are condemned already are left out.

    The caller has found, on exactly this catalog, that no live version reaches them. One that was
    deleted before and is back (a request that arrived late) may be condemned again.
    """
    fresh = sorted(set(keys) - catalog.condemned.keys())
    return [Condemn(keys=part) for part in batches(fresh, limits.KEYS_PER_OP_MAX)]


def swept(catalog: Catalog, keys: Iterable[str]) -> list[Op]:
    """Return the operations that record that condemned objects were deleted."""
    left = sorted(key for key in set(keys) if key in catalog.condemned)
    return [Swept(keys=part) for part in batches(left, limits.KEYS_PER_OP_MAX)]
