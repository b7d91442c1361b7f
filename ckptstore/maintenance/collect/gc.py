"""Garbage collection: condemn what no live version reaches, and after a grace delete it.

Any number of collections may run at once, beside savers, forks, rollbacks and retention, and may
die at any point: everything that they agreed on stands in the log. Why no live version ever names
what was deleted: docs/design/0008-collection.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ckptstore import limits
from ckptstore.catalog import content_ops
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.state import Op
from ckptstore.engine.engine import EngineSpec
from ckptstore.errors import InvalidInputError
from ckptstore.events import ProgressCallback, silent
from ckptstore.format.keys import pack_key, version_id_of
from ckptstore.maintenance.check.lost_log import check_log_is_whole
from ckptstore.maintenance.collect.copy_live import Victim
from ckptstore.maintenance.collect.inline_deltas import Rebased, dead_keys, rebase
from ckptstore.maintenance.collect.repack import Repacked, choose, repack
from ckptstore.maintenance.collect.sweep import due, sweep, wait_s
from ckptstore.maintenance.collect.unreferenced import (
    Candidates,
    condemnable,
    find_candidates,
    storage_now,
)
from ckptstore.maintenance.core.listing import Tally
from ckptstore.maintenance.core.live_set import Reach
from ckptstore.maintenance.core.task_pool import Tasks, open_tasks
from ckptstore.repo import Repo

__all__ = ["GcReport", "Tally", "gc"]


Kinds = Mapping[str, Tally]
"""``packs`` and ``manifests`` to what there is of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GcReport:
    """What a collection found and did; of a dry run, what it would do."""

    dry_run: bool
    commit: int
    """Number of the catalog that the figures describe: before anything was done."""
    versions_count: int
    """Live versions: not deleted, and more than a record."""
    logical_bytes: int
    """What their tensors take in memory."""
    stored: Kinds
    """All packs and manifests, as listed."""
    live: Kinds
    """Those that live versions need."""
    live_chunk_bytes: int
    """What live chunks take; the rest of `live` packs is dead, for a repack to free."""
    reclaimable_now: Kinds
    """Condemned earlier, and the grace is over; with no grace, also what is condemned now."""
    reclaimable_later: Kinds
    """Condemned earlier or now, and the grace is not over."""
    orphans: Kinds
    """Of what is condemned now: named by no commit, and old enough."""
    orphan_age_s_max: float
    """Age of the oldest object that no commit has named, by the storage's clock."""
    young: Kinds
    """Named by no live version, and too young to judge: uploads in flight, most likely."""
    repacked: Repacked
    rebased: Rebased
    """Deltas that were stored by themselves, since nothing else needed their bases."""
    condemned: Kinds
    """Condemned by this collection, packs that were written anew included; in a dry run, what it
    would condemn, those packs apart."""
    swept: Kinds
    """Deleted by this collection; in a dry run, what it would delete."""
    leftovers: Tally
    """Temporary files of writers that died, removed (a dry run: found)."""
    seconds: float
    again_s: float = 0.0
    """Until a second collection deletes what is condemned now, and this one did not delete; of a
    dry run, from the collection on that it stands for. 0 if nothing is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """What the user asks for: see :func:`gc`."""

    grace_s: float
    orphan_age_s: float
    repack_below: float | None
    dry_run: bool
    force: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sorted:
    """Keys of objects, by what a collection would do with them before it has done anything."""

    live: Sequence[str]
    condemnable: Sequence[str]
    """What can be condemned now."""
    now: Sequence[str]
    """What can be deleted now."""
    later: Sequence[str]
    """What can be deleted when the grace is over."""
    orphans: Sequence[str]
    """Of `condemnable`: named by no commit."""
    nameless: Sequence[str]
    """Named by no commit; `orphans` and `young` together."""
    young: Sequence[str]


@dataclass(slots=True, kw_only=True)
class _Collection:
    """One collection under way; owned by the calling thread."""

    repo: Repo
    request: _Request
    reach: Reach
    found: Candidates
    progress: ProgressCallback
    tasks: Tasks
    condemned: list[str] = field(default_factory=list)
    swept: list[str] = field(default_factory=list)

    def condemn(self) -> None:
        """Commit what may be condemned, part by part; each part is decided on what it follows."""
        part: list[str] = []

        def build(now: Catalog) -> Sequence[Op]:
            part[:] = condemnable(self.found, now, self.reach)[: limits.KEYS_PER_OP_MAX]
            return content_ops.condemn(now, part)

        while self.repo.log.append_any(build) is not None:
            self.condemned += part

    def sweep(self) -> None:
        """Delete what was condemned long enough ago, by whomever."""
        grace_s = self.request.grace_s
        catalog = self.repo.refresh()
        now_s = storage_now(self.repo) if catalog.condemned and grace_s > 0 else self.found.now_s
        keys = due(self.repo, catalog, grace_s=grace_s, now_s=now_s)
        sweep(self.repo, keys, progress=self.progress, tasks=self.tasks)
        self.swept += keys

    def rebase(self) -> Rebased:
        """Store deltas by themselves whose bases nothing else needs."""
        if self.request.repack_below is None:
            return Rebased()
        dry_run = self.request.dry_run
        rebased = rebase(self.repo, self.reach, dry_run=dry_run, progress=self.progress)
        if not dry_run:
            self.found.dead.update(dead_keys(rebased) & self.found.objects.keys())
        return rebased

    def free(self, victims: Sequence[Victim]) -> Repacked:
        """Condemn what is dead, write packs anew that mostly are, delete what is due."""
        self.condemn()
        repacked = repack(
            self.repo,
            self.reach,
            victims,
            progress=self.progress,
            tasks=self.tasks,
        )
        self.found.dead.update(pack_key(victim.pack) for victim in victims)
        if repacked.versions_count:
            self.condemn()
        self.sweep()
        return repacked

    def pretend(self, victims: Sequence[Victim], before: _Sorted) -> Repacked:
        """Note what :meth:`free` would do."""
        self.condemned, self.swept = [*before.condemnable], [*before.now]
        return Repacked(
            packs_count=len(victims),
            packs_bytes=sum(victim.size_bytes for victim in victims),
            copied_bytes=sum(victim.live_bytes for victim in victims),
        )

    def tally(self, keys: Iterable[str]) -> dict[str, Tally]:
        """Return count and bytes by kind of those of `keys` that were listed."""
        kinds = {"packs": [0, 0], "manifests": [0, 0]}
        for key in keys:
            info = self.found.objects.get(key)
            if info is not None:
                kind = kinds[key.partition("/")[0]]
                kind[0] += 1
                kind[1] += info.size_bytes
        return {name: Tally(count=count, size_bytes=size) for name, (count, size) in kinds.items()}


def gc(
    repo: Repo,
    *,
    grace_s: float = limits.GC_GRACE_S,
    orphan_age_s: float = limits.GC_ORPHAN_AGE_S,
    repack_below: float | None = limits.GC_REPACK_BELOW,
    dry_run: bool = False,
    force: bool = False,
    executor: EngineSpec | None = None,
    workers: int | None = None,
    progress: ProgressCallback = silent,
) -> GcReport:
    """Condemn what no live version needs, write anew what is mostly dead, delete what is due.

    May be interrupted at any point and called again; may run in several processes at once.

    Parameters
    ----------
    grace_s
        How long what is condemned stays, for its readers; in seconds by the storage's clock. 0
        deletes at once: right only where no one reads what was deleted or relocated.
    orphan_age_s
        Objects that no commit names are left alone for so long; in seconds by the storage's
        clock. 0 may make savers at work write again what they had written; nothing is lost.
    repack_below
        Packs of which a smaller share than this is live are written anew, and deltas whose bases
        nothing else needs are stored by themselves, where that takes less; None leaves packs as
        they are, 1.0 leaves nothing dead in any.
    dry_run
        Say what would be done, and change nothing. Unless the store was opened read-only, one
        empty object is made and removed to read the storage's clock.
    force
        Collect even if what lies in the store says that commits were lost.
    executor
        Where a long listing, the manifests, the copying of a repack and the deleting are done, in
        tasks: an engine or an executor (:func:`ckptstore.engine.engine.open_engine`); None for the
        threads of this process. Whatever is committed is decided and committed here.
    workers
        Tasks at once.
    progress
        Stages ``list``, ``manifests``, ``rebase``, ``repack`` and ``sweep``.

    Raises
    ------
    InvalidInputError
        A parameter is out of its range.
    CorruptObjectError, UnsupportedFeatureError
        The manifest of a live version cannot be read, so that nothing is condemned; it is named.
        Or commits seem to be lost, and it is not forced: see
        :mod:`ckptstore.maintenance.check.lost_log`.
    ReadOnlyError, UnsafeBackendError
        The store cannot be written to.
    StorageError
        The storage failed. Whatever was done is in the log; the next collection goes on.
    """
    _check(grace_s, orphan_age_s, repack_below)
    if not dry_run:
        repo.check_writable()
    request = _Request(
        grace_s=grace_s,
        orphan_age_s=orphan_age_s,
        repack_below=repack_below,
        dry_run=dry_run,
        force=force,
    )
    with open_tasks(repo, executor, workers) as tasks:
        return _collect(repo, request, progress, tasks)


def _collect(
    repo: Repo,
    request: _Request,
    progress: ProgressCallback,
    tasks: Tasks,
) -> GcReport:
    """Look at everything first; the figures are those of before anything is done."""
    began = repo.environment.monotonic()
    catalog = repo.refresh()
    clockless = request.dry_run and repo.options.read_only
    found = find_candidates(
        repo,
        catalog,
        now_s=None if clockless else storage_now(repo),
        orphan_age_s=request.orphan_age_s,
        progress=progress,
        tasks=tasks,
    )
    work = _Collection(
        repo=repo,
        request=request,
        reach=Reach(repo, progress=progress, tasks=tasks),
        found=found,
        progress=progress,
        tasks=tasks,
    )
    before = _sort(work, catalog)
    if not request.force:
        strays = [key for key in before.orphans if version_id_of(key) is not None]
        check_log_is_whole(repo, catalog, strays, in_flight=request.orphan_age_s <= 0)
    rebased = work.rebase()
    chunks = work.reach.chunks(repo.catalog if rebased.versions_count else catalog)
    victims, live_bytes = choose(chunks, found.objects, below=request.repack_below or 0.0)
    repacked = work.pretend(victims, before) if request.dry_run else work.free(victims)
    age_s = max(request.orphan_age_s, limits.GC_LEFTOVER_AGE_MIN_S)
    left = repo.backend.remove_leftovers(
        modified_before=found.now_s - age_s, dry_run=request.dry_run
    )
    contents = [details for _, details in catalog.contents(known={})]
    return GcReport(
        dry_run=request.dry_run,
        commit=catalog.number,
        versions_count=len(contents),
        logical_bytes=sum(logical for each in contents for logical, _, _ in each.roles.values()),
        live_chunk_bytes=live_bytes,
        orphan_age_s_max=max(map(found.age_s, before.nameless), default=0.0),
        repacked=repacked,
        rebased=rebased,
        leftovers=Tally(count=left.count, size_bytes=left.size_bytes),
        seconds=repo.environment.monotonic() - began,
        again_s=_again_s(work, before),
        **_tallies(work, before),
    )


def _again_s(work: _Collection, before: _Sorted) -> float:
    """Return when what a collection leaves condemned can be deleted."""
    grace_s = work.request.grace_s
    if work.request.dry_run and before.condemnable:
        return grace_s
    return wait_s(work.repo, work.repo.catalog, grace_s=grace_s, now_s=work.found.now_s)


def _tallies(work: _Collection, before: _Sorted) -> dict[str, Kinds]:
    """Return the fields of a report that say how many objects of each kind there were."""
    keys: dict[str, Iterable[str]] = {
        "stored": work.found.objects,
        "live": before.live,
        "reclaimable_now": before.now,
        "reclaimable_later": before.later,
        "orphans": before.orphans,
        "young": before.young,
        "condemned": work.condemned,
        "swept": work.swept,
    }
    return {name: work.tally(some) for name, some in keys.items()}


def _sort(work: _Collection, catalog: Catalog) -> _Sorted:
    """Sort the listed objects by what a collection would do with them."""
    found, no_grace = work.found, work.request.grace_s <= 0
    live = work.reach.keys(catalog)
    condemnable_now = condemnable(found, catalog, work.reach)
    over = due(work.repo, catalog, grace_s=work.request.grace_s, now_s=found.now_s)
    waiting = sorted(catalog.condemned.keys() - set(over))
    chosen = set(condemnable_now)
    # Named by a manifest that is dead now, or by none at all?
    nameless = [
        key
        for key in found.objects
        if key not in live and key not in found.dead and key not in catalog.condemned
    ]
    return _Sorted(
        live=sorted(live),
        condemnable=condemnable_now,
        now=[*over, *condemnable_now] if no_grace else over,
        later=waiting if no_grace else [*waiting, *condemnable_now],
        orphans=[key for key in nameless if key in chosen],
        nameless=nameless,
        young=[key for key in nameless if key not in chosen],
    )


def _check(grace_s: float, orphan_age_s: float, repack_below: float | None) -> None:
    for name, value in (("grace", grace_s), ("orphan age", orphan_age_s)):
        if not (math.isfinite(value) and value >= 0):
            msg = f"the {name} is a number of seconds from 0 on, not {value!r}"
            raise InvalidInputError(msg)
    if repack_below is not None and not 0 <= repack_below <= 1:
        msg = f"the share to repack below is from 0 to 1, not {repack_below!r}"
        raise InvalidInputError(msg)
