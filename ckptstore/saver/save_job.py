"""One staged save on its way to an engine, and how an engine writes it. Needs no torch."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeAlias

from ckptstore.backends.transfers import operation, start_thread
from ckptstore.checkpoint.encode import Draft
from ckptstore.checkpoint.request import WriteRequest
from ckptstore.checkpoint.write import write_version
from ckptstore.config import Options
from ckptstore.encodings.casts import Rounding
from ckptstore.encodings.encoding import Encoding
from ckptstore.errors import CkptStoreError, LimitError, OperationCancelledError
from ckptstore.events import Progress, ProgressCallback
from ckptstore.format.manifest import TensorRecord
from ckptstore.maintenance.retention.retain import retain
from ckptstore.model import Version
from ckptstore.repo import Repo
from ckptstore.saver.arena import Arena, Digests, StagedTensor, sources_in
from ckptstore.saver.messages import Done, Failed, Report, Wrote

_log = logging.getLogger("ckptstore")


class CancellationToken:
    """Whether a save may still be cancelled. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cancelled = False
        self._committing = False

    def cancel(self) -> bool:
        """Cancel, and return True; False if the commit has begun."""
        with self._lock:
            if not self._committing:
                self._cancelled = True
            return self._cancelled

    def check(self) -> None:
        """Raise OperationCancelledError if the save was cancelled."""
        if self._cancelled:
            raise OperationCancelledError("the save was cancelled")

    def commit(self) -> None:
        """Begin to commit: from now on nothing cancels it. Raises as :meth:`check`."""
        with self._lock:
            self.check()
            self._committing = True


Row = tuple[str, tuple[int, ...], tuple[int, ...] | None, str, int]
"""A :class:`TensorRecord` of one process, as a tuple: quicker to pickle, which happens in the call.
"""


def row_of(record: TensorRecord) -> Row:
    """Return a record as a row; it has no blocks, which only many ranks make."""
    return record.dtype, record.shape, record.order, record.role, record.nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveJob:
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


class SaveEngine(Protocol):
    """Writes staged saves, one after the other, in the order in which it gets them."""

    name: str

    def submit(self, job: SaveJob, arena: Arena) -> None:
        """Take a job over; returns at once. The arena stays as it is until the job has ended.

        Raises
        ------
        SaverDiedError
            It cannot take any; make another engine.
        """

    def compare(self, number: int, digests: Digests) -> None:
        """Give a job its digests, which it waits for before it is written."""

    def cancel(self, number: int) -> bool:
        """Cancel a job; False if it is done, or being committed."""

    def forget(self, arena: int) -> None:
        """Hear that an arena was given up."""

    def close(self) -> None:
        """Finish what was submitted, and end. Idempotent."""


Hear: TypeAlias = Callable[[SaveEngine, Report], None]
"""Hears from an engine what becomes of its jobs; called in threads of the engine."""


@operation("save")
def write_job(
    repo: Repo,
    job: SaveJob,
    memory: memoryview,
    digests: Digests | None,
    *,
    options: Options,
    token: CancellationToken,
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
        sources=sources_in(memory, job.tensors, digests, token.check),
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
        before_commit=token.commit,
    )
    if job.retain:
        version = _retained(repo, version)
    return version, receipt


def _retained(repo: Repo, version: Version) -> Version:
    """Carry out the policy of the run; return the version as it is then."""
    try:
        retain(repo, run=version.run, dry_run=False)
    except CkptStoreError as error:
        _log.warning("run %s was not pruned after a save: %s", version.run, error)
    return repo.catalog.version(version.id)


Tell: TypeAlias = Callable[[SaveJob, Report], None]
"""Hears what becomes of a job, in the thread that writes."""


@dataclass(slots=True, kw_only=True)
class _Task:
    job: SaveJob
    memory: memoryview
    token: CancellationToken = field(default_factory=CancellationToken)
    digests: Digests | None = None
    ready: threading.Event = field(default_factory=threading.Event)


@dataclass(eq=False, repr=False)
class JobWriter:
    """Writer of jobs, one after the other, in a thread. Any thread may use it.

    Where no thread can be made, the caller that gives a job its digests writes it.

    Digests, codecs and writes release the interpreter's lock. A save in the background leaves one
    processor to the training.
    """

    _repo: Repo
    _tell: Tell
    _rounding: Rounding | None = None
    """Rounds to bfloat16 faster than NumPy; None, in a process without torch, for NumPy."""
    _begin: Callable[[], None] = field(default=lambda: None)
    """Called in the thread, first."""

    def __post_init__(self) -> None:
        options = self._repo.options
        self._options = replace(options, workers=max(1, options.workers - 1))
        self._queue: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._tasks: dict[int, _Task] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        with suppress(LimitError):  # then jobs are written as soon as they can be
            self._thread = start_thread(self._run, "ckptstore-saver")

    def take(self, job: SaveJob, memory: memoryview) -> None:
        """Take a job over, and the arena that it lies in; it is written once it has its digests."""
        task = _Task(job=job, memory=memory)
        with self._lock:
            self._tasks[job.number] = task
        self._queue.put(task)

    def compare(self, number: int, digests: Digests) -> None:
        """Give a job its digests."""
        task = self._task(number)
        if task is not None:
            task.digests = digests
            task.ready.set()
            if self._thread is None:
                self._queue.put(None)
                self._write_all()

    def cancel(self, number: int) -> bool:
        """Cancel a job; False if it is done, or being committed. Digests are waited for no more."""
        task = self._task(number)
        if task is None or not task.token.cancel():
            return False
        task.ready.set()
        return True

    def close(self, *, alone: bool = False) -> None:
        """Write what was submitted, and end.

        Parameters
        ----------
        alone
            No more digests come: jobs without them are written, and not compared.
        """
        with self._lock:
            left = list(self._tasks.values()) if alone else []
        for task in left:
            task.ready.set()
        self._queue.put(None)
        if self._thread is None:
            self._write_all()
        else:
            self._thread.join()

    def _task(self, number: int) -> _Task | None:
        with self._lock:
            return self._tasks.get(number)

    def _run(self) -> None:
        self._begin()
        self._write_all()

    def _write_all(self) -> None:
        while (task := self._queue.get()) is not None:
            self._write(task)
            with self._lock:
                del self._tasks[task.job.number]
            del task  # it holds an arena, and the next one may be long in coming

    def _write(self, task: _Task) -> None:
        job = task.job

        def progress(seen: Progress) -> None:
            self._tell(job, Wrote(number=job.number, done=seen.done, total=seen.total))

        task.ready.wait()
        try:
            version, receipt = write_job(
                self._repo, job, task.memory, task.digests, options=self._options,
                token=task.token, progress=progress, rounding=self._rounding,
            )  # fmt: skip
        except BaseException as error:  # noqa: BLE001 - whatever it is, it arrives at the caller
            self._tell(job, Failed(number=job.number, error=error))
        else:
            self._tell(job, Done(number=job.number, version=version, receipt=receipt))
