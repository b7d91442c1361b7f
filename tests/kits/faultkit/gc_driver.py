"""Lets savers, a forker and collectors of one store die at drawn calls, and checks the store.

Run as ``python -m faultkit.gc_driver`` with a JSON object of :class:`Plan` on stdin; prints its
results as JSON. torch is imported once; all others are forks of this process, which never opens a
store. Each life of a client ends by SIGKILL at the n-th of its calls on files and on the storage,
with a drawn n. Collectors have no grace at all, and one of them no minimum age of orphans either.
"""

from __future__ import annotations

import json
import os
import random  # noqa: TID251 - seeded
import select
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

import ckptstore
import ckptstore.maintenance.collect.gc
import ckptstore.maintenance.replicas.fork
import ckptstore.maintenance.retention.by_hand
import ckptstore.states.lazy
import ckptstore.states.save
from ckptstore.backends.registry import open_backend
from ckptstore.config import Options
from ckptstore.errors import CkptStoreError, IntegrityError, NotFoundError
from ckptstore.format.pack import HEADER_BYTES, TRAILER_BYTES
from ckptstore.model import Version
from ckptstore.repo import open_on
from ckptstore.store import Store
from ckptstore.testing.faulty import Fault, FaultyBackend, When
from faultkit.kill_driver import Tell, finish, fork
from faultkit.tripwire import Tripwire

__all__ = ["Plan", "main"]

CHUNK_BYTES = 1 << 16
ELEMENTS = 1 << 14
"""Of each tensor, float32: a chunk of its own."""
PARTS = 5
KEPT = 12
"""Versions that a saver keeps of its run."""
LOADS_MAX = 50
"""A reader may be overtaken by repacks without grace so often before it is taken for a loss."""
_LIFE_LOG2 = 13.0
"""Binary logarithm of the most calls of a life: enough for many saves, or a few collections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Counts and places of a campaign."""

    urls: list[str]
    """Of one store: each client takes one of them in turn."""
    options: dict[str, Any] = field(default_factory=dict)
    kills: int = 100
    """Deaths after which it ends."""
    seed: int = 0
    savers: int = 6
    collectors: int = 2
    needed: list[str] = field(default_factory=list)
    """Figures that must not be 0: it goes on until none is."""


def state_of(step: int) -> dict[str, Any]:
    """Return the state of a step: one tensor is new in each, others every 2, 4, 8, 16 steps."""
    parts = {}
    for place in range(PARTS):
        generator = torch.Generator().manual_seed(10 * (step >> place) + place)
        parts[f"p{place}"] = torch.randn(ELEMENTS, generator=generator)
    return {"model": parts, "step": step}


def same(found: Any, step: int) -> bool:  # noqa: ANN401
    """Return whether a state is that of a step, bit by bit."""
    meant = state_of(step)
    return found["step"] == step and all(
        torch.equal(found["model"][name], tensor) for name, tensor in meant["model"].items()
    )


def loads(store: Store, version: Version) -> str:
    """Load a version; return its defect, empty if there is none.

    Without grace a repack may delete objects during a load: then the catalog has the version's new
    place; or the version was removed.
    """
    problem = ""
    for _ in range(LOADS_MAX):
        try:
            found = store.load(f"#{version.id}")
        except NotFoundError:
            return ""
        except IntegrityError as error:
            problem = str(error)
            continue
        return "" if same(found, version.step) else f"#{version.id} is not step {version.step}"
    return f"#{version.id} does not load: {problem}"


