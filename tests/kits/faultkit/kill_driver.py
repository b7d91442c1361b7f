"""Kills saving processes with SIGKILL, again and again, and checks the store after each.

Run as ``python -m faultkit.kill_driver FOLDER ROUNDS SEED ELEMENTS``; prints figures as JSON.
torch is imported once; savers and checkers are forks of this process, which never opens a store.

Each kill comes right before or right after a random one of a save's system calls on files: open,
write, fsync, link, mkdir, unlink. So what is hit depends on the seed, and not on the clock.
"""

from __future__ import annotations

import json
import os
import random  # noqa: TID251 - seeded
import select
import shutil
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import ckptstore.states.lazy
import ckptstore.states.save  # noqa: F401 - needed after the fork, so imported before it
from ckptstore.backends.registry import open_backend
from ckptstore.config import Options
from ckptstore.repo import create_on, open_on
from ckptstore.store import Store
from faultkit.states import differences, state_of
from faultkit.stores import trusting
from faultkit.tripwire import Tripwire

__all__ = ["main"]

ROUNDS_PER_STORE = 20
"""Every round loads every version, so that a store must not grow for ever."""
PATIENCE_S = 1200.0
CHUNK_BYTES = 1 << 18
Tell = Callable[[str], None]


def open_folder(folder: Path, *, create: bool = False) -> Store:
    """Open the store in a folder."""
    options = Options(workers=2)
    if create:
        backend = open_backend(folder)
        repo = create_on(backend, prober=trusting, chunk_bytes=CHUNK_BYTES, options=options)
    else:
        repo = open_on(open_backend(folder), prober=trusting, options=options)
    return Store(repo)


def fork(action: Callable[[Tell], None]) -> tuple[int, int]:
    """Run `action` in a child that can send lines; return its pid and the pipe to read."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    os.close(reading)
    told = os.fdopen(writing, "w", buffering=1)
    try:
        action(lambda line: print(line, file=told, flush=True))
    except BaseException:  # noqa: BLE001 - the parent reports it
        print(json.dumps({"error": traceback.format_exc()}), file=told, flush=True)
    os._exit(0)


def finish(pid: int, reading: int) -> list[str]:
    """Wait for a child's end, at most PATIENCE_S; return the lines that it sent."""
    with os.fdopen(reading) as lines:
        ready, _, _ = select.select([lines], [], [], PATIENCE_S)
        if not ready:
            os.kill(pid, signal.SIGKILL)
        told = lines.read().splitlines()
    os.waitpid(pid, 0)
    return told if ready else [*told, json.dumps({"error": "it hung"})]


def killed(chance: random.Random, calls: int, action: Callable[[Tell], None]) -> list[str]:
    """Kill a child at about one of so many calls after "begins"; return the lines that it sent."""
    at, after = chance.randint(1, calls + 4), chance.random() < 0.5

    def armed(tell: Tell) -> None:
        def arm(line: str) -> None:
            if line == "begins":
                Tripwire(at, after=after)
            tell(line)

        action(arm)

    return finish(*fork(armed))


def counted(action: Callable[[Tell], None]) -> int:
    """Return the number of calls of a child like those that are killed."""

    def work(tell: Tell) -> None:
        wires: list[Tripwire] = []
        action(lambda _line: None if wires else wires.append(Tripwire(0, after=False)))
        tell(str(wires[0].seen))

    return int(finish(*fork(work))[-1])


def save(folder: Path, seed: int, elements: int, tell: Tell) -> None:
    """Save one version; send a line at the beginning, and its id at the end."""
    with open_folder(folder) as store:
        state = state_of(seed, elements=elements)
        tell("begins")
        tell(store.run("gpt").save(state, step=seed, metrics={"loss": 1 / (1 + seed)}).id)


def check(folder: Path, elements: int, tell: Tell) -> None:
    """Load every version and verify the store; send versions, commits and problems."""
    with open_folder(folder) as store:
        versions = store.versions()
        problems = [problem.message for problem in store.verify().problems]
        for version in versions:
            meant = state_of(version.step, elements=elements)
            problems += differences(store.load(f"#{version.id}"), meant, f"@{version.step}")
    ids = [version.id for version in versions]
    tell(json.dumps({"ids": ids, "commits": [v.commit for v in versions], "problems": problems}))


