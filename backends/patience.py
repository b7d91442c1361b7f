"""The time that a read waits for its answer before another request is sent in its place.

A few of many requests take much longer than the others, and the last one decides when a load ends.
AWS's performance guide advises to send the slowest 5 % again.
"""

from __future__ import annotations

import statistics
import threading
from collections import deque
from typing import Final

from ckptstore.config import SYSTEM

ANSWERS: Final = 64
"""Recent answers to judge by."""
MEDIANS: Final = 5
"""An answer is late after so many of their medians. Source: the spread of usual answers."""
MIN_S: Final = 0.25
"""None is late before. Source: some times the 20 to 50 ms that an object store takes."""
SHARE: Final = 0.05
"""Of all requests that may be replaced. Source: AWS's performance guide."""


class Patience:
    """Learns from each answer how long the next may take. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._recent: deque[float] = deque(maxlen=ANSWERS)
        self._asked = 0
        self.replaced = 0
        """Requests that were given up for another."""

    def limit_s(self) -> float:
        """Return the seconds until the answer to the next request must begin; 0 for no limit.

        A multiple of the median of recent answers. None before there are some, nor while more
        than one of 20 requests was replaced: then all are slow, and more would not help.
        """
        with self._lock:
            self._asked += 1
            known = len(self._recent) * 2 >= ANSWERS
            if not known or self.replaced > self._asked * SHARE:
                return 0.0
            median = statistics.median(self._recent)
        return max(MIN_S, MEDIANS * median)

    def begun(self, seconds: float) -> None:
        """Note how long an answer took to begin."""
        with self._lock:
            self._recent.append(seconds)

    def over(self) -> None:
        """Note that a request is replaced."""
        with self._lock:
            self.replaced += 1


class Wait:
    """One request and the seconds until its answer must begin; of one thread.

    Parameters
    ----------
    limit_s
        Zero: as long as it takes.
    """

    def __init__(self, patience: Patience, limit_s: float = 0.0) -> None:
        self._patience = patience
        self.limit_s: Final = limit_s
        self._sent_at = 0.0
        self._answered = False

    def sent(self) -> float:
        """Note that the request is sent now; return the seconds that it has, 0 for no limit."""
        self._sent_at = SYSTEM.monotonic()
        return self.limit_s

    def begun(self) -> None:
        """Note that its answer begins."""
        self._answered = True
        self._patience.begun(SYSTEM.monotonic() - self._sent_at)

    @property
    def is_over(self) -> bool:
        """True if the request failed since its answer did not begin in time."""
        waited_s = SYSTEM.monotonic() - self._sent_at
        return bool(self.limit_s) and not self._answered and waited_s >= self.limit_s
