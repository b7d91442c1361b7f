"""Retention of a job's source: drops selected versions only if the target is seen to hold them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.levels import LEVELS
from ckptstore.catalog.replica_ops import had_content
from ckptstore.maintenance.replicas.evict import SecondLook
from ckptstore.maintenance.retention.retain import AfterCommit, RetainReport, retain
from ckptstore.model import Version
from ckptstore.repo import Repo
from ckptstore.store.replicating import missing


def retain_source(
    source: Repo,
    target: Repo,
    selected: Sequence[Version],
    policy: Mapping[str, Any] | None,
    *,
    coming: Collection[str],
    dry_run: bool,
) -> Mapping[str, Any]:
    """Apply retention to the source, except to selected versions that the target lacks.

    The target may lack a version that is too young for the selection, was saved since the
    selection, or that the target evicted because the source holds it. Versions that go because the
    target holds them are checked there before, by their objects; and after each commit, by the
    target's log: versions that the target lost meanwhile are taken back.

    Parameters
    ----------
    policy
        None for the source's own.
    coming
        Ids of versions that count as if the target held them.

    Returns
    -------
    Mapping
        The figures for the report.

    Raises
    ------
    CkptStoreError
        As :func:`ckptstore.maintenance.retention.retain.retain`; or the target did not answer the
        recheck, and the last commit was taken back.
    """
    catalog, there = source.refresh(), target.refresh()
    here = source.superblock.store_id
    waiting = {
        version.id
        for version in selected
        if not _has(there, version) or _rests_on(there, version, here)
    }
    free = {version.id for version in catalog.versions()} - waiting.difference(coming)
    planned = retain(source, policy=policy, dry_run=True, quick=True, free=free)
    chosen = {version.id for version in selected}
    relied = [
        one.version
        for one in planned.changes
        if one.version.id in chosen and _holds(target.catalog, one.version)
    ]
    missed = missing(target, relied) if relied else set()
    second = SecondLook(
        here=source,
        there=target,
        holds=lambda version: _holds(target.catalog, version),
        done="removed or reduced",
    )
    report = retain(
        source,
        policy=policy,
        dry_run=dry_run,
        # Versions outside of the plan were not checked; they can go the next time.
        free={one.version.id for one in planned.changes} - missed,
        after=_looking_again(second, relied),
    )
    return {
        **retained(report, without=second.returned),
        "missed": len(missed),
        "returned": len(second.returned),
        "failures": [asdict(failure) for failure in second.lost],
    }


def retained(report: RetainReport, *, without: Collection[str] = ()) -> dict[str, Any]:
    """Return the figures of a retention, without versions that were taken back."""
    changes = [one for one in report.changes if one.version.id not in without]
    return {
        "changes": len(changes),
        "reclaimable_bytes": sum(one.reclaimable_bytes for one in changes),
        "commits": len(report.commits),
    }


def _looking_again(second: SecondLook, relied: Sequence[Version]) -> AfterCommit:
    """Return the recheck of the target after each commit that changed one of `relied`."""
    looked = {version.id for version in relied}

    def after(changed: Sequence[Version], deleted: Collection[str]) -> Collection[str]:
        """Return the ids of all versions that the target lost up to this commit."""
        concerned = [version for version in changed if version.id in looked]
        if concerned:
            second.look(concerned, deleted=deleted)
        return {*second.returned, *(failure.version for failure in second.lost)}

    return after


def _holds(there: Catalog, version: Version) -> bool:
    """Return True if the target has the content of a version, by its log as last read."""
    return _has(there, version) and not is_settled(there.version(version.id))


def _has(there: Catalog, version: Version) -> bool:
    """Return True if the target has as much of a version as the source, or dropped it itself."""
    if not there.has_version(version.id):
        return False
    found = there.version(version.id)
    at_least = LEVELS.index(found.level) >= LEVELS.index(version.level)
    return is_settled(found) or (at_least and not found.damaged)


def is_settled(there: Version) -> bool:
    """Return True if a store deleted a version itself, or reduced it to its record."""
    return there.deleted or (there.level == "record" and had_content(there))


def _rests_on(there: Catalog, version: Version, store: str) -> bool:
    """Return True if the target has only the record of a version, and notes `store` alone for it.

    The target may have evicted the version because `store` holds it, so `store` must keep it.
    """
    if not there.has_version(version.id):
        return False
    found = there.version(version.id)
    return found.level == "record" and not found.deleted and set(found.replicas) == {store}
