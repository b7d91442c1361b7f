"""Kills archival jobs with SIGKILL, again and again, and checks both stores after each.

Run as ``python -m faultkit.replicate_driver FOLDER ROUNDS SEED ELEMENTS COMMAND``; prints figures
as JSON. COMMAND is the killed job: ``archive`` replicates a store with forks and a rollback to a
second one, evicts from the first the versions of the second, and collects; ``replicate`` is its
first part. As in :mod:`faultkit.kill_driver`, half of the kills come after a random part of the
usual time, the others right before or after a random system call on files.
"""

from __future__ import annotations

import contextlib
import json
import os
import random  # noqa: TID251 - seeded
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import ckptstore
import ckptstore.states.lazy
import ckptstore.states.save
from ckptstore.cli.main import main as cli
from faultkit.kill_driver import Tell, counted, finish, fork, killed, names
from faultkit.states import differences, state_of

__all__ = ["main"]

JOB = """
[source]
url = "{folder}/hot"
[target]
url = "{folder}/cold"
[retain]
evict = "last 1"
[gc]
source = true
grace = "1s"
"""
_MAKES_TARGET = 0.2
"""Share of the beginnings at which a job makes the second store: that alone is half its calls."""
SEEDS = range(1, 6)


def train(folder: Path, elements: int, tell: Tell) -> None:
    """Make the store to be archived; send id, seed and parent of each version."""
    with ckptstore.open(folder / "hot", create=True) as store:
        run = store.run("gpt", metrics={"loss": "min"})
        for seed in SEEDS:
            state = state_of(seed, elements=elements)
            run.save(state, step=seed, metrics={"loss": 1 / seed}, tags=[f"t{seed}"][: seed % 2])
            if seed == 3:
                run.rollback("2")
        store.fork("gpt@4", "tuned")
        tuned = store.run("tuned")
        tuned.save(state_of(9, elements=elements), step=9)
        tuned.save(state_of(10, elements=elements), step=10)
        tell(json.dumps([[v.id, v.step, v.parent] for v in store.versions()]))
    ckptstore.open(folder / "cold", create=True).close()


def work(folder: Path, command: str, tell: Tell) -> None:
    """Run the command once; send a line at the beginning, and its exit code."""
    words = {
        "archive": ["--job", f"{folder}/job.toml", "--report", f"{folder}/report.json"],
        "replicate": ["--to", f"{folder}/cold", "--store", f"{folder}/hot"],
    }
    sys.argv = ["ckptstore", command, *words[command], "--quiet"]
    tell("begins")
    code: object = 0
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        try:
            cli()
        except SystemExit as ended:
            code = ended.code or 0
    tell(json.dumps(code))


def check(folder: Path, versions: list[list[Any]], elements: int, tell: Tell) -> None:
    """Load every version that either store shows; send the defects, and the contents."""
    problems: list[str] = []
    whole: dict[str, set[str]] = {}
    for name in ("hot", "cold"):
        if not (folder / name / "store.json").exists():
            continue
        with ckptstore.open(folder / name) as store:
            problems += [f"{name}: {problem.message}" for problem in store.verify().problems]
            there = store.versions()
            whole[name] = {v.id for v in there if v.level != "record"}
            for version in there:
                if version.level != "record":
                    meant = state_of(version.step, elements=elements)
                    found = store.load(f"#{version.id}")
                    problems += differences(found, meant, f"{name} {version.run}@{version.step}")
            said = [[v.id, v.step, v.parent] for v in there]
            problems += [f"{name} shows {one}" for one in said if one not in versions]
            problems += [f"{name} lacks {one}" for one in versions if one not in said] * (
                name == "hot"
            )
    either = whole.get("hot", set()) | whole.get("cold", set())
    problems += [f"{one} is whole nowhere" for one, _, _ in versions if one not in either]
    counts = {name: len(ids) for name, ids in whole.items()}
    tell(json.dumps({"problems": problems, **counts}))


