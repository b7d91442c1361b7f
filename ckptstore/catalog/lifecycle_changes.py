"""From what a caller wants done to existing versions to the operations of a commit.

As in ``changes``: called inside :meth:`ckptstore.catalog.log.Log.append` on the newest catalog,
again for every number that is tried; raise when a precondition fails; touch nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

import msgspec

from ckptstore import limits
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.changes import check_not_condemned
from ckptstore.catalog.fold_lifecycle import LEVELS, parts_of_level
from ckptstore.catalog.metrics import check_directions
from ckptstore.catalog.pin_changes import pinned_error
from ckptstore.errors import (
    CommitConflictError,
    ConflictError,
    InvalidInputError,
    PolicyError,
    VersionNotFoundError,
)
from ckptstore.format.commit import Op, Save
from ckptstore.format.fields import ManifestPointer, RoleSizes
from ckptstore.format.lifecycle_ops import (
    Condemn,
    Delete,
    Fork,
    Level,
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
from ckptstore.format.names import check_run_name, encode_metadata
from ckptstore.model import RoleBytes, Version

__all__ = [
    "HINT_REDUCED",
    "Move",
    "condemn",
    "delete",
    "fork",
    "pin",
    "quarantine",
    "relocate",
    "rollback",
    "set_policy",
    "swept",
    "undelete",
    "unpin",
    "verified",
]

T = TypeVar("T")

HINT_REDUCED: Final = (
    "undelete brings back versions that were deleted whole; what a replica has, a load with "
    "refill=True does"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One version that is to lie elsewhere, or of which less is to be kept."""

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


def fork(
    catalog: Catalog,
    *,
    run: str,
    source: str,
    version: str,
    step: int,
    manifest: ManifestPointer,
    content: str,
    roles: Mapping[str, RoleBytes],
    metrics: Mapping[str, float],
    metadata: Mapping[str, object],
    directions: Mapping[str, str],
    relies_on: Iterable[str],
) -> list[Op]:
    """Return what begins a run at a version of another: a fork and its first version.

    Raises
    ------
    ConflictError
        If the run exists already.
    VersionNotFoundError
        If the source was deleted meanwhile.
    CondemnedError
        If an object that the first version shares was condemned.
    InvalidInputError
        If the name or a direction is not accepted.
    """
    if catalog.has_run(run):
        msg = f"there is a run {run!r} already"
        hint = "fork to another name"
        deleted = list(catalog.versions(run, deleted=True))
        if deleted and not catalog.run(run).versions_count:
            msg += ", whose versions were all deleted"
            hint += f", or bring them back: ckptstore undelete #{deleted[-1].id[:12]}"
        raise ConflictError(msg, hint=hint)
    origin = _there(catalog, source)
    check_not_condemned(catalog, relies_on)
    inherited = catalog.run(origin.run).metrics
    return [
        Fork(
            run=check_run_name(run),
            source=source,
            metrics={**inherited, **check_directions(directions)},
        ),
        Save(
            version=version,
            run=run,
            step=step,
            parent=source,
            manifest=manifest,
            content=content,
            metrics=dict(metrics),
            metadata=msgspec.Raw(encode_metadata(metadata)),
            roles=_sizes(roles),
        ),
    ]


def rollback(
    catalog: Catalog, *, run: str, version: str, reason: str = "", store: str = ""
) -> list[Op]:
    """Return what moves the head of a run to one of its versions; nothing if it is there.

    Parameters
    ----------
    store
        Id of the store that a replica follows with it; empty for a decision of this store's own.

    Raises
    ------
    VersionNotFoundError
        If there is no such version, or it was deleted.
    InvalidInputError
        If it is of another run.
    """
    target = _there(catalog, version)
    if target.run != run:
        msg = f"version #{version[:8]} is of run {target.run!r}, not {run!r}"
        raise InvalidInputError(msg, hint=f"fork it: ckptstore fork {version[:12]} NEW_RUN")
    if catalog.head_id(run) == version:
        return []
    return [Rollback(run=run, version=version, reason=_reason(reason), store=store)]


def delete(
    catalog: Catalog, versions: Sequence[str], *, reason: str = "", force: bool = False
) -> list[Op]:
    """Return what deletes versions.

    Parameters
    ----------
    force
        Also those that are tagged, and the head of a run that has other versions.

    Raises
    ------
    VersionNotFoundError
        If one is not there.
    PolicyError
        If one is pinned, or needs `force`.
    """
    wanted = list(dict.fromkeys(versions))
    chosen = set(wanted)
    for version_id in wanted:
        version = _there(catalog, version_id)
        named = f"{version.run}@{version.step} (#{version.id[:8]})"
        if version.pinned:
            raise pinned_error(version)
        if version.tags and not force:
            msg = f"{named} is tagged {', '.join(version.tags)}"
            raise PolicyError(msg, hint="take the tags away, or force it")
        if catalog.head_id(version.run) == version_id and not force:
            others = any(v.id not in chosen for v in catalog.versions(version.run))
            if others:
                msg = f"{named} is the head of its run: the next save continues it"
                raise PolicyError(msg, hint="roll back to another version first, or force it")
    return [Delete(versions=part, reason=_reason(reason)) for part in _parts(wanted)]


