"""Checks that everything the catalog names is there and was not changed.

``records`` reads the log, every manifest and the size of every pack that a version needs;
``full`` reads every byte besides, or a sample of it. A chunk that several versions share is read
once. Damage to one object never stops the check of the others. Nothing is changed, except
that ``record`` writes into the log which versions were found sound.

Objects that no version needs are no damage, but they can tell that the log lost commits. A log that
lost commits in its middle shows a gap. One that lost its newest, or all, looks like a shorter one:
to it, the versions of the lost commits are nobody's objects. A collection that believed it would
delete them, so it refuses manifests that cannot come from saves that died.

The two differ in when the objects came. A save that dies leaves its manifest between the commits of
others, or of its successor; lost commits leave theirs in one stretch of time without a single
commit. Both times are the storage's.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from ckptstore import errors, limits
from ckptstore.argument_checks import check_among, check_between, integer
from ckptstore.backends.base import Backend
from ckptstore.backends.transfers import operation
from ckptstore.catalog import content_ops, snapshots
from ckptstore.catalog.catalog import Catalog
from ckptstore.engine.engine import EngineSpec
from ckptstore.events import ProgressCallback, silent
from ckptstore.format import keys
from ckptstore.format.manifest import outline
from ckptstore.maintenance.check.integrity_scan import Problem, Sample, Survey, open_state
from ckptstore.maintenance.check.verify_tasks import check_all
from ckptstore.maintenance.core.task_pool import Tasks, open_tasks
from ckptstore.model import Version
from ckptstore.repo import Repo
from ckptstore.shown import HtmlTable, Shown, bytes_text

Level = Literal["records", "full"]

_DAY_MS = 24 * 3600 * 1000


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class VerifyReport(Shown):
    """Extent and findings of a check."""

    level: Level
    versions_count: int
    packs_count: int
    chunks_count: int
    """Chunks that were read, by this check or the one that it resumed; 0 at level ``records``."""
    read_bytes: int
    """Bytes of tensors that were decoded and compared."""
    seconds: float
    problems: tuple[Problem, ...] = ()
    notices: tuple[Notice, ...] = ()
    """Objects that no version needs; no damage."""
    recorded: tuple[str, ...] = ()
    """Ids of versions that this check recorded as sound."""
    cold_packs_count: int = 0
    """Packs that were not read since they lie in an archive class; at level ``full``."""
    cold_versions: tuple[str, ...] = ()
    """Ids of versions that need such packs: no damage was found, and not all was looked at."""
    sample: Sample | None = None

    def _summary(self) -> HtmlTable:
        read = f"{self.versions_count} versions, {bytes_text(self.read_bytes)} read"
        found = f"{len(self.problems)} problems" if self.problems else "no damage"
        rows = [(f"{p.run}@{p.step}", p.version[:8], p.tensor, p.message) for p in self.problems]
        columns = ("VERSION", "ID", "TENSOR", "PROBLEM")
        return HtmlTable(title=f"{found}: {read}", columns=columns, rows=rows)

    @property
    def ok(self) -> bool:
        """Return whether nothing was found."""
        return not self.problems

    @property
    def damaged_versions(self) -> tuple[str, ...]:
        """Return the ids of versions that do not load whole, each once."""
        return tuple(dict.fromkeys(p.version for p in self.problems if p.version))


def sample_of(fraction: float, *, part: int | None, now_ms: int) -> Sample | None:
    """Return the part of all chunks to read; None for all of them.

    Parameters
    ----------
    fraction
        Above 0, at most 1. The chunks are split into ``round(1 / fraction)`` parts.
    part
        The number of the part, modulo their count; None for that of the day, so that a check a day
        reads every chunk within so many days.
    now_ms
        The time, in milliseconds since 1970.

    Raises
    ------
    InvalidInputError
        The fraction is not of this range.
    """
    check_between("a sample", fraction, 1 / limits.SAMPLE_PARTS_MAX, 1, hint="such as 0.05")
    parts = round(1 / fraction)
    if parts == 1:
        return None
    part = now_ms // _DAY_MS if part is None else integer("part", part, 0)
    return Sample(parts=parts, part=part % parts)


@operation("verify")
def verify(
    repo: Repo,
    *,
    versions: Sequence[Version] | None = None,
    level: Level = "full",
    sample: Sample | None = None,
    record: bool = False,
    resume: Path | None = None,
    executor: EngineSpec | None = None,
    workers: int | None = None,
    progress: ProgressCallback = silent,
) -> VerifyReport:
    """Check versions and report every problem.

    Parameters
    ----------
    versions
        All that are not deleted, the log and the snapshots, if None. Versions that are kept as a
        record only have nothing to check.
    sample
        Read only these chunks, at level ``full``.
    record
        Write into the log which versions are sound in every byte; not with a sample.
    resume
        A file that keeps how far the check has come: if it is there, the check goes on where it
        stopped. It is removed when the check is complete.
    executor
        The engine that reads; the report is the same. None, or ``threads`` without `workers`: this
        process, without tasks.
    workers
        Tasks at once; None for what the engine has.

    Raises
    ------
    StorageError
        The storage itself failed (permissions, retries used up): the check is not complete.
    CorruptObjectError
        The log is damaged; nothing above it can be trusted. The message names the commit.
    InvalidInputError
        The arguments exclude each other, or the file is of another check.
    ReadOnlyError, UnsafeBackendError
        It is to be recorded, and cannot be.
    """
    check_among("level", level, get_args(Level))
    if level != "full" and (sample is not None or record or resume is not None):
        msg = "a sample, a record or a check to be resumed needs the level full"
        raise errors.InvalidInputError(msg)
    if record and sample is not None:
        msg = "a version of which a sample was read cannot be recorded as sound"
        raise errors.InvalidInputError(msg, hint="leave out one of the two")
    if record:
        repo.check_writable()
    began = repo.environment.monotonic()
    repo.refresh(writing=True)
    survey = Survey(repo=repo, full=level == "full", sample=sample, progress=progress)
    state = open_state(resume, store_id=repo.superblock.store_id, sample=sample)
    notices: tuple[Notice, ...] = ()
    with open_tasks(repo, executor, workers) as tasks, state as survey.state:
        if versions is None:
            _check_log(survey)
        chosen = list(repo.catalog.versions()) if versions is None else versions
        recorded = _check_versions(survey, chosen, tasks, record=record)
        if versions is None:
            notices = find_leftovers(survey)
            report_lost_commits(survey, notices)
    return VerifyReport(
        level="full" if survey.full else "records",
        versions_count=len(chosen),
        packs_count=len(survey.packs),
        chunks_count=len({key[:2] for key in survey.read}),
        read_bytes=survey.read_bytes,
        seconds=repo.environment.monotonic() - began,
        problems=tuple(survey.problems),
        notices=notices,
        recorded=tuple(version.id for version in chosen if version.id in recorded),
        cold_packs_count=len(survey.cold_packs),
        cold_versions=tuple(v.id for v in chosen if v.id in survey.cold_versions),
        sample=survey.sample,
    )


def _check_versions(
    survey: Survey, versions: Sequence[Version], tasks: Tasks, *, record: bool
) -> set[str]:
    """Check version after version; return the ids of those recorded as sound."""
    environment = survey.repo.environment
    recorded: set[str] = set()
    waiting: dict[str, str] = {}
    damaged = {version.id for version in versions if version.damaged}
    last = environment.monotonic()
    kept = [version for version in versions if version.level != "record"]
    for version, _ in check_all(survey, kept, tasks):
        if record and version.id in survey.sound:
            waiting[version.id] = survey.sound[version.id]
            if environment.monotonic() - last >= limits.VERIFY_RECORD_S:
                recorded |= _record(survey.repo, waiting, damaged)
                waiting, last = {}, environment.monotonic()
    return recorded | _record(survey.repo, waiting, damaged)


def _record(repo: Repo, sound: Mapping[str, str], known: Collection[str]) -> set[str]:
    """Record versions as sound; return the ids of those that were not.

    Where others found damage since the check began, they may have read later: it stays.
    """
    if not sound:
        return set()
    rest = (v for v in repo.refresh().versions() if not v.damaged or v.id in known)
    fresh = {v.id for v in rest if v.id in sound and not v.verified}
    repo.log.append_any(lambda now: content_ops.verified(now, sound, known))
    return fresh


def _check_log(survey: Survey) -> None:
    """Read every commit again, not only those since the last snapshot; and the snapshots."""
    repo = survey.repo
    numbers = snapshot_numbers(repo.backend)
    digests = {c.number: c.digest for c in repo.log.commits(whole=True) if c.number in numbers}
    for _, error in wrong_snapshots(repo.backend, numbers, digests):
        if not isinstance(error, errors.NotFoundError):  # else pruned since it was listed
            survey.found(error, None)


def snapshot_numbers(backend: Backend) -> set[int]:
    """Return the numbers of the commits that a snapshot folds to."""
    numbers = (keys.snapshot_number(info.key) for info in backend.list(keys.SNAPSHOTS_PREFIX))
    return {number for number in numbers if number is not None}


def wrong_snapshots(
    backend: Backend, numbers: Collection[int], digests: Mapping[int, str]
) -> Iterator[tuple[int, errors.CkptStoreError]]:
    """Yield the snapshots that are gone, damaged or of another log, each with its damage.

    Parameters
    ----------
    digests
        Of the commits that they fold to, by number.
    """
    for number in sorted(numbers):
        try:
            if snapshots.read_one(backend, number).digest != digests.get(number):
                what = "is not of this log" if number in digests else "is of a commit that is gone"
                msg = f"the catalog snapshot {number} {what}"
                raise errors.CorruptObjectError(msg, hint="ckptstore repair writes it again")
        except (errors.IntegrityError, errors.FormatError, errors.NotFoundError) as error:
            yield number, error


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """One object that no version needs."""

    kind: Literal["condemned", "orphan", "unknown"]
    """Waiting to be swept; named by no version (an upload in flight, one that was given up, or
    superseded); or no object of a store at all."""
    key: str
    size_bytes: int


def find_leftovers(survey: Survey) -> tuple[Notice, ...]:
    """Return the objects below the store's prefixes that no version names, in order of keys.

    Lists everything. The manifests of deleted versions are read if need be, since the objects that
    they name are not left over: they can be undeleted. Where a manifest cannot be read, packs that
    only it names are reported; a collection must know better, and does.
    """
    repo = survey.repo
    # A save that is under way when this lists, and commits before this looks, is no orphan.
    infos = [info for prefix in keys.OBJECT_PREFIXES for info in repo.backend.list(prefix)]
    catalog = repo.refresh()
    live = list(catalog.versions())
    named = {version.manifest_key for version in live}
    named.update(map(keys.pack_key, survey.packs))
    left = [
        info
        for info in infos
        if info.key not in named
        and keys.commit_number(info.key) is None
        and keys.snapshot_number(info.key) is None
    ]
    if any(info.key.startswith((keys.PACKS_PREFIX, keys.MANIFESTS_PREFIX)) for info in left):
        late = [version for version in live if version.id not in survey.seen]
        for version in (*late, *catalog.versions(deleted=True)):
            named.update(_names(repo, version))
    return tuple(
        Notice(kind=_kind(info.key, catalog.condemned), key=info.key, size_bytes=info.size_bytes)
        for info in left
        if info.key not in named
    )


def _names(repo: Repo, version: Version) -> Iterator[str]:
    """Yield the keys that a version names, as far as its manifest can be read."""
    if version.level == "record":
        return
    yield version.manifest_key
    try:
        yield from map(keys.pack_key, repo.manifests.load(version).pieces.packs)
    except errors.StorageError:
        raise
    except errors.CkptStoreError:
        return  # its objects were swept, or it is damaged and reported as such


def _kind(key: str, condemned: Collection[str]) -> Literal["condemned", "orphan", "unknown"]:
    if key in condemned:
        return "condemned"
    known = keys.pack_id(key) is not None or keys.version_id_of(key) is not None
    return "orphan" if known else "unknown"


def report_lost_commits(survey: Survey, left: Sequence[Notice]) -> errors.CorruptObjectError | None:
    """Report and return the damage of the log if leftovers say that it lost its end, or all."""
    repo = survey.repo
    strays = [n.key for n in left if n.kind == "orphan" and keys.version_id_of(n.key) is not None]
    try:
        check_log_is_whole(repo, repo.catalog, strays, collecting=False, in_flight=False)
    except errors.CorruptObjectError as error:
        survey.found(error, None)
        return error
    return None


def check_log_is_whole(
    repo: Repo, catalog: Catalog, strays: Collection[str], *, collecting: bool, in_flight: bool
) -> None:
    """Check that no object says that commits were lost.

    Parameters
    ----------
    catalog
        The newest.
    strays
        Keys of unreferenced manifests that do not belong to a running save. A save leaves one
        behind only if it dies in the moment between its manifest and its commit. A repack may leave
        hundreds, but of versions that the log knows: where there are many, they are read.
    collecting
        Compare older snapshots with the log too, as verification does by itself.
    in_flight
        Some of them may be of saves under way after all: a first save is no lost log.

    Raises
    ------
    CorruptObjectError
        A snapshot is newer than the log, or of another history; there is no commit at all, but a
        manifest; or many stray manifests (``STRAY_MANIFESTS_MAX``, and a tenth of the live
        versions) came between two commits that follow each other, or after the last.
    """
    numbers = snapshot_numbers(repo.backend)
    last = max(numbers, default=0)
    if last > catalog.number and last > repo.refresh().number:
        what = f"the catalog snapshot {last} is newer than the log, which ends at {catalog.number}"
    elif collecting and (other := repo.log.other_history(numbers)):
        what = f"the catalog snapshot {other} is of another history than the log's commit {other}"
    elif not catalog.number and strays and not in_flight:
        what = f"there is no commit, but {len(strays)} manifests of versions"
    else:
        bound = max(limits.STRAY_MANIFESTS_MAX, catalog.versions_count // 10)
        unknown = _unknown(repo, strays) if len(strays) > bound else ()
        together = _together(repo, unknown) if len(unknown) > bound else 0
        if together <= bound:
            return
        what = f"{together} manifests are of versions that no commit names, with no commit between"
    raise errors.CorruptObjectError(
        f"commits seem to be lost: {what}",
        hint="restore commits/ from a backup before anything is saved or collected; without one, "
        "ckptstore replicate brings the versions from a replica",
    )


def _unknown(repo: Repo, strays: Collection[str]) -> list[str]:
    """Return the manifests that are of no version in the newest log, or cannot be read."""
    catalog = repo.refresh()
    found = []
    for key in strays:
        try:
            data = repo.backend.get(key, bytes_max=limits.MANIFEST_STORED_BYTES_MAX)
            known = catalog.has_version(outline(data, where=key)[0])
        except errors.NotFoundError:
            continue  # another collection was faster
        except (errors.IntegrityError, errors.FormatError):
            known = False
        if not known:
            found.append(key)
    return found


def _together(repo: Repo, unknown: Collection[str]) -> int:
    """Return how many of some manifests came, at most, between one commit and the next."""
    commits = sorted(info.modified_at for info in repo.backend.list(keys.COMMITS_PREFIX))
    times = {info.key: info.modified_at for info in repo.backend.list(keys.MANIFESTS_PREFIX)}
    gaps = Counter(bisect_right(commits, times[key]) for key in unknown if key in times)
    return max(gaps.values(), default=0)


def missing(repo: Repo, versions: Sequence[Version]) -> set[str]:
    """Return ids of versions that a store has deleted, or whose objects are not all there."""
    now = repo.refresh()
    gone = {one.id for one in versions if now.version(one.id).deleted}
    left = [now.version(one.id) for one in versions if one.id not in gone]
    found = verify(repo, versions=left, level="records")
    return gone.union(problem.version for problem in found.problems)
