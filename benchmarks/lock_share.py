"""Share of the time in which some thread of this process holds the interpreter's lock.

A thread naps in C, without the lock, for 1 to 3 ms, and notes the time at which it wakes; then it
needs the lock to run its next line. Where that takes longer than 20 microseconds another thread
held the lock when it woke. The share is that of such naps, about 500 a second; what holds the lock
for less than 20 microseconds at a time is not seen. The thread itself takes 1 % of a processor.
"""

from __future__ import annotations

import ctypes
import threading
import time
from types import TracebackType
from typing import Final, Self

from benchmarks.native import compiled

__all__ = ["LockShare"]

_NAP_S: Final = 0.001
_SPREAD_S: Final = 0.002
_STEP: Final = 0.618034
"""Of the naps' lengths, which differ so that they keep time with nothing."""
_WAIT_S: Final = 20e-6


class LockShare:
    """Context in which the lock is watched; without a C compiler it watches nothing."""

    def __init__(self) -> None:
        program = compiled("lock_probe.c", "-shared", "-fPIC")
        self._nap = None if program is None else ctypes.CDLL(str(program)).nap
        if self._nap is not None:
            self._nap.argtypes, self._nap.restype = [ctypes.c_double], ctypes.c_double
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._over = False
        self._naps = self._waits = 0

    def __enter__(self) -> Self:
        if self._nap is not None:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over = True
        if self._thread.is_alive():
            self._thread.join()

    @property
    def share(self) -> float | None:
        """Share of the naps after which the lock was held; None without any."""
        return self._waits / self._naps if self._naps else None

    def _watch(self) -> None:
        assert self._nap is not None  # noqa: S101 - else it is not started
        while not self._over:
            woke = self._nap(_NAP_S + _SPREAD_S * (self._naps * _STEP % 1))
            self._waits += time.monotonic() - woke > _WAIT_S
            self._naps += 1
