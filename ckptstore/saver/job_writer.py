"""Writes staged saves in a thread, one after the other: in this process, or in the child."""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeAlias

from ckptstore.backends.transfers import start_thread
from ckptstore.encodings.casts import Rounding
from ckptstore.errors import LimitError
from ckptstore.events import Progress
from ckptstore.repo import Repo
from ckptstore.saver.messages import Done, Failed, Report, Wrote
from ckptstore.saver.save_job import CancellationToken, SaveJob, write_job
from ckptstore.saver.staged import Digests

Tell: TypeAlias = Callable[[SaveJob, Report], None]
"""Hears what becomes of a job, in the thread that writes."""


@dataclass(slots=True, kw_only=True)
class _Task:
    job: SaveJob
    memory: memoryview
    token: CancellationToken = field(default_factory=CancellationToken)
    digests: Digests | None = None
    ready: threading.Event = field(default_factory=threading.Event)


class JobWriter:
    """Writer of jobs, one after the other, in a thread. Any thread may use it.

    Where no thread can be made, the caller that gives a job its digests writes it.

    Digests, codecs and writes release the interpreter's lock. A save in the background leaves one
    processor to the training.

    Parameters
    ----------
    rounding
        Rounds to bfloat16 faster than NumPy; None, in a process without torch, for NumPy.
    begin
        Called in the thread, first.
    """

    def __init__(
        self,
        repo: Repo,
        tell: Tell,
        *,
        rounding: Rounding | None = None,
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        self._repo = repo
        self._options = dataclasses.replace(repo.options, workers=max(1, repo.options.workers - 1))
        self._tell = tell
        self._rounding = rounding
        self._begin = begin
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
                self._repo,
                job,
                task.memory,
                task.digests,
                options=self._options,
                token=task.token,
                progress=progress,
                rounding=self._rounding,
            )
        except BaseException as error:  # noqa: BLE001 - whatever it is, it arrives at the caller
            self._tell(job, Failed(number=job.number, error=error))
        else:
            self._tell(job, Done(number=job.number, version=version, receipt=receipt))
