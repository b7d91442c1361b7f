"""SIGKILL of a training that writes back: nothing durable is lost, and the next one catches up."""

from __future__ import annotations

import random  # noqa: TID251 - seeded
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from soaking import soak_rounds, soak_seed

import ckptstore

TRAIN = """
import sys, torch, ckptstore
from faultkit.tripwire import Tripwire
folder, saves, calls = sys.argv[1], *map(int, sys.argv[2:])
heard = []
def hear(event):
    print(event.kind, event.step, flush=True)
    heard.append(event.kind)
    if event.kind == "durable" and heard.count("durable") == saves:
        Tripwire(calls, after=False)
hot = ckptstore.open(folder + "/hot")
run = hot.run("gpt", write_back="cold")
head = run.head
step = head.step + 1 if head else 0
hot.observe(hear)
print("begins", step, flush=True)
while True:
    state = {"w": torch.full((40_000,), float(step)), "same": torch.arange(40_000.0)}
    if step % 2:
        run.save_async(state, step=step).result()
    else:
        run.save(state, step=step)
    step += 1
"""
_PATIENCE_S = 120.0


def _check(place: Path) -> dict[int, str]:
    """Load all that a store shows, bit by bit; return the states of its versions by step."""
    found: dict[int, str] = {}
    with ckptstore.open(place, read_only=True) as store:
        assert store.verify().ok
        for version in store.versions():
            if version.level == "record":
                continue
            state = store.load(f"#{version.id}", fall_through=False)
            assert torch.equal(state["w"], torch.full((40_000,), float(version.step)))
            found[version.step] = version.state
    return found


def _campaign(folder: Path, *, rounds: int, seed: int) -> int:
    """Let trainings die at a call after some saves, then catch up; return how many versions are."""
    chance = random.Random(seed)
    with ckptstore.open(folder / "hot", create=True) as hot:
        hot.add_replica("cold", folder / "cold", create=True)
    durable: set[int] = set()
    for _ in range(rounds):
        words = [str(folder), str(chance.randint(1, 4)), str(chance.randint(1, 120))]
        child = subprocess.run(
            [sys.executable, "-c", TRAIN, *words], capture_output=True, text=True, check=False
        )
        assert child.returncode == -signal.SIGKILL, child.stderr
        told = child.stdout.splitlines()
        durable.update(int(line.split()[1]) for line in told if line.startswith("durable"))
        there = _check(folder / "cold")
        here = _check(folder / "hot")
        assert durable <= set(here)
        noted = {step for step, state in here.items() if state == "replicated"}
        assert noted <= set(there), (noted, there)
    with ckptstore.open(folder / "hot") as hot:
        hot.write_back("cold")
        for version in hot.versions():
            assert hot.wait_replicated(version, _PATIENCE_S).state == "replicated"
    assert set(_check(folder / "cold")) == set(_check(folder / "hot"))
    return len(_check(folder / "cold"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_trainings_are_caught_up_with(tmp_path: Path) -> None:
    """What is noted as replicated is there, whole; in the end the replica has everything."""
    assert _campaign(tmp_path, rounds=3, seed=1) >= 3


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_hundred_killed_trainings(tmp_path: Path) -> None:
    """The long form."""
    rounds = soak_rounds(100)
    versions = _campaign(tmp_path, rounds=rounds, seed=soak_seed(2026))
    print(f"{rounds} kills, {versions} versions")  # noqa: T201 - the figures of a campaign
    assert versions >= rounds
