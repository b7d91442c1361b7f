"""Replication: versions of one store become versions of another, under the same ids.

Chunks that the other store has are shared with it (see
:mod:`ckptstore.maintenance.replicas.copy_manifest`), the others travel as they are stored, each
checked on the way and read back there. Then the manifest is written, then one commit makes the
version visible: at any moment the target shows whole versions and no others; the next run finishes
an interrupted one, within its version too (:mod:`ckptstore.maintenance.replicas.copy_manifest`).
Ancestors that are not copied come along as records, so that lineage and the
history of metrics are whole.

Nothing is ever taken away from the target: a version that the source deletes, or ages, stays there
as long as the target's own policy keeps it; and one that the target itself deleted or reduced is
not brought back, unless it is asked for again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

from ckptstore.backends.transfers import operation
from ckptstore.catalog import replica_ops, run_ops
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.content_ops import quarantine
from ckptstore.catalog.retention import fixed_roles, inherit_roles
from ckptstore.catalog.state import Op
from ckptstore.chunking import batches
from ckptstore.engine.engine import EngineSpec
from ckptstore.errors import (
    CkptStoreError,
    ColdObjectError,
    ConflictError,
    CorruptObjectError,
    IntegrityError,
)
from ckptstore.events import Progress, ProgressCallback
from ckptstore.maintenance.core.task_pool import Tasks, open_tasks
from ckptstore.maintenance.replicas import copy_manifest, replicate_version
from ckptstore.maintenance.replicas.evict import Pins
from ckptstore.maintenance.replicas.replicate_version import Failure
from ckptstore.model import NamedVersion, Version, naming
from ckptstore.objects.copying import ChunkCopies
from ckptstore.repo import Repo
from ckptstore.shown import Shown

_log = logging.getLogger("ckptstore")

# Manifests of the target that stay in memory: heads, neighbours, and the last that came.
_KEPT = 12
# Records whose operations are made at once: a commit takes no more of them.
_RECORDS_AT_ONCE = 256

Why = Literal["deleted in the target", "reduced in the target", "deleted in the source"]
"""Why a version does not come: the target's own retention, or somebody there, took it away, in
whole or in part; or the source has lost it since it was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut(NamedVersion):
    """A version that does not come, by the decision of one of the stores."""

    why: Why


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ReplicateReport(Shown):
    """Result of a replication, or of its dry run."""

    dry_run: bool
    source: str
    """Location, as that of the target without credentials."""
    target: str
    target_id: str
    """Id of the target store."""
    copied: tuple[str, ...] = ()
    """Ids of versions whose content came, oldest first; with `dry_run`, that would come."""
    present: tuple[str, ...] = ()
    """Ids of versions that were there already, or whose deletion there was taken back."""
    left: tuple[LeftOut, ...] = ()
    """Versions that the target itself has deleted or reduced, which stay so unless they are asked
    for again; and those that the source deleted meanwhile."""
    records_count: int = 0
    """Ancestors whose record came."""
    chunk_bytes: int = 0
    """Stored bytes that travelled, or would."""
    chunks_count: int = 0
    resumed_bytes: int = 0
    """Stored bytes that did not travel again, since an interrupted copy had left them there; read
    back before they counted. 0 in a dry run, which does not look for them."""
    logical_bytes: int = 0
    """Size of the copied versions in memory."""
    checked: bool = False
    """Every chunk that travelled was read back from the target."""
    noted: bool = False
    """The source's catalog says that the target has all of these versions."""
    note_failure: str = ""
    """Why it does not, if it could not be written."""
    heads_kept: tuple[str, ...] = ()
    """Runs whose head stays where the target has put it: by training there, or by a rollback."""
    metrics_left_count: int = 0
    """Values of metrics that the target had no room for, beside those of its own."""
    failures: tuple[Failure, ...] = ()
    seconds: float = 0.0

    @property
    def exit_code(self) -> int:
        """5 if a version is damaged, 8 if some are only cold, 0 if nothing failed."""
        if not self.failures:
            return 0
        cold = all(failure.kind == ColdObjectError.kind for failure in self.failures)
        return ColdObjectError.exit_code if cold else IntegrityError.exit_code


