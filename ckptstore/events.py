"""What operations tell about themselves: progress while they run, and events of saves.

Events go to two places: to the functions that :meth:`ckptstore.Store.observe` was given, and to
the logger ``ckptstore.saves``, whose records carry them as a dict in the attribute ``event``, for
any formatter that writes JSON.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

__all__ = [
    "Events",
    "Observer",
    "Progress",
    "ProgressCallback",
    "SaveEvent",
    "SaveEventKind",
    "silent",
]

_log: Final = logging.getLogger("ckptstore.saves")


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """One step forward of a long operation."""

    stage: str
    """What is being done: ``write``, ``read``, ``verify``, ``probe`` ..."""
    done: int
    """Units done so far (bytes, unless `unit` says otherwise)."""
    total: int
    """Units in all; 0 when not known."""
    unit: str = "bytes"
    detail: str = ""
    """Name of the tensor, object or step, for people."""


ProgressCallback = Callable[[Progress], None]
"""Called from worker threads, one call at a time; must return quickly and not raise."""


def silent(_: Progress) -> None:
    """Ignore progress."""


SaveEventKind = Literal["staged", "durable", "replicated", "failed", "cancelled", "skipped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveEvent:
    """Something that became of a save."""

    kind: SaveEventKind
    """``staged`` comes before the others, of which each save in the background has one; but for
    ``replicated``, which comes after ``durable``, once for each replica that is written back to."""
    store: str
    """Location, without credentials."""
    run: str
    step: int
    version: str
    """Id of the version; also of one that never appeared."""
    at_ms: int
    """Wall clock, in milliseconds since 1970."""
    receipt: Mapping[str, float] = field(default_factory=dict)
    """Seconds and bytes, as far as they are known; each name ends in its unit."""
    error_kind: str = ""
    """``kind`` of the error, of ``failed``."""
    message: str = ""
    """The error, for people."""
    replica: str = ""
    """Name of the replica, of ``replicated``."""

    def document(self) -> dict[str, Any]:
        """Return it as plain values, for JSON."""
        found: dict[str, Any] = {
            name: getattr(self, name)
            for name in ("kind", "store", "run", "step", "version", "at_ms")
        }
        found["receipt"] = dict(self.receipt)
        if self.error_kind:
            found |= {"error_kind": self.error_kind, "message": self.message}
        if self.replica:
            found["replica"] = self.replica
        return found


Observer = Callable[[SaveEvent], None]
"""Called once an event, from any thread; must return quickly. What it raises is logged."""

_ENDS: Final = ("durable", "failed", "cancelled", "skipped")


class Events:
    """Passes the events of a store on. Any thread may use it."""

    def __init__(self) -> None:
        self._observers: list[Observer] = []
        self._counts = dict.fromkeys(_ENDS, 0)
        self._lock = threading.Lock()

    def counts(self) -> dict[str, int]:
        """Return how many saves came to each end since the store was opened."""
        with self._lock:
            return dict(self._counts)

    def observe(self, observer: Observer) -> Callable[[], None]:
        """Call `observer` for each event from now on; return what ends that."""
        with self._lock:
            self._observers.append(observer)

        def end() -> None:
            with self._lock:
                if observer in self._observers:
                    self._observers.remove(observer)

        return end

    def emit(self, event: SaveEvent, *, raised: bool = False) -> None:
        """Log an event and tell the observers; never raises.

        Parameters
        ----------
        raised
            The caller gets the error anyway, and has no need to see it twice.
        """
        text = f"{event.run}@{event.step} {event.kind}"
        if event.replica:
            text += f" to {event.replica}"
        if event.message:
            text += f": {event.message}"
        level = logging.ERROR if event.kind == "failed" and not raised else logging.INFO
        _log.log(level, "%s", text, extra={"event": event.document()})
        with self._lock:
            if event.kind in self._counts:
                self._counts[event.kind] += 1
            observers = list(self._observers)
        for observer in observers:
            try:
                observer(event)
            except Exception:  # noqa: BLE001 - the user's code, in a thread of ours
                _log.exception("an observer of saves failed")
