"""Methods of :class:`ckptstore.Store` about single versions and what is kept of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ckptstore import limits
from ckptstore.catalog import lifecycle_ops, run_ops
from ckptstore.catalog.levels import LowerLevel
from ckptstore.catalog.refs import parse_ref
from ckptstore.errors import InvalidInputError
from ckptstore.events import ProgressCallback, silent
from ckptstore.format.names import check_listed
from ckptstore.model import Version
from ckptstore.replicas.options import HasRepo
from ckptstore.store import resume_check
from ckptstore.store.version_lookup import named_version, named_versions

if TYPE_CHECKING:
    from ckptstore.encodings.encoding import Encoding
    from ckptstore.engine.engine import EngineSpec
    from ckptstore.maintenance.collect.gc import GcReport
    from ckptstore.maintenance.retention.reduce import Target
    from ckptstore.maintenance.retention.remove import Removal
    from ckptstore.maintenance.retention.retain import AnyPolicy, RetainReport


def pin(self: HasRepo, ref: str) -> Version:
    """Pin a version: nothing deletes it, or a part of it, until it is unpinned."""
    version = named_version(self.repo, ref)
    self.repo.log.append_any(lambda now: lifecycle_ops.pin(now, version.id))
    return self.repo.catalog.version(version.id)


def unpin(self: HasRepo, ref: str) -> Version:
    """Take a pin away."""
    version = named_version(self.repo, ref)
    self.repo.log.append_any(lambda now: lifecycle_ops.unpin(now, version.id))
    return self.repo.catalog.version(version.id)


def tag(self: HasRepo, ref: str, tag: str) -> Version:
    """Give a version a tag in its run; a tag of this name moves. Return the version.

    Raises
    ------
    InvalidInputError
        The tag is not accepted (digits only, ``latest``, ``best:...`` and ``~...`` are refs).
    ReadOnlyError, UnsafeBackendError, StorageError
        It could not be committed.
    """
    version = named_version(self.repo, ref)
    self.repo.log.append(lambda now: run_ops.tag(now, version.run, version.id, tag))
    return self.repo.catalog.version(version.id)


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


def annotate(self: HasRepo, ref: str, metrics: Mapping[str, float]) -> Version:
    """Add metrics to a version, or replace their values; return the version.

    Raises
    ------
    InvalidInputError
        A metric is not a number.
    ReadOnlyError, UnsafeBackendError, StorageError
        It could not be committed.
    """
    version = named_version(self.repo, ref)
    self.repo.log.append(lambda now: run_ops.annotate(now, version.id, metrics))
    return self.repo.catalog.version(version.id)


def rollback(self: HasRepo, ref: str, *, reason: str = "") -> Version:
    """Make a version the head of its run again; return it. See :meth:`Run.rollback`."""
    from ckptstore.maintenance.retention.rollback import rollback

    version = named_version(self.repo, ref)
    resume_check.chosen(self.repo, version.run)
    return rollback(self.repo, version.run, version.id, reason=reason).target


def set_policy(self: HasRepo, policy: AnyPolicy | None) -> None:
    """Store the retention policy of runs that have none of their own; None takes it away.

    Raises
    ------
    InvalidInputError, PolicyError
        It does not follow the grammar, or has no rule.
    """
    from ckptstore.maintenance.retention.retain import set_policy

    set_policy(self.repo, "", policy)


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
        Change nothing; the report says what would become of each version, and why. For levels
        that round weights these are read, rounded and measured.
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
    from ckptstore.maintenance.retention.retain import age

    target = _lowered(level, lossy)
    ids = age(self.repo, named_versions(self.repo, refs), target, force=force)
    return [self.repo.catalog.version(one) for one in ids]


def remove(
    self: HasRepo,
    refs: Sequence[str],
    *,
    keep: LowerLevel | None = None,
    lossy: Encoding | str | None = None,
    reason: str = "",
    force: bool = False,
    dry_run: bool = False,
) -> list[Removal]:
    """Delete versions, all or none; they can be undeleted until a collection.

    Parameters
    ----------
    keep
        Delete only a part of each: keep its weights, or its record. This cannot be undone; see
        :meth:`age`, which does the same. Versions of which no more is kept are left out.
    lossy
        As in :meth:`age`.
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
        One is pinned, or needs `force`; or has no tensors of role ``weights`` to keep. Nothing
        was deleted.
    InvalidInputError
        No version is named; or a reason is given for what the log has no place for one.
    """
    from ckptstore.maintenance.retention.remove import remove
    from ckptstore.maintenance.retention.retain import age, foresee

    versions = named_versions(self.repo, refs)
    if keep is None:
        return remove(self.repo, versions, reason=reason, force=force, dry_run=dry_run)
    if reason or not versions:
        msg = "no version to remove a part of" if not versions else "a part goes without reason"
        raise InvalidInputError(msg, hint="reasons are kept of whole versions that are deleted")
    target = _lowered(keep, lossy)
    found = foresee(self.repo, versions, target, force=force, measure=dry_run)
    if not dry_run:
        age(self.repo, versions, target, force=force)
    return found


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
    from ckptstore.maintenance.retention.remove import find_deleted, undelete

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

    See :func:`ckptstore.maintenance.collect.gc.gc`.
    """
    from ckptstore.maintenance.collect.gc import gc

    return gc(
        self.repo,
        grace_s=grace_s,
        orphan_age_s=orphan_age_s,
        repack_below=repack_below,
        dry_run=dry_run,
        force=force,
        executor=executor,
        workers=workers,
        progress=progress,
    )


def _lowered(level: LowerLevel, lossy: Encoding | str | None) -> Target:
    """Return the level that versions go down to, with the encodings of its weights.

    Raises
    ------
    InvalidInputError
        The level is not written in the encoding.
    """
    from ckptstore.catalog.policy import rounding_of
    from ckptstore.encodings.encoding import Encoding
    from ckptstore.maintenance.retention.reduce import Target

    given = None if lossy is None else Encoding.of(lossy)
    encodings = rounding_of(level, [] if given is None else [given])
    if given is not None and given.name not in [one.name for one in encodings]:
        msg = f"{str(given)!r} is not what the level {level} is written in"
        raise InvalidInputError(msg, hint="weights-bf16 goes with bf16, weights-int8 with int8")
    return Target(level=level, encodings=encodings)
