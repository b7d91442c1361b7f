"""Three clients of one store, interleaved call by call, with lost messages and crashes.

Each client's commit runs in a thread that stops before every call to the storage; Hypothesis
decides who goes on, and whether the call, its answer, or the client is lost. The oracle is a model
of thirty lines that reads the stored JSON itself and shares no code with the fold.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from shortening import examples
from simulated_environment import SimulatedEnvironment

from ckptstore import limits
from ckptstore.backends.base import Buffer, Capabilities, ObjectInfo
from ckptstore.backends.memory import MemoryBackend
from ckptstore.backends.wrapper import WrapperBackend
from ckptstore.catalog import run_ops
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.log import Build, Log
from ckptstore.catalog.state import Op
from ckptstore.errors import AmbiguousWriteError, CkptStoreError
from ckptstore.format.fields import ManifestPointer
from ckptstore.format.keys import COMMITS_PREFIX, manifest_key

T = TypeVar("T")
Fate = Literal["go", "lose request", "lose answer", "hold request", "crash", "crash after"]
FATES: list[Fate] = ["go", "go", "go", "lose request", "lose answer", "hold request"]
FATES += ["crash", "crash after"]
CLIENTS = 3


class Crash(BaseException):
    """The process of a client dies."""


class Turns:
    """Hands control back and forth between the machine and one client's thread."""

    def __init__(self) -> None:
        self.fate: Fate = "go"
        self.running = False
        self._go = threading.Semaphore(0)
        self._stopped = threading.Semaphore(0)

    def start(self, work: Callable[[], None]) -> None:
        """Run `work` in a thread up to its first call."""

        def run() -> None:
            try:
                work()
            finally:
                self.running = False
                self._stopped.release()

        self.running = True
        threading.Thread(target=run, daemon=True).start()
        assert self._stopped.acquire(timeout=300)

    def step(self, fate: Fate) -> None:
        """Let the thread make its call, and run up to the next one or to its end."""
        self.fate = fate
        self._go.release()
        assert self._stopped.acquire(timeout=300)

    def wait(self) -> Fate:
        """Stop here, in the client's thread, until the machine says how to go on."""
        self._stopped.release()
        assert self._go.acquire(timeout=300)
        return self.fate


class Stepping(WrapperBackend):
    """Stops before every call; requests may be held back and arrive much later."""

    def __init__(self, inner: MemoryBackend, turns: Turns, held: list[tuple[str, bytes]]) -> None:
        super().__init__(inner)
        self._turns = turns
        self._held = held

    @property
    def capabilities(self) -> Capabilities:
        """Declare one request at a time, so that all calls come from the client's own thread."""
        return replace(self.inner.capabilities, concurrency=1)

    def put_if_absent(self, key: str, data: Buffer) -> None:
        """Create, with all that can happen to a message."""
        fate = self._turns.wait()
        if fate == "crash":
            raise Crash
        if fate == "hold request":
            self._held.append((key, bytes(data)))
        if fate in {"hold request", "lose request"}:
            raise AmbiguousWriteError("timeout")
        self.inner.put_if_absent(key, data)
        if fate == "crash after":
            raise Crash
        if fate == "lose answer":
            raise AmbiguousWriteError("timeout")

    def get(self, key: str, *, bytes_max: int) -> bytes:
        """Read."""
        return self._call(lambda: self.inner.get(key, bytes_max=bytes_max))

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """List what is there at that moment."""
        return iter(self._call(lambda: list(self.inner.list(prefix, after=after))))

    def delete(self, key: str) -> None:
        """Delete."""
        self._call(lambda: self.inner.delete(key))

    def _call(self, call: Callable[[], T]) -> T:
        if self._turns.wait() in {"crash", "crash after"}:
            raise Crash
        return call()


@dataclass
class Client:
    """One process: a log, and at most one commit under way."""

    turns: Turns
    log: Log
    versions: list[str] = field(default_factory=list)
    """Ids of the saves that were asked for and whose outcome is open."""


@dataclass
class Model:
    """What the catalog must be: read from the stored JSON, one operation at a time."""

    runs: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    tags: dict[str, dict[str, str]] = field(default_factory=dict)

    def apply(self, op: dict[str, Any]) -> None:
        """Apply one stored operation."""
        if op["op"] == "create-run":
            assert op["run"] not in self.runs
            self.runs[op["run"]], self.tags[op["run"]] = [], {}
        elif op["op"] == "save":
            line = self.runs[op["run"]]
            assert op["parent"] == (line[-1]["version"] if line else "")
            line.append({"version": op["version"], "metrics": dict(op["metrics"])})
            self.tags[op["run"]].update(dict.fromkeys(op["tags"], op["version"]))
        elif op["op"] == "annotate":
            for line in self.runs.values():
                for row in line:
                    if row["version"] == op["version"]:
                        row["metrics"].update(op["metrics"])
        else:
            assert op["op"] == "tag"
            self.tags[op["run"]][op["tag"]] = op["version"]

    def same_as(self, catalog: Catalog) -> None:
        """Compare with what readers see."""
        assert {run.name: dict(run.tags) for run in catalog.runs()} == self.tags
        for run, line in self.runs.items():
            seen = [{"version": v.id, "metrics": v.metrics} for v in catalog.versions(run)]
            assert seen == line
            assert catalog.head_id(run) == (line[-1]["version"] if line else "")


