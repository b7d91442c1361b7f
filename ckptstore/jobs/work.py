"""Runs a job: replication, then retention and collection of both stores, then late versions.

A run takes no lock: two runs at once, of one job or of several, do no harm, since each step decides
inside its commits. The next run finishes one that was killed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal, TypeAlias

from ckptstore import errors, limits
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.replica_ops import had_content, has_less
from ckptstore.catalog.retention_rules import parse_bytes, parse_duration
from ckptstore.config import SYSTEM, Environment, workers_default
from ckptstore.events import ProgressCallback, silent
from ckptstore.jobs.job_file import Archive, Job, Place
from ckptstore.maintenance.check.verify import missing
from ckptstore.maintenance.cold.archive import ArchiveReport, archivable, archive
from ckptstore.maintenance.core.select_versions import select_versions
from ckptstore.maintenance.core.storage_times import StorageTimes
from ckptstore.maintenance.replicas.evict import SecondLook, evict
from ckptstore.maintenance.replicas.replicate import ReplicateReport, replicate
from ckptstore.maintenance.replicas.replicate_version import ReplicateRequest, read_back
from ckptstore.maintenance.reports.prometheus_text import metric
from ckptstore.maintenance.retention.retain import RetainReport, retain
from ckptstore.model import NamedVersion, Version, naming
from ckptstore.store import Store, open_store
from ckptstore.store.opening import open_target_of

_log = logging.getLogger("ckptstore")


def run_job(
    job: Job,
    *,
    dry_run: bool = False,
    since_s: float | None = None,
    since_target: str = "",
    environment: Environment = SYSTEM,
    progress: ProgressCallback = silent,
) -> JobReport:
    """Run a job once; return its report.

    The report has each step that failed, and steps that do not depend on it run: if a version
    could not be copied, nothing is evicted and the source's retention is skipped.

    Parameters
    ----------
    dry_run
        Change nothing in either store; the report says what a run would do.
    since_s
        Also copy only versions saved at or after this time, in seconds since 1970. The report
        lists late versions in any case.
    since_target
        Id of the store to which `since_s` applies; another target ignores it.

    Raises
    ------
    ConflictError
        Source and target are one store. Nothing was done.
    CkptStoreError
        A store cannot be opened, or the selection names nothing. Nothing was done.
    """
    began = environment.monotonic()
    began_at = _moment(environment.now_ms() / 1000)
    with ExitStack() as stack:
        source, target = _opened(stack, job, dry_run=dry_run)
        if since_target not in ("", target.info.store_id):
            since_s = None
        times = StorageTimes(source.repo)
        run = _Run(job, source, target, times, since_s, environment, progress, dry_run=dry_run)
        covered_s = max(0.0, run.times.seen_until_s() - run.age(job.select.older_than))
        run.work()
        return JobReport(
            name=job.name,
            source=source.url,
            target=_shown(job.target.url) if dry_run else target.url,
            target_id=target.info.store_id,
            dry_run=dry_run,
            began_at=began_at,
            covered_until=_moment(covered_s),
            seconds=environment.monotonic() - began,
            steps=tuple(run.steps),
            overdue=tuple(run.overdue()),
        )


def _opened(stack: ExitStack, job: Job, *, dry_run: bool) -> tuple[Store, Store]:
    """Return source and target, two stores, which the stack closes."""
    with _told_which("source", job.source.url):
        workers, words = job.copy.workers or workers_default(), _words(job.source)
        opened = open_store(job.source.url, read_only=dry_run, workers=workers, **words)
        source = stack.enter_context(opened)
    _selected(source, job)  # refuses a selection that names nothing before a store is made
    with _told_which("target", job.target.url):
        opening = open_target_of(source, job.target.url, dry_run=dry_run, **_words(job.target))
        target = stack.enter_context(opening)
    if source.info.store_id == target.info.store_id:
        msg = f"the source and the target of the job {job.name!r} are one store"
        raise errors.ConflictError(msg, hint="name two stores, neither a copy of the other")
    return source, target


def _words(place: Place) -> dict[str, Any]:
    """Return the options with which a store is opened."""
    return {**place.options, "single_writer": place.single_writer, "encryption_key": place.key}


def _selected(source: Store, job: Job) -> list[Version]:
    """Return the versions that the file names, whatever their age."""
    select = job.select
    refs = [source.resolve(ref) for ref in select.refs]
    return select_versions(source.repo, refs=refs, runs=select.runs, rules=select.keep)


@contextmanager
def _told_which(place: str, url: str) -> Iterator[None]:
    """Name the store that could not be opened in an error."""
    try:
        yield
    except errors.CkptStoreError as error:
        msg = f"the {place}, {_shown(url)}, cannot be opened: {error.message}"
        raise type(error)(msg, hint=error.hint) from error


def _shown(url: str) -> str:
    """Return the location of a store, which may not exist, without credentials."""
    if "://" not in url:
        return url
    from ckptstore.backends.fsspec_backend import without_credentials

    return without_credentials(url)


def _own_policy(wanted: Mapping[str, Any] | bool) -> Mapping[str, Any] | None:
    """Return the policy in a job file; None for the store's own."""
    return wanted if isinstance(wanted, Mapping) else None


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


