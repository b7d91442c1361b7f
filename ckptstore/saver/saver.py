"""Saves of one store in the background: admission, staging, order, errors, and the end."""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Literal, get_args

import numpy as np

from ckptstore import errors, limits
from ckptstore.argument_checks import check_among
from ckptstore.backends.transfers import Threads, ending, interrupts_held
from ckptstore.checkpoint.request import check_wishes
from ckptstore.config import check_choice, memory_bytes
from ckptstore.events import Events, SaveEventKind
from ckptstore.repo import Repo
from ckptstore.saver.arena import Arena, ArenaPool, Digests
from ckptstore.saver.messages import Done, Failed, Report, Wrote
from ckptstore.saver.pending import PendingSave
from ckptstore.saver.process_engine import ProcessEngine, why_not
from ckptstore.saver.save_job import Hear, JobWriter, SaveEngine, SaveJob
from ckptstore.saver.save_state import BackgroundSave, IfBusy
from ckptstore.saver.staging import ArenaLayout, Staging, lay_out
from ckptstore.saver.thread_priority import step_back
from ckptstore.states.save import SaveRequest, draft_of
from ckptstore.tensors.bfloat16 import to_bfloat16
from ckptstore.tensors.flatten import FlatState, flatten

_log = logging.getLogger("ckptstore")

Stage = Literal["now", "background"]

_numbers = itertools.count(1)


