"""Retention carried out: by commits only, on the newest catalog, and of a job's source."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import ckptstore
from ckptstore import errors
from ckptstore.catalog import content_ops, replica_ops, retention
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.log import Log
from ckptstore.catalog.state import Op
from ckptstore.jobs import Job, JobReport, read_job, run_job
from ckptstore.jobs.work import StepReport
from ckptstore.maintenance.replicas.evict import SecondLook
from ckptstore.maintenance.retention import retain as retention_module
from ckptstore.maintenance.retention.reduce import Target
from ckptstore.maintenance.retention.retain import RetainReport


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a store of one run: six versions, the loss is least at 30."""
    with ckptstore.open(tmp_path / "store", create=True) as store:
        run = store.run("gpt", metrics={"loss": "min"})
        for step in range(0, 60, 10):
            run.save(_state(step), step=step, metrics={"loss": abs(step - 30)})
    return tmp_path / "store"


@pytest.fixture
def store(path: Path) -> Iterator[ckptstore.Store]:
    """Return that store, open."""
    with ckptstore.open(path) as opened:
        yield opened


def _state(step: int) -> dict[str, Any]:
    return {
        "model": {"w": torch.full((100, 100), float(step))},
        "optimizer": {"m": torch.full((100, 100), step + 0.5)},
    }


POLICY = {"full": "last 2", "weights": "best 1 loss", "record": "every 20 steps"}


def _levels(store: ckptstore.Store) -> dict[int, str]:
    return {version.step: version.level for version in store.versions("gpt")}


def test_a_dry_run_changes_nothing_and_says_it_all(store: ckptstore.Store) -> None:
    """It reports exactly what the real one then does."""
    before = store.repo.refresh().number
    report = store.retain(POLICY, run="gpt", dry_run=True)
    assert store.repo.refresh().number == before
    planned = {d.version.step: d.fate for d in report.plans[0].decisions if d.fate != "gone"}
    done = store.retain(POLICY, run="gpt")
    assert (
        planned
        == _levels(store)
        == {0: "record", 20: "record", 30: "weights", 40: "full", 50: "full"}
    )
    assert (report.dry_run, done.dry_run) == (True, False)
    assert done.commits == (before + 1,)
    assert report.reclaimable_bytes == done.reclaimable_bytes > 0
    assert store.verify().ok
    assert torch.equal(store.load("gpt@30")["model"]["w"], _state(30)["model"]["w"])


def test_again_there_is_nothing_to_do(store: ckptstore.Store) -> None:
    """A second time commits nothing."""
    store.retain(POLICY)
    assert store.retain(POLICY).commits == ()


@pytest.mark.parametrize("level", ["weights", "record"])
def test_what_is_pinned_after_the_plan_keeps_its_content(
    store: ckptstore.Store, path: Path, level: Literal["weights", "record"]
) -> None:
    """The commit refuses by itself, whatever the plan was."""
    version = store.resolve("gpt@10")
    less = retention_module.prepare(store.repo, version, Target(level=level), []).move
    with ckptstore.open(path) as other:
        other.pin("gpt@10")
    before = store.repo.refresh().number
    with pytest.raises(errors.PolicyError, match=r"gpt@10 .* is pinned") as caught:
        store.repo.log.append(lambda now: content_ops.relocate(now, [less]))
    assert "unpin it" in caught.value.hint
    assert store.repo.refresh().number == before
    store.gc(grace_s=0, orphan_age_s=0)
    assert _levels(store)[10] == "full"
    assert torch.equal(store.load("gpt@10")["optimizer"]["m"], _state(10)["optimizer"]["m"])