def undelete(
    catalog: Catalog, versions: Sequence[str], needs: Mapping[str, Collection[str]]
) -> list[Op]:
    """Return what makes deleted versions be there again.

    Parameters
    ----------
    needs
        Per version: keys of its manifest and of all packs that it names.

    Raises
    ------
    VersionNotFoundError
        If there is no such version.
    InvalidInputError
        If one is not deleted.
    CondemnedError
        If something that one needs was condemned: it is too late.
    """
    wanted = list(dict.fromkeys(versions))
    for version_id in wanted:
        version = catalog.version(version_id)
        if not version.deleted:
            named = f"{version.run}@{version.step} (#{version.id[:8]})"
            if version.level != "full":
                msg = f"{named} was reduced to {version.level}, which is for good"
                raise InvalidInputError(msg, hint=HINT_REDUCED)
            msg = f"{named} is not deleted"
            raise InvalidInputError(msg)
        check_not_condemned(catalog, needs[version_id])
    return [Undelete(versions=part) for part in _parts(wanted)]


def pin(catalog: Catalog, version: str) -> list[Op]:
    """Return what pins a version for this store; nothing if it is pinned for this one alone."""
    found = _there(catalog, version)
    return [] if found.pinned and not found.pinned_for else [Pin(version=version)]


def unpin(catalog: Catalog, version: str) -> list[Op]:
    """Return what takes all pins of a version away, of whomever; nothing if it has none."""
    return [Unpin(version=version)] if catalog.version(version).pinned else []


def set_policy(catalog: Catalog, run: str, policy: Mapping[str, object]) -> list[Op]:
    """Return what gives a run (or the store, if `run` is empty) a retention policy.

    Raises
    ------
    RunNotFoundError
        If there is no such run.
    InvalidInputError, LimitError
        If the policy is no JSON object, or too large.
    """
    if run:
        catalog.run(run)
    return [SetPolicy(run=run, policy=msgspec.Raw(encode_metadata(policy)))]


def verified(catalog: Catalog, sound: Mapping[str, str]) -> list[Op]:
    """Return what records that versions were found sound, byte for byte.

    Parameters
    ----------
    sound
        Version id to the digest of the manifest that was read: a version that lies elsewhere
        since then is left out, as are those that were deleted or are recorded already.
    """
    there = {version.id: version for version in catalog.versions()}
    ids = [
        version_id
        for version_id, digest in sound.items()
        if version_id in there
        and there[version_id].manifest_digest == digest
        and not there[version_id].verified
    ]
    return [Verified(versions=part) for part in _parts(ids)]


def quarantine(catalog: Catalog, lost: Mapping[str, str]) -> list[Op]:
    """Return what records that parts of versions are lost.

    Parameters
    ----------
    lost
        Version id to the digest of its manifest then: a version that lies elsewhere since is left
        out, as are those that were deleted or are recorded already.
    """
    there = {version.id: version for version in catalog.versions()}
    ids = [
        version_id
        for version_id, digest in lost.items()
        if version_id in there
        and there[version_id].manifest_digest == digest
        and not there[version_id].damaged
    ]
    return [Quarantine(versions=part) for part in _parts(ids)]


def relocate(catalog: Catalog, moves: Sequence[Move]) -> list[Op]:
    """Return what makes versions lie elsewhere, or be kept in part.

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
            msg = f"{version.run}@{version.step} (#{version.id[:8]}) changed meanwhile"
            raise CommitConflictError(msg, hint="try again")
        if LEVELS.index(move.level) > LEVELS.index(version.level):
            msg = f"{version.run}@{version.step} is kept as {version.level}, not {move.level}"
            raise CommitConflictError(msg)
        if version.pinned and move.level != version.level:
            raise pinned_error(version)
        check_not_condemned(catalog, move.relies_on)
        part, encoding = parts_of_level(move.level)
        ops.append(
            Relocate(
                version=move.version,
                based_on=move.based_on,
                level=part,
                encoding=encoding,
                manifest=move.manifest,
                content=move.content,
                roles=_sizes(move.roles),
            )
        )
    return ops


def condemn(catalog: Catalog, keys: Iterable[str]) -> list[Op]:
    """Return what condemns objects, those left out that are condemned and not deleted yet.

    The caller has found, on exactly this catalog, that no live version reaches them. One that was
    deleted before and is back (a request that arrived late) may be condemned again.
    """
    fresh = sorted(set(keys) - catalog.condemned.keys())
    return [Condemn(keys=part) for part in _parts(fresh, limits.KEYS_PER_OP_MAX)]


def swept(catalog: Catalog, keys: Iterable[str]) -> list[Op]:
    """Return what records that condemned objects were deleted, if no one has done so yet."""
    left = sorted(key for key in set(keys) if key in catalog.condemned)
    return [Swept(keys=part) for part in _parts(left, limits.KEYS_PER_OP_MAX)]


def _there(catalog: Catalog, version_id: str) -> Version:
    version = catalog.version(version_id)
    if version.deleted:
        msg = f"{version.run}@{version.step} (#{version.id[:8]}) was deleted"
        raise VersionNotFoundError(msg, hint=f"ckptstore undelete {version.id[:12]}")
    return version


def _sizes(roles: Mapping[str, RoleBytes]) -> dict[str, RoleSizes]:
    return {
        role: RoleSizes(logical=item.logical, new=item.new, stored=item.stored)
        for role, item in roles.items()
    }


def _reason(text: str) -> str:
    return text[: limits.REASON_CHARS_MAX]


def _parts(items: Sequence[T], size: int = limits.VERSIONS_PER_OP_MAX) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
