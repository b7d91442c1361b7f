"""SIGKILL in the middle of archival jobs: no version is ever whole nowhere, nor shown in part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from programs import run_program
from soaking import soak_rounds, soak_seed

PHASES = (
    "killed before anything travelled",
    "killed while a version travelled",
    "killed after versions had come",
    "killed after versions were evicted",
    "the job ended before the kill",
)


def campaign(
    folder: Path, *, rounds: int, seed: int, elements: int, command: str
) -> dict[str, Any]:
    """Return the figures of a campaign of kills."""
    numbers = [str(number) for number in (rounds, seed, elements)]
    printed = run_program(
        "faultkit.replicate_driver", str(folder), *numbers, command, timeout_s=3600
    )
    found: dict[str, Any] = json.loads(printed)
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("command", ["archive", "replicate"])
def test_killed_jobs_lose_nothing(tmp_path: Path, command: str) -> None:
    """After each kill all that shows loads bit-identical, and each version is whole somewhere."""
    found = campaign(tmp_path, rounds=6, seed=5, elements=20_000, command=command)

    assert found["problems"] == []
    assert found["figures"]["rounds"] == 6


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("command", ["archive", "replicate"])
def test_a_hundred_killed_jobs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """The long form: more than 100 kills that hit every phase of a job."""
    rounds = soak_rounds(150)
    found = campaign(
        tmp_path, rounds=rounds, seed=soak_seed(2026), elements=200_000, command=command
    )

    with capsys.disabled():
        print(json.dumps(found, indent=1))  # noqa: T201
    assert found["problems"] == []
    assert found["figures"]["killed"] >= rounds * 2 // 3
    for phase in PHASES[: 4 if command == "archive" else 3]:
        assert found["figures"].get(phase, 0) > 0, phase
