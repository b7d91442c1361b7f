"""Ageing: less of a version is kept: its weights, these in fewer bits, its record. Torch-free.

For its weights alone no tensor is read or written, but for those that follow from one that goes; to
have them in fewer bits, they are read, rounded and written. Then comes a new manifest, which names
what stays; and one commit makes the version point to it and condemns the old manifest, and what
only that one named is a collection's to free. A crash before the commit leaves orphans, and the
version as it was.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from ckptstore import limits
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.content_ops import Move
from ckptstore.catalog.levels import LEVELS, Level
from ckptstore.catalog.pin_ops import pinned_error
from ckptstore.catalog.retention import reclaimable
from ckptstore.committing import commit_retrying
from ckptstore.errors import InvalidInputError, PolicyError
from ckptstore.format.manifest import PieceTable
from ckptstore.maintenance.core.relocate import record_move, relocate, write_move
from ckptstore.maintenance.retention.reduce import Lowered, Target, lower, weigh
from ckptstore.maintenance.retention.remove import Removal
from ckptstore.maintenance.retention.rounding_report import Rounding
from ckptstore.model import Version
from ckptstore.repo import Repo

__all__ = ["Prepared", "Target", "age", "foresee", "prepare", "warn"]

_log = logging.getLogger("ckptstore")
_RECENT = 2
"""Versions that were written just before, whose pieces are looked through for equal ones."""
_NAMED = 5
"""Tensors that a warning names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What a commit can carry out: everything that it names is durable."""

    move: Move
    lowered: Lowered | None
    """What is left; None for a record."""


def age(
    repo: Repo,
    versions: Sequence[Version],
    target: Target,
    *,
    force: bool = False,
) -> list[str]:
    """Keep less of versions, each in whole or not at all; return the ids of those that changed.

    Parameters
    ----------
    force
        Also tagged ones, and the head of a run, from which its training could then not go on.

    Raises
    ------
    PolicyError
        One is pinned; or tagged or the head, and `force` is False; or has no tensors of role
        ``weights``. Nothing was changed.
    CommitConflictError
        One was deleted or changed meanwhile.
    CorruptObjectError
        The manifest of one is damaged.
    """
    repo.check_writable()
    catalog = repo.refresh()
    chosen = _concerned(versions, target.level)
    for version in chosen:
        _check(catalog, version, target.level, force=force)
    size = limits.ROUNDED_PER_COMMIT if target.encodings else limits.RELOCATES_PER_COMMIT
    recent: list[PieceTable] = []
    for start in range(0, len(chosen), size):
        _commit(repo, chosen[start : start + size], target, recent, force=force)
    return [version.id for version in chosen]


def foresee(
    repo: Repo,
    versions: Sequence[Version],
    target: Target,
    *,
    force: bool = False,
    measure: bool = False,
) -> list[Removal]:
    """Return the versions that :func:`age` would change, and what is in the way of each.

    Parameters
    ----------
    measure
        Read and round what the level rounds, and say what comes of it; else what is freed is an
        estimate from the catalog.
    """
    catalog = repo.refresh()
    recent: list[PieceTable] = []
    found = []
    for version in _concerned(versions, target.level):
        obstacle = ""
        try:
            _check(catalog, version, target.level, force=force)
        except PolicyError as error:
            obstacle = error.message
        frees, rounding = reclaimable(version, target.level), None
        if measure and target.encodings and not obstacle:
            lowered = weigh(repo, version, target, recent)
            frees, rounding = lowered.reclaimable_bytes, lowered.rounding
        found.append(
            Removal(
                version=version,
                obstacle=obstacle,
                reclaimable_bytes=frees,
                rounding=rounding,
            )
        )
    return found


def _concerned(versions: Sequence[Version], level: Level) -> list[Version]:
    """Return those of which more than this is kept, each once."""
    each = {version.id: version for version in versions}.values()
    return [version for version in each if LEVELS.index(level) < LEVELS.index(version.level)]


def _check(catalog: Catalog, version: Version, level: Level, *, force: bool) -> None:
    named = f"{version.run}@{version.step} (#{version.id[:8]})"
    now = catalog.version(version.id)
    if now.pinned:
        raise pinned_error(now)
    if now.tags and not force:
        msg = f"{named} is tagged {', '.join(now.tags)}"
        raise PolicyError(msg, hint="take the tags away, or force it")
    if catalog.head_id(version.run) == version.id and not force:
        msg = f"{named} is the head of its run: training goes on from it"
        raise PolicyError(msg, hint="force it, if the run is over")
    if level != "record" and not any(r == "weights" and p.logical for r, p in now.roles.items()):
        msg = f"{named} has no tensors of role weights: nothing would be left"
        raise PolicyError(msg, hint="save with roles={PATTERN: 'weights'}")


def _commit(
    repo: Repo,
    versions: Sequence[Version],
    target: Target,
    recent: list[PieceTable],
    *,
    force: bool,
) -> None:
    def attempt(_: set[str]) -> None:
        """Write and commit; again where a collection took a new manifest for an orphan."""
        del recent[:-_RECENT]
        moves = [prepare(repo, one, target, recent).move for one in versions]

        def checked(now: Catalog) -> Sequence[Move]:
            """Return all moves, if the versions may still age."""
            for version in versions:
                _check(now, version, target.level, force=force)
            return moves

        relocate(repo, checked)

    commit_retrying(attempt)


def prepare(repo: Repo, version: Version, target: Target, recent: list[PieceTable]) -> Prepared:
    """Write what is to stay of a version, and its manifest; return the move to it.

    Parameters
    ----------
    recent
        See :func:`ckptstore.maintenance.retention.reduce.lower`.

    Raises
    ------
    CorruptObjectError
        The version's manifest is damaged.
    CorruptTensorError
        A tensor that has to be read is.
    StorageError
        The storage failed; nothing has changed.
    """
    if target.level == "record":
        return Prepared(move=record_move(version), lowered=None)
    if target.level == "full":
        msg = f"a version does not age to {target.level!r}"
        raise InvalidInputError(msg, hint=", ".join(reversed(LEVELS[:-1])))
    lowered = lower(repo, version, target, recent)
    move = write_move(repo, version, lowered.manifest, level=target.level, roles=lowered.roles)
    warn(version, lowered.rounding)
    return Prepared(move=move, lowered=lowered)


def warn(version: Version, rounding: Rounding | None) -> None:
    """Log which tensors of a version are not in the form that its level asks for."""
    problems = () if rounding is None else rounding.problems
    if problems:
        named = "; ".join(f"{one.path} ({one.problem})" for one in problems[:_NAMED])
        more = f" and {len(problems) - _NAMED} more" if problems[_NAMED:] else ""
        where = f"{version.run}@{version.step} (#{version.id[:8]})"
        _log.warning("%s: kept more exactly than its level says: %s%s", where, named, more)