class Campaign:
    """Rounds of kills; collects figures and problems."""

    def __init__(self, folder: Path, seed: int, elements: int, command: str) -> None:
        self.folder = folder
        self.command = command
        self.elements = elements
        self.chance = random.Random(seed)
        self.figures: Counter[str] = Counter()
        self.problems: list[str] = []
        self.versions: list[list[Any]] = []
        self.calls = 0
        self.now: dict[str, int] = {}

    def begin(self) -> Path:
        """Make the store, and measure a job."""
        first = self.folder / "first"
        first.mkdir(parents=True)
        for seed in (*SEEDS, 9, 10):
            state_of(seed, elements=self.elements)  # built here once, not in each child
        told = finish(*fork(lambda tell: train(first, self.elements, tell)))
        self.versions = json.loads(told[-1])
        trial = self.renew(first, "trial", makes_target=0)
        self.calls = counted(lambda tell: work(trial, self.command, tell))
        return first

    def renew(self, first: Path, name: str, *, makes_target: float = _MAKES_TARGET) -> Path:
        """Return a folder with a copy of the store, and sometimes an empty second one."""
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(first, folder)
        if self.chance.random() < makes_target:
            shutil.rmtree(folder / "cold")
        (folder / "job.toml").write_text(JOB.format(folder=folder))
        self.now = {"hot": len(self.versions), "cold": 0}
        return folder

    def round(self, folder: Path) -> bool:
        """Kill one job and check the stores; return whether nothing was left to do."""
        before = names(folder)
        told = killed(self.chance, self.calls, lambda tell: work(folder, self.command, tell))
        found = self.checked(folder)
        fresh = (name for name in names(folder) - before if ".tmp-" not in name)
        kinds = {name.split("/")[1] for name in fresh if "/" in name}
        self.figures["rounds"] += 1
        self.figures["killed"] += len(told) < 2
        ended = len(told) > 1
        if ended:
            self.figures["the job ended before the kill"] += 1
            self.problems += [] if told[1] == "0" else [f"it ended with code {told[1]}"]
        elif found.get("hot", 0) < self.now.get("hot", 0):
            self.figures["killed after versions were evicted"] += 1
        elif found.get("cold", 0) > self.now.get("cold", 0):
            self.figures["killed after versions had come"] += 1
        elif kinds & {"packs", "manifests"}:
            self.figures["killed while a version travelled"] += 1
        else:
            self.figures["killed before anything travelled"] += 1
        self.now = found
        return ended

    def checked(self, folder: Path) -> dict[str, int]:
        """Check both stores in a process of its own; return how many versions are whole."""
        told = finish(*fork(lambda tell: check(folder, self.versions, self.elements, tell)))
        found: dict[str, Any] = json.loads(told[-1]) if told else {"error": "it said nothing"}
        self.problems += found.pop("problems", [found.get("error", "")])
        return found

    def run(self, rounds: int) -> dict[str, Any]:
        """Return figures and problems after `rounds` rounds."""
        first = self.begin()
        folder = self.renew(first, "stores")
        for _ in range(rounds):
            if self.round(folder) and not self.problems:
                folder = self.renew(first, "stores")
            if self.problems:
                break
        # No leftover stops a job.
        told = finish(*fork(lambda tell: work(folder, self.command, tell)))
        if not self.problems and (
            told[1:] != ["0"] or self.checked(folder).get("cold") != len(self.versions)
        ):
            self.problems.append(f"the job after the last kill left something undone: {told}")
        return {"figures": self.figures, "problems": self.problems, "calls": self.calls}


def main() -> None:
    """Run a campaign."""
    torch.set_num_threads(1)
    folder, rounds, seed, elements, command = sys.argv[1:]
    campaign = Campaign(Path(folder) / "campaign", int(seed), int(elements), command)
    json.dump(campaign.run(int(rounds)), sys.stdout)


if __name__ == "__main__":
    main()
