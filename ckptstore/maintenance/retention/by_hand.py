"""By hand: versions are removed and brought back, and the head of a run is moved. Torch-free.

All are commits: nothing is deleted before a collection condemns what no live version needs, and
until then a removed version can come back.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from ckptstore import errors
from ckptstore.catalog import lifecycle_ops
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.retention import reclaimable
from ckptstore.catalog.run_ops import check_not_condemned
from ckptstore.catalog.state import Op
from ckptstore.committing import on_reserve
from ckptstore.format.keys import pack_key
from ckptstore.model import Ref, Version
from ckptstore.repo import Repo

_log = logging.getLogger("ckptstore")

REDUCED: Final = "of it not all is kept: a training cannot go on from it as it was"


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """One version that was removed, or would be."""

    version: Version
    obstacle: str
    """Why it would be refused: pinned, tagged, the head ...; empty if nothing is in the way."""
    reclaimable_bytes: int
    """Stored bytes that no longer have to be kept for it; a collection frees that much at most,
    since other versions may share a part of them."""


def remove(
    repo: Repo, versions: Sequence[Version], *, reason: str, force: bool, dry_run: bool
) -> list[Removal]:
    """Delete versions by a commit, all or none; a dry run says what would be in the way.

    Parameters
    ----------
    force
        Also tagged ones, the head of a run, and the only verified version of a run; never pinned
        ones.

    Raises
    ------
    PolicyError
        One is pinned, or needs `force`. Nothing was removed.
    VersionNotFoundError
        One is not there any more.
    """
    chosen = list(dict.fromkeys(version.id for version in versions))
    if not chosen:
        raise errors.InvalidInputError("no version to remove")
    catalog = repo.refresh()

    def build(now: Catalog) -> list[Op]:
        """Return the deletion, or raise what is in its way now."""
        if not force:
            for error in _sole_verified(now, chosen).values():
                raise error
        return lifecycle_ops.delete(now, chosen, reason=reason, force=force)

    if not dry_run:
        on_reserve(repo.backend, lambda: repo.log.append(build))
    obstacles = _obstacles(catalog, chosen, force=force) if dry_run else {}
    return [
        Removal(
            version=version,
            obstacle=obstacles.get(version.id, ""),
            reclaimable_bytes=reclaimable(version, "gone"),
        )
        for version in map(catalog.version, chosen)
    ]


def _obstacles(catalog: Catalog, chosen: Sequence[str], *, force: bool) -> dict[str, str]:
    """Return, by id, why versions cannot be removed together."""
    going, sole = set(chosen), _sole_verified(catalog, chosen)
    runs = {catalog.version(one).run for one in chosen}
    # The head of a run may go with all others.
    whole = {run for run in runs if all(each.id in going for each in catalog.versions(run))}
    found: dict[str, str] = {}
    for version in map(catalog.version, chosen):
        if force and not version.pinned:
            continue
        free = version.run in whole and not (version.pinned or version.tags)
        try:
            lifecycle_ops.delete(catalog, [version.id], force=free)
            if version.verified and version.run in sole:
                raise sole[version.run]
        except errors.PolicyError as error:
            found[version.id] = error.message
    return found


def _sole_verified(catalog: Catalog, chosen: Collection[str]) -> dict[str, errors.PolicyError]:
    """Return an error for each run that would keep versions, but lose all that were verified."""
    found: dict[str, errors.PolicyError] = {}
    going = set(chosen)
    for run in dict.fromkeys(catalog.version(one).run for one in chosen):
        versions = [v for v in catalog.versions(run) if v.level != "record"]
        sound = [version for version in versions if version.verified]
        left = [version for version in versions if version.id not in going]
        if sound and left and all(version.id in going for version in sound):
            msg = f"{sound[-1].label} is the only verified one of its run"
            found[run] = errors.PolicyError(msg, hint="verify another one first, or force it")
    return found


def find_deleted(catalog: Catalog, ref: Ref) -> str:
    """Return the id of the deleted version that ``#ID`` or ``RUN@STEP`` names.

    Raises
    ------
    VersionNotFoundError, RunNotFoundError
        It names none.
    InvalidRefError
        It is of another form, or an id that is not unique.
    """
    if ref.kind == "id":
        found = [v for v in catalog.by_prefix(ref.value) if not ref.run or v.run == ref.run]
        if len(found) > 1:
            msg = f"{ref.text!r} is not unique: {len(found)} or more versions begin so"
            raise errors.InvalidRefError(msg)
    elif ref.kind == "step":
        found = [v for v in catalog.versions(ref.run, deleted=True) if v.step == ref.number]
    else:
        msg = f"{ref.text!r}: a deleted version is named by its id or step"
        raise errors.InvalidRefError(msg, hint="#ID or RUN@STEP; log RUN shows what was deleted")
    if not found:
        if ref.kind == "step":
            _refuse_reduced(catalog, ref)
        msg = f"{ref.text!r} names no version that was deleted"
        raise errors.VersionNotFoundError(msg, hint="ckptstore log shows what was deleted")
    return found[-1].id


def _refuse_reduced(catalog: Catalog, ref: Ref) -> None:
    """Raise if ``RUN@STEP`` names a version that lost a part: there is no way back."""
    for version in catalog.versions(ref.run):
        if version.step == ref.number and version.level != "full":
            msg = f"{ref.text!r} was reduced to {version.level}, which is for good"
            raise errors.VersionNotFoundError(msg, hint=lifecycle_ops.HINT_REDUCED)


def undelete(repo: Repo, versions: Sequence[str]) -> list[Version]:
    """Make deleted versions be there again, all or none; return them.

    Everything that they need must be there still: each pack is looked for, and the commit checks
    that nothing was condemned up to then.

    Parameters
    ----------
    versions
        Their ids, in full.

    Raises
    ------
    VersionNotFoundError
        There is none of this id; or a collection has deleted what it needs: it is too late.
    InvalidInputError
        One is not deleted.
    CondemnedError
        A collection has condemned what one needs: it is too late.
    CorruptObjectError
        The manifest of one is damaged.
    """
    repo.check_writable()
    catalog = repo.refresh()
    needs = {one: _needs(repo, catalog, catalog.version(one)) for one in versions}
    repo.log.append(lambda now: lifecycle_ops.undelete(now, versions, needs))
    back = [repo.catalog.version(one) for one in dict.fromkeys(versions)]
    for version in back:
        if version.level == "record" and version.replicas:  # an eviction unpins what was deleted
            what = "only the record of %s is here; ckptstore evict --replica NAME REF pins it again"
            _log.warning(what, version.label)
    return back


def _needs(repo: Repo, catalog: Catalog, version: Version) -> list[str]:
    """Return the keys of the objects of a version, if all are there."""
    if version.level == "record" or not version.deleted:
        return []
    check_not_condemned(catalog, [version.manifest_key], lifecycle_ops.HINT_LATE)
    try:
        keys = [version.manifest_key]
        repo.backend.stat(version.manifest_key)
        keys += map(pack_key, repo.manifests.load(version).pieces.packs)
        for key in keys[1:]:
            repo.backend.stat(key)
    except errors.ObjectNotFoundError as error:
        msg = f"{version.label} cannot come back: a collection has deleted what it needs"
        raise errors.VersionNotFoundError(msg, hint=error.message) from error
    except errors.CorruptObjectError:
        check_not_condemned(repo.refresh(), [version.manifest_key], lifecycle_ops.HINT_LATE)
        raise
    return keys


# --- the head of a run --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Rolled:
    """Result of a rollback."""

    target: Version
    """The head from now on: the next save continues it."""
    head_before: str
    """Id of the head before; rolling back to it undoes this. Equal to the target's: no change."""
    abandoned: tuple[Version, ...] = ()
    """Versions that were on the line of the run and no longer are, newest first."""
    returned: tuple[Version, ...] = ()
    """Versions that an earlier rollback had abandoned and that are on the line again."""


