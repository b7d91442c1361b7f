"""Chooses the engine that writes, and replaces one that cannot begin or has died."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import numpy as np

from ckptstore import limits
from ckptstore.config import memory_bytes
from ckptstore.errors import LimitError, SaverDiedError
from ckptstore.repo import Repo
from ckptstore.saver.arena import Arena, ArenaPool
from ckptstore.saver.job_writer import JobWriter
from ckptstore.saver.messages import Done, Failed, Report, Wrote
from ckptstore.saver.process_engine import ProcessEngine, why_not
from ckptstore.saver.save_job import Hear, SaveEngine, SaveJob
from ckptstore.saver.save_state import BackgroundSave
from ckptstore.saver.staged import Digests
from ckptstore.saver.thread_priority import step_back
from ckptstore.tensors.bfloat16 import to_bfloat16

_log = logging.getLogger("ckptstore")


class ThreadEngine(JobWriter):
    """One thread that writes job after job; see :class:`ckptstore.saver.save_job.SaveEngine`.

    The threads that digests and codecs run in are children of this one, and have its priority.
    """

    name = "thread"

    def __init__(self, repo: Repo, hear: Hear) -> None:
        def tell(_: SaveJob, report: Report) -> None:
            hear(self, report)

        super().__init__(repo, tell, rounding=to_bfloat16, begin=step_back)

    def submit(self, job: SaveJob, arena: Arena) -> None:
        """Take a job over."""
        self.take(job, arena.view)

    def forget(self, arena: int) -> None:
        """Do nothing: arenas are this process's own."""


class EngineSupervisor:
    """Lends memory, and hands what is staged in it to an engine. Any thread may use it.

    With ``auto`` a process writes, where another process can reach the storage; if the first one
    cannot even begin, a thread takes its place. A process that dies later is replaced, and what it
    had not committed fails.

    Parameters
    ----------
    ended
        Called once for each save that was submitted, in a thread of the engine or in
        :meth:`submit`.

    Raises
    ------
    InvalidInputError
        The store asks for an engine that cannot reach its storage.
    """

    def __init__(self, repo: Repo, ended: Callable[[BackgroundSave, Done | Failed], None]) -> None:
        self._repo = repo
        self._ended = ended
        self._wanted = repo.options.engine
        self.kind: str = self._wanted
        if self._wanted == "auto":
            self.kind = "thread" if why_not(repo) else "process"
        budget = repo.options.staging_bytes
        if budget is None:
            budget = int(memory_bytes() * limits.STAGING_MEMORY_SHARE)
        shared = self.kind == "process"
        self._pool = ArenaPool(budget, arenas_max=repo.options.in_flight, shared=shared)
        self._lock = threading.RLock()
        self._engine: SaveEngine | None = None
        self._under_way: dict[int, BackgroundSave] = {}
        """The saves that an engine has."""

    @property
    def size_bytes(self) -> int:
        """Bytes of memory that are held for staged states, in use or not."""
        return self._pool.size_bytes

    @property
    def pid(self) -> int:
        """Process id of the child that writes; 0 if there is none."""
        engine = self._engine
        return engine.pid if isinstance(engine, ProcessEngine) else 0

    def start(self) -> SaveEngine:
        """Return the engine; begins one if there is none."""
        with self._lock:
            if self._engine is None:
                try:
                    kind = ProcessEngine if self.kind == "process" else ThreadEngine
                    self._engine = kind(self._repo, self._hear)
                except LimitError:  # the interpreter is ending: a save is written as it is made
                    self._engine = ThreadEngine(self._repo, self._hear)
            return self._engine

    def lend(self, size_bytes: int) -> Arena | None:
        """Return memory for a state; None while others use too much of the budget.

        Raises
        ------
        LimitError
            It is more than the whole budget.
        """
        arena = self._pool.lend(size_bytes)
        dropped = self._pool.dropped()
        if dropped:
            engine = self.start()
            for number in dropped:
                engine.forget(number)
        return arena

    def reserve(self, size_bytes: int) -> bool:
        """Take memory from the system now; False if others use too much of the budget.

        Raises
        ------
        LimitError
            It is more than the whole budget.
        """
        arena = self.lend(size_bytes)
        if arena is None:
            return False
        np.frombuffer(arena.view, np.uint8).fill(0)  # a page is there once it was written
        self.give_back(arena)
        return True

    def give_back(self, arena: Arena) -> None:
        """Take memory back."""
        self._pool.give_back(arena)

    def submit(self, save: BackgroundSave) -> None:
        """Have a save written; returns at once, and raises nothing: its end is told."""
        with self._lock:
            self._under_way[save.number] = save
            try:
                self._submit(save)
            except SaverDiedError as error:
                _log.warning("%s; another one is begun", error.message)
                self._engine = None
                try:
                    self._submit(save)
                except SaverDiedError as again:
                    self._end(Failed(number=save.number, error=again))

    def _submit(self, save: BackgroundSave) -> None:
        engine = self.start()
        assert save.job is not None  # noqa: S101 - it is complete
        assert save.arena is not None  # noqa: S101
        engine.submit(save.job, save.arena)
        digests = save.digests
        if save.number in self._under_way and digests is not None:
            engine.compare(save.number, digests)

    def compare(self, save: BackgroundSave, digests: Digests) -> None:
        """Have what a save reads compared with these; it is not written before."""
        with self._lock:
            save.digests = digests
            if save.number in self._under_way:
                self.start().compare(save.number, digests)

    def _hear(self, engine: SaveEngine, report: Report) -> None:
        """Pass on what becomes of a save, unless another engine takes it over."""
        save = self._under_way.get(report.number)
        if isinstance(report, Wrote):
            if save is not None:
                save.progressed(report.done, report.total)
        elif (
            save is not None
            and isinstance(report, Failed)
            and isinstance(report.error, SaverDiedError)
            and self._falls_back(engine)
        ):
            self.submit(save)  # to the engine that is left: only this one died
        else:
            self._end(report)

    def _end(self, report: Done | Failed) -> None:
        with self._lock:
            save = self._under_way.pop(report.number)
        self._ended(save, report)

    def cancel(self, number: int) -> bool:
        """Cancel a job; False if it is done, or being committed."""
        engine = self._engine
        return engine is not None and engine.cancel(number)

    def _falls_back(self, engine: SaveEngine) -> bool:
        """Return whether a thread takes over from an engine that could not begin."""
        if not isinstance(engine, ProcessEngine) or engine.began or self._wanted != "auto":
            return False
        with self._lock:
            if self.kind == "process":
                _log.warning("%s; a thread saves from now on", engine.gone)
                self.kind = "thread"
                self._engine = None
        return True

    def close(self) -> None:
        """End the engine when it has written everything, and give the memory back."""
        with self._lock:
            engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()
        self._pool.close()
