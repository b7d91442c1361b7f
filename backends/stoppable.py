"""A backend that can be stopped: from then on it refuses every call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from ckptstore.backends.base import Backend
from ckptstore.backends.wrapper import WrapperBackend
from ckptstore.errors import OperationCancelledError

T = TypeVar("T")


class StoppableBackend(WrapperBackend):
    """Passes calls on until it is stopped; then each raises OperationCancelledError.

    Calls under way are not interrupted; later ones are refused. Any thread may stop it.
    """

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Refuse every call from now on, except deleting, aborting and closing."""
        self._stopped.set()

    def around(self, call: str, key: str, action: Callable[[], T], size_bytes: int = 0) -> T:
        """Refuse once the backend was stopped."""
        if call != "delete" and self._stopped.is_set():
            raise OperationCancelledError(f"the operation on {self.url} was stopped")
        return action()
