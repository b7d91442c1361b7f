"""State of one background save, from the call of the user until it is durable or has failed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from ckptstore.checkpoint.encode import Draft
from ckptstore.checkpoint.request import WriteRequest
from ckptstore.config import Environment
from ckptstore.errors import OperationCancelledError, SaveBusyError
from ckptstore.events import Progress, ProgressCallback
from ckptstore.model import Receipt, ReceiptState, Version
from ckptstore.saver.arena import Arena, Digests
from ckptstore.saver.messages import Done, Failed
from ckptstore.saver.save_job import SaveJob, row_of
from ckptstore.saver.staging import Staging

_log = logging.getLogger("ckptstore")

IfBusy = Literal["wait", "skip", "fail"]


@dataclass(eq=False, repr=False, kw_only=True)
class BackgroundSave:
    """One save in the background. Any thread may use it; states only go forward.

    ``waiting`` -> ``staged`` -> ``durable``, or an end without a version. What it needs to be
    staged is there from :meth:`board` until it ends; a caller that keeps it keeps no memory.

    Parameters
    ----------
    began
        When the caller asked for it, on the environment's clock.
    on_progress
        Called in a thread of the engine; what it raises is logged.
    """

    number: int
    request: WriteRequest
    retain: bool
    version_id: str
    began: float
    if_busy: IfBusy = "wait"
    environment: Environment
    on_progress: ProgressCallback

    def __post_init__(self) -> None:
        self.run: str = self.request.run
        self.step: int = self.request.step
        self.state: ReceiptState = "waiting"
        """The state it is in; this class alone sets it, and the next three."""
        self.reached_staged: bool = False
        """Whether the state was copied, whatever came after."""
        self.progress = Progress(stage="stage", done=0, total=0)
        """Bytes that are done."""
        self.error: BaseException | None = None
        """Why it failed."""
        self.heard: bool = False
        """The error was raised to somebody."""
        self.staging: Staging | None = None
        self.arena: Arena | None = None
        self.job: SaveJob | None = None
        """For the engine, once everything is in the arena. The saver's lock guards it, and the
        next two."""
        self.cancelled = False
        """Cancelled before an engine had it."""
        self.digests: Digests | None = None
        """Of the state when it was staged; None until they were taken."""
        self.draft: Callable[[], Draft] | None = None
        """Describes the state; None once it did."""
        self._described: SaveJob | None = None
        self._changed = threading.Condition()
        self._returned: float | None = None
        self._waits_count = 0
        self._waits_since = 0.0
        self._waited = 0.0
        self._staging_s = 0.0
        self._numbers: dict[str, float] = {}
        self._version: Version | None = None
        self._released = False
        """The observers have heard of its end."""

    # --- looking ------------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """Whether nothing more becomes of it."""
        return self.state not in ("waiting", "staged")

    def numbers(self) -> dict[str, float]:
        """Return the entries of the receipt so far."""
        with self._changed:
            now = self.environment.monotonic()
            blocked = (self._returned or now) - self.began + self._waited
            if self._waits_count:
                blocked += now - self._waits_since
            return {**self._numbers, "blocked_s": blocked, "staging_s": self._staging_s}

    def receipt(self) -> Receipt:
        """Return the receipt so far."""
        return Receipt.of(self.numbers(), self.state)

    # --- waiting ------------------------------------------------------------------------------

    def wait_staged(self, timeout: float | None) -> bool:
        """Wait until the state was copied or the save is over; the time counts as blocked.

        Time in which several threads wait counts once.
        """
        with self._changed:
            if not self._waits_count:
                self._waits_since = self.environment.monotonic()
            self._waits_count += 1
            try:
                return self._changed.wait_for(lambda: self.reached_staged or self.over, timeout)
            finally:
                self._waits_count -= 1
                if not self._waits_count:
                    self._waited += self.environment.monotonic() - self._waits_since

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is over, and the observers have heard of that."""
        with self._changed:
            return self._changed.wait_for(lambda: self._released, timeout)

    def raise_error(self) -> None:
        """Raise why there is no version, if there is none, and never will be."""
        if self.state in ("durable", "waiting", "staged"):
            return
        self.heard = True
        if self.state == "skipped":
            msg = f"the save of {self.run}@{self.step} was skipped: one before it was under way"
            raise SaveBusyError(msg)
        assert self.error is not None  # noqa: S101 - the ends without a version all have one
        raise self.error

    def result(self) -> Version:
        """Return the version; raises if there is none."""
        self.raise_error()
        assert self._version is not None  # noqa: S101 - the caller has waited
        return self._version

    # --- staging ------------------------------------------------------------------------------

    def describe(self) -> None:
        """Describe the state, and let go of it."""
        assert self.draft is not None  # noqa: S101 - called once, when staged
        assert self.staging is not None  # noqa: S101
        assert self.arena is not None  # noqa: S101
        draft, self.draft = self.draft(), None
        self._described = SaveJob(
            number=self.number,
            version=self.version_id,
            arena=self.arena.number,
            tensors=self.staging.tensors,
            records=tuple(map(row_of, draft.records)),
            frame=draft.frame,
            wishes=draft.wishes,
            request=self.request,
            receipt={},
            retain=self.retain,
        )

    def complete(self) -> None:
        """Make the job, now that everything is in the arena."""
        assert self._described is not None  # noqa: S101 - called after describe
        self.job = replace(self._described, receipt=self.numbers())

    # --- going forward ------------------------------------------------------------------------

    def returned(self) -> None:
        """Note that the caller goes on."""
        with self._changed:
            self._returned = self.environment.monotonic()

    def copied(self, seconds: float) -> None:
        """Note what the copy took."""
        with self._changed:
            self._staging_s = seconds

    def staged(self) -> None:
        """Note that the caller may change the state; it may be durable by then."""
        with self._changed:
            self.reached_staged = True
            if self.state == "waiting":
                self.state = "staged"
            self._changed.notify_all()

    def progressed(self, done: int, total: int) -> None:
        """Note how far the engine is."""
        self.progress = Progress(stage="write", done=done, total=total)
        try:
            self.on_progress(self.progress)
        except Exception:  # noqa: BLE001 - the user's code, in a thread of ours
            _log.exception("the progress callback of the save of %s@%s failed", self.run, self.step)

    def skip(self) -> None:
        """End it before it began."""
        with self._changed:
            self.state, self._released = "skipped", True
            self._returned = self.environment.monotonic()
            self._changed.notify_all()

    def finish(self, end: Done | Failed) -> None:
        """End it: with a version, or with an error; let go of what it was staged with."""
        with self._changed:
            self.staging, self.arena, self.job, self.digests = None, None, None, None
            self.draft, self._described = None, None
            if isinstance(end, Done):
                self._numbers.update(end.receipt)
                self._version, self.state = end.version, "durable"
                size = int(self._numbers.get("logical_bytes", 0))
                self.progress = Progress(stage="write", done=size, total=size)
            else:
                self.error = end.error
                if isinstance(end.error, OperationCancelledError):
                    self.state, self.heard = "cancelled", True
                else:
                    self.state = "failed"
            self._changed.notify_all()

    def released(self) -> None:
        """Let those go on who wait for its end."""
        with self._changed:
            self._released = True
            self._changed.notify_all()
