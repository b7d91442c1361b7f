"""Figures of transfers: requests, bytes and seconds between this process and a storage.

They are counted by operation (:func:`operation`), with the most requests that were on their way at
once. An object store counts each request that it sends; of other storage every call counts, as its
width is the number of threads that call.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any, Final, Literal, ParamSpec, Self, TypeVar

from ckptstore.backends.per_process import PerProcess
from ckptstore.backends.width import Width
from ckptstore.config import SYSTEM
from ckptstore.errors import LimitError, TransientStorageError

P = ParamSpec("P")
R = TypeVar("R")

Direction = Literal["read", "write"]
_READS: Final = frozenset({"get", "list", "read_into", "stat"})
"""Requests and calls that change nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfers:
    """Figures of one operation in one direction."""

    requests_count: int = 0
    """Requests to an object store, each try; calls of other storage."""
    requests_bytes: int = 0
    """Bytes that they moved; of those that failed none."""
    requests_s: float = 0.0
    """Seconds in which at least one of them was on its way."""
    at_once_count: int = 0
    """Most of them that were on their way at once."""
    retries_count: int = 0
    """Those that failed for a while: each is sent again, up to a number of tries."""
    refused_count: int = 0
    """Those of them that the storage refused, since it was too busy (503, 429)."""
    late_count: int = 0
    """Those of them whose answer did not begin in time, and which another request replaced."""
    thin_count: int = 0
    """Requests that succeeded by the short path (:mod:`ckptstore.backends.wire`); the others went
    by the library of the service."""
    limit_count: int = 0
    """Most requests of the storage that may be on their way at once; 0 where the number of threads
    decides."""

    @property
    def bytes_per_s(self) -> float:
        """Throughput while a request was on its way."""
        return self.requests_bytes / self.requests_s if self.requests_s else 0.0

    @classmethod
    def of(cls, receipt: Mapping[str, Any]) -> Self:
        """Return what a save wrote, as its receipt says; no requests if it does not."""
        known = {one.name: receipt[one.name] for one in fields(cls) if one.name in receipt}
        return cls(**{name: x if name == "requests_s" else int(x) for name, x in known.items()})

    def document(self) -> dict[str, float]:
        """Return the figures for JSON, with the throughput."""
        return {**asdict(self), "bytes_per_s": self.bytes_per_s}


class Meter:
    """Counts requests, and the time in which at least one is on its way. Safe from any thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._inside = self._most = 0
        self._since = self._seconds = 0.0
        self._counts = Counter[str]()

    def add(self, inside: int = 0, counts: Mapping[str, int] | None = None) -> None:
        """Count a request that begins (1) or ends (-1), and what became of it."""
        with self._lock:
            now = self._clock()
            self._seconds += now - self._since if self._inside else 0.0
            self._since = now
            self._inside += inside
            self._most = max(self._most, self._inside)
            self._counts.update(counts)

    def __enter__(self) -> None:
        self.add(1)

    def __exit__(self, *_: object) -> None:
        self.add(-1)

    def figures(self, limit: int = 0) -> Transfers:
        """Return the figures so far, with a limit of the requests."""
        self.add()  # the seconds until now
        with self._lock:
            counts = {**self._counts, "at_once_count": self._most, "limit_count": limit}
            return Transfers(requests_s=self._seconds, **counts)


class Ledger:
    """The figures of one operation, in both directions."""

    def __init__(self, name: str, clock: Callable[[], float] = SYSTEM.monotonic) -> None:
        self.name = name
        self.meters: dict[Direction, Meter] = {"read": Meter(clock), "write": Meter(clock)}

    def figures(self, limit: int = 0) -> dict[Direction, Transfers]:
        """Return the figures of each direction in which there were requests."""
        found = {direction: meter.figures(limit) for direction, meter in self.meters.items()}
        return {direction: one for direction, one in found.items() if one.requests_count}

    def document(self) -> dict[str, Any]:
        """Return the figures as ``transfers`` of a JSON document."""
        found = self.figures()
        return {"transfers": {direction: one.document() for direction, one in found.items()}}


_current: ContextVar[Ledger | None] = ContextVar("ckptstore_operation", default=None)


@contextmanager
def operation(name: str) -> Iterator[Ledger]:
    """Count what the block moves as one operation's; yield its figures. Decorates functions too.

    A block inside another one belongs to the outer one. Threads belong to an operation if
    :class:`Threads` made them.
    """
    outer = _current.get()
    if outer is not None:
        yield outer
        return
    made = Ledger(name)
    token = _current.set(made)
    try:
        yield made
    finally:
        _current.reset(token)


ending = threading.Event()
"""Set at the end of the interpreter: nothing may be left to another thread any more."""


def start_thread(work: Callable[[], object], name: str) -> threading.Thread:
    """Call `work` in a new daemon thread.

    Raises
    ------
    LimitError
        None can be made: the interpreter is ending, or the system has a limit.
    """
    thread = threading.Thread(target=work, name=name, daemon=True)
    try:
        if ending.is_set() or sys.is_finalizing():
            raise RuntimeError("the interpreter is ending")
        thread.start()
    except RuntimeError as error:
        hint = "do it before the interpreter ends; or see ulimit -u"
        raise LimitError(f"no thread can be started: {error}", hint=hint) from error
    return thread


class Threads(ThreadPoolExecutor):
    """Threads whose work belongs to the operation that submits it.

    Where no thread can be made, since the interpreter is ending or the system has a limit, the
    submitter makes the call itself: no call may wait for what its submitter does later.
    """

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Submit a call; it sees the context of the caller."""
        done = Future[R]()
        once = iter([(partial(copy_context().run, fn, *args, **kwargs), done)])

        def work() -> None:
            """Make the call, unless that was done or cancelled, and tell what became of it."""
            for call, told in once:  # by a thread of the pool or the submitter, not by both
                if told.set_running_or_notify_cancel():
                    try:
                        told.set_result(call())
                    except BaseException as error:  # noqa: BLE001 - for who asks for the result
                        told.set_exception(error)
                del call, told  # an error refers to this frame: it would keep itself

        try:
            super().submit(work)
        except RuntimeError:
            work()
        return done


