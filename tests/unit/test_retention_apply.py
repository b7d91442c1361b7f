"""Carrying retention out: by commits only, on the newest catalog, after saves if asked."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import ckptstore
from ckptstore.catalog import content_ops, retention
from ckptstore.errors import InvalidInputError, PolicyError, ReadOnlyError, RunNotFoundError
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


def test_what_is_tagged_or_pinned_meanwhile_stays(
    store: ckptstore.Store, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan is made again on the catalog that the commit follows."""
    real = retention_module.prepare

    def prepare(*arguments: Any) -> Any:  # noqa: ANN401 - passed on
        with ckptstore.open(path) as other:
            other.tag("gpt@10", "wanted")
            other.pin("gpt@20")
            other.run("gpt").rollback(0)
        return real(*arguments)

    monkeypatch.setattr(retention_module, "prepare", prepare)
    store.retain({"full": "last 1", "weights": "best 1 loss"})
    assert _levels(store)[10] == _levels(store)[20] == _levels(store)[0] == "full"


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
    with pytest.raises(PolicyError, match=r"gpt@10 .* is pinned") as caught:
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
    with pytest.raises(PolicyError, match=r"run 'gpt'.*keep the content of none"):
        store.retain({"full": "tagged"})
    with pytest.raises(PolicyError, match=r"run 'other'.*low or high"):
        store.retain({"full": "best 1 loss"})
    assert store.repo.refresh().number == before
    assert "none" in store.retain({"full": "tagged"}, dry_run=True).plans[0].refused


def test_what_is_no_policy_is_refused(store: ckptstore.Store) -> None:
    """No policy at all, an empty one, one that is no policy, a run that is not there."""
    with pytest.raises(InvalidInputError, match="no retention policy"):
        store.retain()
    with pytest.raises(PolicyError, match="delete everything"):
        store.retain({})
    with pytest.raises(PolicyError, match="delete everything"):
        store.set_policy({"full": []})
    with pytest.raises(InvalidInputError, match="not a rule"):
        store.retain({"full": "some"})
    with pytest.raises(RunNotFoundError):
        store.retain(POLICY, run="gtp")


def test_a_read_only_store_plans_and_no_more(path: Path) -> None:
    """Who may not write may look."""
    with ckptstore.open(path, read_only=True) as store:
        assert store.retain(POLICY, dry_run=True).changes
        with pytest.raises(ReadOnlyError):
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
        with pytest.raises(InvalidInputError, match="run 'gpt' has no retention policy"):
            other.retain(run="gpt")


def test_a_save_can_be_followed_by_retention(store: ckptstore.Store) -> None:
    """A run that prunes itself keeps what its policy says after each save."""
    run = store.run("self", metrics={"loss": "min"})
    with pytest.raises(InvalidInputError, match="no retention policy"):
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
        raise PolicyError(msg)

    monkeypatch.setattr("ckptstore.maintenance.retention.retain.retain", retain)
    with caplog.at_level(logging.WARNING, "ckptstore"):
        version = run.save(_state(60), step=60, retain=True)
    assert run.head == version
    assert "not now" in caplog.text


def test_encodings_alone_leave_the_rules_to_the_store(store: ckptstore.Store) -> None:
    """A run may have encodings of its own and be kept by the store's rules; and the other way."""
    run = store.run("gpt")
    run.set_policy({"encodings": {"role:optimizer": "bf16"}})
    with pytest.raises(InvalidInputError, match="no retention policy"):
        run.retain()
    with pytest.raises(PolicyError, match="delete everything"):
        run.retain({"encodings": {"role:optimizer": "bf16"}})
    store.set_policy({"full": "last 1", "weights": "all", "encodings": {"model.*": "int8"}})
    catalog = store.repo.refresh()
    assert retention.stored_encodings(catalog, "gpt") == {"role:optimizer": "bf16"}
    assert retention.stored_encodings(catalog, "not there yet") == {"model.*": "int8"}
    run.retain()
    assert list(_levels(store).values()) == ["weights"] * 5 + ["full"]
