"""The newest sound version of a run: the meaning of ``latest-valid``.

From the head back along the line of the run, within the run. Versions that do not verify are
skipped with a warning each, and never changed. Only a version that was read whole is sound.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from ckptstore import errors
from ckptstore.backends.transfers import operation
from ckptstore.catalog.catalog import Catalog
from ckptstore.checkpoint.cold_reads import thaw_command
from ckptstore.events import ProgressCallback, silent
from ckptstore.maintenance.check.integrity_scan import Survey
from ckptstore.maintenance.check.verify_tasks import check_all
from ckptstore.model import Version
from ckptstore.repo import Repo

T = TypeVar("T")

_log = logging.getLogger("ckptstore")


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A version that does not verify."""

    version: Version
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LatestValid:
    """The newest sound version of a run, and the newer ones that are not."""

    version: Version
    skipped: tuple[Skipped, ...]


@operation("verify")
def latest_valid(repo: Repo, run: str, *, progress: ProgressCallback = silent) -> LatestValid:
    """Return the newest version of a run without damage; reads every byte of it.

    Raises
    ------
    RunNotFoundError, VersionNotFoundError
        There is no such run, or it has no version that could be loaded.
    CorruptObjectError
        None is sound; the message has the whole list. Or the log is damaged.
    ColdObjectError
        The newest that may be sound lies in an archive class, so that it cannot be checked.
    StorageError
        The storage failed.
    """

    def attempt(version: Version) -> Version:
        """Return a version without damage; raise the damage of another."""
        survey = Survey(repo=repo, full=True, progress=progress)
        for _ in check_all(survey, [version]):
            pass
        touching = [problem for problem in survey.problems if problem.version]
        if touching:
            more = f" (and {len(touching) - 1} more)" if len(touching) > 1 else ""
            raise errors.CorruptObjectError(touching[0].message + more)
        if version.id in survey.cold_versions:
            msg = f"{version.run}@{version.step} lies in an archive class: it cannot be checked"
            raise errors.ColdObjectError(msg, hint=thaw_command(version.id, repo.url))
        return version

    skipped: list[Skipped] = []
    version = first_sound(repo, run, attempt, skipped=skipped)
    return LatestValid(version=version, skipped=tuple(skipped))


def first_sound(
    repo: Repo, run: str, attempt: Callable[[Version], T], *, skipped: list[Skipped] | None = None
) -> T:
    """Return the result of `attempt` for the newest version in which it finds no damage.

    Parameters
    ----------
    attempt
        Reads a version; raises IntegrityError where that is damaged. Other errors go through.
    skipped
        Gets the versions that were skipped.

    Raises
    ------
    RunNotFoundError, VersionNotFoundError, CorruptObjectError, StorageError
        As :func:`latest_valid`.
    """
    catalog = repo.refresh()
    found = [] if skipped is None else skipped
    for version in _line(catalog, run):
        try:
            try:
                return attempt(version)
            except errors.ConflictError:  # moved while it was read
                return attempt(repo.refresh().version(version.id))
        except errors.VersionNotFoundError:
            if not repo.refresh().version(version.id).deleted:
                raise
            _log.warning("skipped %s, which was deleted meanwhile", version.label)
        except errors.IntegrityError as error:
            found.append(Skipped(version=version, why=error.message))
            _log.warning("skipped %s, which is damaged: %s", version.label, error.message)
    if not found:
        raise errors.VersionNotFoundError(f"run {run!r} has no version that could be loaded")
    lines = "; ".join(f"@{s.version.step} (#{s.version.id[:8]}): {s.why}" for s in found)
    msg = f"no version of run {run!r} is sound: {lines}"
    hint = "ckptstore repair --from another store that holds them"
    raise errors.CorruptObjectError(msg, hint=hint)


def _line(catalog: Catalog, run: str) -> Iterator[Version]:
    """Yield the versions on the line of a run that can be loaded, newest first."""
    head = catalog.run(run).head
    for version in catalog.ancestors(head) if head else ():
        if version.run != run:
            return
        if not version.deleted and version.level != "record":
            yield version
