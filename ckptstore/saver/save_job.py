"""One staged save on its way to an engine, and how an engine writes it. Needs no torch."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from ckptstore.checkpoint.encode import Draft
from ckptstore.checkpoint.request import WriteRequest
from ckptstore.checkpoint.write import write_version
from ckptstore.config import Options
from ckptstore.encodings.casts import Rounding
from ckptstore.encodings.encoding import Encoding
from ckptstore.errors import CkptStoreError
from ckptstore.events import ProgressCallback
from ckptstore.format.manifest import TensorRecord
from ckptstore.model import Version
from ckptstore.repo import Repo
from ckptstore.saver.arena import Arena
from ckptstore.saver.cancellation import Gate
from ckptstore.saver.staged import Digests, StagedTensor, sources_in

__all__ = ["Engine", "Job", "Row", "Told", "background_options", "row_of", "write_job"]

_log = logging.getLogger("ckptstore")


Row = tuple[str, tuple[int, ...], tuple[int, ...] | None, str, int]
"""A :class:`TensorRecord` of one process, as a tuple: quicker to pickle, which happens in the call.
"""


def row_of(record: TensorRecord) -> Row:
    """Return a record as a row; it has no blocks, which only many ranks make."""
    return record.dtype, record.shape, record.order, record.role, record.nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A staged save; pickled to a child process. What it holds is plain and its own."""

    number: int
    """Counts the saves of a process."""
    version: str
    """Id that the version will have."""
    arena: int
    """Number of the arena that holds the bytes."""
    tensors: tuple[StagedTensor, ...]
    records: tuple[Row, ...]
    """What the manifest says of each tensor."""
    frame: bytes
    wishes: Mapping[int, Encoding]
    """The lossy forms that rules ask for, by place."""
    request: WriteRequest
    receipt: Mapping[str, float]
    """``blocked_s`` and ``staging_s``."""
    retain: bool
    """Carry out the run's retention policy afterwards."""


class Told(Protocol):
    """Who is told what becomes of a job; called from threads of the engine."""

    def progressed(self, done: int, total: int) -> None:
        """Hear how many bytes are done."""

    def succeeded(self, version: Version, receipt: Mapping[str, float]) -> None:
        """Hear that it is durable."""

    def failed(self, error: BaseException) -> None:
        """Hear that it came to nothing."""


class Engine(Protocol):
    """Writes staged saves, one after the other, in the order in which it gets them."""

    name: str

    def submit(self, job: Job, arena: Arena, told: Told) -> None:
        """Take a job over; returns at once. The arena stays as it is until `told` is told.

        Raises
        ------
        SaverDiedError
            It cannot take any; make another engine.
        """

    def compare(self, number: int, digests: Digests) -> None:
        """Know the digests of a job, which waits for them before it is written."""

    def cancel(self, number: int) -> bool:
        """Cancel a job; False if it is done, or being committed."""

    def forget(self, arena: int) -> None:
        """Know that an arena was given up."""

    def close(self) -> None:
        """Finish what was submitted, and end. Idempotent."""


def background_options(options: Options) -> Options:
    """Return how a save in the background works: it leaves a processor to the training."""
    return dataclasses.replace(options, workers=max(1, options.workers - 1))


def write_job(
    repo: Repo,
    job: Job,
    memory: memoryview,
    digests: Digests | None,
    *,
    options: Options,
    gate: Gate,
    progress: ProgressCallback,
    rounding: Rounding | None = None,
) -> tuple[Version, dict[str, float]]:
    """Write a staged save and commit it; return the version and its receipt.

    Parameters
    ----------
    memory
        The arena.
    digests
        Of what was staged, to compare with; None if nobody lived to take them.
    rounding
        Rounds to bfloat16 faster than NumPy; None, in a process without torch, for NumPy.

    Raises
    ------
    TornStateError
        What is in the arena is not what was staged.
    OperationCancelledError
        It was cancelled before it was committed.
    CkptStoreError
        As :func:`ckptstore.checkpoint.write.write_version`.
    """
    draft = Draft(
        sources=sources_in(memory, job.tensors, digests, gate.check),
        records=tuple(
            TensorRecord(dtype=dtype, shape=shape, order=order, role=role, nbytes=nbytes)
            for dtype, shape, order, role, nbytes in job.records
        ),
        frame=job.frame,
        names=[tensor.name for tensor in job.tensors],
        wishes=job.wishes,
        rounding=rounding,
    )
    version, receipt = write_version(
        repo,
        draft,
        job.request,
        version=job.version,
        options=options,
        receipt=job.receipt,
        progress=progress,
        before_commit=gate.commit,
    )
    if job.retain:
        version = _retained(repo, version)
    return version, receipt


def _retained(repo: Repo, version: Version) -> Version:
    """Carry out the policy of the run; return the version as it is then."""
    from ckptstore.maintenance.retention.retain import retain

    try:
        retain(repo, run=version.run, dry_run=False)
    except CkptStoreError as error:
        _log.warning("run %s was not pruned after a save: %s", version.run, error)
    return repo.catalog.version(version.id)
