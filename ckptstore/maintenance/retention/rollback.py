"""Rollback: the head of a run moves to one of its versions; nothing is deleted or copied."""

from __future__ import annotations

from dataclasses import dataclass

from ckptstore.catalog import lifecycle_ops
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.state import Op
from ckptstore.errors import VersionNotFoundError
from ckptstore.model import Version
from ckptstore.repo import Repo


@dataclass(frozen=True, slots=True, kw_only=True)
class Rolled:
    """Result of a rollback."""

    target: Version
    """The head from now on: the next save continues it."""
    head_before: str
    """Id of the head before; rolling back to it undoes this. Equal to the target's: no change."""
    abandoned: tuple[Version, ...] = ()
    """Versions that were on the line of the run and no longer are, newest first."""
    returned: tuple[Version, ...] = ()
    """Versions that an earlier rollback had abandoned and that are on the line again."""


def rollback(repo: Repo, run: str, version: str, *, reason: str = "") -> Rolled:
    """Move the head of a run to a version of it, forward or back.

    Raises
    ------
    VersionNotFoundError
        There is no such version, it was deleted, or only its record is kept.
    InvalidInputError
        It is of another run.
    ReadOnlyError, UnsafeBackendError, StorageError
        It could not be committed.
    """
    seen: list[Catalog] = []

    def build(catalog: Catalog) -> list[Op]:
        """Note the catalog that the commit follows, and move the head."""
        target = catalog.version(version)
        if target.level == "record":
            msg = f"only the record of {target.label} is kept"
            hint = "go back to a version that can be loaded"
            if target.replicas:
                hint = "another store has it: bring it back first, load it with refill=True"
            raise VersionNotFoundError(msg, hint=hint)
        seen[:] = [catalog]
        return lifecycle_ops.rollback(catalog, run=run, version=version, reason=reason)

    build(repo.refresh())
    repo.log.append_any(build)
    (before,) = seen
    line = _line(before, before.head_id(run))
    kept = _line(before, version)
    ids = {found.id for found in kept}
    return Rolled(
        target=repo.catalog.version(version),
        head_before=before.head_id(run),
        abandoned=tuple(v for v in line if v.id not in ids),
        returned=tuple(v for v in kept if v.abandoned),
    )


def _line(catalog: Catalog, head: str) -> list[Version]:
    """Return a version and its ancestors within its run, newest first, without deleted ones."""
    found: list[Version] = []
    run = catalog.version(head).run
    for version in catalog.ancestors(head):
        if version.run != run:
            break
        if not version.deleted:
            found.append(version)
    return found
