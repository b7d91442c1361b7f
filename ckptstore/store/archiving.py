"""Methods of :class:`ckptstore.Store` about storage classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckptstore import limits
from ckptstore.errors import InvalidInputError
from ckptstore.events import ProgressCallback, silent
from ckptstore.format.names import check_listed
from ckptstore.model import Version
from ckptstore.replicas.options import HasRepo
from ckptstore.repo import Repo
from ckptstore.store.version_lookup import named_version, named_versions

if TYPE_CHECKING:
    from ckptstore.format.paths import Pattern
    from ckptstore.maintenance.cold.archive import ArchiveReport
    from ckptstore.maintenance.cold.thaw import ThawReport


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

    A version in an archive class (``GLACIER``, ``DEEP_ARCHIVE``) must be thawed before it can
    be loaded, and shows in every listing as before. A repetition finishes what was
    interrupted. With ``STANDARD`` packs come back, for good.

    Parameters
    ----------
    refs
        Versions, heads of runs too. If None: all that `runs`, `keep_hot` and `min_age_s` leave,
        never a head.
    storage_class
        As the storage calls it: ``STANDARD_IA``, ``GLACIER``, ``NEARLINE`` ...
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
    from ckptstore.maintenance.cold.archive import archive

    versions = _chosen(self.repo, refs, runs, keep_hot, min_age_s)
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

    Exactly the packs that hold what is asked for, and what that refers to. Nothing is asked for
    twice: call it again to see how far it is, or to go on waiting. Where no restore is needed,
    everything is readable at once.

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


def _chosen(
    repo: Repo,
    refs: Sequence[str] | None,
    runs: Sequence[str] | None,
    keep_hot: str | Sequence[str] | None,
    min_age_s: float,
) -> Sequence[Version]:
    """Return the versions that are named, or those that runs, rules and age select."""
    from ckptstore.maintenance.cold.archive import archivable

    if refs is None:
        of = check_listed(runs or (), "runs")
        return archivable(repo, runs=of, keep_hot=keep_hot, min_age_s=min_age_s)
    if runs is not None or keep_hot is not None or min_age_s:
        msg = "refs and a selection by runs, rules or age exclude each other"
        raise InvalidInputError(msg)
    return named_versions(repo, refs)
