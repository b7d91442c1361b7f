"""Saves of one store in the background: admission, staging, order, errors, and the end."""

from __future__ import annotations

import atexit
import itertools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

from ckptstore.checkpoint.request import WriteRequest, check_wishes
from ckptstore.codecs.codec_table import check_choice
from ckptstore.errors import InvalidInputError, OperationCancelledError, SaveBusyError
from ckptstore.events import Events, SaveEvent, SaveEventKind
from ckptstore.model import Version
from ckptstore.repo import Repo
from ckptstore.saver.arena import Arena
from ckptstore.saver.engine_supervisor import Dispatcher
from ckptstore.saver.pending import PendingSave
from ckptstore.saver.save_state import Flight
from ckptstore.saver.staged_save import Departure
from ckptstore.saver.staging import Staging, lay_out
from ckptstore.states.save import SaveRequest, draft_of
from ckptstore.tensors.flatten import flatten

__all__ = ["IfBusy", "Saver", "Stage"]

IfBusy = Literal["wait", "skip", "fail"]
Stage = Literal["now", "background"]

_numbers = itertools.count(1)


def _cancelled() -> OperationCancelledError:
    return OperationCancelledError("the save was cancelled")


class Saver:
    """Saves of one store in the background. Any thread may use it; a forked child makes its own.

    Versions appear in the order of the calls. Close it before the repo.
    """

    def __init__(self, repo: Repo, events: Events) -> None:
        self.pid = os.getpid()
        self.dispatcher = Dispatcher(repo)
        self._repo = repo
        self._events = events
        self._admitting = threading.Lock()
        self._changed = threading.Condition(threading.RLock())
        self._flights: dict[int, Flight] = {}
        self._departures: deque[Departure] = deque()
        self._unheard: list[tuple[Flight, BaseException]] = []
        self._helpers_count = repo.options.workers - 1
        self._helpers = ThreadPoolExecutor(
            max(1, self._helpers_count), thread_name_prefix="ckptstore-copy"
        )
        self._stager = ThreadPoolExecutor(1, thread_name_prefix="ckptstore-stage")
        _savers.add(self)

    @property
    def in_flight(self) -> int:
        """How many saves are under way."""
        return len(self._flights)

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
        if if_busy not in ("wait", "skip", "fail") or stage not in ("now", "background"):
            msg = f"if_busy={if_busy!r} or stage={stage!r} is not accepted"
            raise InvalidInputError(msg, hint="wait, skip or fail; now or background")
        self._repo.check_writable()
        check_choice(request.codec)
        wishes = request.plain()
        flight = self._flight(request, wishes, began)
        with self._admitting:  # one at a time: the order of the calls is that of the versions
            self.raise_failure(wishes.run)
            check_wishes(self._repo.catalog, wishes)
            if self._admitted(flight, if_busy, self._has_room):
                self.dispatcher.start()  # a child process starts while the state is copied
                later = stage == "background"
                departure = self._depart(
                    flight, state, request, wishes, if_busy, retain=retain, later=later
                )
                if departure is not None:
                    self._stage(departure, later=later)
        flight.returned()
        return PendingSave(flight, self._cancel)

    def _flight(self, request: SaveRequest, wishes: WriteRequest, began: float) -> Flight:
        environment = self._repo.environment
        return Flight(
            number=next(_numbers),
            run=wishes.run,
            step=wishes.step,
            version=environment.random_hex(16),
            began=began,
            environment=environment,
            on_progress=request.progress,
        )

    def _depart(
        self,
        flight: Flight,
        state: object,
        request: SaveRequest,
        wishes: WriteRequest,
        if_busy: IfBusy,
        *,
        retain: bool,
        later: bool,
    ) -> Departure | None:
        """Take a state apart and find room for it; None if the save is skipped."""
        flat = flatten(state, request.adapters)
        layout = lay_out(flat.tensors, self._repo.superblock.chunk_bytes)
        lent: list[Arena] = []

        def lend() -> bool:
            arena = self.dispatcher.lend(layout.size_bytes)
            lent.extend([] if arena is None else [arena])
            return arena is not None

        if not self._admitted(flight, if_busy, lend):
            return None
        departure = Departure(
            flight=flight,
            request=wishes,
            draft=lambda: draft_of(flat, request.roles, request.encodings),
            staging=Staging(flat.tensors, layout, lent[0], later=later),
            arena=lent[0],
            retain=retain,
        )
        with self._changed:
            self._flights[flight.number] = flight
            self._departures.append(departure)
        return departure

    def _has_room(self) -> bool:
        return len(self._flights) < self._repo.options.in_flight

    def _admitted(self, flight: Flight, if_busy: IfBusy, ready: Callable[[], bool]) -> bool:
        """Return whether `ready` holds; if it does not, wait for it, skip the save, or refuse."""
        with self._changed:
            while not ready():
                if if_busy == "skip":
                    flight.skip()
                    break
                if if_busy == "fail":
                    raise self._busy(flight)
                self._changed.wait()
                self.raise_failure(flight.run)
        if flight.over:
            self._emit("skipped", flight)
        return not flight.over

    def _busy(self, flight: Flight) -> SaveBusyError:
        under_way = ", ".join(f"{one.run}@{one.step}" for one in self._flights.values())
        msg = f"{flight.run}@{flight.step} is not saved: {under_way} is still under way"
        return SaveBusyError(msg, hint="save less often, or use if_busy='wait'")

    # --- staging ------------------------------------------------------------------------------

    def _stage(self, departure: Departure, *, later: bool) -> None:
        """Copy the state now, or begin and leave the rest to a thread."""
        try:
            began = self._repo.environment.monotonic()
            departure.staging.begin()
            if later:
                departure.describe()
                self._stager.submit(self._stage_later, departure, began)
                return
            departure.staging.copy(self._helpers, self._helpers_count, departure.describe)
            self._settle(departure, began)
        except BaseException as error:  # raised here and now: nobody else has to hear of it
            departure.flight.heard = True
            self._end(departure, error=error, raised=True)
            raise
        self._stager.submit(self._compare, departure)

    def _stage_later(self, departure: Departure, began: float) -> None:
        try:
            departure.staging.copy()
            self._settle(departure, began)
        except BaseException as error:  # noqa: BLE001 - it arrives at who waits
            self._end(departure, error=error)
        else:
            self._compare(departure)

    def _settle(self, departure: Departure, began: float) -> None:
        """Let the caller go on, once the engine has it: then it outlives this process."""
        flight = departure.flight
        departure.staging.settle()
        flight.copied(self._repo.environment.monotonic() - began)
        self._emit("staged", flight)
        self._complete(departure)
        flight.staged()

    def _compare(self, departure: Departure) -> None:
        """Take the digests, right after the state was staged; the engine waits for them."""
        digests = departure.staging.digests()
        with self._changed:
            departure.digests = digests
            if departure not in self._departures:
                self.dispatcher.compare(departure.flight.number, digests)

    def _complete(self, departure: Departure) -> None:
        """Make the job, now that everything is in the arena, and send it off."""
        job = departure.make_job()
        with self._changed:
            departure.job = job
            self._send_off()

    def _send_off(self) -> None:
        """Hand over what is staged, in the order of the calls."""
        with self._changed:
            while self._departures and (job := self._departures[0].job) is not None:
                departure = self._departures.popleft()
                told = _Told(self, departure)
                if departure.cancelled:
                    told.failed(_cancelled())
                else:
                    self.dispatcher.submit(job, departure.arena, told)
                    if departure.digests is not None:  # it had to wait for one before it
                        self.dispatcher.compare(job.number, departure.digests)

    # --- ends ---------------------------------------------------------------------------------

    def _cancel(self, flight: Flight) -> bool:
        with self._changed:
            for departure in self._departures:  # no engine has it yet
                if departure.flight is flight:
                    departure.cancelled = True
                    return True
        return self.dispatcher.cancel(flight.number)

    def _end(
        self,
        departure: Departure,
        *,
        version: Version | None = None,
        receipt: Mapping[str, float] | None = None,
        error: BaseException | None = None,
        raised: bool = False,
    ) -> None:
        """Note what became of a save, and let those go on who wait for it or for its memory."""
        flight = departure.flight
        cancelled = isinstance(error, OperationCancelledError)
        if error is not None and not cancelled:
            error.add_note(f"in the background save of {flight.run}@{flight.step}")
        self.dispatcher.give_back(departure.arena)
        with self._changed:
            if departure in self._departures:
                self._departures.remove(departure)
            if error is not None and not cancelled:
                self._unheard.append((flight, error))
            del self._flights[flight.number]
            self._changed.notify_all()
        kind: SaveEventKind = "durable" if error is None else "cancelled" if cancelled else "failed"
        self._emit(kind, flight, receipt, error, raised=raised)
        flight.finish(version=version, receipt=receipt, error=error)
        self._send_off()

    def _emit(
        self,
        kind: SaveEventKind,
        flight: Flight,
        receipt: Mapping[str, float] | None = None,
        error: BaseException | None = None,
        *,
        raised: bool = False,
    ) -> None:
        self._events.emit(
            SaveEvent(
                kind=kind,
                store=self._repo.url,
                run=flight.run,
                step=flight.step,
                version=flight.version_id,
                at_ms=self._repo.environment.now_ms(),
                receipt={**flight.numbers(), **(receipt or {})},
                error_kind=getattr(error, "kind", "error") if error is not None else "",
                message=str(error) if error is not None else "",
            ),
            raised=raised,
        )

    # --- waiting and errors -------------------------------------------------------------------

    def raise_failure(self, run: str | None = None) -> None:
        """Raise the error of a save of this run, or of any, that nobody has heard of; once."""
        with self._changed:
            self._unheard = [(one, error) for one, error in self._unheard if not one.heard]
            for flight, error in self._unheard:
                if run in (None, flight.run):
                    flight.heard = True
                    raise error

    def wait(self, run: str | None = None) -> None:
        """Wait until no save of this run, or of any, is under way; errors stay for later."""
        with self._changed:
            flights = [one for one in self._flights.values() if run in (None, one.run)]
        for flight in flights:
            flight.wait()

    def close(self) -> None:
        """Wait for all saves, end the engine and give the memory back; raises nothing.

        Afterwards :meth:`raise_failure` tells what nobody has heard of.
        """
        self.wait()
        self._stager.shutdown()
        self._helpers.shutdown()
        self.dispatcher.close()
        _savers.discard(self)


class _Told:
    """Tells a saver what an engine makes of a departure."""

    def __init__(self, saver: Saver, departure: Departure) -> None:
        self._saver = saver
        self._departure = departure

    def progressed(self, done: int, total: int) -> None:
        self._departure.flight.progressed(done, total)

    def succeeded(self, version: Version, receipt: Mapping[str, float]) -> None:
        self._saver._end(self._departure, version=version, receipt=receipt)

    def failed(self, error: BaseException) -> None:
        self._saver._end(self._departure, error=error)


_savers: weakref.WeakSet[Saver] = weakref.WeakSet()


def _finish_all() -> None:
    """Finish what is under way before the interpreter goes down, if nobody closed the store."""
    for saver in list(_savers):
        if saver.pid == os.getpid():
            saver.close()


# At the ordinary exit handlers' time no thread can be started any more, and an engine starts some.
getattr(threading, "_register_atexit", atexit.register)(_finish_all)
