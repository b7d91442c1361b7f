"""Removing by hand and taking it back: refusals, dry runs, and when it is too late."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from faultkit.stores import trusting
from metered import MeteredBackend

import ckptstore
from ckptstore.backends.memory import MemoryBackend
from ckptstore.errors import (
    CondemnedError,
    InvalidInputError,
    InvalidRefError,
    PolicyError,
    VersionNotFoundError,
)
from ckptstore.repo import create_on
from ckptstore.store import Store


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a store with a run of five versions, the third tagged."""
    with ckptstore.open(tmp_path / "store", create=True) as store:
        run = store.run("gpt", metrics={"loss": "min"})
        for step in range(5):
            tags = ["paper"] if step == 2 else []
            run.save({"model": {"w": torch.full((50, 50), step / 7)}}, step=step, tags=tags)
    return tmp_path / "store"


@pytest.fixture
def store(path: Path) -> Iterator[ckptstore.Store]:
    """Return that store, open."""
    with ckptstore.open(path) as opened:
        yield opened


def _steps(store: ckptstore.Store) -> list[int]:
    return [version.step for version in store.versions("gpt")]


def test_removed_and_back(store: ckptstore.Store) -> None:
    """What is removed is gone from lists and refs, and undeleting brings it back whole."""
    (removal,) = store.remove(["gpt@1"], reason="bad data")
    assert removal.version.step == 1
    assert removal.reclaimable_bytes > removal.version.roles["weights"].stored
    assert _steps(store) == [0, 2, 3, 4]
    with pytest.raises(VersionNotFoundError):
        store.resolve("gpt@1")
    with pytest.raises(VersionNotFoundError, match="undelete"):
        store.resolve(f"#{removal.version.id}")
    assert store.log()[-1].ops[0].reason == "bad data"  # type: ignore[attr-defined]  # a delete
    (back,) = store.undelete([f"#{removal.version.id[:10]}"])
    assert back.step == 1
    assert _steps(store) == [0, 1, 2, 3, 4]
    assert store.load("gpt@1")["model"]["w"][0, 0].item() == pytest.approx(1 / 7)


def test_many_are_removed_by_as_few_requests_as_one() -> None:
    """The log is read as often, however many are named; what comes back has its manifest read."""
    asked = []
    for count in (1, 30):
        meter = MeteredBackend(MemoryBackend(f"remove-{count}"))
        with Store(create_on(meter, prober=trusting)) as store:
            for step in range(count + 1):
                store.run("gpt").save({"w": b"%d" % step}, step=step)
            refs = [f"gpt@{step}" for step in range(count)]
            for action in (store.remove, store.undelete):
                before = meter.snapshot()
                assert len(action(refs)) == count
                after = meter.snapshot()
                asked.append({name: after[name].calls - before[name].calls for name in before})
    (removed, undeleted), many = asked[:2], asked[2:]
    assert many == [removed, undeleted | {"get": 30}]


@pytest.mark.parametrize(("ref", "said"), [("gpt@2", "tagged paper"), ("gpt@4", "head")])
def test_what_needs_force(store: ckptstore.Store, ref: str, said: str) -> None:
    """Tagged versions and heads go only by force; a dry run says so, and nothing goes by half."""
    (removal,) = store.remove([ref], dry_run=True)
    assert said in removal.obstacle
    with pytest.raises(PolicyError, match=said):
        store.remove(["gpt@0", ref])
    assert _steps(store) == [0, 1, 2, 3, 4]
    assert store.remove([ref], force=True, dry_run=True)[0].obstacle == ""
    store.remove([ref], force=True)
    assert store.resolve("gpt").step == (3 if ref == "gpt@4" else 4)


def test_pins_hold_against_force(store: ckptstore.Store) -> None:
    """Until they are taken away."""
    assert store.pin("gpt@1").pinned
    assert store.pin("gpt@1").pinned, "twice is once"
    assert "pinned" in store.remove(["gpt@1"], force=True, dry_run=True)[0].obstacle
    with pytest.raises(PolicyError, match="pinned"):
        store.remove(["gpt@1"], force=True)
    assert not store.unpin("gpt@1").pinned
    store.remove(["gpt@1"])
    assert _steps(store) == [0, 2, 3, 4]


