"""What is asked of a replication, and what it says that it did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ckptstore.errors import ColdObjectError, IntegrityError
from ckptstore.events import ProgressCallback, silent

Why = Literal["deleted in the target", "reduced in the target", "deleted in the source"]
"""Why a version does not come: the target's own retention, or somebody there, took it away, in
whole or in part; or the source has lost it since it was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicateRequest:
    """What the user asks for, besides the versions."""

    dry_run: bool = False
    check: bool = True
    """Read back what was written, before the version becomes visible in the target."""
    bytes_per_s: float = 0.0
    """Bandwidth to the target, both directions together; 0 for no limit."""
    again: frozenset[str] = frozenset()
    """Ids of versions that come also if the target has deleted them, or keeps less of them."""
    resume: bool = True
    """Look in the target for chunks that an interrupted copy left there."""
    progress: ProgressCallback = silent
    """Told the bytes in memory of the versions that are done, of those that are to be copied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A version that could not be copied, while others were."""

    version: str
    run: str
    step: int
    message: str
    kind: str = IntegrityError.kind
    """Code of the error: it is damaged, or cold and must be thawed first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A version that does not come, since one of the stores has decided so."""

    version: str
    run: str
    step: int
    why: Why


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicateReport:
    """What a replication did, or would do."""

    dry_run: bool
    source: str
    """Location, as that of the target without credentials."""
    target: str
    target_id: str
    """Id of the target store."""
    copied: tuple[str, ...] = ()
    """Ids of versions whose content came, oldest first; with `dry_run`, that would come."""
    present: tuple[str, ...] = ()
    """Ids of versions that were there already, or whose deletion there was taken back."""
    left: tuple[LeftOut, ...] = ()
    """Versions that the target itself has deleted or reduced, which stay so unless they are asked
    for again; and those that the source deleted meanwhile."""
    records_count: int = 0
    """Ancestors of which the record came."""
    chunk_bytes: int = 0
    """Stored bytes that travelled, or would."""
    chunks_count: int = 0
    resumed_bytes: int = 0
    """Stored bytes that did not travel again, since an interrupted copy had left them there; read
    back before they counted. 0 in a dry run, which does not look for them."""
    logical_bytes: int = 0
    """What the copied versions take in memory."""
    checked: bool = False
    """Every chunk that travelled was read back from the target."""
    noted: bool = False
    """The source's catalog says that the target has these versions."""
    note_failure: str = ""
    """Why it does not, if it could not be written."""
    heads_kept: tuple[str, ...] = ()
    """Runs whose head stays where the target has put it: by training there, or by a rollback."""
    metrics_left_count: int = 0
    """Values of metrics that the target had no room for, beside those of its own."""
    failures: tuple[Failure, ...] = ()
    seconds: float = 0.0

    @property
    def exit_code(self) -> int:
        """5 if a version is damaged, 8 if some are only cold, 0 if nothing failed."""
        if not self.failures:
            return 0
        cold = all(failure.kind == ColdObjectError.kind for failure in self.failures)
        return ColdObjectError.exit_code if cold else IntegrityError.exit_code
