"""Replication: versions of one store become versions of another, under the same ids.

Chunks that the other store has are shared with it (see
:mod:`ckptstore.maintenance.replicas.copy_manifest`), the others travel as they are stored, each
checked on the way and read back there. Then the manifest is written, then one commit makes the
version visible: at any moment the target shows whole versions and no others; the next run finishes
an interrupted one, within its version too (:mod:`ckptstore.maintenance.replicas.orphan_packs`).
Ancestors that are not copied come along as records, so that lineage and the
history of metrics are whole.

Nothing is ever taken away from the target: what is deleted in the source, or aged, stays there as
long as the target's own policy keeps it; and what the target itself deleted or reduced is not
brought back, unless it is asked for again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from ckptstore.catalog import replica_ops
from ckptstore.engine.engine import THREADS, EngineSpec, open_engine
from ckptstore.errors import ColdObjectError, ConflictError, IntegrityError
from ckptstore.events import Progress, ProgressCallback
from ckptstore.maintenance.replicas import replicate_catalog
from ckptstore.maintenance.replicas.copy_manifest import foresee
from ckptstore.maintenance.replicas.replicate_report import (
    Failure,
    LeftOut,
    ReplicateReport,
    ReplicateRequest,
    Why,
)
from ckptstore.maintenance.replicas.replicate_version import bring, take_back_deletion
from ckptstore.maintenance.replicas.replication_context import Near, Sides, read_back
from ckptstore.model import Version
from ckptstore.repo import Repo

__all__ = ["Failure", "LeftOut", "ReplicateReport", "ReplicateRequest", "read_back", "replicate"]

_log = logging.getLogger("ckptstore")

# Manifests of the target that stay in memory: heads, neighbours, and the last that came.
_KEPT = 12


def replicate(
    source: Repo,
    target: Repo,
    versions: Sequence[Version],
    request: ReplicateRequest,
    *,
    executor: EngineSpec | None = None,
    workers: int | None = None,
) -> ReplicateReport:
    """Make versions of a store versions of another; return what was done.

    Two replications at once, and savers or collections on either side, do each other no harm.

    Parameters
    ----------
    executor
        Who copies and reads back; manifests and commits are written here. None, or ``threads``
        without `workers`: this process, without tasks.
    workers
        Tasks at once; None for what the engine has.

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
    with ExitStack() as stack:
        engine = None
        if not (executor is None or request.dry_run or (executor == THREADS and workers is None)):
            opening = open_engine(executor, workers=workers, environment=target.environment)
            engine = stack.enter_context(opening)
        sides = Sides.of(source, target, request, engine)
        stack.enter_context(target.manifests.keeping(_KEPT))
        return _replicate(sides, versions, began)


def _replicate(sides: Sides, versions: Sequence[Version], began: float) -> ReplicateReport:
    work = _Replication(
        sides=sides,
        near=Near(sides=sides),
        wanted=[version for version in versions if version.level != "record"],
    )
    work.look()
    if sides.request.dry_run:
        work.foresee()
    else:
        work.copy()
        work.follow()
        sides.target.log.leave_snapshot()
        work.note()
    return work.report(sides.target.environment.monotonic() - began)


