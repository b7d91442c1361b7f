"""Progress of running operations, and events of saves.

Events go to the functions registered with :meth:`ckptstore.Store.observe`, and to the logger
``ckptstore.saves``. Its records carry the event as a dict in the attribute ``event``, for
formatters that write JSON.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal

from ckptstore.errors import InvalidInputError
from ckptstore.shown import shown

__all__ = [
    "Events", "Observer", "Progress", "ProgressCallback", "SaveEvent", "SaveEventKind",
    "silent",
]  # fmt: skip

_log: Final = logging.getLogger("ckptstore.saves")


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Progress of a long operation."""

    stage: str
    """The current stage: ``write``, ``read``, ``verify``, ``probe`` ..."""
    done: int
    """Units done so far (bytes, unless `unit` says otherwise)."""
    total: int
    """Total units; 0 if unknown."""
    unit: str = "bytes"
    detail: str = ""
    """Name of the tensor, object or step, for display."""


ProgressCallback = Callable[[Progress], None]
"""Called from worker threads, one call at a time; must return quickly and not raise."""


def silent(_: Progress) -> None:
    """Ignore progress."""


@dataclass(slots=True, eq=False)
class Counted:
    """Reports how much of a total is done. Any thread may add to it."""

    progress: ProgressCallback
    stage: str
    total: int
    done: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, count: int) -> None:
        """Report that more is done."""
        with self._lock:
            self.done += count
            self.progress(Progress(stage=self.stage, done=self.done, total=self.total))

    def beyond(self) -> ProgressCallback:
        """Return the callback of a step that begins where this one is now."""
        before, whole = self.done, partial(Progress, stage=self.stage, total=self.total)
        return lambda step: self.progress(whole(done=before + step.done))


SaveEventKind = Literal["staged", "durable", "replicated", "failed", "cancelled", "skipped"]
"""Kinds of events of a save."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveEvent:
    """A change in the state of a save."""

    kind: SaveEventKind
    """``staged`` comes first. Then each background save has exactly one of the other kinds, except
    that ``replicated`` can follow ``durable``, once for each write-back replica.
    """
    store: str
    """Location, without credentials."""
    run: str
    step: int
    version: str
    """Id of the version, also if the version never became visible."""
    at_ms: int
    """Wall clock, in milliseconds since 1970."""
    receipt: Mapping[str, float] = field(default_factory=dict)
    """The known seconds and bytes; each name ends in its unit."""
    error_kind: str = ""
    """``kind`` of the error, if `kind` is ``failed``."""
    message: str = ""
    """Text of the error."""
    replica: str = ""
    """Name of the replica, if `kind` is ``replicated``."""

    def document(self) -> dict[str, Any]:
        """Return the event as plain values, for JSON."""
        names = ("kind", "store", "run", "step", "version", "at_ms")
        found: dict[str, Any] = {name: getattr(self, name) for name in names}
        found["receipt"] = dict(self.receipt)
        if self.error_kind:
            found |= {"error_kind": self.error_kind, "message": self.message}
        if self.replica:
            found["replica"] = self.replica
        return found


Observer = Callable[[SaveEvent], None]
"""Called once per event, from any thread; must return quickly. Its exceptions are logged."""

_ENDS: Final = ("durable", "failed", "cancelled", "skipped")


class Events:
    """Distributes the events of a store to logger and observers. Thread-safe."""

    def __init__(self) -> None:
        self._observers: list[Observer] = []
        self._counts = dict.fromkeys(_ENDS, 0)
        self._lock = threading.Lock()

    def counts(self) -> dict[str, int]:
        """Return the number of saves by outcome since the store was opened."""
        with self._lock:
            return dict(self._counts)

    def observe(self, observer: Observer) -> Callable[[], None]:
        """Call `observer` for each event from now on; return a function that removes it."""
        if not callable(observer):  # else each save would fail
            raise InvalidInputError(f"an observer is a function, not {shown(observer)}")
        with self._lock:
            self._observers.append(observer)

        def end() -> None:
            with self._lock:
                if observer in self._observers:
                    self._observers.remove(observer)

        return end

    def emit(self, event: SaveEvent, *, raised: bool = False) -> None:
        """Log an event and call the observers; never raises.

        Parameters
        ----------
        raised
            The caller raises the error anyway, so it is not logged as an error again.
        """
        text = f"{event.run}@{shown(event.step)} {event.kind}"
        if event.replica:
            text += f" to {event.replica}"
        if event.message:
            text += f": {event.message}"
        level = logging.ERROR if event.kind == "failed" and not raised else logging.INFO
        log = partial(_log.log, level, "%s", text, extra={"event": event.document()})
        with self._lock:
            if event.kind in self._counts:
                self._counts[event.kind] += 1
            observers = list(self._observers)
        for tell in (log, *(partial(observer, event) for observer in observers)):
            try:
                tell()
            except (Exception, SystemExit):  # noqa: BLE001 - the user's code, in a thread of ours
                with suppress(Exception):  # of a handler of the log
                    _log.exception("an observer of saves failed")
