"""Kills saving processes with SIGKILL, again and again, and checks the store after each.

Run as ``python -m faultkit.kill_driver FOLDER ROUNDS SEED ELEMENTS``; prints figures as JSON.
torch is imported once; savers and checkers are forks of this process, which never opens a store.

Half of the kills come after a random part of a save's usual time. The others come right before or
right after a random one of its system calls on files: open, write, fsync, link, mkdir, unlink.
"""

from __future__ import annotations

import json
import os
import random  # noqa: TID251 - seeded
import select
import shutil
import signal
import sys
import threading
import time
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

__all__ = ["main"]

ROUNDS_PER_STORE = 20
"""Every round loads every version, so that a store must not grow for ever."""
PATIENCE_S = 120.0
CALLS = ("open", "write", "writev", "fsync", "link", "mkdir", "unlink", "close")
CHUNK_BYTES = 1 << 18


def open_folder(folder: Path, *, create: bool = False) -> Store:
    """Open the store in a folder."""
    options = Options(workers=2)
    if create:
        backend = open_backend(folder)
        repo = create_on(backend, prober=trusting, chunk_bytes=CHUNK_BYTES, options=options)
    else:
        repo = open_on(open_backend(folder), prober=trusting, options=options)
    return Store(repo)


class Tripwire:
    """Counts the calls on files of this process, and kills it at one of them."""

    def __init__(self, at: int, *, after: bool) -> None:
        self.seen = 0
        self._at = at
        self._after = after
        self._lock = threading.Lock()
        for name in CALLS:
            setattr(os, name, self._wrapped(getattr(os, name)))

    def _wrapped(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **words: Any) -> Any:  # noqa: ANN401
            with self._lock:
                self.seen += 1
                hit = self.seen == self._at
            if hit and not self._after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = real(*args, **words)
            if hit:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call


def fork(action: Callable[[Callable[[str], None]], None]) -> tuple[int, int]:
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


def save(folder: Path, seed: int, elements: int, tell: Callable[[str], None]) -> None:
    """Save one version; send a line at the beginning, and its id at the end."""
    with open_folder(folder) as store:
        state = state_of(seed, elements=elements)
        tell("begins")
        tell(store.run("gpt").save(state, step=seed, metrics={"loss": 1 / (1 + seed)}).id)


def check(folder: Path, elements: int, tell: Callable[[str], None]) -> None:
    """Load every version and verify the store; send versions, commits and problems."""
    with open_folder(folder) as store:
        versions = store.versions()
        problems = [problem.message for problem in store.verify().problems]
        for version in versions:
            meant = state_of(version.step, elements=elements)
            problems += differences(store.load(f"#{version.id}"), meant, f"@{version.step}")
    ids = [version.id for version in versions]
    tell(json.dumps({"ids": ids, "commits": [v.commit for v in versions], "problems": problems}))


def create(folder: Path, elements: int, tell: Callable[[str], None]) -> None:
    """Create a store with one version."""
    with open_folder(folder, create=True) as store:
        run = store.run("gpt", metrics={"loss": "min"})
        tell(run.save(state_of(0, elements=elements), step=0).id)


def measure(folder: Path, elements: int, tell: Callable[[str], None]) -> None:
    """Save once, in a process like those that are killed; send its duration and calls."""
    marks: list[float] = []
    wires: list[Tripwire] = []

    def mark(line: str) -> None:
        if line == "begins":
            wires.append(Tripwire(0, after=False))
        marks.append(time.perf_counter())

    save(folder, 1, elements, mark)
    tell(json.dumps({"seconds": marks[1] - marks[0], "calls": wires[0].seen}))


class Campaign:
    """Rounds of kills; collects figures and problems."""

    def __init__(self, folder: Path, seed: int, elements: int) -> None:
        self.folder = folder
        self.elements = elements
        self.chance = random.Random(seed)
        self.figures: Counter[str] = Counter()
        self.problems: list[str] = []
        self.measured: dict[str, Any] = {}
        self.ids: list[str] = []
        self.next_seed = 0

    def renew(self, number: int) -> Path:
        """Make a new store, and drop the one before."""
        shutil.rmtree(self.folder, ignore_errors=True)
        store = self.folder / f"store-{number}"
        finish(*fork(lambda tell: create(store, self.elements, tell)))
        told = finish(*fork(lambda tell: measure(store, self.elements, tell)))
        self.measured = json.loads(told[-1])
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
        if self.chance.random() < 0.5:
            told = self.killed_by_time(store, seed)
        else:
            told = self.killed_at_call(store, seed)
        acknowledged = told[1:2]
        found = self.checked(store)
        self.compare(store, before, found, acknowledged)
        self.ids = found

    def killed_by_time(self, store: Path, seed: int) -> list[str]:
        """Kill a save after a random time; return the lines that it sent."""
        pid, reading = fork(lambda tell: save(store, seed, self.elements, tell))
        head = os.read(reading, len("begins\n"))
        time.sleep(self.chance.random() * 1.1 * self.measured["seconds"])
        os.kill(pid, signal.SIGKILL)
        return [head.decode().strip(), *finish(pid, reading)]

    def killed_at_call(self, store: Path, seed: int) -> list[str]:
        """Kill a save at one of its calls on files; return the lines that it sent."""
        at = self.chance.randint(1, self.measured["calls"] + 4)
        after = self.chance.random() < 0.5

        def action(tell: Callable[[str], None]) -> None:
            def armed(line: str) -> None:
                if line == "begins":
                    Tripwire(at, after=after)
                tell(line)

            save(store, seed, self.elements, armed)

        return finish(*fork(action))

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
        return {"figures": self.figures, "problems": self.problems, **self.measured}


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