@dataclass(slots=True, kw_only=True)
class _Replication:
    """One replication; owned by the calling thread."""

    sides: Sides
    near: Near
    wanted: Sequence[Version]
    missing: list[Version] = field(default_factory=list)
    """What is to be copied, in the order of the source's commits."""
    line: list[Version] = field(default_factory=list)
    """These and their ancestors."""
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
            known = here.version(version.id) if here.has_version(version.id) else None
            asked = version.id in self.sides.request.again
            less = known is not None and replica_ops.has_less(known, version)
            if known is None or (asked and (known.deleted or less)):
                self.missing.append(version)
            elif known.deleted:
                self._leave(version, "deleted in the target")
            elif not less:
                self.present.append(version.id)
            elif replica_ops.had_content(known):
                self._leave(version, "reduced in the target")
            else:
                self.missing.append(version)
        roots = [version.id for version in self.missing]
        origins = (before.run(version.run).origin for version in self.missing)
        self.line = replica_ops.lineage(before, [*roots, *filter(None, origins)])
        runs = {version.run for version in (*self.wanted, *self.line)}
        replica_ops.check_line(here, before, runs)

    def _leave(self, version: Version, why: Why) -> None:
        left = LeftOut(version=version.id, run=version.run, step=version.step, why=why)
        self.left.append(left)

    def _near(self, version: Version) -> list[str]:
        return self.near.of(version, last=self.copied[-1] if self.copied else "")

    def foresee(self) -> None:
        """Count what would travel; reads manifests, no chunks."""
        planned: set[bytes] = set()
        self.near.note_heads()
        for version in self.missing:
            try:
                manifest = self.sides.source.manifests.load(version)
            except IntegrityError as error:
                self._failed(version, error)
                continue
            found = foresee(
                manifest,
                target=self.sides.target,
                source_id=version.id,
                only=self._near(version),
                planned=planned,
            )
            self.chunk_bytes += found.chunk_bytes
            self.chunks_count += found.chunks_count
            self.copied.append(version.id)

    def copy(self) -> None:
        """Bring versions in the order of their commits, each after the records it descends from."""
        coming = {version.id for version in self.missing}
        self.total_bytes = sum(map(_logical, self.missing))
        self.near.note_heads()
        if self.missing:
            replicate_catalog.begin(self.sides, self.line[0].run)
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

    def _is_known(self, version: Version) -> bool:
        return self.sides.target.catalog.has_version(version.id)

    def _bring_records(self, records: list[Version]) -> None:
        """Bring versions as records; empties the list."""
        replicate_catalog.bring_records(self.sides, records)
        self.records_count += len(records)
        records.clear()

    def _bring(self, version: Version) -> bool:
        """Copy a version; return whether that leaves nothing to be done for it."""
        here = self.sides.target.catalog
        if self._is_known(version) and here.version(version.id).deleted:
            if version.id not in self.sides.request.again:  # deleted since it was looked for
                self._leave(version, "deleted in the target")
                return True
            if take_back_deletion(self.sides, version):
                self.present.append(version.id)
                return True
        progress = self._progress(version)
        try:
            outcome = bring(self.sides, version, self._near, progress)
        finally:
            progress(Progress(stage="copy", done=1, total=1))
        self.chunk_bytes += outcome.chunk_bytes
        self.chunks_count += outcome.chunks_count
        self.resumed_bytes += outcome.resumed_bytes
        if outcome.fate == "copied":
            self.copied.append(version.id)
        elif outcome.fate == "present":
            self.present.append(version.id)
        elif outcome.fate == "failed":
            assert outcome.error is not None  # noqa: S101 - for the type checker
            self._failed(version, outcome.error)
        else:
            self._leave(version, outcome.fate)
        return outcome.is_there

    def _progress(self, version: Version) -> ProgressCallback:
        before, size, total = self.done_bytes, _logical(version), self.total_bytes

        def progress(step: Progress) -> None:
            share = step.done / max(step.total, 1)
            done = min(before + int(size * share), total)
            self.sides.request.progress(Progress(stage="copy", done=done, total=total))

        return progress

    def _failed(self, version: Version, error: IntegrityError | ColdObjectError) -> None:
        _log.warning("%s@%s was not replicated: %s", version.run, version.step, error)
        self.failures.append(
            Failure(
                version=version.id,
                run=version.run,
                step=version.step,
                message=str(error),
                kind=error.kind,
            )
        )

    def follow(self) -> None:
        """Bring metrics, tags and heads to where the source has them."""
        replicate_catalog.follow(self.sides, self._runs())

    def _runs(self) -> list[str]:
        return sorted({version.run for version in self.wanted})

    def note(self) -> None:
        """Say in the source's catalog what the target has, if that can be written."""
        if self.sides.request.check:
            self.note_failure = replicate_catalog.note(self.sides, self.copied, self.present)
            self.noted = not self.note_failure

    def report(self, seconds: float) -> ReplicateReport:
        """Return what was done."""
        source, target, request = self.sides.source, self.sides.target, self.sides.request
        copied, runs = set(self.copied), self._runs()
        kept = [run for run in runs if replica_ops.keeps_head(target.catalog, source.catalog, run)]
        unfit = replica_ops.unfit(target.catalog, source.catalog, runs)
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
            metrics_left_count=unfit,
            failures=tuple(self.failures),
            seconds=seconds,
        )


def _logical(version: Version) -> int:
    return sum(part.logical for part in version.roles.values())