class Child:
    """One client in a process of its own, started again and again."""

    def __init__(self, plan: Plan, name: str, number: int) -> None:
        self.plan = plan
        self.name = name
        self.number = number
        self.life = 0
        self.pid = self.reading = -1
        self.rest = b""

    def begin(self) -> None:
        """Start the process."""
        self.life += 1
        self.rest = b""
        self.pid, self.reading = fork(self.work)

    def hear(self) -> list[str] | None:
        """Return the lines printed since the last call, the rest of one later; None at the end."""
        data = os.read(self.reading, 1 << 16)
        *lines, self.rest = (self.rest + data).split(b"\n")
        return [line.decode() for line in lines] if data else None

    def kill(self) -> list[str]:
        """Kill the process; return the lines that it had printed."""
        os.kill(self.pid, signal.SIGKILL)  # dead or not: it has not been waited for
        lines = finish(self.pid, self.reading)
        if lines:
            lines[0] = self.rest.decode() + lines[0]
        return lines

    def ended(self) -> int:
        """Return the exit code of a process that ended by itself; negative: by this signal."""
        _, status = os.waitpid(self.pid, 0)
        os.close(self.reading)
        self.pid = -1
        return os.waitstatus_to_exitcode(status)

    def work(self, tell: Tell) -> None:
        """Run the client of this name until it dies at a call."""
        chance = random.Random(f"{self.plan.seed} {self.number} {self.life}")
        url = self.plan.urls[self.number % len(self.plan.urls)]
        wire = Tripwire(int(2 ** chance.uniform(0, _LIFE_LOG2)), after=False)

        def tick(_call: str, _key: str) -> None:
            wire.count()

        each = Fault(times=0, when=When.CALLBACK, callback=tick)
        backend = FaultyBackend(open_backend(url, **self.plan.options), each)
        with Store(open_on(backend, options=Options(workers=1))) as store:
            turn = 0
            while True:
                step = 1_000_000 * self.number + 10_000 * self.life + turn
                try:
                    getattr(self, f"_{self.name}")(store, chance, step, tell)
                except IntegrityError as error:
                    # A fork may lose the race for the manifest of a version that a repack moves.
                    fatal = self.name != "forker"
                    tell(f"{'problem' if fatal else 'failed'} {self.name} {error.kind}: {error}")
                except CkptStoreError as error:
                    tell(f"failed {self.name} {error.kind}")
                turn += 1

    def _saver(self, store: Store, chance: random.Random, step: int, tell: Tell) -> None:
        run = store.run(f"saver-{self.number}")
        version = run.save(state_of(step), step=step)
        tell(f"saved {version.id}")
        if chance.random() < 0.3 and (problem := loads(store, version)):
            tell(f"problem {problem}")
        for old in run.versions()[:-KEPT]:
            self._remove(store, old, tell)

    def _forker(self, store: Store, chance: random.Random, step: int, tell: Tell) -> None:
        versions = [v for v in store.versions() if not v.run.startswith("fork-")]
        if not versions:
            return
        source = chance.choice(versions)
        run = store.fork(f"#{source.id}", f"fork-{step}")
        first = run.versions()[0]
        tell(f"saved {first.id}")
        tell("forked")
        second = run.save(state_of(step), step=step)
        tell(f"saved {second.id}")
        store.rollback(f"#{first.id}")
        tell("forked and rolled back")
        if problem := loads(store, first):
            tell(f"problem {problem}")
        for version in store.versions():
            if version.run.startswith("fork-") and chance.random() < 0.5:
                self._remove(store, version, tell)

    def _remove(self, store: Store, version: Version, tell: Tell) -> None:
        tell(f"removing {version.id}")
        store.remove([f"#{version.id}"], force=True)

    def _collector(self, store: Store, chance: random.Random, _step: int, tell: Tell) -> None:
        report = store.gc(
            grace_s=0,
            orphan_age_s=0 if self.number % 2 else 1.0,
            repack_below=chance.choice([None, 0.5, 1.0]),
        )
        swept = sum(tally.count for tally in report.swept.values())
        tell(f"collected {swept} {report.repacked.versions_count}")
        done = store.repo.catalog.number
        while store.repo.refresh().number == done:  # the savers have a turn
            time.sleep(0.005)