@dataclass(slots=True)
class _Run:
    """One run; owned by the calling thread."""

    job: Job
    source: Store
    target: Store
    times: StorageTimes
    """Of the source."""
    since_s: float | None
    environment: Environment
    progress: ProgressCallback
    dry_run: bool
    steps: list[StepReport] = field(default_factory=list)
    replicated: ReplicateReport | None = None

    def work(self) -> None:
        """Do all steps, except those that need one that failed."""
        scrub = self.job.scrub
        if scrub.source:
            self._step("scrub-source", lambda: self._scrub(self.source, self.target, scrub.source))
        chosen = self.chosen(self.job.select.older_than, since_s=self.since_s)
        copied = self._step("replicate", lambda: self._replicate(chosen))
        retain = self.job.retain
        if scrub.target and not self._step(
            "scrub-target", lambda: self._scrub(self.target, self.source, scrub.target)
        ):
            copied = False
        if retain.target:
            self._step("retain-target", self._retain_target)
        if self.job.archive is not None:
            self._step("archive-target", partial(self._archive, self.job.archive))
        if copied:
            if retain.evict is not None:
                self._step("evict", self._evict)
            if retain.source:
                self._step("retain-source", self._retain_source)
        if self.job.gc.target:
            self._step("gc-target", lambda: self._collect(self.target))
        if self.job.gc.source:
            self._step("gc-source", lambda: self._collect(self.source))

    def chosen(self, older_than: str | None, *, since_s: float | None = None) -> list[Version]:
        """Return the selected versions that were saved within the wanted time."""
        since, least_s = self.age(self.job.select.since), self.age(older_than)
        versions = _selected(self.source, self.job)
        if not (since or since_s or least_s):
            return versions
        now_s, saved_s = self.times.now_s(), self.times.saved_s
        earliest = max(now_s - since if since else 0.0, since_s or 0.0)
        # Where the storage tells no times, versions are as new as the moment in which one asks.
        latest = now_s - least_s if least_s else math.inf
        return [one for one in versions if earliest <= saved_s(one) <= latest]

    def age(self, text: str | None) -> float:
        """Return the seconds of a duration; 0 for none."""
        return 0.0 if text is None else float(parse_duration(text))

    def _step(self, name: StepName, work: Callable[[], Mapping[str, Any]]) -> bool:
        """Do one step; return whether it did everything."""
        began = self.environment.monotonic()
        result: Mapping[str, Any] = {}
        try:
            result = work()
        except errors.CkptStoreError as failure:
            error, code = str(failure), failure.exit_code
            _log.warning("job %s: %s: %s", self.job.name, name, failure)
        else:
            error, code = problem_of(result)
        seconds = self.environment.monotonic() - began
        done = StepReport(
            name=name, ok=not error, seconds=seconds, result=result, error=error, exit_code=code
        )
        self.steps.append(done)
        return not error

    @property
    def _tasks(self) -> dict[str, Any]:
        """Options of operations that run in tasks."""
        return {"executor": self.job.copy.engine, "workers": self.job.copy.tasks}

    def _scrub(self, store: Store, other: Store, share: float) -> Mapping[str, Any]:
        """Read a part of a store; after damage, repair the store from the other."""
        found = store.verify(sample=share, progress=self.progress, **self._tasks)
        result: dict[str, Any] = {"chunks": found.chunks_count, "problems": len(found.problems)}
        if found.ok or self.dry_run:
            return result
        healed = store.repair(other, progress=self.progress)
        lost = [
            {"version": one.version, "run": one.run, "step": one.step, "message": one.why}
            for one in healed.lost
        ]
        if not (healed.ok or lost):
            why = healed.commits_lost or "its log is damaged: ckptstore repair"
            lost.append({"version": "", "run": "", "step": 0, "message": why})
        return {**result, "mended": len(healed.mended), "failures": lost}

    def _replicate(self, versions: Sequence[Version]) -> Mapping[str, Any]:
        request = ReplicateRequest(
            dry_run=self.dry_run,
            check=self.job.copy.check,
            bytes_per_s=float(parse_bytes(str(self.job.copy.rate))),
            progress=self.progress,
        )
        source, target = self.source.repo, self.target.repo
        report = replicate(source, target, versions, request, **self._tasks)
        self.replicated = report
        frees = self.job.retain.evict is not None or self.job.retain.source  # goes by the notes
        return {
            "selected": len(versions),
            "copied": len(report.copied),
            "present": len(report.present),
            "left": len(report.left),
            "records": report.records_count,
            "chunks": report.chunks_count,
            "chunk_bytes": report.chunk_bytes,
            "logical_bytes": report.logical_bytes,
            "noted": report.noted,
            "note_failure": report.note_failure if frees else "",
            "failures": [asdict(failure) for failure in report.failures],
        }

    def _retain_source(self) -> Mapping[str, Any]:
        """Thin out the source, but for selected versions that were not read back in the target.

        The target may lack a version that is too young for the selection, was saved since the
        selection, whose copy was never read back, or that the target evicted because the source
        holds it. Versions that go because the target holds them are checked there before, by their
        objects; and after each commit, by the target's log: versions that the target lost
        meanwhile are taken back.
        """
        source, target = self.source.repo, self.target.repo
        selected = _selected(self.source, self.job)
        policy = _own_policy(self.job.retain.source)
        coming = self._coming if self.dry_run else ()
        catalog, there = source.refresh(), target.refresh()
        here, other = source.superblock.store_id, target.superblock.store_id
        waiting = {
            version.id
            for version in selected
            if not _has(there, version, other) or _rests_on(there, version, here)
        }
        free = {version.id for version in catalog.versions()} - waiting.difference(coming)
        planned = retain(source, policy=policy, dry_run=True, quick=True, free=free)
        chosen = {version.id for version in selected}
        relied = {
            one.version.id: one.version
            for one in planned.changes
            if one.version.id in chosen and _holds(target.catalog, one.version, other)
        }
        missed = missing(target, list(relied.values())) if relied else set()

        def holds(version: Version) -> bool:
            return _holds(target.catalog, version, other)

        second = SecondLook(source, target, holds, "removed or reduced")

        def after(changed: Sequence[Version], deleted: Collection[str]) -> Collection[str]:
            """Return the ids of all versions that the target lost up to this commit."""
            concerned = [version for version in changed if version.id in relied]
            if concerned:
                second.look(concerned, deleted=deleted)
            return {*second.returned, *(failure.version for failure in second.lost)}

        report = retain(
            source,
            policy=policy,
            dry_run=self.dry_run,
            # Versions outside of the plan were not checked; they can go the next time.
            free={one.version.id for one in planned.changes} - missed,
            after=after,
        )
        return {
            **retained(report, without=second.returned),
            "missed": len(missed),
            "returned": len(second.returned),
            "failures": [asdict(failure) for failure in second.lost],
        }

    @property
    def _coming(self) -> Collection[str]:
        """Ids of the versions that this run has copied, or would copy, and has read back."""
        return self.replicated.copied if self.replicated and self.job.copy.check else ()

    def _retain_target(self) -> Mapping[str, Any]:
        policy = _own_policy(self.job.retain.target)
        return retained(retain(self.target.repo, policy=policy, dry_run=self.dry_run))

    def _evict(self) -> Mapping[str, Any]:
        """Keep only the record of versions that the target holds and no rule keeps."""
        source, target = self.source.repo, self.target.repo
        kept = {one.id for one in select_versions(source, rules=self.job.retain.evict)}
        report = evict(
            source,
            target,
            [version for version in _selected(self.source, self.job) if version.id not in kept],
            coming=self._coming,
            pin=self.job.retain.pin_evicted,
            dry_run=self.dry_run,
        )
        listed = ("evicted", "pinned", "unpinned", "missed", "returned")
        return {
            **{name: len(getattr(report, name)) for name in listed},
            "reclaimable_bytes": report.reclaimable_bytes,
            "failures": [asdict(failure) for failure in report.lost],
        }

    def _archive(self, wanted: Archive) -> Mapping[str, Any]:
        """Move old versions of the target to a colder class; with `copy.check`, checked ones."""
        repo, checked = self.target.repo, self.job.copy.check
        if self.dry_run and repo.backend.capabilities.private and not repo.backend.cold_storage():
            # The backend stands for a target that is not made yet.
            report = ArchiveReport(dry_run=True, storage_class=wanted.storage_class)
        else:
            old = archivable(repo, keep_hot=wanted.keep_hot, min_age_s=self.age(wanted.min_age))
            report = archive(
                repo,
                [version for version in old if read_back(version) or not checked],
                wanted.storage_class,
                dry_run=self.dry_run,
                progress=self.progress,
            )
        return {
            "class": report.storage_class,
            "versions": len(report.versions),
            "moved": report.moved.count,
            "moved_bytes": report.moved.size_bytes,
            "there": report.there.count,
            "left": len(report.left),
            "skipped": [asdict(one) for one in report.skipped],
            "cooled": list(report.cooled),
            "warnings": list(report.warnings),
        }

    def _collect(self, store: Store) -> Mapping[str, Any]:
        grace = self.job.gc.grace
        grace_s = limits.GC_GRACE_S if grace is None else float(parse_duration(grace))
        report = store.gc(dry_run=self.dry_run, grace_s=grace_s, **self._tasks)
        return {"reclaimable_now_bytes": sum(t.size_bytes for t in report.reclaimable_now.values())}

    def overdue(self) -> list[Overdue]:
        """Return the selected versions that are old enough, and not in the target."""
        after = self.job.alert.not_replicated_after
        if after is None:
            return []
        there = self.target.repo.refresh()
        late = []
        for version in self.chosen(after):
            one = there.find(version.id)
            if one is None or not (is_settled(one) or (one.level != "record" and not one.damaged)):
                late.append(Overdue(**naming(version), age_s=self.times.age_s(version)))
        return late