@contextmanager
def interrupts_held(then: Callable[[], object]) -> Iterator[None]:
    """Raise KeyboardInterrupt after the block, however often SIGINT comes in it.

    Handlers of the user, which may do something else, are called as ever.

    Parameters
    ----------
    then
        Called when it comes, in the main thread at any moment.
    """
    handler = signal.getsignal(signal.SIGINT)
    here = threading.current_thread() is threading.main_thread()
    if not here or handler is not signal.default_int_handler:
        yield
        return
    held: list[object] = []

    def hold(*told: object) -> None:
        held.append(told)
        then()

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if held:
        raise KeyboardInterrupt


class FillingThreads(Threads):
    """Threads that write into memory of the caller: to leave the block waits for them.

    Ctrl-C does not cut that short: what they wrote later would go into tensors in use again.
    """

    def __exit__(self, *failure: object) -> None:
        """Wait for the threads."""
        with interrupts_held(lambda: None):
            self.shutdown()


class Recorder:
    """Figures of one storage, and the width of its requests. Safe from any thread.

    Parameters
    ----------
    most
        Most requests at once; 0 for storage whose calls do not wait for each other.
    clock
        Returns seconds; monotonic.
    """

    def __init__(self, most: int = 0, *, clock: Callable[[], float] = SYSTEM.monotonic) -> None:
        self.limit = most
        self.width: Width = Width(most, clock=clock)
        self._clock = clock
        self._totals: dict[str, Ledger] = {}

    @contextmanager
    def request(self, call: str) -> Iterator[Counter[str]]:
        """Count one request from its beginning to its end; yield its counts, for its bytes.

        Parameters
        ----------
        call
            Its first word: ``get``, ``list``, ``stat`` and ``read_into`` read, all others write.
        """
        meters = self._meters("read" if call in _READS else "write")
        counts = Counter(requests_count=1)
        for meter in meters:
            meter.add(1)
        try:
            yield counts
        except TransientStorageError as error:
            counts.update(retries_count=1, refused_count=int(error.slow_down))
            raise
        finally:
            for meter in meters:
                meter.add(-1, counts)

    def late(self) -> None:
        """Count a read that another request replaces."""
        for meter in self._meters("read"):
            meter.add(counts={"late_count": 1})

    def stats(self) -> dict[str, dict[Direction, Transfers]]:
        """Return the figures so far, by operation."""
        return {name: one.figures(self.limit) for name, one in sorted(self._totals.items())}

    def _meters(self, direction: Direction) -> list[Meter]:
        """Return the meters of the current operation: of this storage, and its own."""
        own = _current.get()
        name = "other" if own is None else own.name
        if name not in self._totals:  # threads that come at once all get the same one
            self._totals.setdefault(name, Ledger(name, self._clock))
        return [each.meters[direction] for each in (self._totals[name], own) if each is not None]


def receipt_entries(storage: PerProcess[Recorder] | None) -> dict[str, float]:
    """Return what the current operation has written, as entries of a save's receipt; no zeros."""
    own = _current.get()
    if own is None or storage is None:
        return {}
    found = asdict(own.meters["write"].figures(storage.get().limit))
    return {name: float(value) for name, value in found.items() if value}