class LogMachine(RuleBasedStateMachine):
    """Clients commit, messages get lost, processes die; the log stays what it must be."""

    stores = 0

    def __init__(self) -> None:
        super().__init__()
        LogMachine.stores += 1
        self.backend = MemoryBackend(f"log-machine-{LogMachine.stores}")
        self.environment = SimulatedEnvironment(LogMachine.stores)
        self.held: list[tuple[str, bytes]] = []
        self.clients = [self._client() for _ in range(CLIENTS)]
        self.acked: set[str] = set()
        self.refused: set[str] = set()
        self.number = 0
        self._commits_min = limits.SNAPSHOT_COMMITS_MIN
        limits.SNAPSHOT_COMMITS_MIN = 3  # type: ignore[misc]  # restored at the end

    def _client(self) -> Client:
        turns = Turns()
        backend = Stepping(self.backend, turns, self.held)
        return Client(turns=turns, log=Log(backend, self.environment))

    # --- what happens -------------------------------------------------------------------------

    @rule(
        index=st.integers(0, CLIENTS - 1),
        what=st.sampled_from(["save", "save", "annotate", "tag"]),
        run=st.sampled_from("ab"),
    )
    def begin(self, index: int, what: str, run: str) -> None:
        """Begin a commit, if the client is idle."""
        client = self.clients[index]
        if client.turns.running:
            return
        self.number += 1
        version = f"{self.number:032x}"
        build = _building(what, run, version)
        if what == "save":
            client.versions = [version]
        client.turns.start(lambda: self._work(client, build))

    def _work(self, client: Client, build: Build) -> None:
        """Run one commit in the client's thread, and note what it was told."""
        try:
            client.log.append(build)
        except AmbiguousWriteError:
            pass  # there or not: both are allowed
        except CkptStoreError:
            self.refused.update(client.versions)
        except Crash:
            self.clients[[c is client for c in self.clients].index(True)] = self._client()
        else:
            self.acked.update(client.versions)
        client.versions = []

    @rule(index=st.integers(0, CLIENTS - 1), fate=st.sampled_from(FATES), calls=st.integers(1, 8))
    def step(self, index: int, fate: Fate, calls: int) -> None:
        """Let a client make some calls; what befalls them is drawn."""
        turns = self.clients[index].turns
        for left in range(calls, 0, -1):
            # Messages about commits are lost whenever they are sent; death comes at the last call.
            if turns.running:
                turns.step("go" if left > 1 and fate in {"crash", "crash after"} else fate)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        """Let a request arrive that its sender gave up long ago."""
        key, body = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        try:
            self.backend.put_if_absent(key, body)
        except CkptStoreError:
            assert key in self._keys()

    # --- what must hold -----------------------------------------------------------------------

    def _keys(self) -> list[str]:
        return [info.key for info in self.backend.list(COMMITS_PREFIX)]

    @invariant()
    def the_log_is_what_was_acknowledged(self) -> None:
        """No gap; every acknowledged save once, no refused one; readers see what the model says."""
        keys = self._keys()
        model, seen = Model(), []
        for number, key in enumerate(keys, 1):
            body = json.loads(self.backend.get(key, bytes_max=10**6))["body"]
            assert body["number"] == number == int(key[-17:-5])
            for op in body["ops"]:
                model.apply(op)
                seen += [op["version"]] if op["op"] == "save" else []
        assert len(seen) == len(set(seen))
        assert self.acked <= set(seen)
        assert not self.refused & set(seen)
        fresh = Log(self.backend, self.environment).refresh()
        assert fresh.number == len(keys)
        model.same_as(fresh)
        for client in self.clients:
            known = client.log.catalog
            versions = [v.id for v in known.versions()]
            assert known.number <= len(keys)
            assert versions == seen[: len(versions)]

    def teardown(self) -> None:
        """Everyone finishes undisturbed; late messages arrive; one more commit works."""
        try:
            for client in list(self.clients):
                while client.turns.running:
                    client.turns.step("go")
            while self.held:
                key, body = self.held.pop()
                if key not in self._keys():
                    self.backend.put_if_absent(key, body)
            self.the_log_is_what_was_acknowledged()
            before = len(self._keys())
            last = Log(self.backend, self.environment).append(_building("save", "a", "f" * 32))
            assert last.number == before + 1
        finally:
            limits.SNAPSHOT_COMMITS_MIN = self._commits_min  # type: ignore[misc]  # as it was


def _building(what: str, run: str, version: str) -> Build:
    """Return what makes the operations of one commit."""

    def build(catalog: Catalog) -> Sequence[Op]:
        head = catalog.head_id(run)
        if what == "annotate" and head:
            return run_ops.annotate(catalog, head, {f"m{version[-1]}": 1.0})
        if what == "tag" and head:
            return run_ops.tag(catalog, run, head, f"t{version[-1]}")
        pointer = ManifestPointer(key=manifest_key(version), stored_bytes=1, digest="1" * 64)
        return run_ops.save(
            catalog,
            run=run,
            version=version,
            step=catalog.number,
            manifest=pointer,
            content="2" * 64,
            metrics={"n": catalog.number},
            tags=["newest"],
        )

    return build


TestLogMachine = LogMachine.TestCase
TestLogMachine.settings = settings(
    max_examples=examples(100),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