@operation("replicate")
def replicate(
    source: Repo,
    target: Repo,
    versions: Sequence[Version],
    request: replicate_version.ReplicateRequest,
    *,
    executor: EngineSpec | None = None,
    workers: int | None = None,
) -> ReplicateReport:
    """Make versions of a store versions of another; return what was done.

    Two replications at once, and savers or collections on either side, do each other no harm.

    Parameters
    ----------
    executor
        Copies and reads back, in tasks; manifests and commits are written here. None, or
        ``threads`` without `workers`: this process, without tasks.
    workers
        Tasks at once; None for as many as the engine has.

    Raises
    ------
    ConflictError
        Source and target are one store; or the target has a run of a name that has nothing in
        common with the source's, of a version or of an ancestor. Nothing was written.
    ReadOnlyError, UnsafeBackendError, StorageError
        The target cannot be written to, or a storage failed. What was committed stays, and a
        repetition goes on.
    CondemnedError
        Collections condemned what a copy needs, again and again.
    """
    began = target.environment.monotonic()
    if source.superblock.store_id == target.superblock.store_id:
        msg = f"{source.url} and {target.url} are one store, or copies of one"
        raise ConflictError(msg, hint="replicate to a store of its own: ckptstore init URL")
    if not request.dry_run:
        target.check_writable()
    with (
        open_tasks(target, None if request.dry_run else executor, workers) as tasks,
        target.manifests.keeping(_KEPT),
    ):
        copies = ChunkCopies(
            source=Tasks.of(source, tasks.engine).storage,
            target=tasks.storage,
            options=target.options,
            environment=target.environment,
            engine=tasks.engine,
            bytes_per_s=request.bytes_per_s,
            check=request.check,
        )
        orphans = copy_manifest.Orphans(target) if request.resume else None
        sides = replicate_version.Sides(source, target, request, copies, orphans)
        wanted = [version for version in versions if version.level != "record"]
        work = _Replication(sides, wanted, frozenset(version.id for version in versions))
        work.look()
        if request.dry_run:
            work.foresee()
        else:
            work.copy()
            work.follow()
            target.log.leave_snapshot()
            work.note()
        return work.report(target.environment.monotonic() - began)


