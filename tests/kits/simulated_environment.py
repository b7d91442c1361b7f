"""Time and randomness under a test's control: no waiting, and every test can be repeated."""

from __future__ import annotations

import threading

from ckptstore.hashing import blake3_digest


class SimulatedEnvironment:
    """An ``Environment`` whose clock moves only by ``sleep``, or by hand.

    Safe from any thread. Two instances of one seed give the same random numbers.

    Parameters
    ----------
    seed
        Seed of the random numbers.
    now_ms
        The wall clock at the beginning, in milliseconds since 1970.
    """

    def __init__(self, seed: int = 0, *, now_ms: int = 1_700_000_000_000) -> None:
        self._seed = seed
        self._drawn = 0
        self._start_ms = now_ms
        self._elapsed_s = 0.0
        self._lock = threading.Lock()

    def now_ms(self) -> int:
        """Return the simulated wall clock."""
        return self._start_ms + int(self._elapsed_s * 1000)

    def monotonic(self) -> float:
        """Return the simulated seconds since the beginning."""
        return self._elapsed_s

    def sleep(self, seconds: float) -> None:
        """Advance the clock by `seconds` at once."""
        with self._lock:
            self._elapsed_s += seconds

    def random_hex(self, bytes_count: int) -> str:
        """Return the next random bytes of the seed, at most 32, as hex."""
        return self._draw()[:bytes_count].hex()

    def jitter(self) -> float:
        """Return the next random number of the seed in [0, 1)."""
        return int.from_bytes(self._draw()[:6], "little") / (1 << 48)

    def _draw(self) -> bytes:
        with self._lock:
            self._drawn += 1
            return blake3_digest(f"{self._seed} {self._drawn}".encode())


class Skewed(SimulatedEnvironment):
    """Another machine in the time of an environment, whose wall clock is ahead by a fixed time."""

    def __init__(self, near: SimulatedEnvironment, ahead_s: float) -> None:
        super().__init__()
        self._near = near
        self._ahead_ms = round(ahead_s * 1000)

    def now_ms(self) -> int:
        """Return the other time."""
        return self._near.now_ms() + self._ahead_ms

    def monotonic(self) -> float:
        """Return the seconds of the near one."""
        return self._near.monotonic()

    def sleep(self, seconds: float) -> None:
        """Advance the time of both."""
        self._near.sleep(seconds)

    def _draw(self) -> bytes:
        return self._near._draw()
