"""Methods of :class:`ckptstore.Store` about single versions, what is kept of them, and where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

from ckptstore import limits
from ckptstore.argument_checks import check_among, integer
from ckptstore.catalog import lifecycle_ops, run_ops
from ckptstore.catalog.levels import LowerLevel
from ckptstore.catalog.refs import parse_ref
from ckptstore.errors import InvalidInputError
from ckptstore.events import ProgressCallback, silent
from ckptstore.format.names import check_listed
from ckptstore.model import Version
from ckptstore.replicas.options import HasRepo
from ckptstore.repo import Repo
from ckptstore.store import resume_check
from ckptstore.store.store_session import HasVersions, RefT
from ckptstore.store.version_lookup import named_version, named_versions

if TYPE_CHECKING:
    from ckptstore.encodings.encoding import Encoding
    from ckptstore.engine.engine import EngineSpec
    from ckptstore.format.paths import Pattern
    from ckptstore.maintenance.cold.archive import ArchiveReport
    from ckptstore.maintenance.cold.thaw import ThawReport
    from ckptstore.maintenance.collect.gc import GcReport
    from ckptstore.maintenance.retention.by_hand import Removal
    from ckptstore.maintenance.retention.retain import AnyPolicy, RetainReport


def pin(self: HasVersions[RefT], ref: RefT) -> Version:
    """Pin a version: nothing deletes it, or a part of it, until it is unpinned."""
    repo, version = self._session.repo, self.resolve(ref)
    repo.log.append_any(lambda now: lifecycle_ops.pin(now, version.id))
    return repo.catalog.version(version.id)


def unpin(self: HasVersions[RefT], ref: RefT) -> Version:
    """Take a pin away."""
    repo, version = self._session.repo, self.resolve(ref)
    repo.log.append_any(lambda now: lifecycle_ops.unpin(now, version.id))
    return repo.catalog.version(version.id)


def tag(self: HasVersions[RefT], ref: RefT, tag: str) -> Version:
    """Give a version a tag in its run; a tag of this name moves. Return the version.

    Raises
    ------
    InvalidInputError
        The tag is not accepted (digits only, ``latest``, ``best:...`` and ``~...`` are refs).
    ReadOnlyError, UnsafeBackendError, StorageError
        It could not be committed.
    """
    repo, version = self._session.repo, self.resolve(ref)
    repo.log.append(lambda now: run_ops.tag(now, version.run, version.id, tag))
    return repo.catalog.version(version.id)


def untag(self: HasRepo, ref: str, tag: str) -> Version:
    """Take a tag away from a version; return the version.

    Raises
    ------
    VersionNotFoundError
        The version does not have this tag. Else as :meth:`resolve`.
    ReadOnlyError, UnsafeBackendError, StorageError
        It could not be committed.
    """
    found = named_version(self.repo, ref)
    self.repo.log.append(lambda now: run_ops.untag(now, found.run, tag, version=found.id))
    return self.repo.catalog.version(found.id)


def annotate(
    self: HasVersions[RefT],
    ref: RefT,
    metrics: Mapping[str, float] | None = None,
    *,
    metadata: Mapping[str, Any] | None = None,
) -> Version:
    """Add metrics and metadata to a version, or replace their values; return the version.

    Parameters
    ----------
    metadata
        Entries of a JSON object, such as ``{"note": "the one in the paper"}``.

    Raises
    ------
    InvalidInputError
        A metric is not a number, the metadata is not JSON, or there is neither.
    LimitError
        The version would have too many metrics or too much metadata.
    ReadOnlyError, UnsafeBackendError, StorageError
        It could not be committed.
    """
    repo, version = self._session.repo, self.resolve(ref)
    given = {} if metrics is None else metrics
    repo.log.append(lambda now: run_ops.annotate(now, version.id, given, metadata))
    return repo.catalog.version(version.id)


def rollback(self: HasVersions[RefT], ref: RefT, *, reason: str = "") -> Version:
    """Make a version the head of its run again; return it.

    The next save continues it, and ``latest`` names it. Versions after it are abandoned: they
    stay, can be loaded by step or id, and come back by rolling back to the last of them.
    Nothing is copied or deleted.

    Parameters
    ----------
    ref
        A version, such as ``best:val_loss``.
    reason
        For people who read the log.

    Raises
    ------
    VersionNotFoundError
        It names no version, or one that has only its record.
    ReadOnlyError, UnsafeBackendError, StorageError
        It could not be committed.
    """
    from ckptstore.maintenance.retention.by_hand import rollback

    if (saver := self._session.own_saver) is not None:
        saver.wait(self._parsed(ref).run or None)  # what is under way may be what the ref names
    repo, version = self._session.repo, self.resolve(ref)
    resume_check.chosen(repo, version.run)
    return rollback(repo, version.run, version.id, reason=reason).target


def set_policy(self: HasRepo, policy: AnyPolicy | None) -> None:
    """Store the retention policy of runs that have none of their own; None takes it away.

    Raises
    ------
    InvalidInputError, PolicyError
        It does not follow the grammar, or has no rule.
    """
    from ckptstore.maintenance.retention.retain import set_policy

    set_policy(self.repo, "", policy)


def keep(
    repo: Repo, run: str, directions: Mapping[str, str], *, last: int | None, best: int | None
) -> None:
    """Store the policy of ``keep_last`` and ``keep_best``; see :meth:`Store.run`.

    Only a policy of the same kind is replaced: one that keeps more was somebody's decision.
    """
    from ckptstore.catalog.policy import Policy
    from ckptstore.catalog.retention_rules import Best, Last, Rule
    from ckptstore.maintenance.retention.retain import set_policy

    hint = "leave it out to keep all"
    last = None if last is None else integer("keep_last", last, hint=hint)
    best = None if best is None else integer("keep_best", best, hint=hint)
    catalog = repo.refresh()
    info = catalog.run(run) if catalog.has_run(run) else None
    metrics = {**directions, **(info.metrics if info else {})}
    if best is not None and not metrics:
        msg = f"keep_best: run {run!r} has declared no metric to be best by"
        raise InvalidInputError(msg, hint=f"store.run({run!r}, metrics={{'val_loss': 'min'}}, ...)")
    rules: list[Rule] = [] if last is None else [Last(last)]
    rules += [] if best is None else [Best(best, name) for name in metrics]
    wanted = Policy(full=tuple(rules))
    stored = {key: x for key, x in ((info and info.policy) or {}).items() if key != "roles"}
    own = Policy.from_json(stored) if stored else None
    if own == wanted:
        return
    kind = (Last, Best)
    if own and (own != Policy(full=own.full) or not all(isinstance(x, kind) for x in own.full)):
        msg = f"run {run!r} has another policy already: {own}"
        hint = "leave keep_last and keep_best out, and save with retain=True; or clear it first: "
        raise InvalidInputError(msg, hint=f"{hint}store.run({run!r}).set_policy(None)")
    set_policy(repo, run, wanted, directions=directions)


def retain(
    self: HasRepo,
    policy: AnyPolicy | None = None,
    *,
    run: str | None = None,
    dry_run: bool = False,
    quick: bool = False,
) -> RetainReport:
    """Delete and age versions by a policy; deletion can be undone until a collection.

    The plan is made again inside each commit: a version that is tagged meanwhile stays.

    Parameters
    ----------
    policy
        Levels to rules, such as ``{"full": "last 3", "weights": "best 5 val_loss"}``; None
        for the policy that each run has, or the store's.
    run
        Only this run; None for all.
    dry_run
        Change nothing; the report says what would become of each version, and why. Weights that
        would be rounded are read and measured. Rules of time make and remove one empty object, to
        read the storage's clock.
    quick
        With `dry_run`: do not; what is freed is then estimated, and errors are not known.

    Raises
    ------
    InvalidInputError
        There is no policy, or it does not follow the grammar.
    PolicyError
        It has no rule, or would keep the content of no version of a run. Nothing was changed.
    RunNotFoundError
        There is no such run.
    """
    from ckptstore.maintenance.retention.retain import retain

    return retain(self.repo, policy=policy, run=run, dry_run=dry_run, quick=quick)


def age(
    self: HasRepo,
    refs: Sequence[str],
    level: LowerLevel,
    *,
    lossy: Encoding | str | None = None,
    force: bool = False,
) -> list[Version]:
    """Keep only the weights of versions, or only their records; return those that changed.

    This is for good: :meth:`undelete` does not bring back what goes.

    Parameters
    ----------
    level
        ``weights-bf16`` and ``weights-int8`` round the weights, and read and write them.
    lossy
        With these two: how far a tensor may change, such as ``"int8:rel_l2=0.02"``. One that
        would change by more is kept at the level above, and a warning says so.
    force
        Also tagged ones, and the head of a run, from which its training could then not go on.

    Raises
    ------
    PolicyError
        One is pinned, or needs `force`, or has no tensors of role ``weights``.
    """
    from ckptstore.catalog.policy import rounding_of
    from ckptstore.encodings.encoding import Encoding
    from ckptstore.maintenance.retention.reduce import Target
    from ckptstore.maintenance.retention.retain import age

    check_among("level", level, get_args(LowerLevel))
    given = None if lossy is None else Encoding.of(lossy)
    encodings = rounding_of(level, [] if given is None else [given])
    if given is not None and given.name not in [one.name for one in encodings]:
        msg = f"{str(given)!r} is not what the level {level} is written in"
        raise InvalidInputError(msg, hint="weights-bf16 goes with bf16, weights-int8 with int8")
    target = Target(level=level, encodings=encodings)
    ids = age(self.repo, named_versions(self.repo, refs), target, force=force)
    return [self.repo.catalog.version(one) for one in ids]


def remove(
    self: HasRepo,
    refs: Sequence[str],
    *,
    reason: str = "",
    force: bool = False,
    dry_run: bool = False,
) -> list[Removal]:
    """Delete versions, all or none; they can be undeleted until a collection.

    Parameters
    ----------
    reason
        For people who read the log.
    force
        Also tagged ones, the head of a run, and the only verified version of one; never
        pinned ones.
    dry_run
        Change nothing; the result says what would be in the way.

    Raises
    ------
    PolicyError
        One is pinned, or needs `force`. Nothing was deleted.
    InvalidInputError
        No version is named.
    """
    from ckptstore.maintenance.retention.by_hand import remove

    versions = named_versions(self.repo, refs)
    return remove(self.repo, versions, reason=reason, force=force, dry_run=dry_run)


def undelete(self: HasRepo, refs: Sequence[str]) -> list[Version]:
    """Make deleted versions be there again, all or none; return them.

    Parameters
    ----------
    refs
        ``#ID``, or ``RUN@STEP``: of several, the version of this step that was saved last.

    Raises
    ------
    VersionNotFoundError
        No deleted version is named so; or a collection has deleted what it needs.
    InvalidInputError
        One is there: it was not deleted, or only a part of it was, which is for good.
    CondemnedError
        A collection is about to delete what one needs.
    """
    from ckptstore.maintenance.retention.by_hand import find_deleted, undelete

    catalog = self.repo.refresh()
    ids = [find_deleted(catalog, parse_ref(ref)) for ref in check_listed(refs, "refs")]
    return undelete(self.repo, ids)


def gc(
    self: HasRepo,
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
    """Free the space of what no version needs.

    See :class:`ckptstore.maintenance.collect.gc.Collection`.
    """
    from ckptstore.maintenance.collect.gc import Collection

    work = Collection(self.repo, progress, grace_s, orphan_age_s, repack_below, dry_run=dry_run)
    return work.run(executor, workers, force=force)


def archive(
    self: HasRepo,
    refs: Sequence[str] | None = None,
    *,
    storage_class: str,
    runs: Sequence[str] | None = None,
    keep_hot: str | Sequence[str] | None = None,
    min_age_s: float = 0.0,
    dry_run: bool = False,
    progress: ProgressCallback = silent,
) -> ArchiveReport:
    """Move packs to a colder storage class: those that only the named versions need.

    A version in an archive class (``GLACIER``, ``DEEP_ARCHIVE``) must be thawed before a load. A
    repetition continues. ``STANDARD`` moves packs back for good.

    Parameters
    ----------
    refs
        Versions, heads of runs too. If None: all that `runs`, `keep_hot` and `min_age_s` leave,
        never a head.
    storage_class
        As the storage calls it: ``STANDARD_IA``, ``GLACIER``, ``NEARLINE``, ``Cool`` ...
    runs
        Names of runs, whose versions are meant; all runs if None. Not with `refs`.
    keep_hot
        Rules as in a retention policy, such as ``"tagged, best 2 val_loss"``, for versions
        that stay as they are. Not with `refs`.
    min_age_s
        Only versions that were saved so long ago, in seconds. Not with `refs`.
    dry_run
        Say what would be moved, and move nothing.
    progress
        Called with the bytes that are moved.

    Returns
    -------
    ArchiveReport
        Also which packs stay since other versions need them, and what costs more than it seems.

    Raises
    ------
    InvalidRefError, RunNotFoundError, VersionNotFoundError
        Something names nothing. Nothing was moved.
    InvalidInputError
        The storage has no classes, none may be called so, or arguments exclude each other.
    ReadOnlyError, StorageError
        The store cannot be written to, or the storage failed. What was moved stays so.
    """
    from ckptstore.maintenance.cold.archive import archivable, archive

    if refs is None:
        of = check_listed(runs or (), "runs")
        versions = archivable(self.repo, runs=of, keep_hot=keep_hot, min_age_s=min_age_s)
    elif runs is not None or keep_hot is not None or min_age_s:
        raise InvalidInputError("refs and a selection by runs, rules or age exclude each other")
    else:
        versions = named_versions(self.repo, refs)
    return archive(self.repo, versions, storage_class, dry_run=dry_run, progress=progress)


def thaw(
    self: HasRepo,
    ref: str,
    *,
    roles: Sequence[str] | None = None,
    include: Sequence[Pattern] | None = None,
    exclude: Sequence[Pattern] | None = None,
    wait: bool = False,
    days: int = limits.THAW_DAYS,
    tier: str = "Standard",
    poll_s: float | None = None,
    dry_run: bool = False,
    progress: ProgressCallback = silent,
) -> ThawReport:
    """Ask the storage to make a version readable that lies in an archive class.

    Only the packs of the selection. Nothing is requested twice: call it again to see the progress
    or to go on waiting.

    Parameters
    ----------
    ref
        Names the version; see :meth:`resolve`.
    roles
        Only tensors of these roles, such as ``["weights"]``.
    include, exclude
        Patterns of paths, as of :meth:`load`.
    wait
        Return when everything can be read; the usual time is in the report and in `progress`.
    days
        How long it is to be readable.
    tier
        ``Expedited``, ``Standard`` or ``Bulk``, as the class has it.
    poll_s
        How often to look while waiting, in seconds; None for what fits the tier.
    dry_run
        Say what is cold, and ask for nothing.
    progress
        Called with the bytes that can be read.

    Raises
    ------
    VersionNotFoundError, TensorNotFoundError
        The ref or a pattern names nothing, or only the record of the version is kept.
    InvalidInputError
        A role, the days or the tier is none.
    CorruptObjectError, ObjectNotFoundError
        The manifest is damaged, or a pack is gone.
    StorageError
        The storage failed, or has no capacity for the tier.
    """
    from ckptstore.checkpoint.selection import Selection
    from ckptstore.maintenance.cold.thaw import ThawRequest, thaw

    request = ThawRequest(
        selection=Selection(include=include, exclude=exclude, roles=roles),
        days=days,
        tier=tier,
        wait=wait,
        poll_s=poll_s,
        dry_run=dry_run,
        progress=progress,
    )
    return thaw(self.repo, named_version(self.repo, ref), request)
