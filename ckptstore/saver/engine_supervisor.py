"""Which engine writes, and what happens when it cannot begin or has died."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping

import numpy as np

from ckptstore import limits
from ckptstore.config import memory_bytes
from ckptstore.errors import SaverDiedError
from ckptstore.model import Version
from ckptstore.repo import Repo
from ckptstore.saver.arena import Arena, Pool
from ckptstore.saver.process_engine import ProcessEngine, why_not
from ckptstore.saver.save_job import Engine, Job, Told
from ckptstore.saver.staged import Digests
from ckptstore.saver.thread_engine import ThreadEngine

__all__ = ["Dispatcher"]

_log = logging.getLogger("ckptstore")


class Dispatcher:
    """Lends memory, and hands what is staged in it to an engine. Any thread may use it.

    With ``auto`` a process writes, where another process can reach the storage; if the first one
    cannot even begin, a thread takes its place. A process that dies later is replaced, and what it
    had not committed fails.

    Raises
    ------
    InvalidInputError
        The store asks for an engine that cannot reach its storage.
    """

    def __init__(self, repo: Repo) -> None:
        self._repo = repo
        self._wanted = repo.options.engine
        self.kind = self._wanted
        if self._wanted == "auto":
            self.kind = "thread" if why_not(repo) else "process"
        budget = repo.options.staging_bytes
        if budget is None:
            budget = int(memory_bytes() * limits.STAGING_MEMORY_SHARE)
        shared = self.kind == "process"
        self._pool = Pool(budget, arenas_max=repo.options.in_flight, shared=shared)
        self._lock = threading.RLock()
        self._engine: Engine | None = None
        self._under_way: dict[int, Digests | None] = {}
        """Digests of the jobs that an engine has; None until they are known."""

    @property
    def size_bytes(self) -> int:
        """Bytes of memory that are held for staged states, in use or not."""
        return self._pool.size_bytes

    @property
    def pid(self) -> int:
        """Process id of the child that writes; 0 if there is none."""
        engine = self._engine
        return engine.pid if isinstance(engine, ProcessEngine) else 0

    def start(self) -> Engine:
        """Return the engine; begins one if there is none."""
        with self._lock:
            if self._engine is None:
                if self.kind == "process":
                    self._engine = ProcessEngine(self._repo)
                else:
                    self._engine = ThreadEngine(self._repo)
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

    def submit(self, job: Job, arena: Arena, told: Told) -> None:
        """Have a job written; returns at once, and raises nothing: `told` is told."""
        with self._lock:
            self._under_way.setdefault(job.number, None)
            try:
                self._submit(job, arena, told)
            except SaverDiedError as error:
                _log.warning("%s; another one is begun", error.message)
                self._engine = None
                try:
                    self._submit(job, arena, told)
                except SaverDiedError as again:
                    self.ended(job)
                    told.failed(again)

    def _submit(self, job: Job, arena: Arena, told: Told) -> None:
        engine = self.start()
        engine.submit(job, arena, _Passing(self, engine, job, arena, told))
        digests = self._under_way.get(job.number)
        if digests is not None:  # the engine before knew them
            engine.compare(job.number, digests)

    def compare(self, number: int, digests: Digests) -> None:
        """Have what a job reads compared with these; it is not written before."""
        with self._lock:
            if number in self._under_way:
                self._under_way[number] = digests
                self.start().compare(number, digests)

    def ended(self, job: Job) -> None:
        """Forget a job."""
        with self._lock:
            self._under_way.pop(job.number, None)

    def cancel(self, number: int) -> bool:
        """Cancel a job; False if it is done, or being committed."""
        engine = self._engine
        return engine is not None and engine.cancel(number)

    def falls_back(self, engine: Engine) -> bool:
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


class _Passing:
    """Passes on what becomes of a job, unless another engine takes it over."""

    def __init__(
        self, dispatcher: Dispatcher, engine: Engine, job: Job, arena: Arena, told: Told
    ) -> None:
        self._dispatcher = dispatcher
        self._engine = engine
        self._job = job
        self._arena = arena
        self._told = told

    def progressed(self, done: int, total: int) -> None:
        self._told.progressed(done, total)

    def succeeded(self, version: Version, receipt: Mapping[str, float]) -> None:
        self._dispatcher.ended(self._job)
        self._told.succeeded(version, receipt)

    def failed(self, error: BaseException) -> None:
        """Give the job to the engine that is left, if only this one died."""
        if isinstance(error, SaverDiedError) and self._dispatcher.falls_back(self._engine):
            self._dispatcher.submit(self._job, self._arena, self._told)
        else:
            self._dispatcher.ended(self._job)
            self._told.failed(error)
