"""Share of the time in which some thread of this process holds the interpreter's lock.

The lock is looked at every 1 to 3 ms. A thread sleeps in C until then, without the lock, and notes
the time at which it wakes; then it needs the lock to run its next line. Where that takes longer
than 20 microseconds another thread held the lock; it was also held at the times to look that pass
while the thread waits. What holds the lock for less than 20 microseconds is not seen, and a wait
for a busy processor counts. The thread takes 1 % of a processor.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from collections.abc import Iterator
from typing import Final, Self

from benchmarks.native import compiled

__all__ = ["LockShare"]

_LEAST_S: Final = 0.001
_SPREAD_S: Final = 0.002
_STEP: Final = 0.618034
"""Of the intervals' lengths, which differ so that they keep time with nothing."""
_WAIT_S: Final = 20e-6


class LockShare:
    """Context in which the lock is watched; without a C compiler it watches nothing."""

    def __init__(self) -> None:
        program = compiled("lock_probe.c", "-shared", "-fPIC")
        self._sleep = None if program is None else ctypes.CDLL(str(program)).sleep_until
        if self._sleep is not None:
            self._sleep.argtypes, self._sleep.restype = [ctypes.c_double], ctypes.c_double
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._over = False
        self._looks = self._held = 0

    def __enter__(self) -> Self:
        if self._sleep is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        if self._thread.is_alive():
            self._thread.join()

    @property
    def share(self) -> float | None:
        """Share of the looks at which the lock was held; None without any."""
        return self._held / self._looks if self._looks else None

    def _watch(self) -> None:
        assert self._sleep is not None  # noqa: S101 - else it is not started
        times = _times(time.monotonic())
        due = next(times)
        while not self._over:
            woke = self._sleep(due)
            now = time.monotonic()
            self._looks += 1
            self._held += now - woke > _WAIT_S
            while (due := next(times)) < now:
                passed = due > woke  # else the thread woke late, and nothing is known
                self._looks += passed
                self._held += passed


def _times(due: float) -> Iterator[float]:
    """Yield the times to look."""
    for number in itertools.count():
        due += _LEAST_S + _SPREAD_S * (number * _STEP % 1)
        yield due
