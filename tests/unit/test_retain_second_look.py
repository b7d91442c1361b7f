"""Retention of a job's source: nothing goes for the target's sake that the target does not hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore.catalog import content_ops
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.log import Log
from ckptstore.catalog.state import Op
from ckptstore.errors import StorageError, TransientStorageError
from ckptstore.jobs import Job, JobReport, read_job, run_job
from ckptstore.jobs.report import StepReport
from ckptstore.maintenance.replicas.evict import SecondLook

STEPS = (1, 2, 3)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Return a job over a source of three versions, whose last one alone its rules keep."""
    with ckptstore.open(tmp_path / "hot", create=True) as store:
        run = store.run("gpt")
        for step in STEPS:
            run.save(_state(step), step=step)
    return _job(tmp_path, '{ full = "last 1" }')


def _job(tmp_path: Path, rules: str) -> Job:
    file = tmp_path / "job.toml"
    file.write_text(
        f'[source]\nurl = "{tmp_path}/hot"\n[target]\nurl = "{tmp_path}/cold"\n'
        f"[retain]\nsource = {rules}\n"
    )
    return read_job(file)


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[], object]], None]]:
    """Return what has something happen once, right before the source's retention commits."""
    build = Log.append_any

    def arrange(call: Callable[[], object]) -> None:
        waiting = [call]

        def append_any(self: Log, wanted: Any) -> Any:  # noqa: ANN401 - as the log's own
            def seen(now: Catalog) -> list[Op]:
                ops = list(wanted(now))
                named = {type(op).__name__ for op in ops}
                if waiting and named & {"Delete", "Relocate"}:
                    waiting.pop()()
                return ops

            return build(self, seen)

        monkeypatch.setattr(Log, "append_any", append_any)

    yield arrange
    monkeypatch.undo()


def _state(step: int) -> dict[str, dict[str, torch.Tensor]]:
    return {
        "model": {"w": torch.full((20_000,), float(step))},
        "optimizer": {"m": torch.full((20_000,), -float(step))},
    }


def _step(report: JobReport) -> StepReport:
    (found,) = [step for step in report.steps if step.name == "retain-source"]
    return found


def _assert_loads(place: Path, step: int) -> None:
    with ckptstore.open(place) as store:
        loaded = store.load(f"gpt@{step}")
        for part, tensors in _state(step).items():
            for name, tensor in tensors.items():
                assert torch.equal(loaded[part][name], tensor)


@pytest.mark.short(sample=3)
@pytest.mark.parametrize("rules", ['{ full = "last 1" }', '{ full = "last 1", weights = "all" }'])
@pytest.mark.parametrize("how", ["delete", "reduce", "damage"])
def test_let_go_there_at_the_same_moment(
    job: Job,
    tmp_path: Path,
    meanwhile: Callable[[Callable[[], object]], None],
    how: str,
    rules: str,
) -> None:
    """Lost there between the look and the commit: it is here as before, whole, and stays."""

    def let_go() -> None:
        with ckptstore.open(tmp_path / "cold") as cold:
            if how == "delete":
                cold.remove(["gpt@1"])
            elif how == "reduce":
                cold.age(["gpt@1"], "record")
            else:
                lost = {cold.resolve("gpt@1").id: cold.resolve("gpt@1").manifest_digest}
                cold.repo.log.append(lambda now: content_ops.quarantine(now, lost))

    with ckptstore.open(tmp_path / "hot") as hot:
        before = hot.resolve("gpt@1")
    meanwhile(let_go)
    step = _step(run_job(_job(tmp_path, rules)))

    assert step.ok, step.error
    assert step.result["returned"] == 1
    assert step.result["changes"] == 1
    with ckptstore.open(tmp_path / "hot") as hot:
        levels = {version.step: version.level for version in hot.versions()}
        assert levels[1] == levels[3] == "full"
        assert levels.get(2) == ("weights" if "weights" in rules else None)
        after = hot.resolve("gpt@1")
        assert (after.roles, after.metrics, after.content) == (
            before.roles,
            before.metrics,
            before.content,
        )
        hot.gc(grace_s=0.0, orphan_age_s=0.0)
        assert hot.verify().ok
    _assert_loads(tmp_path / "hot", 1)


def test_what_the_target_has_goes(job: Job, tmp_path: Path) -> None:
    """Where nothing happens meanwhile, nothing is taken back; a dry run foresees the same."""
    foreseen = _step(run_job(job, dry_run=True)).result
    done = _step(run_job(job)).result
    assert {**done, "commits": 0} == dict(foreseen)
    assert (done["changes"], done["returned"], done["missed"]) == (2, 0, 0)
    _assert_loads(tmp_path / "cold", 1)


def test_what_is_not_all_there_stays(job: Job, tmp_path: Path) -> None:
    """A pack that was taken away in the target past its log keeps its version here."""
    with ckptstore.open(tmp_path / "hot") as hot:
        hot.replicate(tmp_path / "cold")
    with ckptstore.open(tmp_path / "cold") as cold:
        packs = cold.repo.manifests.load(cold.resolve("gpt@2")).pieces.packs
        others = cold.repo.manifests.load(cold.resolve("gpt@1")).pieces.packs
    (pack,) = set(packs) - set(others)
    next((tmp_path / "cold").rglob(f"{pack}.pack")).unlink()
    step = _step(run_job(job))
    assert step.ok
    assert (step.result["missed"], step.result["changes"]) == (1, 1)
    with ckptstore.open(tmp_path / "hot") as hot:
        assert [version.step for version in hot.versions()] == [2, 3]
    _assert_loads(tmp_path / "hot", 2)


def test_no_answer_to_the_second_look(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the target cannot be looked at again, everything is here as before."""
    look = SecondLook.look

    def deaf(self: SecondLook, gone: Any, **more: Any) -> Any:  # noqa: ANN401
        def refresh() -> None:
            raise TransientStorageError("injected")

        monkeypatch.setattr(self.there, "refresh", refresh)
        return look(self, gone, **more)

    monkeypatch.setattr(SecondLook, "look", deaf)
    report = run_job(job)
    assert not _step(report).ok
    assert "injected" in _step(report).error
    assert _step(report).exit_code == StorageError.exit_code
    for step in STEPS:
        _assert_loads(tmp_path / "hot", step)


def test_collected_here_at_the_same_moment(
    job: Job, tmp_path: Path, meanwhile: Callable[[Callable[[], object]], None]
) -> None:
    """A collection without grace that is faster yet: the report names what is to be undeleted."""

    def let_go() -> None:
        with ckptstore.open(tmp_path / "cold") as cold:
            cold.remove(["gpt@1"])

    meanwhile(let_go)
    look = SecondLook.look

    def late(self: SecondLook, gone: Any, **more: Any) -> Any:  # noqa: ANN401
        with ckptstore.open(tmp_path / "hot") as hot:
            hot.gc(grace_s=0.0, orphan_age_s=0.0)
        return look(self, gone, **more)

    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(SecondLook, "look", late)
        step = _step(run_job(job))
    (failure,) = step.result["failures"]
    assert failure["step"] == 1
    assert "undelete it there" in failure["message"]
    with ckptstore.open(tmp_path / "cold") as cold:
        cold.undelete([f"#{failure['version']}"])
    _assert_loads(tmp_path / "cold", 1)