class Saver:
    """Saves of one store in the background. Any thread may use it; a forked child makes its own.

    Versions appear in the order of the calls. Close it before the repo.
    """

    def __init__(self, repo: Repo, events: Events) -> None:
        self.pid: int = os.getpid()
        self.dispatcher: EngineSupervisor = EngineSupervisor(repo, self._end)
        self._repo = repo
        self._events = events
        self._admitting = threading.Lock()
        self._changed = threading.Condition(threading.RLock())
        self._under_way: dict[int, BackgroundSave] = {}
        self._staged: deque[BackgroundSave] = deque()
        """Those that no engine has yet, in the order of the calls."""
        self._unheard: list[tuple[BackgroundSave, BaseException]] = []
        self._helpers_count = repo.options.workers - 1
        self._helpers = Threads(max(1, self._helpers_count), thread_name_prefix="ckptstore-copy")
        self._stager = Threads(1, thread_name_prefix="ckptstore-stage")

    @property
    def in_flight(self) -> int:
        """Number of saves under way."""
        return len(self._under_way)

    # --- saving -------------------------------------------------------------------------------

    def save(
        self,
        state: object,
        request: SaveRequest,
        *,
        began: float,
        if_busy: IfBusy,
        stage: Stage,
        retain: bool,
    ) -> PendingSave:
        """Copy a state, or begin to, and return; see :meth:`ckptstore.Run.save_async`.

        Parameters
        ----------
        began
            When the caller asked for it, on the environment's clock.
        """
        check_among("if_busy", if_busy, get_args(IfBusy))
        check_among("stage", stage, get_args(Stage))
        self._repo.check_writable()
        check_choice(request.codec)
        wishes = request.portable()
        save = BackgroundSave(
            number=next(_numbers),
            request=wishes,
            retain=retain,
            version_id=self._repo.environment.random_hex(16),
            began=began,
            if_busy=if_busy,
            environment=self._repo.environment,
            on_progress=request.progress,
        )
        with self._admitting:  # one at a time: the order of the calls is that of the versions
            self.raise_failure(save.run)
            check_wishes(self._repo.catalog, wishes)
            if self._admitted(save, lambda: len(self._under_way) < self._repo.options.in_flight):
                self.dispatcher.start()  # a child process starts while the state is copied
                flat = flatten(state, request.adapters, plain=request.plain)
                layout = lay_out(flat.tensors, self._repo.superblock.chunk_bytes)

                def lend() -> bool:
                    with interrupts_held(lambda: None):  # raised when the save has what was lent
                        save.arena = self.dispatcher.lend(layout.size_bytes)
                    return save.arena is not None

                try:
                    if self._admitted(save, lend):
                        save.draft = lambda: draft_of(flat, request.roles, request.encodings)
                        self._stage(save, flat, layout, later=stage == "background")
                except BaseException:
                    with self._changed:
                        if save.arena is not None and save.number not in self._under_way:
                            self.dispatcher.pool.give_back(save.arena)
                    raise
        save.returned()
        return PendingSave(save, self._cancel)

    def _admitted(self, save: BackgroundSave, ready: Callable[[], bool]) -> bool:
        """Return whether `ready` holds; if it does not, wait for it, skip the save, or refuse."""
        with self._changed:
            while not ready():
                if save.if_busy == "skip":
                    save.skip()
                    break
                if save.if_busy == "fail":
                    raise self._busy(save)
                self._changed.wait()
                self.raise_failure(save.run)
        if save.over:
            self._emit("skipped", save)
        return not save.over

    def _busy(self, save: BackgroundSave) -> errors.SaveBusyError:
        under_way = ", ".join(f"{one.run}@{one.step}" for one in self._under_way.values())
        msg = f"{save.run}@{save.step} is not saved: {under_way} is still under way"
        return errors.SaveBusyError(msg, hint="save less often, or use if_busy='wait'")

    # --- staging ------------------------------------------------------------------------------

    def _stage(
        self, save: BackgroundSave, flat: FlatState, layout: ArenaLayout, *, later: bool
    ) -> None:
        """Copy the state into what was lent now, or begin and leave the rest to a thread.

        Ctrl-C waits until the engine has it: what was given back might be written to, or be saved.
        """
        with interrupts_held(lambda: None):
            assert save.arena is not None  # noqa: S101 - it was lent
            save.staging = staging = Staging(flat.tensors, layout, save.arena, later=later)
            _savers.add(self)
            with self._changed:
                self._under_way[save.number] = save
                self._staged.append(save)
            try:
                began = self._repo.environment.monotonic()
                staging.begin()
                if later:
                    save.describe()
                    self._stager.submit(self._stage_later, save, staging, began)
                    return
                staging.copy(self._helpers, self._helpers_count, save.describe)
                self._settle(save, staging, began)
            except BaseException as error:  # raised here and now: nobody else has to hear of it
                save.heard = True
                staging.drain()
                self._end(save, Failed(number=save.number, error=error), raised=True)
                raise
            self._stager.submit(self._compare, save, staging)

    def _stage_later(self, save: BackgroundSave, staging: Staging, began: float) -> None:
        try:
            staging.copy()
            self._settle(save, staging, began)
        except BaseException as error:  # noqa: BLE001 - it arrives at who waits
            staging.drain()
            self._end(save, Failed(number=save.number, error=error))
        else:
            self._compare(save, staging)

    def _settle(self, save: BackgroundSave, staging: Staging, began: float) -> None:
        """Let the caller go on, once the engine has it: then it outlives this process."""
        staging.settle()
        save.copied(self._repo.environment.monotonic() - began)
        self._emit("staged", save)
        with self._changed:
            save.complete()
            self._send_off()
        save.staged()

    def _compare(self, save: BackgroundSave, staging: Staging) -> None:
        """Take the digests, right after the state was staged; the engine waits for them."""
        digests = staging.digests()
        with self._changed:
            self.dispatcher.compare(save, digests)

    def _send_off(self) -> None:
        """Hand over what is staged, in the order of the calls."""
        with self._changed:
            while self._staged and self._staged[0].job is not None:
                save = self._staged.popleft()
                if save.cancelled:
                    error = errors.OperationCancelledError("the save was cancelled")
                    self._end(save, Failed(number=save.number, error=error))
                else:
                    self.dispatcher.submit(save)

    # --- ends ---------------------------------------------------------------------------------

    def _cancel(self, save: BackgroundSave) -> bool:
        with self._changed:
            if save in self._staged:  # no engine has it yet
                save.cancelled = True
                return True
        return self.dispatcher.cancel(save.number)

    def _end(self, save: BackgroundSave, end: Done | Failed, *, raised: bool = False) -> None:
        """Note what became of a save, and let those go on who wait for it or for its memory.

        Its state is known as soon as the next is admitted; `result` returns after the observers.
        """
        error = end.error if isinstance(end, Failed) else None
        cancelled = isinstance(error, errors.OperationCancelledError)
        if error is not None and not cancelled:
            error.add_note(f"in the background save of {save.run}@{save.step}")
        with self._changed:
            if save.arena is not None:
                self.dispatcher.pool.give_back(save.arena)
            save.finish(end)
            if save in self._staged:
                self._staged.remove(save)
            if error is not None and not cancelled:
                self._unheard.append((save, error))
            del self._under_way[save.number]
            self._changed.notify_all()
        kind: SaveEventKind = "durable" if error is None else "cancelled" if cancelled else "failed"
        try:
            self._emit(kind, save, end, raised=raised)
        finally:
            save.released()
            self._send_off()

    def _emit(
        self, kind: SaveEventKind, save: BackgroundSave, end: object = None, *, raised: bool = False
    ) -> None:
        known = {**save.numbers(), **(end.receipt if isinstance(end, Done) else {})}
        what = (kind, save.run, save.step, save.version_id)
        event = self._repo.save_event(*what, receipt=known, error=save.error)
        self._events.emit(event, raised=raised)

    # --- waiting and errors -------------------------------------------------------------------

    def raise_failure(self, run: str | None = None) -> None:
        """Raise the error of a save of this run, or of any, that nobody has heard of; once."""
        with self._changed:
            self._unheard = [(one, error) for one, error in self._unheard if not one.heard]
            for save, error in self._unheard:
                if run in (None, save.run):
                    save.heard = True
                    raise error

    def wait(self, run: str | None = None) -> None:
        """Wait until no save of this run, or of any, is under way; errors stay for later."""
        with self._changed:
            saves = [one for one in self._under_way.values() if run in (None, one.run)]
        for save in saves:
            save.wait()

    def close(self) -> None:
        """Wait for all saves, end the engine and give the memory back; raises nothing.

        Afterwards :meth:`raise_failure` tells what nobody has heard of.
        """
        self.wait()
        self._stager.shutdown()
        self._helpers.shutdown()
        self.dispatcher.close()
        _savers.discard(self)