def check(plan: Plan, tell: Tell) -> None:
    """Collect twice, then check everything; print the contents and the defects."""
    problems: list[str] = []
    with ckptstore.open(plan.urls[0], **plan.options) as store:
        for _ in range(2):
            store.gc(grace_s=0, orphan_age_s=0, repack_below=1.0)
        report = store.gc(grace_s=0, orphan_age_s=0, repack_below=1.0)
        if report.stored != report.live:
            problems.append(f"stored are {report.stored}, needed {report.live}")
        packs = report.stored["packs"]
        room = packs.size_bytes - packs.count * (HEADER_BYTES + TRAILER_BYTES)
        if room != report.live_chunk_bytes:
            problems.append(f"{room} bytes of chunks, {report.live_chunk_bytes} of live ones")
        if store.repo.catalog.condemned:
            problems.append("something is still condemned")
        versions = store.versions()
        problems += filter(None, (loads(store, version) for version in versions))
        problems += [problem.message for problem in store.verify().problems]
        commits = store.repo.catalog.number
    found = {
        "problems": problems,
        "ids": [version.id for version in versions],
        "commits": commits,
        "stored_bytes": packs.size_bytes,
    }
    tell(json.dumps(found))


def create(plan: Plan, _tell: Tell) -> None:
    """Make the store."""
    ckptstore.open(plan.urls[0], create=True, chunk_bytes=CHUNK_BYTES, **plan.options).close()


class Campaign:
    """Starts the clients, kills them, and keeps the lines that they printed."""

    def __init__(self, plan: Plan) -> None:
        names = ["saver"] * plan.savers + ["forker"] + ["collector"] * plan.collectors
        self.plan = plan
        self.children = [Child(plan, name, number) for number, name in enumerate(names)]
        self.chance = random.Random(plan.seed)
        self.figures: Counter[str] = Counter()
        self.problems: list[str] = []
        self.saved: set[str] = set()
        self.removing: set[str] = set()

    def take(self, lines: list[str]) -> None:
        """Record the lines that a client printed."""
        for line in lines:
            word, _, rest = line.partition(" ")
            if word == "saved":
                self.saved.add(rest)
            elif word == "removing":
                self.removing.add(rest)
            elif word == "collected":
                swept, moved = rest.split()
                self.figures["objects swept"] += int(swept)
                self.figures["versions relocated"] += int(moved)
            elif word not in {"failed", "forked"}:
                self.problems.append(line)
            self.figures[f"failed {rest.partition(':')[0]}" if word == "failed" else word] += 1

    def run(self) -> dict[str, Any]:
        """Return figures and problems."""
        self.problems += finish(*fork(lambda tell: create(self.plan, tell)))
        for child in self.children:
            child.begin()
        while not self.problems and (
            self.figures["kills"] < self.plan.kills
            or not all(self.figures[name] for name in self.plan.needed)
        ):
            by_pipe = {child.reading: child for child in self.children}
            for pipe in select.select(list(by_pipe), [], [])[0]:
                child = by_pipe[pipe]
                lines = child.hear()
                self.take(lines or [])
                if lines is None and (code := child.ended()) != -signal.SIGKILL:
                    self.problems.append(f"a {child.name} ended by itself: {code}")
                elif lines is None:
                    self.figures["kills"] += 1
                    child.begin()
        for child in self.children:
            if child.pid != -1:
                self.take(child.kill())
        return self.found()

    def found(self) -> dict[str, Any]:
        """Check the store once all clients are dead."""
        told = finish(*fork(lambda tell: check(self.plan, tell)))
        checked: dict[str, Any] = json.loads(told[-1]) if told else {"error": "it said nothing"}
        if "error" in checked:
            self.problems.append(checked["error"])
        self.problems += checked.get("problems", [])
        lost = self.saved - self.removing - set(checked.get("ids", []))
        if lost:
            self.problems.append(f"lost: {sorted(lost)}")
        return {
            "problems": self.problems,
            "figures": self.figures,
            "versions": len(checked.get("ids", [])),
            "commits": checked.get("commits"),
            "stored_bytes": checked.get("stored_bytes"),
        }


def main() -> None:
    """Run a campaign."""
    torch.set_num_threads(1)
    plan = Plan(**json.load(sys.stdin))
    json.dump(Campaign(plan).run(), sys.stdout)


if __name__ == "__main__":
    main()
