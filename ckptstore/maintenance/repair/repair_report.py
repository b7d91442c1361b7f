"""Findings of a repair, and its results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ckptstore.maintenance.check.integrity_scan import Problem
from ckptstore.model import NamedVersion
from ckptstore.shown import Shown


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitFinding:
    """One commit that is not as it should be."""

    number: int
    key: str
    what: Literal["missing", "damaged"]
    mended: bool
    """What it held is there again; in a dry run, it can be brought back."""
    set_aside: bool = False
    """The log goes on past it, a damaged record at its end, which stays where it is; in a dry run,
    it would."""
    why: str
    """The damage, and the obstacle to mending it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mended(NamedVersion):
    """A version that was brought back, wholly or in part; in a dry run, one that can be."""

    manifest: bool
    """Its manifest was lost, too, and was rebuilt."""
    tensors: tuple[str, ...]
    """Paths of tensors that were damaged and are whole again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost(NamedVersion):
    """A version that lost some of its tensors, or all."""

    tensors: tuple[str, ...]
    """Paths of the tensors that are lost; empty if the whole version is."""
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdSource(NamedVersion):
    """A version of another store that holds missing pieces in an archive class."""

    url: str
    """Where the other store is, without credentials."""
    command: str
    """Command that makes it readable there; the repair is then to be run again."""
    pieces_count: int


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RepairReport(Shown):
    """Findings of a repair, and its results."""

    dry_run: bool
    commits: tuple[CommitFinding, ...] = ()
    """Commits that are missing or damaged, oldest first."""
    commits_readable: int
    """Number of the last commit up to which the log can be read now."""
    versions_readable: int
    """Number of versions that the log has up to there."""
    commits_lost: str = ""
    """Evidence that the log lost its last commits, or all, and the way out; empty without any.
    Nothing can bring them back from within the store, or from a store with another log."""
    snapshots: tuple[str, ...] = ()
    """Keys of catalog snapshots that were damaged; a new one was folded."""
    problems: tuple[Problem, ...] = ()
    """Findings of a verification before the repair."""
    mended: tuple[Mended, ...] = ()
    lost: tuple[Lost, ...] = ()
    quarantined: tuple[str, ...] = ()
    """Ids of versions that this repair recorded as damaged."""
    relocated: tuple[str, ...] = ()
    """Ids of versions that lie elsewhere now, some only to leave a pack with a damaged index."""
    pieces: dict[str, int] = field(default_factory=dict)
    """Number of pieces by origin: ``elsewhere``, ``moved``, ``salvaged``, ``scanned``,
    ``source``."""
    written_bytes: int = 0
    """Bytes of new packs."""
    cold: tuple[ColdSource, ...] = ()
    """Other stores that have lost pieces, once they are thawed there."""

    @property
    def ok(self) -> bool:
        """Return whether nothing is lost."""
        return (
            not self.lost
            and not self.commits_lost
            and all(commit.mended or commit.set_aside for commit in self.commits)
        )
