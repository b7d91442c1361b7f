"""Decides atomically whether a save is committed or cancelled."""

from __future__ import annotations

import threading

from ckptstore.errors import OperationCancelledError


class CancellationToken:
    """Whether a save may still be cancelled. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cancelled = False
        self._committing = False

    def cancel(self) -> bool:
        """Cancel, and return True; False if the commit has begun."""
        with self._lock:
            if not self._committing:
                self._cancelled = True
            return self._cancelled

    def check(self) -> None:
        """Raise OperationCancelledError if the save was cancelled."""
        if self._cancelled:
            msg = "the save was cancelled"
            raise OperationCancelledError(msg)

    def commit(self) -> None:
        """Begin to commit: from now on nothing cancels it. Raises as :meth:`check`."""
        with self._lock:
            self.check()
            self._committing = True
