"""SIGKILL in the middle of saves: what was there stays, what was coming is absent or whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from programs import run_program
from shortening import is_short
from soaking import soak_rounds, soak_seed

PHASES = (
    "killed before anything was written", "killed while writing the pack",
    "killed between pack and manifest", "killed between manifest and commit",
    "killed after the commit, before it returned", "save returned before the kill",
)  # fmt: skip


def campaign(folder: Path, *, rounds: int, seed: int, elements: int) -> dict[str, Any]:
    """Return the figures of a campaign of kills."""
    numbers = [str(number) for number in (rounds, seed, elements)]
    printed = run_program("faultkit.kill_driver", str(folder), *numbers, timeout_s=3600)
    found: dict[str, Any] = json.loads(printed)
    return found


@pytest.mark.timeout(600)
def test_killed_saves_are_absent_or_whole(tmp_path: Path) -> None:
    """After each of a few kills every earlier version loads bit-identical and verify is clean."""
    rounds = 12 if is_short() else 24
    found = campaign(tmp_path, rounds=rounds, seed=11, elements=300_000)

    assert found["problems"] == []
    assert found["figures"]["rounds"] == rounds
    assert sum(found["figures"].get(phase, 0) for phase in PHASES[1:5]) > rounds // 5


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_five_hundred_killed_saves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The long form: 500 kills that hit every phase of a save."""
    rounds = soak_rounds(500)
    found = campaign(tmp_path, rounds=rounds, seed=soak_seed(2024), elements=1_000_000)

    with capsys.disabled():
        print(json.dumps(found, indent=1))  # noqa: T201
    assert found["problems"] == []
    assert found["figures"]["rounds"] == rounds
    for phase in PHASES:
        assert found["figures"].get(phase, 0) > 0, phase