def create(folder: Path, elements: int, tell: Tell) -> None:
    """Create a store with one version."""
    with open_folder(folder, create=True) as store:
        run = store.run("gpt", metrics={"loss": "min"})
        tell(run.save(state_of(0, elements=elements), step=0).id)


class Campaign:
    """Rounds of kills; collects figures and problems."""

    def __init__(self, folder: Path, seed: int, elements: int) -> None:
        self.folder = folder
        self.elements = elements
        self.chance = random.Random(seed)
        self.figures: Counter[str] = Counter()
        self.problems: list[str] = []
        self.calls = 0
        self.ids: list[str] = []
        self.next_seed = 0

    def renew(self, number: int) -> Path:
        """Make a new store, and drop the one before."""
        shutil.rmtree(self.folder, ignore_errors=True)
        store = self.folder / f"store-{number}"
        finish(*fork(lambda tell: create(store, self.elements, tell)))
        self.calls = counted(lambda tell: save(store, 1, self.elements, tell))
        self.ids, self.next_seed = self.checked(store), 2
        return store

    def checked(self, store: Path) -> list[str]:
        """Check a store in a process of its own; return the ids of its versions."""
        told = finish(*fork(lambda tell: check(store, self.elements, tell)))
        found: dict[str, Any] = json.loads(told[-1]) if told else {"error": "it said nothing"}
        self.problems += found.get("problems", [found.get("error", "")])
        ids: list[str] = found.get("ids", [])
        if found.get("commits", []) != list(range(1, len(ids) + 1)):
            self.problems.append(f"commits are {found.get('commits')}")
        return ids

    def round(self, store: Path) -> None:
        """Kill one save and check the store afterwards."""
        seed, elements = self.next_seed, self.elements
        self.next_seed += 1
        state_of(seed, elements=elements)  # built here once, not in each child
        before = names(store)
        told = killed(self.chance, self.calls, lambda tell: save(store, seed, elements, tell))
        acknowledged = told[1:2]
        found = self.checked(store)
        self.compare(store, before, found, acknowledged)
        self.ids = found

    def compare(
        self, store: Path, before: set[str], found: list[str], acknowledged: list[str]
    ) -> None:
        """Check that earlier versions and acknowledged ones exist; count."""
        if found[: len(self.ids)] != self.ids or len(found) > len(self.ids) + 1:
            self.problems.append(f"versions were {self.ids}, are {found}")
        new = found[len(self.ids) :]
        if acknowledged and acknowledged != new:
            self.problems.append(f"acknowledged {acknowledged}, but new are {new}")
        appeared = names(store) - before
        kinds = {name.split("/")[0] for name in appeared if ".tmp-" not in name}
        self.figures["rounds"] += 1
        self.figures["left temporary files"] += any(".tmp-" in name for name in appeared)
        if acknowledged:
            self.figures["save returned before the kill"] += 1
        elif new:
            self.figures["killed after the commit, before it returned"] += 1
        elif "manifests" in kinds:
            self.figures["killed between manifest and commit"] += 1
        elif "packs" in kinds:
            self.figures["killed between pack and manifest"] += 1
        elif appeared:
            self.figures["killed while writing the pack"] += 1
        else:
            self.figures["killed before anything was written"] += 1

    def run(self, rounds: int) -> dict[str, Any]:
        """Return figures and problems after `rounds` rounds."""
        store = self.folder
        for number in range(rounds):
            if number % ROUNDS_PER_STORE == 0:
                store = self.renew(number)
            self.round(store)
            if self.problems:
                break
        # No leftover stops a save.
        count = len(self.ids)
        finish(*fork(lambda tell: save(store, self.next_seed, self.elements, tell)))
        if len(self.checked(store)) != count + 1:
            self.problems.append("the save after the last kill left no version")
        return {"figures": self.figures, "problems": self.problems, "calls": self.calls}


def names(store: Path) -> set[str]:
    """Return the names of all files below a folder."""
    return {path.relative_to(store).as_posix() for path in store.rglob("*") if path.is_file()}


def main() -> None:
    """Run a campaign."""
    torch.set_num_threads(1)
    folder, rounds, seed, elements = sys.argv[1:]
    campaign = Campaign(Path(folder) / "stores", int(seed), int(elements))
    json.dump(campaign.run(int(rounds)), sys.stdout)


if __name__ == "__main__":
    main()