def rollback(repo: Repo, run: str, version: str, *, reason: str = "") -> Rolled:
    """Move the head of a run to a version of it, forward or back.

    Raises
    ------
    VersionNotFoundError
        There is no such version, it was deleted, or only its record is kept.
    InvalidInputError
        It is of another run.
    ReadOnlyError, UnsafeBackendError, StorageError
        It could not be committed.
    """
    seen: list[Catalog] = []

    def build(catalog: Catalog) -> list[Op]:
        """Note the catalog that the commit follows, and move the head."""
        target = catalog.version(version)
        if target.level == "record":
            msg = f"only the record of {target.label} is kept"
            hint = "go back to a version that can be loaded"
            if target.replicas:
                hint = "another store has it: bring it back first, load it with refill=True"
            raise errors.VersionNotFoundError(msg, hint=hint)
        seen[:] = [catalog]
        return lifecycle_ops.rollback(catalog, run=run, version=version, reason=reason)

    build(repo.refresh())
    repo.log.append_any(build)
    (before,) = seen
    line = _line(before, before.head_id(run))
    kept = _line(before, version)
    if kept and kept[0].level != "full":
        _log.warning("%s: %s", kept[0].label, REDUCED)
    ids = {found.id for found in kept}
    return Rolled(
        target=repo.catalog.version(version),
        head_before=before.head_id(run),
        abandoned=tuple(v for v in line if v.id not in ids),
        returned=tuple(v for v in kept if v.abandoned),
    )


def _line(catalog: Catalog, head: str) -> list[Version]:
    """Return a version and its ancestors within its run, newest first, without deleted ones."""
    found: list[Version] = []
    run = catalog.version(head).run if head else ""
    for version in catalog.ancestors(head) if head else ():
        if version.run != run:
            break
        if not version.deleted:
            found.append(version)
    return found