def retained(report: RetainReport, *, without: Collection[str] = ()) -> dict[str, Any]:
    """Return the figures of a retention, without versions that were taken back."""
    changes = [one for one in report.changes if one.version.id not in without]
    return {
        "changes": len(changes),
        "reclaimable_bytes": sum(one.reclaimable_bytes for one in changes),
        "commits": len(report.commits),
    }


def _holds(there: Catalog, version: Version, store: str) -> bool:
    """Return True if the target has the content of a version, by its log as last read."""
    return _has(there, version, store) and not is_settled(there.version(version.id))


def _has(there: Catalog, version: Version, store: str) -> bool:
    """Return True if the target has as much of a version as the source, or dropped it itself.

    What it has must have been read back there: the source notes its id, `store`, only then.
    """
    found = there.find(version.id)
    if found is None:
        return False
    whole = not (has_less(found, version) or found.damaged)
    return is_settled(found) or (whole and store in version.replicas)


def is_settled(there: Version) -> bool:
    """Return True if a store deleted a version itself, or reduced it to its record."""
    return there.deleted or (there.level == "record" and had_content(there))


def _rests_on(there: Catalog, version: Version, store: str) -> bool:
    """Return True if the target has only the record of a version, and notes `store` alone for it.

    The target may have evicted the version because `store` holds it, so `store` must keep it.
    """
    found = there.find(version.id)
    if found is None or found.level != "record" or found.deleted:
        return False
    return set(found.replicas) == {store}


