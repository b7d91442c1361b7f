"""The handle that ``Run.save_async`` returns: a save that goes on while the training does."""

from __future__ import annotations

from collections.abc import Callable

from ckptstore.errors import SaveBusyError
from ckptstore.events import Progress
from ckptstore.model import Receipt, ReceiptState, Version
from ckptstore.saver.save_state import BackgroundSave


class PendingSave:
    """A save in the background, with two moments: staged, and durable. Any thread may use it.

    From the first on the caller may change its state; from the second on the version is visible and
    durable. An error that nobody asked for is logged at once, and raised by the next save of the
    run or by
    :meth:`ckptstore.Store.close`.
    """

    def __init__(self, save: BackgroundSave, cancel: Callable[[BackgroundSave], bool]) -> None:
        self._save = save
        self._cancel = cancel

    def __repr__(self) -> str:
        """Return which it is, and how far."""
        return f"<PendingSave {self.run}@{self.step} {self.state}>"

    @property
    def run(self) -> str:
        """Name of the run."""
        return self._save.run

    @property
    def step(self) -> int:
        """Step of the version."""
        return self._save.step

    @property
    def version_id(self) -> str:
        """Id that the version has once it is durable."""
        return self._save.version_id

    @property
    def state(self) -> ReceiptState:
        """``waiting``, ``staged``, ``durable``; or ``failed``, ``cancelled``, ``skipped``."""
        return self._save.state

    @property
    def staged(self) -> bool:
        """Whether the state has been copied: it may be changed from now on."""
        return self._save.reached_staged

    @property
    def durable(self) -> bool:
        """Whether the version is visible and durable."""
        return self._save.state == "durable"

    @property
    def done(self) -> bool:
        """Whether nothing more becomes of it: it is durable, or there will be no version."""
        return self._save.over

    @property
    def skipped(self) -> bool:
        """Whether it never began, since one before it was under way."""
        return self._save.state == "skipped"

    @property
    def progress(self) -> Progress:
        """Bytes of the state that are written, or found to be stored already."""
        return self._save.progress

    @property
    def receipt(self) -> Receipt:
        """Progress and cost so far."""
        return self._save.receipt()

    @property
    def error(self) -> BaseException | None:
        """Why there is no version, if it failed; to look at it is not to be told."""
        return self._save.error

    def wait_staged(self, timeout: float | None = None) -> bool:
        """Wait until the state may be changed; return whether it may.

        To be called before ``optimizer.step()`` after a save with ``stage="background"``; returns
        at once otherwise, and after a save that was skipped.

        Parameters
        ----------
        timeout
            In seconds; None for no limit.

        Raises
        ------
        TornStateError
            The state was changed while it was being copied; the tensor is named.
        CkptStoreError
            Why else it could not be copied.
        """
        save = self._save
        if not save.reached_staged and not save.wait_staged(timeout):
            return False
        if not save.reached_staged and not self.skipped:
            save.raise_error()
        return True

    def result(self, timeout: float | None = None) -> Version:
        """Wait until the version is durable, and return it.

        Parameters
        ----------
        timeout
            In seconds; None for no limit.

        Raises
        ------
        SaveBusyError
            It is still under way after `timeout`; or it was skipped.
        OperationCancelledError
            It was cancelled.
        CkptStoreError
            It failed, and no version appeared: what :meth:`ckptstore.Run.save` raises,
            TornStateError, or SaverDiedError.
        """
        if not self._save.wait(timeout):
            msg = f"the save of {self.run}@{self.step} is still under way after {timeout} s"
            raise SaveBusyError(msg)
        return self._save.result()

    def cancel(self) -> bool:
        """Stop it, if it is not being committed; return whether there will be no version.

        Does not wait until it has stopped, as :meth:`result` does, which then raises
        OperationCancelledError. What was written for it is collected later.
        """
        if self._save.over:
            return self._save.state != "durable"
        return self._cancel(self._save)
