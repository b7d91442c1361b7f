"""SIGKILL of workers, and of the coordinator, in the middle of what runs over a cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from programs import run_program
from soaking import soak_rounds, soak_seed

OPERATIONS = ("gc", "repack", "verify", "replicate")


def campaign(folder: Path, *, rounds: int, seed: int, victim: str, engine: str) -> dict[str, Any]:
    """Return the figures of a campaign of kills."""
    numbers = [str(rounds), str(seed), victim, engine]
    printed = run_program("faultkit.worker_driver", str(folder), *numbers, timeout_s=3000)
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("victim", "engine"), [("worker", "dask"), ("worker", "pool"), ("coordinator", "dask")]
)
def test_who_dies_loses_nothing(tmp_path: Path, victim: str, engine: str) -> None:
    """Dask runs a dead worker's tasks again; what a dead pool or coordinator began is finished."""
    found = campaign(tmp_path / "campaign", rounds=4, seed=7, victim=victim, engine=engine)

    assert found["problems"] == []
    assert found["figures"]["rounds"] == 4


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("victim", "engine"), [("worker", "dask"), ("worker", "pool"), ("coordinator", "dask")]
)
def test_who_dies_a_hundred_times_loses_nothing(
    tmp_path: Path, victim: str, engine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The long form: 100 kills at random moments, every operation hit at work."""
    rounds, seed = soak_rounds(100), soak_seed(2026)
    found = campaign(tmp_path / "campaign", rounds=rounds, seed=seed, victim=victim, engine=engine)

    with capsys.disabled():
        print(json.dumps(found, indent=1))  # noqa: T201 - the figures of a campaign
    assert found["problems"] == []
    assert found["figures"]["rounds"] == rounds
    for operation in OPERATIONS:
        assert found["figures"].get(f"{operation}: at work", 0) > 0, operation