@dataclass(slots=True)
class _Replication:
    """One replication; owned by the calling thread."""

    sides: replicate_version.Sides
    wanted: Sequence[Version]
    chosen: frozenset[str]
    """Ids of these, and of versions whose record alone is asked for."""
    missing: list[Version] = field(default_factory=list)
    """Versions that are to be copied, in the order of the source's commits."""
    line: list[Version] = field(default_factory=list)
    """These and their ancestors."""
    heads: Sequence[str] = ()
    """Of the target's runs, as they were before: the newest."""
    places: dict[str, int] = field(default_factory=dict)
    """Of versions in their runs of the source."""
    present: list[str] = field(default_factory=list)
    left: list[LeftOut] = field(default_factory=list)
    copied: list[str] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    records_count: int = 0
    chunk_bytes: int = 0
    chunks_count: int = 0
    resumed_bytes: int = 0
    done_bytes: int = 0
    total_bytes: int = 0
    noted: bool = False
    note_failure: str = ""

    def look(self) -> None:
        """Find out what the target has, and whether the runs go together; write nothing."""
        before = self.sides.source.refresh()
        here = self.sides.target.refresh()
        for version in sorted(self.wanted, key=lambda version: version.commit):
            known = here.find(version.id)
            asked = version.id in self.sides.request.again
            less = known is not None and replica_ops.has_less(known, version)
            if known is None or (asked and (known.deleted or less)):
                self.missing.append(version)
            elif known.deleted:
                self._leave(version, "deleted in the target")
            elif not less and known.damaged:
                msg = f"parts of the copy of {version.label} are lost"
                hint = "mend it: ckptstore repair --store TARGET --from SOURCE"
                self._failed(version, CorruptObjectError(msg, hint=hint))
            elif not less:
                self.present.append(version.id)
            elif replica_ops.had_content(known):
                self._leave(version, "reduced in the target")
            else:
                self.missing.append(version)
        roots = [version.id for version in self.missing]
        origins = (before.run(version.run).origin for version in self.missing)
        self.line = replica_ops.lineage(before, [*roots, *filter(None, origins)])
        if self.sides.request.alone:
            self.line = [version for version in self.line if version.id in self.chosen]
        runs = {version.run for version in (*self.wanted, *self.line)}
        replica_ops.check_line(here, before, runs)
        self.heads = copy_manifest.newest_heads(here)

    def _leave(self, version: Version, why: Why) -> None:
        self.left.append(LeftOut(**naming(version), why=why))

    def _near(self, version: Version) -> list[Version]:
        """Return the target's versions that are likely to have chunks of one.

        A checked replication shares with none that was not read back: its chunks may be anything.
        """
        ids = self.sides.source.catalog.ids(version.run)
        if version.id not in self.places:
            self.places.update((one, place) for place, one in enumerate(ids))
        here = self.sides.target.catalog

        def shares(version_id: str) -> bool:
            """Return whether chunks of a version of the target may be shared."""
            found = here.find(version_id)
            if found is None or found.deleted or found.damaged or found.level == "record":
                return False
            return replicate_version.read_back(found) or not self.sides.request.check

        return copy_manifest.near_versions(
            here,
            version,
            ids=ids,
            place=self.places[version.id],
            heads=self.heads,
            wanted=shares,
            last=self.copied[-1] if self.copied else "",
        )

    def foresee(self) -> None:
        """Count what would travel; reads manifests, no chunks."""
        planned: set[bytes] = set()
        for version in self.missing:
            try:
                replicate_version.check_whole(version)
                manifest = self.sides.source.manifests.load(version)
            except IntegrityError as error:
                self._failed(version, error)
                continue
            count, size = copy_manifest.foresee(
                manifest, target=self.sides.target, candidates=self._near(version), planned=planned
            )
            self.chunks_count += count
            self.chunk_bytes += size
            self.copied.append(version.id)

    def copy(self) -> None:
        """Bring versions in the order of their commits, each after the records it descends from."""
        coming = {version.id for version in self.missing}
        self.total_bytes = sum(map(_logical, self.missing))
        if self.missing:
            self._begin(self.line[0].run)
        records: list[Version] = []
        for version in self.line:
            if version.id in coming:
                self._bring_records(records)
                if not self._bring(version) and not self._is_known(version):
                    self._bring_records([version])
                self.done_bytes += _logical(version)
            elif not self._is_known(version):
                records.append(version)
        self._bring_records(records)

    def _begin(self, run: str) -> None:
        """Make the first commit of an empty target: a run.

        A copy that dies before its own first commit leaves a manifest; in a store without any
        commit this would look like a log that was lost.
        """
        ways = self.sides.source.catalog.run(run).metrics

        def build(now: Catalog) -> list[Op]:
            return run_ops.ensure_run(now, run, ways) if not now.number else []

        self.sides.target.log.append_any(build)

    def _is_known(self, version: Version) -> bool:
        return self.sides.target.catalog.has_version(version.id)

    def _bring_records(self, records: list[Version]) -> None:
        """Make versions known in the target, without their content; empties the list.

        Parameters
        ----------
        records
            In the order of their commits, each after its parent, unless that is there already.
        """
        source, log = self.sides.source, self.sides.target.log
        alone = self.sides.request.alone
        store = source.superblock.store_id
        for batch in batches(records, _RECORDS_AT_ONCE):

            def build(now: Catalog, batch: Sequence[Version] = batch) -> list[Op]:
                """Return what of the batch is not known yet, as far as one commit holds it."""
                ops = replica_ops.arrive(
                    now, source.catalog, batch, store=store, arrivals={}, alone=alone
                )
                return replica_ops.fitting(ops)

            while log.append_any(build) is not None:
                pass
        self.records_count += len(records)
        records.clear()

    def _bring(self, version: Version) -> bool:
        """Copy a version; return whether the target knows it now, so that no record need come."""
        if self._is_known(version) and self.sides.target.catalog.version(version.id).deleted:
            if version.id not in self.sides.request.again:  # deleted since it was looked for
                self._leave(version, "deleted in the target")
                return True
            if replicate_version.take_back_deletion(self.sides, version):
                self.present.append(version.id)
                return True
        progress = self._progress(version)
        try:
            fate, landed = replicate_version.bring(self.sides, version, self._near, progress)
        finally:
            progress(Progress(stage="copy", done=1, total=1))
        if landed is not None:
            self.chunk_bytes += landed.chunk_bytes
            self.chunks_count += landed.chunks_count
            self.resumed_bytes += landed.resumed_bytes
        if isinstance(fate, CkptStoreError):
            self._failed(version, fate)
            return False
        if fate == "copied":
            self.copied.append(version.id)
        elif fate == "present":
            self.present.append(version.id)
        else:
            self._leave(version, fate)
        return fate != "deleted in the source"

    def _progress(self, version: Version) -> ProgressCallback:
        before, size, total = self.done_bytes, _logical(version), self.total_bytes

        def progress(step: Progress) -> None:
            done = min(before + int(size * step.done / max(step.total, 1)), total)
            self.sides.request.progress(Progress(stage="copy", done=done, total=total))

        return progress

    def _failed(self, version: Version, error: IntegrityError | ColdObjectError) -> None:
        _log.warning("%s@%s was not replicated: %s", version.run, version.step, error)
        self.failures.append(Failure(**naming(version), message=str(error), kind=error.kind))

    def follow(self) -> None:
        """Bring metrics, tags, heads and fixed roles of runs to where the source has them.

        As many commits as it takes; each is decided on the catalog that it follows.
        """
        before, runs = self.sides.source.catalog, self._runs()
        store = self.sides.source.superblock.store_id

        def build(now: Catalog) -> list[Op]:
            """Return what of it the target lacks still, as far as one commit holds it."""
            here = [run for run in runs if now.has_run(run)]
            roles = (inherit_roles(now, run, fixed_roles(before, run)) for run in here)
            ops = replica_ops.follow(now, before, here, store=store)
            return replica_ops.fitting(chain(ops, *roles))

        while self.sides.target.log.append_any(build) is not None:
            pass

    def _runs(self) -> list[str]:
        return sorted({version.run for version in self.wanted})

    def note(self) -> None:
        """Say in the source's catalog what the target has, if that can be written.

        Of versions that were there already only those that were read back there, or first saved
        there, are not damaged, and of which the target keeps as much.
        """
        known = self.sides.source.backend.capabilities
        if not self.sides.request.check or self.sides.request.alone or known.read_only:
            return
        source, store = self.sides.source, self.sides.target.superblock.store_id
        ids = [one for one in (*self.copied, *self.present) if self._is_sound(one)]
        pins = Pins(here=self.sides.target, there=source)
        back = [one for one in self.copied if one in ids and pins.has(one)]
        if back or replica_ops.replicated(source.catalog, ids, store):
            try:
                source.check_writable()
                lost = self._find_lost(back) if back else {}  # the source may have the only copy
                ids, back = ([one for one in of if one not in lost] for of in (ids, back))
                while source.log.append_any(lambda now: replica_ops.replicated(now, ids, store)):
                    pass
                pins.take_away(back)  # the target has let them go, and has them again
            except CkptStoreError as error:
                _log.warning("%s does not say who has its versions: %s", source.url, error)
                self.note_failure = str(error)
        self.noted = not self.note_failure and {*self.copied, *self.present} <= {*ids}

    def _find_lost(self, version_ids: Sequence[str]) -> dict[str, str]:
        """Record that copies share chunks which the target has lost; return their manifests."""
        from ckptstore.maintenance.check.verify import missing

        target = self.sides.target
        gone = missing(target, [target.catalog.version(one) for one in version_ids])
        lost = {one: target.catalog.version(one).manifest_digest for one in gone}
        if lost:
            target.log.append_any(lambda now: quarantine(now, lost))
            self.copied = [one for one in self.copied if one not in lost]
        msg = f"it shares chunks that {target.url} has lost"
        error = CorruptObjectError(msg, hint="mend it there: ckptstore repair")
        for one in lost:
            self._failed(target.catalog.version(one), error)
        return lost

    def _is_sound(self, version_id: str) -> bool:
        there = self.sides.target.catalog.version(version_id)
        here = self.sides.source.catalog.version(version_id)
        less = replica_ops.has_less(there, here) or there.damaged or there.deleted
        return not less and replicate_version.read_back(there)

    def report(self, seconds: float) -> ReplicateReport:
        """Return what was done."""
        source, target, request = self.sides.source, self.sides.target, self.sides.request
        copied, runs = set(self.copied), self._runs()
        kept = [run for run in runs if replica_ops.keeps_head(target.catalog, source.catalog, run)]
        return ReplicateReport(
            dry_run=request.dry_run,
            source=source.url,
            target=target.url,
            target_id=target.superblock.store_id,
            copied=tuple(self.copied),
            present=tuple(self.present),
            left=tuple(self.left),
            records_count=self.records_count,
            chunk_bytes=self.chunk_bytes,
            chunks_count=self.chunks_count,
            resumed_bytes=self.resumed_bytes,
            logical_bytes=sum(_logical(v) for v in self.missing if v.id in copied),
            checked=request.check and not request.dry_run,
            noted=self.noted,
            note_failure=self.note_failure,
            heads_kept=tuple(kept),
            metrics_left_count=replica_ops.unfit(target.catalog, source.catalog, runs),
            failures=tuple(self.failures),
            seconds=seconds,
        )


def _logical(version: Version) -> int:
    return sum(part.logical for part in version.roles.values())
