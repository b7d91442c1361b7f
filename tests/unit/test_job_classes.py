"""The table [archive] of a job: what is old in the target gets cold, and the report says it."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from coldbackend import ColdBackend, Shelf

import ckptstore
from ckptstore.backends import registry
from ckptstore.backends.memory import open_memory
from ckptstore.errors import InvalidInputError
from ckptstore.jobs import Job, JobReport, read_job, run_job

_MORE = '[archive]\nclass = "GLACIER"\nkeep_hot = "tagged"\n'


@pytest.fixture
def shelf(monkeypatch: pytest.MonkeyPatch) -> Shelf:
    """Let locations of the scheme ``cold`` have storage classes, and return what they know."""
    shelf = Shelf()

    def open_cold(url: str, **_options: object) -> ColdBackend:
        return ColdBackend(open_memory(url.replace("cold://", "memory://")), shelf)

    monkeypatch.setattr("coldbackend.open_cold", open_cold, raising=False)
    monkeypatch.setitem(registry.FACTORIES, "cold", "coldbackend:open_cold")
    return shelf


@pytest.fixture
def target() -> str:
    """Return where the target is to be."""
    return f"cold://{uuid.uuid4().hex}"


def _job(tmp_path: Path, target: str, more: str = _MORE) -> Job:
    file = tmp_path / "nightly.toml"
    file.write_text(f'[source]\nurl = "{tmp_path}/hot"\n[target]\nurl = "{target}"\n{more}')
    return read_job(file)


def _train(tmp_path: Path, *steps: int) -> None:
    with ckptstore.open(tmp_path / "hot", create=True) as store:
        run = store.run("gpt")
        for step in steps:
            tags = ["keep"] if step == 2 else ()
            run.save({"w": torch.full((40_000,), float(step))}, step=step, tags=tags)


def _step(report: JobReport) -> dict[str, Any]:
    (found,) = [step for step in report.steps if step.name == "archive-target"]
    return dict(found.result)


def test_what_is_old_in_the_target_gets_cold(tmp_path: Path, shelf: Shelf, target: str) -> None:
    """All but the head and what a rule keeps; a second run has nothing to do."""
    _train(tmp_path, 1, 2, 3, 4)
    job = _job(tmp_path, target)
    report = run_job(job)
    assert report.ok
    found = _step(report)
    assert (found["versions"], found["moved"], found["class"]) == (2, 2, "GLACIER")
    assert found["moved_bytes"] > 0
    assert len(shelf.classes) == 2
    again = _step(run_job(job))
    assert (again["moved"], again["there"]) == (0, 2)
    with ckptstore.open(target) as cold:
        assert cold.verify().cold_packs_count == 2
        assert cold.load("gpt@keep")["w"][0] == 2.0
        assert cold.load("gpt@4")["w"][0] == 4.0


def test_a_dry_run_moves_nothing(tmp_path: Path, shelf: Shelf, target: str) -> None:
    """Neither where there is no target yet, nor where there is one."""
    _train(tmp_path, 1, 2, 3)
    job = _job(tmp_path, target)
    with ckptstore.open(target, create=True):
        pass
    assert run_job(job, dry_run=True).ok
    run_job(_job(tmp_path, target, ""))
    planned = _step(run_job(job, dry_run=True))
    assert planned["moved"] == 1
    assert not shelf.classes
    missing = _job(tmp_path, f"{tmp_path}/not-there")
    assert _step(run_job(missing, dry_run=True))["moved"] == 0


def test_scrubs_and_evictions_go_on_beside_cold_packs(
    tmp_path: Path, shelf: Shelf, target: str
) -> None:
    """A scrub reads what it can, and content leaves the source also of what is cold."""
    _train(tmp_path, 1, 2, 3, 4)
    more = '[retain]\nevict = "last 1"\n[scrub]\ntarget = 1.0\n[gc]\nsource = true\ntarget = true\n'
    job = _job(tmp_path, target, _MORE + more)
    run_job(job)
    _train(tmp_path, 5)
    report = run_job(job)
    assert report.ok, [step.error for step in report.steps]
    assert len(shelf.classes) == 3
    with ckptstore.open(tmp_path / "hot") as hot:
        levels = {version.step: version.level for version in hot.versions()}
        assert levels == {1: "record", 2: "full", 3: "record", 4: "record", 5: "full"}


def test_a_target_without_classes_fails_its_step_alone(tmp_path: Path) -> None:
    """The rest of the job is done, and the exit code tells."""
    _train(tmp_path, 1, 2, 3)
    report = run_job(_job(tmp_path, f"{tmp_path}/cold"))
    (failed,) = [step for step in report.steps if not step.ok]
    assert failed.name == "archive-target"
    assert "no storage classes" in failed.error
    assert report.exit_code == InvalidInputError.exit_code