def test_the_only_verified_version_needs_force(store: ckptstore.Store) -> None:
    """Unless the whole run goes."""
    store.verify(["gpt@0", "gpt@1"], record=True)
    store.remove(["gpt@0"])
    assert "only verified" in store.remove(["gpt@1"], dry_run=True)[0].obstacle
    with pytest.raises(PolicyError, match="only verified"):
        store.remove(["gpt@1"])
    store.run("gpt").untag("paper")
    everything = [f"gpt@{step}" for step in range(1, 5)]
    assert all(not r.obstacle for r in store.remove(everything, dry_run=True))
    store.remove(everything)
    assert _steps(store) == []
    assert len(store.undelete([f"gpt@{step}" for step in range(5)])) == 5
    assert store.run("gpt").head is not None


def test_a_collection_makes_it_too_late(path: Path) -> None:
    """Condemned or deleted: the version cannot come back, and nothing half of it does."""
    with ckptstore.open(path) as store:
        removed = store.remove(["gpt@0"])[0].version
        store.gc(grace_s=3600, orphan_age_s=0)
        with pytest.raises(CondemnedError):
            store.undelete([f"#{removed.id}"])
        store.gc(grace_s=0, orphan_age_s=0)
        with pytest.raises(CondemnedError):
            store.undelete([f"#{removed.id}"])
    with ckptstore.open(path) as store:
        with pytest.raises((VersionNotFoundError, CondemnedError)):
            store.undelete([f"#{removed.id}"])
        assert _steps(store) == [1, 2, 3, 4]
        assert store.verify().ok


def test_a_pack_that_is_gone_makes_it_too_late(store: ckptstore.Store, path: Path) -> None:
    """Who opens a store after a sweep cannot know its names: each pack is looked for."""
    removed = store.remove(["gpt@0"])[0].version
    for pack in sorted((path / "packs").rglob("*.pack")):
        pack.unlink()
    with pytest.raises(VersionNotFoundError, match="has deleted what it needs"):
        store.undelete([f"#{removed.id}"])
    assert 0 not in _steps(store)


def test_only_what_is_deleted_comes_back(store: ckptstore.Store) -> None:
    """A version that is there, one that never was, and a ref that names no deleted one."""
    there = store.resolve("gpt@1").id
    with pytest.raises(InvalidInputError, match="not deleted"):
        store.undelete([f"#{there}"])
    for ref in ("gpt@1", "gpt@77", "#" + "f" * 32):
        with pytest.raises(VersionNotFoundError, match="names no version"):
            store.undelete([ref])
    for ref in ("gpt@latest", "gpt@paper", "gpt"):
        with pytest.raises(InvalidRefError, match="by its id or step"):
            store.undelete([ref])
    with pytest.raises(InvalidInputError, match="no version to remove"):
        store.remove([])


def test_of_a_step_that_was_deleted_twice_the_newer_comes_back(store: ckptstore.Store) -> None:
    """By step the version that was saved last; the other by its id."""
    store.remove(["gpt@1"])
    newer = store.run("gpt").save({"model": {"w": torch.ones(3)}}, step=1)
    store.run("gpt").save({"x": 1}, step=9)
    store.remove([f"#{newer.id}"])
    assert store.undelete(["gpt@1"])[0].id == newer.id
    assert store.undelete(["gpt@1"])[0].id != newer.id
    assert _steps(store).count(1) == 2


def test_a_record_comes_back_without_objects(store: ckptstore.Store) -> None:
    """It needs none."""
    store.age(["gpt@0"], "record")
    store.remove(["gpt@0"])
    store.gc(grace_s=0, orphan_age_s=0)
    assert store.undelete(["gpt@0"])[0].level == "record"
