"""Many clients of one storage in virtual time: real code, simulated waiting.

Each client is a thread, and one of them runs at a time: a client that waits for the storage, or
sleeps, gives the turn to the one that is due next, and the clock jumps. Nothing really waits, and
equal seeds give equal runs. Clients must not start threads of their own.
"""

from __future__ import annotations

import heapq
import itertools
import random  # noqa: TID251 - seeded: equal seeds give equal runs
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ckptstore.backends.base import Backend, Buffer, Capabilities, ObjectInfo
from ckptstore.backends.wrapper import WrapperBackend

__all__ = ["Client", "Latency", "Storage", "VirtualTime"]

_STACK_BYTES = 512 * 1024


class VirtualTime:
    """A clock, and the clients that wait for it; owned by the thread that calls :meth:`run`."""

    def __init__(self, seed: int = 0) -> None:
        self.now_s = 0.0
        self.random = random.Random(seed)
        self.failures: list[BaseException] = []
        self._due: list[tuple[float, int, threading.Semaphore]] = []
        self._order = itertools.count()
        self._stopped = threading.Semaphore(0)

    def start(self, work: Callable[[Client], None], *, at_s: float = 0.0) -> None:
        """Begin a client at a time."""
        client = Client(self)

        def run() -> None:
            client.turn.acquire()
            try:
                work(client)
            except BaseException as error:  # noqa: BLE001 - raised by run()
                self.failures.append(error)
            finally:
                self._stopped.release()

        before = threading.stack_size(_STACK_BYTES)
        threading.Thread(target=run, daemon=True).start()
        threading.stack_size(before)
        self.push(at_s, client.turn)

    def push(self, at_s: float, turn: threading.Semaphore) -> None:
        """Record the thread that is to run at a time."""
        heapq.heappush(self._due, (at_s, next(self._order), turn))

    def give_way(self) -> None:
        """Give the turn to the next client: the running one waits now."""
        self._stopped.release()

    def run(self) -> None:
        """Let all clients run to their ends; raise the first failure."""
        while self._due:
            at_s, _, turn = heapq.heappop(self._due)
            self.now_s = max(self.now_s, at_s)
            turn.release()
            self._stopped.acquire()
        if self.failures:
            raise self.failures[0]


class Client:
    """The environment of one client (see :class:`ckptstore.config.Environment`)."""

    def __init__(self, time: VirtualTime) -> None:
        self.time = time
        self.turn = threading.Semaphore(0)
        self.owed_s = 0.0
        """Time that passed for this client alone, and which it has not waited for yet."""

    def now_ms(self) -> int:
        """Return the virtual time, in milliseconds since 1970."""
        return 1_700_000_000_000 + int(self.monotonic() * 1000)

    def monotonic(self) -> float:
        """Return the virtual seconds since the beginning."""
        return self.time.now_s + self.owed_s

    def sleep(self, seconds: float) -> None:
        """Let other clients run until the time has come."""
        self.time.push(self.monotonic() + seconds, self.turn)
        self.owed_s = 0.0
        self.time.give_way()
        self.turn.acquire()

    def random_hex(self, bytes_count: int) -> str:
        """Return random bytes of the simulation's seed as hex."""
        return self.time.random.randbytes(bytes_count).hex()

    def jitter(self) -> float:
        """Return a random number in [0, 1)."""
        return self.time.random.random()


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Durations of requests."""

    request_s: float
    """The mean; each takes between half and one and a half of it."""
    in_flight: int
    """Reads of one client that run in parallel."""


class Storage(WrapperBackend):
    """One client's view of a storage that all share: every request takes its time.

    A request reaches the storage after half of its latency. Consecutive reads after the first
    count as parallel, a fixed number at a time; their objects never change, so that they are
    answered at once, and the client waits at its next other request.
    """

    def __init__(self, inner: Backend, client: Client, latency: Latency) -> None:
        super().__init__(inner)
        self._client = client
        self._latency = latency
        self._reading = False
        self.requests: Counter[str] = Counter()

    @property
    def capabilities(self) -> Capabilities:
        """Declare one request at a time: clients have no threads here."""
        return replace(self.inner.capabilities, concurrency=1)

    def put_if_absent(self, key: str, data: Buffer) -> None:
        """Create, half-way through the wait."""
        self._wait("PUT")
        try:
            self.inner.put_if_absent(key, data)
        finally:
            self._client.sleep(self._half())

    def put(self, key: str, data: Buffer) -> None:
        """Write."""
        self._wait("PUT")
        self.inner.put(key, data)
        self._client.sleep(self._half())

    def get(self, key: str, *, bytes_max: int) -> bytes:
        """Read, and add the time to the client's debt."""
        share = self._latency.in_flight if self._reading else 1
        self._reading = True
        self.requests["GET"] += 1
        self._client.owed_s += 2 * self._half() / share
        return self.inner.get(key, bytes_max=bytes_max)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """List the objects half-way through the wait."""
        self._wait("LIST")
        found = list(self.inner.list(prefix, after=after))
        self._client.sleep(self._half())
        return iter(found)

    def delete(self, key: str) -> None:
        """Delete."""
        self._wait("DELETE")
        self.inner.delete(key)
        self._client.sleep(self._half())

    def _wait(self, what: str) -> None:
        self._reading = False
        self.requests[what] += 1
        self._client.sleep(self._half())

    def _half(self) -> float:
        return 0.5 * self._latency.request_s * (0.5 + self._client.time.random.random())