def test_many_versions_take_several_commits(
    store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No commit grows beyond its bounds, and none of the work is lost."""
    monkeypatch.setattr("ckptstore.limits.RELOCATES_PER_COMMIT", 2)
    monkeypatch.setattr("ckptstore.limits.VERSIONS_PER_OP_MAX", 1)
    report = store.retain({"full": "last 1", "weights": "every 20 steps"})
    assert _levels(store) == {0: "weights", 20: "weights", 40: "weights", 50: "full"}
    assert len(report.commits) == 2
    assert store.verify().ok


def test_a_refused_plan_changes_no_run(store: ckptstore.Store) -> None:
    """One run whose policy keeps no content stops the others, too: it is a mistake somewhere."""
    store.run("other").save(_state(1), step=1)
    store.run("other").save(_state(2), step=2, tags=["x"])
    before = store.repo.refresh().number
    with pytest.raises(errors.PolicyError, match=r"run 'gpt'.*keep the content of none"):
        store.retain({"full": "tagged"})
    with pytest.raises(errors.PolicyError, match=r"run 'other'.*low or high"):
        store.retain({"full": "best 1 loss"})
    assert store.repo.refresh().number == before
    assert "none" in store.retain({"full": "tagged"}, dry_run=True).plans[0].refused


def test_what_is_no_policy_is_refused(store: ckptstore.Store) -> None:
    """No policy at all, an empty one, one that is no policy, a run that is not there."""
    with pytest.raises(errors.InvalidInputError, match="no retention policy"):
        store.retain()
    with pytest.raises(errors.PolicyError, match="delete everything"):
        store.retain({})
    with pytest.raises(errors.PolicyError, match="delete everything"):
        store.set_policy({"full": []})
    with pytest.raises(errors.InvalidInputError, match="not a rule"):
        store.retain({"full": "some"})
    with pytest.raises(errors.RunNotFoundError):
        store.retain(POLICY, run="gtp")


def test_a_read_only_store_plans_and_no_more(path: Path) -> None:
    """Who may not write may look."""
    with ckptstore.open(path, read_only=True) as store:
        assert store.retain(POLICY, dry_run=True).changes
        with pytest.raises(errors.ReadOnlyError):
            store.retain(POLICY)


def test_policies_are_stored_per_run_and_store(store: ckptstore.Store, path: Path) -> None:
    """A run's own comes first; None takes one away; a run may have one before its first save."""
    store.set_policy({"full": "last 3"})
    store.run("gpt").set_policy(POLICY)
    store.run("new", metrics={"acc": "max"}).set_policy({"full": "best 2 acc"})
    with ckptstore.open(path) as other:
        infos = {info.name: info for info in other.runs()}
        assert infos["gpt"].policy == {
            "full": ["last 2"], "weights": ["best 1 loss"], "record": ["every 20 steps"]
        }  # fmt: skip
        assert infos["new"].policy == {"full": ["best 2 acc"]}
        other.run("gpt").retain()
        assert len(_levels(other)) == 5
        other.run("gpt").set_policy(None)
        assert other.runs()[0].policy is None
        other.retain(run="gpt")
        assert list(_levels(other).values()).count("full") == 2
        other.set_policy(None)
        with pytest.raises(errors.InvalidInputError, match="run 'gpt' has no retention policy"):
            other.retain(run="gpt")


def test_a_save_can_be_followed_by_retention(store: ckptstore.Store) -> None:
    """A run that prunes itself keeps what its policy says after each save."""
    run = store.run("self", metrics={"loss": "min"})
    with pytest.raises(errors.InvalidInputError, match="no retention policy"):
        run.save(_state(0), step=0, retain=True)
    assert run.versions() == []
    run.set_policy({"full": "last 2", "weights": "best 1 loss"})
    for step, loss in enumerate([5, 1, 4, 3, 2]):
        version = run.save(_state(step), step=step, metrics={"loss": loss}, retain=True)
        assert version.level == "full"
    assert {v.step: v.level for v in run.versions()} == {1: "weights", 3: "full", 4: "full"}


def test_retention_that_fails_after_a_save_is_logged(
    store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The version is durable: the save returns it, and says that pruning did not work."""
    run = store.run("gpt")
    run.set_policy({"full": "last 1"})

    def retain(*_: object, **__: object) -> RetainReport:
        msg = "not now"
        raise errors.PolicyError(msg)

    monkeypatch.setattr("ckptstore.maintenance.retention.retain.retain", retain)
    with caplog.at_level(logging.WARNING, "ckptstore"):
        version = run.save(_state(60), step=60, retain=True)
    assert run.head == version
    assert "not now" in caplog.text


def test_encodings_alone_leave_the_rules_to_the_store(store: ckptstore.Store) -> None:
    """A run may have encodings of its own and be kept by the store's rules; and the other way."""
    run = store.run("gpt")
    run.set_policy({"encodings": {"role:optimizer": "bf16"}})
    with pytest.raises(errors.InvalidInputError, match="no retention policy"):
        run.retain()
    with pytest.raises(errors.PolicyError, match="delete everything"):
        run.retain({"encodings": {"role:optimizer": "bf16"}})
    store.set_policy({"full": "last 1", "weights": "all", "encodings": {"model.*": "int8"}})
    catalog = store.repo.refresh()
    assert retention.stored_encodings(catalog, "gpt") == {"role:optimizer": "bf16"}
    assert retention.stored_encodings(catalog, "not there yet") == {"model.*": "int8"}
    run.retain()
    assert list(_levels(store).values()) == ["weights"] * 5 + ["full"]


STEPS = (1, 2, 3)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Return a job over a source of three versions, whose last one alone its rules keep."""
    with ckptstore.open(tmp_path / "hot", create=True) as store:
        run = store.run("gpt")
        for step in STEPS:
            run.save(_job_state(step), step=step)
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


def _job_state(step: int) -> dict[str, dict[str, torch.Tensor]]:
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
        for part, tensors in _job_state(step).items():
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
    assert not step.ok
    assert step.exit_code == errors.IntegrityError.exit_code
    assert (step.result["missed"], step.result["changes"]) == (1, 1)
    with ckptstore.open(tmp_path / "hot") as hot:
        assert [version.step for version in hot.versions()] == [2, 3]
    _assert_loads(tmp_path / "hot", 2)


def test_what_cannot_be_noted_frees_nothing(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """A source that is full has no room for the note that goes before its versions: it is told."""
    real, asked = replica_ops.replicated, []

    def full(*args: Any) -> list[Op]:  # noqa: ANN401 - as it is
        asked.append(args)
        if len(asked) > 1 and (ops := real(*args)):
            raise errors.StorageFullError(f"{len(ops)} cannot be appended")
        return real(*args)

    monkeypatch.setattr(replica_ops, "replicated", full)
    report = run_job(job)
    assert report.exit_code == errors.StorageError.exit_code
    assert [(step.name, step.ok) for step in report.steps] == [("replicate", False)]
    assert "cannot be appended" in report.steps[0].error
    monkeypatch.setattr(replica_ops, "replicated", real)
    assert _step(run_job(job)).result["changes"] == 2


def test_no_answer_to_the_second_look(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the target cannot be looked at again, everything is here as before."""
    look = SecondLook.look

    def deaf(self: SecondLook, gone: Any, **more: Any) -> Any:  # noqa: ANN401
        def refresh() -> None:
            raise errors.TransientStorageError("injected")

        monkeypatch.setattr(self.there, "refresh", refresh)
        return look(self, gone, **more)

    monkeypatch.setattr(SecondLook, "look", deaf)
    report = run_job(job)
    assert not _step(report).ok
    assert "injected" in _step(report).error
    assert _step(report).exit_code == errors.StorageError.exit_code
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
