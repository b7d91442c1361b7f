"""What a repair found, what it mended, and what is lost."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ckptstore.maintenance.check.integrity_scan import Problem

__all__ = ["ColdSource", "CommitFinding", "Lost", "Mended", "RepairReport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitFinding:
    """One commit that is not as it should be."""

    number: int
    key: str
    what: Literal["missing", "damaged"]
    mended: bool
    """It is right again; in a dry run, it can be made so."""
    why: str
    """What is wrong, and what stands in the way of mending it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mended:
    """A version that was brought back, wholly or in part; in a dry run, that can be."""

    version: str
    run: str
    step: int
    manifest: bool
    """Its manifest was lost, too, and was rebuilt."""
    tensors: tuple[str, ...]
    """Paths of tensors that were damaged and are whole again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A version of which something is lost."""

    version: str
    run: str
    step: int
    tensors: tuple[str, ...]
    """Paths of the tensors that are lost; empty if the whole version is."""
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdSource:
    """A version of another store that has what is missing here, in an archive class."""

    version: str
    run: str
    step: int
    url: str
    """Where the other store is, without credentials."""
    command: str
    """What makes it readable there; the repair is then to be run again."""
    pieces_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairReport:
    """What was found, what was mended, and what is lost."""

    dry_run: bool
    commits: tuple[CommitFinding, ...] = ()
    """Commits that are missing or damaged, oldest first."""
    commits_readable: int
    """Number of the last commit up to which the log can be read now."""
    versions_readable: int
    """How many versions the log has up to there."""
    commits_lost: str = ""
    """What says that the log lost its last commits, or all, and what to do; empty if nothing does.
    Nothing can bring them back from within the store, or from a store with another log."""
    snapshots: tuple[str, ...] = ()
    """Keys of catalog snapshots that were damaged; one was folded anew."""
    problems: tuple[Problem, ...] = ()
    """What a verification finds before the repair."""
    mended: tuple[Mended, ...] = ()
    lost: tuple[Lost, ...] = ()
    quarantined: tuple[str, ...] = ()
    """Ids of versions that this repair recorded as damaged."""
    relocated: tuple[str, ...] = ()
    """Ids of versions that lie elsewhere now, some only to leave a pack with a damaged index."""
    pieces: dict[str, int] = field(default_factory=dict)
    """How many pieces came from where: ``elsewhere``, ``moved``, ``salvaged``, ``scanned``,
    ``source``."""
    written_bytes: int = 0
    """Bytes of new packs."""
    cold: tuple[ColdSource, ...] = ()
    """What of the lost can be had from other stores once it is thawed there."""

    @property
    def ok(self) -> bool:
        """Return whether nothing is lost."""
        return (
            not self.lost
            and not self.commits_lost
            and all(commit.mended for commit in self.commits)
        )
