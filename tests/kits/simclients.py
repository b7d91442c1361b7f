"""Simulated clients: every call to the storage waits for its turn, and any may kill its client."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from simulated_environment import SimulatedEnvironment

from ckptstore.backends.base import (
    Backend,
    Buffer,
    Capabilities,
    ObjectInfo,
    ObjectWriter,
    PutIfAbsent,
)
from ckptstore.backends.memory import MemoryBackend
from ckptstore.backends.wrapper import WrapperBackend, WrapperWriter
from ckptstore.catalog.catalog import Catalog
from ckptstore.config import Options
from ckptstore.errors import AmbiguousWriteError, CkptStoreError
from ckptstore.repo import Finding, open_on
from ckptstore.store import Store

__all__ = ["Crash", "Fate", "Late", "SimClient", "trusting"]

T = TypeVar("T")
PATIENCE_S = 600.0
"""Seconds of a turn after which it counts as a deadlock: only a machine that stands still for that
long is mistaken for one."""

Fate = Literal["go", "lose request", "lose answer", "late", "twice", "crash", "crash after"]
"""Fate of one call: it is carried out; its request or its answer is lost; its request
arrives much later (the sender has given up); it arrives once more much later; its sender dies
before or after it."""


class Crash(BaseException):
    """The process of a client dies."""


@dataclass(frozen=True, slots=True)
class Late:
    """A request that is still in transit."""

    key: str
    data: bytes
    absent: bool
    """Only if there is no object of this name."""


class SimClient:
    """One process: a store, and at most one running operation, in a thread of its own.

    The thread stops before every call to the storage until :meth:`step` lets it continue. Threads
    that the operation itself starts make their calls one after another.
    """

    def __init__(
        self, backend: MemoryBackend, environment: SimulatedEnvironment, late: list[Late]
    ) -> None:
        self.running = False
        self.dead = False
        self.calls = 0
        self.error: CkptStoreError | None = None
        self._environment = environment
        self._fate: Fate = "go"
        self._go = threading.Semaphore(0)
        self._stopped = threading.Semaphore(0)
        self._one = threading.Lock()
        self._backend = _Stepping(backend, self, late)
        self._store: Store | None = None
        self._done: Callable[[CkptStoreError | None], None] = lambda _error: None

    def start(
        self, work: Callable[[Store], object], done: Callable[[CkptStoreError | None], None]
    ) -> None:
        """Run `work` in a thread up to its first call; call `done` at its end, not on a crash."""

        def run() -> None:
            error: CkptStoreError | None = None
            try:
                work(self._opened())
            except Crash:
                self.dead = True
            except CkptStoreError as failed:
                error = failed
            finally:
                if not self.dead:
                    done(error)
                self.running = False
                self._stopped.release()

        self.running = True
        threading.Thread(target=run, daemon=True).start()
        assert self._stopped.acquire(timeout=PATIENCE_S)

    def step(self, fate: Fate) -> None:
        """Let the thread make its call, and run up to the next one or to its end."""
        self._fate = fate
        self._go.release()
        assert self._stopped.acquire(timeout=PATIENCE_S)

    def perform(self, call: Callable[[Fate], T]) -> T:
        """Wait for a turn, in a thread of the client, and make a call."""
        with self._one:
            if self.dead:
                raise Crash
            self._stopped.release()
            assert self._go.acquire(timeout=PATIENCE_S)
            self.calls += 1
            if self._fate == "crash":
                self.dead = True
                raise Crash
            result = call(self._fate)
            if self._fate == "crash after":
                self.dead = True
                raise Crash
            return result

    @property
    def known(self) -> Catalog | None:
        """The catalog that the client has read so far."""
        return None if self._store is None else self._store.repo.log.catalog

    def _opened(self) -> Store:
        if self._store is None:
            # One worker and one request at a time: the order of calls follows from the turns.
            repo = open_on(
                self._backend,
                environment=self._environment,
                options=Options(workers=1),
                prober=trusting,
            )
            self._store = Store(repo)
        return self._store


def trusting(_backend: Backend, _environment: object) -> Finding:
    """Stand in for the probe: this storage keeps its promises."""
    return Finding(put_if_absent=PutIfAbsent.ATOMIC, report={})


class _Stepping(WrapperBackend):
    """Every call is one step of its client."""

    def __init__(self, inner: MemoryBackend, client: SimClient, late: list[Late]) -> None:
        super().__init__(inner)
        self.client = client
        self.late = late

    @property
    def capabilities(self) -> Capabilities:
        """Declare one request at a time."""
        return replace(self.inner.capabilities, concurrency=1)

    def put(self, key: str, data: Buffer) -> None:
        """Write; the sender must consider a lost or late request as not written."""

        def call(fate: Fate) -> None:
            self.send(key, bytes(data), fate, absent=False)

        self.client.perform(call)

    def put_if_absent(self, key: str, data: Buffer) -> None:
        """Create, with every fate of a message."""

        def call(fate: Fate) -> None:
            self.send(key, bytes(data), fate, absent=True)

        self.client.perform(call)

    def send(self, key: str, data: bytes, fate: Fate, *, absent: bool) -> None:
        """Carry a request out, or lose it."""
        if fate == "late" or (fate == "twice" and key.startswith("packs/")):
            self.late.append(Late(key, data, absent))
        if fate in {"late", "lose request"}:
            raise AmbiguousWriteError("timeout")
        if absent:
            self.inner.put_if_absent(key, data)
        else:
            self.inner.put(key, data)
        if fate == "lose answer":
            raise AmbiguousWriteError("timeout")

    def open_writer(self, key: str) -> ObjectWriter:
        """Return a writer whose commit is one step."""
        return _SteppingWriter(self.inner.open_writer(key), self, key)

    def get(self, key: str, *, bytes_max: int) -> bytes:
        """Read."""
        return self.client.perform(lambda _: self.inner.get(key, bytes_max=bytes_max))

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Read."""
        self.client.perform(lambda _: self.inner.read_into(key, offset, buffers))

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """List the objects of that moment."""
        return iter(self.client.perform(lambda _: list(self.inner.list(prefix, after=after))))

    def stat(self, key: str) -> ObjectInfo:
        """Stat."""
        return self.client.perform(lambda _: self.inner.stat(key))

    def delete(self, key: str) -> None:
        """Delete."""
        self.client.perform(lambda _: self.inner.delete(key))


class _SteppingWriter(WrapperWriter):
    """Collects bytes, and sends them on commit."""

    def __init__(self, inner: ObjectWriter, backend: _Stepping, key: str) -> None:
        super().__init__(inner)
        self._backend = backend
        self._key = key
        self._parts = bytearray()

    def write(self, data: Buffer | Sequence[Buffer]) -> None:
        """Collect."""
        for part in (data,) if isinstance(data, bytes | bytearray | memoryview) else data:
            self._parts += part

    def write_kept(self, data: Sequence[Buffer], done: Callable[[], None]) -> None:
        """Collect."""
        self.write(data)
        done()

    def commit(self) -> None:
        """Send the whole object."""

        def call(fate: Fate) -> None:
            self._backend.send(self._key, bytes(self._parts), fate, absent=False)

        self._backend.client.perform(call)