# --- the report ---------------------------------------------------------------------------------


StepName: TypeAlias = Literal[
    "scrub-source", "replicate", "scrub-target", "retain-target", "archive-target", "evict",
    "retain-source", "gc-target", "gc-source",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One step of a job."""

    name: StepName
    ok: bool
    seconds: float
    result: Mapping[str, Any]
    """Figures of the step: the API's report of the same name in short."""
    error: str = ""
    """The error; empty for a step that did everything."""
    exit_code: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Overdue(NamedVersion):
    """A late version: the target should hold it, and does not."""

    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReport:
    """One run of a job."""

    name: str
    source: str
    """Location, as that of the target without credentials."""
    target: str
    target_id: str
    """Id of the target store."""
    dry_run: bool
    began_at: str
    """UTC, ISO 8601."""
    covered_until: str
    """The same; versions saved before this time were old enough for the selection."""
    seconds: float
    steps: tuple[StepReport, ...]
    overdue: tuple[Overdue, ...]
    """Late versions after the steps."""

    @property
    def ok(self) -> bool:
        """True if every step did everything and no version is late."""
        return self.exit_code == 0

    @property
    def exit_code(self) -> int:
        """Code of the first step that failed; 7 if only a version is late; else 0."""
        for step in self.steps:
            if not step.ok:
                return step.exit_code or errors.CkptStoreError.exit_code
        return errors.PolicyError.exit_code if self.overdue else 0


def exposition(name: str, report: JobReport | None, *, now_s: float) -> str:
    """Return the figures of a run for a text file that Prometheus's node exporter collects.

    Parameters
    ----------
    name
        Name of the job.
    report
        None for a run that could do nothing: it has only its failure and its time.
    now_s
        Seconds since 1970.
    """
    figures: list[tuple[str, str, float]] = [
        ("ok", "Whether the last run did all it should.", report is not None and report.ok),
        ("end_timestamp_seconds", "When it ended.", now_s),
    ]
    if report is not None:
        figures += _figures(report)
    labels = {"job_name": name}
    return "".join(metric(f"job_{each}", "gauge", text, [(labels, x)]) for each, text, x in figures)


def _figures(report: JobReport) -> list[tuple[str, str, float]]:
    """Return name, text and value of each figure of a report."""
    replicated = next((step for step in report.steps if step.name == "replicate"), None)
    result: Mapping[str, Any] = {} if replicated is None else replicated.result
    late, oldest_s = len(report.overdue), max((one.age_s for one in report.overdue), default=0.0)
    return [
        ("seconds", "What it took.", report.seconds),
        ("overdue_versions", "Versions that should be in the target and are not.", late),
        ("overdue_seconds", "Age of the oldest of them.", oldest_s),
        ("replicated_versions", "Versions that the last run copied.", result.get("copied", 0)),
        ("replicated_bytes", "Bytes that travelled.", result.get("chunk_bytes", 0)),
    ]


def problem_of(result: Mapping[str, Any]) -> tuple[str, int]:
    """Return the failure that a step's figures report, with its exit code; empty and 0 for none."""
    failures, skipped = result.get("failures"), result.get("skipped")
    if failures and all(one.get("kind") == errors.ColdObjectError.kind for one in failures):
        return f"{len(failures)} versions are cold: thaw them", errors.ColdObjectError.exit_code
    if failures:
        return f"{len(failures)} versions are damaged", errors.IntegrityError.exit_code
    if skipped:
        return f"{len(skipped)} packs could not be moved", errors.PolicyError.exit_code
    if missed := result.get("missed"):
        return f"{missed} versions are not whole in the target", errors.IntegrityError.exit_code
    if unnoted := result.get("note_failure"):
        return (
            f"the source cannot note what the target has: {unnoted}",
            errors.StorageError.exit_code,
        )
    return "", 0
