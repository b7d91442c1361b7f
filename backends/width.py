"""The number of requests on their way at once: found out while they move bytes.

One connection to an object store moves 50 to 90 MB/s, and a node's network takes dozens of them;
a small server is slower with dozens than with a few, and some answer "slow down". So the width
begins small, doubles as long as that is no slower, goes back when it is, and is halved when the
storage refuses requests. Design and measurements: docs/design/0025-width.md.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, Self

from ckptstore import limits
from ckptstore.argument_checks import integer
from ckptstore.config import SYSTEM

FIRST: Final = 16
"""Requests at once in the beginning. Source: as many as before this was measured."""
REQUESTS_MAX: Final = 1024
"""Most requests at once that a user may choose: each has a thread and a connection of its own."""
TICK_S: Final = 0.1
"""The width is judged by the bytes of so many seconds at least, and by a mebibyte a request."""
REFUSED_S: Final = 1.0
"""Seconds in which refusals count once. Source: a request of 8 MiB takes 0.8 s over a connection of
10 MB/s; those that began together come again together."""
REST_TICKS: Final = 20
"""Ticks before a larger width is tried after one that was slower, or was refused."""
GAIN: Final = 0.95
"""A larger width stays if it has this share of the throughput of the smaller one, or more: what
other work takes away for a tick would else keep it small (measured: docs/design/0025)."""
TRIAL_BYTES: Final = 4 * limits.MIB
"""Bytes a request before a width is found slower than another one. Source: half a part; a tick's
bytes may only have filled the buffers of sockets, and requests that began together end together."""


class Width:
    """Lets requests pass, as many at once as serve the storage best. Safe from any thread.

    Parameters
    ----------
    most
        Most requests at once.
    first
        Requests at once in the beginning.
    clock
        Returns seconds; monotonic.
    """

    def __init__(
        self,
        most: int = limits.REQUESTS_AT_ONCE_MAX,
        *,
        first: int = FIRST,
        clock: Callable[[], float] = SYSTEM.monotonic,
    ) -> None:
        self._most = max(1, most)
        self._width = min(first, self._most)
        self._clock = clock
        self._free = threading.Condition()
        self._inside = 0
        self._waiting = 0
        self._began = clock()
        self._bytes = 0
        self._full = False
        """Whether more requests wanted to pass in this tick than could."""
        self._before = 0.0
        """Throughput at the width before the present one, in bytes a second."""
        self._narrow = 0
        """The width to go back to if the present one is no faster; 0 while none is tried."""
        self._wide = 0
        """The width that seemed slower than the present one; 0 if none did."""
        self._seen_bytes, self._seen_s = 0, 0.0
        """Moved at the present width while requests waited."""
        self._rest = 0
        """Ticks until a larger width is tried."""
        self._cautious = False
        """Whether the storage refused requests once: then the width grows by small steps."""
        self._refused_at = -1.0

    def request(self, size_bytes: int = 0) -> Passing:
        """Return a context that waits until a request may be sent, and counts it until it ends.

        Parameters
        ----------
        size_bytes
            Bytes that it moves. Those that nobody reported by :func:`moved` are counted at its end.
        """
        return Passing(self, size_bytes)

    def enter(self) -> None:
        """Wait until one more request may be sent."""
        with self._free:
            self._waiting += 1
            try:
                while self._inside >= self._width:
                    self._full = True
                    self._free.wait()
            finally:
                self._waiting -= 1
            self._inside += 1

    def leave(self) -> None:
        """Let another request pass."""
        with self._free:
            self._inside -= 1
            self._free.notify()

    def moved(self, count: int) -> None:
        """Count bytes that were sent or received, in either direction."""
        with self._free:
            self._bytes += count
            now = self._clock()
            elapsed = now - self._began
            if elapsed >= TICK_S and self._bytes >= self._width * limits.MIB:
                self._judge(self._bytes, elapsed)
                self._began, self._bytes, self._full = now, 0, self._waiting > 0

    def refused(self) -> None:
        """Halve the width: the storage asked to slow down.

        Requests that were on their way together are refused together: they count once.
        """
        with self._free:
            now = self._clock()
            if now - self._refused_at < REFUSED_S:
                return
            self._refused_at, self._cautious = now, True
            self._narrow, self._wide, self._before, self._rest = 0, 0, 0.0, REST_TICKS
            self._become(max(1, self._width // 2))

    @property
    def now(self) -> int:
        """Requests that may be on their way at this moment."""
        return self._width

    def _judge(self, count: int, seconds: float) -> None:
        """Choose the width of the next tick by the throughput of this one.

        What is no slower within a tick gets wider. A narrower width has to be faster than the
        wider one was, each over more than a tick.
        """
        if not self._full:
            return  # nobody waited: the width made no difference
        self._seen_bytes += count
        self._seen_s += seconds
        mean = self._seen_bytes / self._seen_s
        sure = self._seen_bytes >= self._width * TRIAL_BYTES
        if self._wide:
            if sure:
                back = self._wide if mean * GAIN < self._before else self._width
                self._wide, self._rest = 0, REST_TICKS
                self._become(back)
        elif self._narrow and count < self._before * GAIN * seconds:
            if sure and mean < self._before * GAIN:
                self._wide, self._before = self._width, mean
                self._become(self._narrow)
                self._narrow = 0
        elif self._rest and not self._narrow:
            self._rest -= 1
        else:
            step = max(1, self._width // 8) if self._cautious else self._width
            self._narrow = self._width if self._width < self._most else 0
            self._before = count / seconds
            self._become(min(self._most, self._width + step))

    def _become(self, width: int) -> None:
        """Let so many requests pass from now on."""
        self._width = width
        self._seen_bytes, self._seen_s = 0, 0.0
        self._free.notify_all()


class Passing:
    """One request on its way; owned by the thread that sends it."""

    def __init__(self, width: Width, size_bytes: int) -> None:
        self._width, self._left = width, size_bytes
        self.moved_bytes = 0
        """Bytes that were reported so far."""
        self.thin = False
        """Whether :mod:`ckptstore.backends.wire` sent it, not a library."""

    def moved(self, count: int) -> None:
        """Count bytes of this request that were sent or received."""
        self._left -= count
        self.moved_bytes += count
        self._width.moved(count)

    def __enter__(self) -> Self:
        self._width.enter()
        _here.passing = self
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        _here.passing = None
        if kind is None and self._left > 0:
            self._width.moved(self._left)
        self._width.leave()


class _Here(threading.local):
    """The request that this thread sends."""

    passing: Passing | None = None


_here = _Here()


def moved(count: int) -> None:
    """Count bytes that this thread's request, if it sends one, has just sent or received."""
    if _here.passing is not None:
        _here.passing.moved(count)


def served_thin(*, thin: bool = True) -> None:
    """Note whether this thread's request was sent without a library."""
    if _here.passing is not None:
        _here.passing.thin = thin


def check_requests(requests: object) -> int:
    """Return the most requests at once that a user chose, as a number or, as in a URL, a text.

    Raises
    ------
    InvalidInputError
        It is no number from 1 to ``REQUESTS_MAX``.
    """
    text = str(requests)
    number = int(text) if text.isdecimal() and len(text) < 5 else requests
    hint = "such as requests=16 for a small server; leave it out to have the number found"
    return integer("requests", number, 1, REQUESTS_MAX, hint)
