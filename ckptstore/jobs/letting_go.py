"""The steps of a job that let go of versions in the source, of what the target is seen to hold."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ckptstore.jobs.held import has, is_settled, rests_on
from ckptstore.maintenance.replicas.evict import evict
from ckptstore.maintenance.replicas.recheck import SecondLook
from ckptstore.maintenance.retention.retain import AfterCommit, RetainReport, retain
from ckptstore.model import Version
from ckptstore.store.store import Store


def evict_source(
    source: Store,
    target: Store,
    versions: Sequence[Version],
    *,
    coming: Collection[str],
    pin: bool,
    dry_run: bool,
) -> Mapping[str, Any]:
    """Keep the record alone of what the target has; return the figures of it.

    Parameters
    ----------
    versions
        Those that no rule keeps.
    coming, pin
        As of :func:`ckptstore.maintenance.replicas.evict.evict`.

    Raises
    ------
    CkptStoreError
        As of that.
    """
    report = evict(
        source.repo,
        target.repo,
        versions,
        missing=lambda wanted: _missing(target, wanted),
        coming=coming,
        pin=pin,
        dry_run=dry_run,
    )
    return {
        "evicted": len(report.evicted),
        "pinned": len(report.pinned),
        "unpinned": len(report.unpinned),
        "reclaimable_bytes": report.reclaimable_bytes,
        "missed": len(report.missed),
        "returned": len(report.returned),
        "failures": [asdict(failure) for failure in report.lost],
    }


def retain_source(
    source: Store,
    target: Store,
    selected: Sequence[Version],
    policy: Mapping[str, Any] | None,
    *,
    coming: Collection[str],
    dry_run: bool,
) -> Mapping[str, Any]:
    """Thin out the source, but for what is selected and not in the target; return the figures.

    That may be too young for the selection, or have been saved since it was made; or the target has
    let it go because it is here. Of what goes since the target has it, the objects are looked for
    there before, and its log is read again after each commit: what the target lost meanwhile is
    taken back.

    Parameters
    ----------
    policy
        None for the source's own.
    coming
        With `dry_run`: ids of versions that the target would have by now.

    Raises
    ------
    CkptStoreError
        As :func:`ckptstore.maintenance.retention.retain.retain`; or the target did not answer the
        recheck, and the last commit was taken back.
    """
    free = _free(source, target, selected, coming=coming if dry_run else ())
    planned = retain(source.repo, policy=policy, dry_run=True, quick=True, free=free)
    relied = _relied_on(target, planned, selected)
    missed = _missing(target, relied) if relied else set()
    second = SecondLook(
        here=source.repo,
        there=target.repo,
        holds=lambda version: _holds(target, version),
        done="removed or reduced",
    )
    report = retain(
        source.repo,
        policy=policy,
        dry_run=dry_run,
        # What was not planned for was not looked at; it may go the next time.
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
    """Return the figures of a retention, but for versions that were taken back."""
    changes = [one for one in report.changes if one.version.id not in without]
    return {
        "changes": len(changes),
        "reclaimable_bytes": sum(one.reclaimable_bytes for one in changes),
        "commits": len(report.commits),
    }


def _free(
    source: Store, target: Store, selected: Sequence[Version], *, coming: Collection[str]
) -> set[str]:
    """Return ids of versions of the source but for those selected that the target has yet to get.

    Parameters
    ----------
    coming
        Ids of versions that count as if the target had them.
    """
    catalog = source.repo.refresh()
    there = target.repo.refresh()
    here = source.info.store_id
    waiting = {
        version.id
        for version in selected
        if not has(there, version) or rests_on(there, version, here)
    }
    return {version.id for version in catalog.versions()} - waiting.difference(coming)


def _relied_on(target: Store, planned: RetainReport, selected: Sequence[Version]) -> list[Version]:
    """Return, of the versions that a plan changes, those that go since the target has them."""
    chosen = {version.id for version in selected}
    return [
        one.version
        for one in planned.changes
        if one.version.id in chosen and _holds(target, one.version)
    ]


def _looking_again(second: SecondLook, relied: Sequence[Version]) -> AfterCommit:
    """Return what looks at the target again after each commit that changed one of `relied`."""
    looked = {version.id for version in relied}

    def after(changed: Sequence[Version], deleted: Collection[str]) -> Collection[str]:
        """Return the ids of all that the target lost meanwhile, up to this commit."""
        concerned = [version for version in changed if version.id in looked]
        if concerned:
            second.look(concerned, deleted=deleted)
        return {*second.returned, *(failure.version for failure in second.lost)}

    return after


def _holds(target: Store, version: Version) -> bool:
    """Return whether the target has the content of a version, by its log as it was last read."""
    there = target.repo.catalog
    return has(there, version) and not is_settled(there.version(version.id))


def _missing(target: Store, versions: Sequence[Version]) -> set[str]:
    """Return ids of versions of the target whose objects are not all there.

    What was read back long ago may have been taken away since, past the log.
    """
    found = target.verify([f"#{one.id}" for one in versions], level="records")
    return {problem.version for problem in found.problems}
