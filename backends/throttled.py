"""Slows a backend down to a bandwidth in bytes a second."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from ckptstore.backends.base import Backend
from ckptstore.backends.wrapper import WrapperBackend
from ckptstore.config import SYSTEM, Environment
from ckptstore.errors import InvalidInputError

T = TypeVar("T")


class ThrottledBackend(WrapperBackend):
    """Shares a bandwidth among all threads, both directions together.

    Parameters
    ----------
    bytes_per_s
        Bandwidth; 0 for no limit.

    Raises
    ------
    InvalidInputError
        For a negative number.
    """

    def __init__(
        self, inner: Backend, *, bytes_per_s: float = 0.0, environment: Environment = SYSTEM
    ) -> None:
        super().__init__(inner)
        if bytes_per_s < 0:
            raise InvalidInputError(f"bytes_per_s={bytes_per_s} must not be negative")
        self._bytes_per_s = bytes_per_s
        self._environment = environment
        self._lock = threading.Lock()
        self._free_at = 0.0

    def around(self, call: str, key: str, action: Callable[[], T], size_bytes: int = 0) -> T:
        """Wait for the bandwidth; for that of ``get`` afterwards, when its size is known."""
        self._wait(size_bytes)
        result = action()
        if isinstance(result, bytes):
            self._wait(len(result))
        return result

    def _wait(self, size_bytes: int) -> None:
        """Wait until the bandwidth has room for `size_bytes` more."""
        if not self._bytes_per_s or not size_bytes:
            return
        with self._lock:
            now = self._environment.monotonic()
            self._free_at = max(self._free_at, now) + size_bytes / self._bytes_per_s
            pause = self._free_at - now
        self._environment.sleep(pause)

    def __reduce__(self) -> tuple[object, ...]:
        return partial(ThrottledBackend, bytes_per_s=self._bytes_per_s), (self.inner,)
