"""Preemption: a signal that announces the end becomes a step at which all ranks save and stop.

The handler only records the signal and the time. The loop checks at each step, and ranks that
train together agree: the step is the largest that any of them had reached, so that all stop
at the same one, even if only one rank got the signal.

::

    with Preemption(deadline_s=100) as preemption:
        for step in range(first, last + 1):
            train_one_step()
            if step % 500 == 0:
                pending = run.save_async(state(), step=step)
            if preemption.should_stop(step):
                preemption.secure(run, state(), step=step, pending=pending)
                sys.exit(preemption.exit_code)
"""

from __future__ import annotations

import logging
import math
import signal
import threading
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

from ckptstore import limits
from ckptstore.config import SYSTEM, Environment
from ckptstore.errors import CkptStoreError, InvalidInputError, SaveBusyError

if TYPE_CHECKING:
    import torch

    from ckptstore.model import Version
    from ckptstore.saver.pending import PendingSave
    from ckptstore.store import Run

__all__ = ["Preemption"]

_log = logging.getLogger("ckptstore")

_Handler = Callable[[int, FrameType | None], Any] | int | None


class Preemption:
    """Listens to signals that announce the end of the process. A context manager.

    Enter it in the main thread, on all ranks. Python runs the handler between two instructions of
    the main thread: a collective or a kernel that does not return delays it.

    Parameters
    ----------
    signals
        Signals that announce the end: SIGTERM, SIGUSR1 (``sbatch --signal=USR1@120``), SIGINT and
        so on. An earlier handler is called too; that of SIGINT only at the second signal.
    deadline_s
        Seconds from the signal to the kill, less the time that a process needs to end.
    check_every
        Agree at every n-th call of :meth:`should_stop`: one small all-reduce each time. All ranks
        must call it equally often.
    group
        The process group that agrees; None for the default one, or, with NCCL alone, a gloo group
        that the first call makes.
    chain
        Call the earlier handlers too.
    environment
        Gives the time; tests pass their own.

    Raises
    ------
    InvalidInputError
        A setting cannot work: `signals` is one signal instead of several, or contains one that no
        process can handle (SIGKILL).
    """

    def __init__(
        self,
        signals: Sequence[int] = (signal.SIGTERM,),
        *,
        deadline_s: float = limits.PREEMPTION_DEADLINE_S,
        check_every: int = 1,
        group: Any = None,
        chain: bool = True,
        environment: Environment = SYSTEM,
    ) -> None:
        if deadline_s <= 0 or check_every < 1:
            msg = f"deadline_s={deadline_s} and check_every={check_every} must be above zero"
            raise InvalidInputError(msg)
        self._signals = _checked(signals)
        self._deadline_s = deadline_s
        self._check_every = check_every
        self._group = group
        self._chain = chain
        self._environment = environment
        self._before: dict[int, _Handler] = {}
        self._entered = False
        self._inside = False
        self._signal: int | None = None
        self._since: float | None = None
        self._stop_at: int | None = None
        self._calls = 0

    def __enter__(self) -> Self:
        """Install the handlers.

        Raises
        ------
        InvalidInputError
            This is not the main thread; Python handles signals only there.
        """
        if threading.current_thread() is not threading.main_thread():
            msg = "signals can be handled from the main thread only"
            raise InvalidInputError(msg, hint="make the Preemption there, and pass it on")
        for number in self._signals:
            self._before[number] = signal.signal(number, self._note)
        self._entered = self._inside = True
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the earlier handlers."""
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._note:  # else other code has replaced it
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before.clear()
        self._inside = False

    def take_back(self) -> None:
        """Install the handlers again after other code replaced them; do not call its handlers."""
        for number in self._before:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Record a signal; does not log, which is not safe in a handler."""
        first = self._signal is None
        self.request(number)
        handler = self._before.get(number)
        if not self._chain or not callable(handler):
            return
        if handler is not signal.default_int_handler or not first:
            handler(number, frame)

    @property
    def requested(self) -> bool:
        """True if the end was announced: here, or on any rank and agreed upon."""
        return self._signal is not None or self._stop_at is not None

    @property
    def stop_at(self) -> int | None:
        """The step at which all ranks stop; None before they agreed."""
        return self._stop_at

    @property
    def remaining_s(self) -> float:
        """Seconds until the deadline, at least 0; infinite until the end is announced."""
        if self._since is None:
            return math.inf
        return max(0.0, self._since + self._deadline_s - self._environment.monotonic())

    @property
    def exit_code(self) -> int:
        """Exit code: 128 and the signal's number, as in shells (143); 0 without a signal."""
        return 0 if self._signal is None else 128 + self._signal

    def request(self, number: int = signal.SIGTERM) -> None:
        """Act as if a signal had come: for notices by other means, such as HTTP."""
        if self._signal is None:
            self._since = self._environment.monotonic()
            self._signal = number

    def should_stop(self, step: int) -> bool:
        """Return whether to save and stop now; call it once after each step, on all ranks.

        True on all ranks at the same step, the largest that any of them had reached when they
        agreed; a rank that is behind continues up to it.

        Parameters
        ----------
        step
            The step that was just finished.

        Raises
        ------
        InvalidInputError
            The call is outside of the ``with`` block, where no signal is handled.
        """
        if not self._inside:
            raise _not_entered()
        if self._stop_at is None:
            self._decide(step)
        return self._stop_at is not None and step >= self._stop_at

    def _decide(self, step: int) -> None:
        from ckptstore.integrations.ranks import together

        if not together():
            if self._signal is not None:
                self._stop_at = step
                self._tell()
            return
        self._calls += 1
        if self._calls % self._check_every == 0:
            self._agree(step)

    def _agree(self, step: int) -> None:
        import torch
        import torch.distributed as dist

        elapsed = 0.0 if self._since is None else self._environment.monotonic() - self._since
        asked = self._signal or 0
        said = torch.tensor([asked, step, int(elapsed * 1000)], device=self._meeting_place())
        dist.all_reduce(said, op=dist.ReduceOp.MAX, group=self._group)
        number, latest, elapsed_ms = said.tolist()
        if number == 0:
            return
        self._signal = self._signal or number
        # The tightest deadline of all ranks holds for all.
        self._since = self._environment.monotonic() - elapsed_ms / 1000
        self._stop_at = latest
        self._tell()

    def _meeting_place(self) -> torch.device:
        """Return the device where the group reduces integers; make a group on the CPU if needed.

        Waiting for a device at each step would keep it from working ahead.
        """
        import torch
        import torch.distributed as dist

        if "cpu:" in str(dist.get_backend_config(self._group)):
            return torch.device("cpu")
        if self._group is None:
            self._group = dist.new_group(backend="gloo")  # all ranks get here at the same call
            return torch.device("cpu")
        return torch.device(torch.accelerator.current_accelerator() or "cpu")

    def _tell(self) -> None:
        name = signal.Signals(self._signal or signal.SIGTERM).name
        left = self.remaining_s
        _log.warning("%s: stopping at step %s, %.0f s are left", name, self._stop_at, left)

    def secure(
        self,
        run: Run,
        state: object = None,
        *,
        step: int | None = None,
        pending: PendingSave | None = None,
        **options: Any,
    ) -> Version:
        """Make the newest available state durable within the deadline; return the version.

        It waits for the running save first, then saves the current state: a deadline too short
        for both still gets the first. Of ranks that hold the same state, one calls it.

        Parameters
        ----------
        run
            The run to save to.
        state
            The current state, to be saved too; None if `pending` is all.
        step
            Step of `state`. If `pending` is of this step already, nothing more is saved.
        pending
            The newest save, running or done.
        options
            For :meth:`ckptstore.Run.save_async`: metrics, tags, metadata ...

        Raises
        ------
        SaveBusyError
            The deadline passed, and neither save is durable. A running save continues while the
            process, or its engine, lives.
        CkptStoreError
            Saving failed, and neither save is durable.
        InvalidInputError
            Neither `state` and `step` nor `pending` is given; or the ``with`` block was not
            entered.
        """
        if not self._entered:
            raise _not_entered()
        if (state is None or step is None) and pending is None:
            msg = "nothing to secure: give a state and its step, a pending save, or both"
            raise InvalidInputError(msg)
        newest: Version | None = None
        failure: CkptStoreError | None = None
        if pending is not None:
            newest, failure = self._wait(lambda: pending)
        late = pending is not None and not pending.done  # a new save would have to wait for it
        newer = newest is None or newest.step != step
        if state is not None and step is not None and newer and not late:
            last, failure = self._wait(lambda: run.save_async(state, step=step, **options))
            newest = last or newest
        if newest is None:
            raise failure or SaveBusyError("nothing was saved")
        if failure is not None:
            _log.warning("%s is durable, the newer state is not: %s", newest, failure)
        return newest

    def _wait(
        self, begin: Callable[[], PendingSave]
    ) -> tuple[Version | None, CkptStoreError | None]:
        try:
            pending, left = begin(), self.remaining_s
            return pending.result(None if math.isinf(left) else left), None
        except CkptStoreError as error:
            return None, error


def _checked(signals: object) -> tuple[int, ...]:
    """Return signals, each once; refuse a single one, and one that cannot be handled."""
    if isinstance(signals, str | bytes) or not isinstance(signals, Iterable):
        msg = f"signals={signals!r} must be several signals"
        raise InvalidInputError(msg, hint="put them in a list: Preemption([signal.SIGUSR1])")
    several = tuple(signals)
    possible = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
    for number in several:
        if not isinstance(number, int) or number not in possible:
            msg = f"signals has {number!r}, which no process can handle"
            hint = "SIGKILL and SIGSTOP cannot be; take those that come before, such as SIGTERM"
            raise InvalidInputError(msg, hint=hint)
    return tuple(dict.fromkeys(several))


def _not_entered() -> InvalidInputError:
    msg = "this Preemption does not handle signals yet"
    return InvalidInputError(msg, hint="enter it first: with Preemption(...) as preemption")