_savers: weakref.WeakSet[Saver] = weakref.WeakSet()


def _finish_all() -> None:
    """Finish what is under way before the interpreter goes down, if nobody closed the store."""
    for saver in list(_savers):
        if saver.pid == os.getpid():
            saver.close()


def _finish() -> None:
    """Finish what threads that outlived the main one began; what comes later is not left behind."""
    _finish_all()
    ending.set()


# Once while pools have threads, which they lose before the main thread waits for others; and once
# more at the ordinary exit handlers' time.
try:
    getattr(threading, "_register_atexit", atexit.register)(_finish_all)
except RuntimeError:  # the first save of a process that is ending
    ending.set()
atexit.register(_finish)


class ThreadEngine(JobWriter):
    """One thread that writes job after job; see :class:`ckptstore.saver.save_job.SaveEngine`.

    The threads that digests and codecs run in are children of this one, and have its priority.
    """

    name = "thread"

    def __init__(self, repo: Repo, hear: Hear) -> None:
        def tell(_: SaveJob, report: Report) -> None:
            hear(self, report)

        super().__init__(repo, tell, to_bfloat16, step_back)

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
        self.pool = ArenaPool(budget, arenas_max=repo.options.in_flight, shared=shared)
        """The memory of staged states, in use or not."""
        self._lock = threading.RLock()
        self._engine: SaveEngine | None = None
        self._under_way: dict[int, BackgroundSave] = {}
        """The saves that an engine has."""

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
                except errors.LimitError:
                    # The interpreter is ending: a save is written as it is made.
                    self._engine = ThreadEngine(self._repo, self._hear)
            return self._engine

    def lend(self, size_bytes: int) -> Arena | None:
        """Return memory for a state; None while others use too much of the budget.

        Raises
        ------
        LimitError
            It is more than the whole budget.
        """
        arena = self.pool.lend(size_bytes)
        dropped = self.pool.dropped()
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
        self.pool.give_back(arena)
        return True

    def submit(self, save: BackgroundSave) -> None:
        """Have a save written; returns at once, and raises nothing: its end is told."""
        with self._lock:
            self._under_way[save.number] = save
            try:
                self._submit(save)
            except errors.SaverDiedError as error:
                _log.warning("%s; another one is begun", error.message)
                self._engine = None
                try:
                    self._submit(save)
                except errors.SaverDiedError as again:
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
            and isinstance(report.error, errors.SaverDiedError)
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
        self.pool.close()
