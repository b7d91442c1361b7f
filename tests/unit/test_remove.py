"""Removal, undeletion and rollback of versions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from faultkit.stores import trusting
from metered import MeteredBackend

import ckptstore
from ckptstore import errors
from ckptstore.backends.memory import MemoryBackend
from ckptstore.config import Options
from ckptstore.maintenance.retention.by_hand import rollback
from ckptstore.repo import create_on, open_on
from ckptstore.store import Store
from ckptstore.store.checking import log


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
def store(path: Path) -> Iterator[Store]:
    """Return that store, open."""
    with ckptstore.open(path) as opened:
        yield opened


def _steps(store: Store) -> list[int]:
    return [version.step for version in store.versions("gpt")]


def test_removed_and_back(store: Store) -> None:
    """What is removed is gone from lists and refs, and undeleting brings it back whole."""
    (removal,) = store.remove(["gpt@1"], reason="bad data")
    assert removal.version.step == 1
    assert removal.reclaimable_bytes > removal.version.roles["weights"].stored
    assert _steps(store) == [0, 2, 3, 4]
    with pytest.raises(errors.VersionNotFoundError):
        store.resolve("gpt@1")
    with pytest.raises(errors.VersionNotFoundError, match="undelete"):
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
def test_what_needs_force(store: Store, ref: str, said: str) -> None:
    """Tagged versions and heads go only by force; a dry run says so, and nothing goes by half."""
    (removal,) = store.remove([ref], dry_run=True)
    assert said in removal.obstacle
    with pytest.raises(errors.PolicyError, match=said):
        store.remove(["gpt@0", ref])
    assert _steps(store) == [0, 1, 2, 3, 4]
    assert store.remove([ref], force=True, dry_run=True)[0].obstacle == ""
    store.remove([ref], force=True)
    assert store.resolve("gpt").step == (3 if ref == "gpt@4" else 4)


def test_pins_hold_against_force(store: Store) -> None:
    """Until they are taken away."""
    assert store.pin("gpt@1").pinned
    assert store.pin("gpt@1").pinned, "twice is once"
    assert "pinned" in store.remove(["gpt@1"], force=True, dry_run=True)[0].obstacle
    with pytest.raises(errors.PolicyError, match="pinned"):
        store.remove(["gpt@1"], force=True)
    assert not store.unpin("gpt@1").pinned
    store.remove(["gpt@1"])
    assert _steps(store) == [0, 2, 3, 4]


def test_the_only_verified_version_needs_force(store: Store) -> None:
    """Unless the whole run goes."""
    store.verify(["gpt@0", "gpt@1"], record=True)
    store.remove(["gpt@0"])
    assert "only verified" in store.remove(["gpt@1"], dry_run=True)[0].obstacle
    with pytest.raises(errors.PolicyError, match="only verified"):
        store.remove(["gpt@1"])
    store.run("gpt").untag("paper")
    everything = [f"gpt@{step}" for step in range(1, 5)]
    assert all(not r.obstacle for r in store.remove(everything, dry_run=True))
    store.remove(everything)
    assert _steps(store) == []
    assert len(store.undelete([f"gpt@{step}" for step in range(5)])) == 5
    assert store.resolve("gpt@latest").step == 4, "the newest, whatever comes back first"


def test_a_head_that_comes_back_is_the_head_again(store: Store) -> None:
    """Unless the run went on without it: then it is abandoned, and never the best of its line."""
    run = store.run("gpt", metrics={"loss": "min"})
    last = run.save({"w": torch.ones(2)}, step=5, metrics={"loss": 0.0})
    store.remove(["gpt@5"], force=True)
    assert store.resolve("gpt@latest").step == 4
    store.undelete([f"#{last.id}"])
    assert run.head is not None
    assert run.head.id == last.id
    store.remove(["gpt@5", "gpt@3"], force=True)
    run.save({"w": torch.zeros(2)}, step=6, metrics={"loss": 1.0})
    store.undelete([f"#{last.id}", "gpt@3"])
    assert store.resolve("gpt@latest").step == 6
    assert {one.step: one.abandoned for one in run.versions()[-4:]} == {
        3: False, 4: False, 5: True, 6: False
    }  # fmt: skip
    assert store.resolve("gpt@best:loss").step == 6


def test_a_run_that_comes_back_continues_its_line(store: Store) -> None:
    """A version that a rollback abandoned is not the head, newest as it is."""
    run = store.run("gpt")
    run.rollback(2)
    everything = [f"gpt@{step}" for step in range(5)]
    store.remove(everything, force=True)
    assert run.head is None
    store.undelete(everything)
    assert store.resolve("gpt@latest").step == 2


def test_a_collection_makes_it_too_late(path: Path) -> None:
    """Condemned or deleted: the version cannot come back, and nothing half of it does."""
    with ckptstore.open(path) as store:
        removed = store.remove(["gpt@0"])[0].version
        store.gc(grace_s=3600, orphan_age_s=0)
        with pytest.raises(errors.CondemnedError):
            store.undelete([f"#{removed.id}"])
        store.gc(grace_s=0, orphan_age_s=0)
        with pytest.raises(errors.CondemnedError):
            store.undelete([f"#{removed.id}"])
    with ckptstore.open(path) as store:
        with pytest.raises((errors.VersionNotFoundError, errors.CondemnedError)):
            store.undelete([f"#{removed.id}"])
        assert _steps(store) == [1, 2, 3, 4]
        assert store.verify().ok


def test_a_pack_that_is_gone_makes_it_too_late(store: Store, path: Path) -> None:
    """Who opens a store after a sweep cannot know its names: each pack is looked for."""
    removed = store.remove(["gpt@0"])[0].version
    for pack in sorted((path / "packs").rglob("*.pack")):
        pack.unlink()
    with pytest.raises(errors.VersionNotFoundError, match="has deleted what it needs"):
        store.undelete([f"#{removed.id}"])
    assert 0 not in _steps(store)


def test_only_what_is_deleted_comes_back(store: Store) -> None:
    """A version that is there, one that never was, and a ref that names no deleted one."""
    there = store.resolve("gpt@1").id
    with pytest.raises(errors.InvalidInputError, match="not deleted"):
        store.undelete([f"#{there}"])
    for ref in ("gpt@1", "gpt@77", "#" + "f" * 32):
        with pytest.raises(errors.VersionNotFoundError, match="names no version"):
            store.undelete([ref])
    for ref in ("gpt@latest", "gpt@paper", "gpt"):
        with pytest.raises(errors.InvalidRefError, match="by its id or step"):
            store.undelete([ref])
    with pytest.raises(errors.InvalidInputError, match="no version to remove"):
        store.remove([])


def test_of_a_step_that_was_deleted_twice_the_newer_comes_back(store: Store) -> None:
    """By step the version that was saved last; the other by its id."""
    store.remove(["gpt@1"])
    newer = store.run("gpt").save({"model": {"w": torch.ones(3)}}, step=1)
    store.run("gpt").save({"x": 1}, step=9)
    store.remove([f"#{newer.id}"])
    assert store.undelete(["gpt@1"])[0].id == newer.id
    assert store.undelete(["gpt@1"])[0].id != newer.id
    assert _steps(store).count(1) == 2


def test_a_record_comes_back_without_objects(store: Store) -> None:
    """It needs none."""
    store.age(["gpt@0"], "record")
    store.remove(["gpt@0"])
    store.gc(grace_s=0, orphan_age_s=0)
    assert store.undelete(["gpt@0"])[0].level == "record"


@pytest.fixture
def rollback_store(memory: MemoryBackend) -> Store:
    """Return a store in memory."""
    return Store(create_on(memory))


@pytest.fixture
def run(rollback_store: Store) -> ckptstore.Run:
    """Return a run of five versions, the third the best."""
    run = rollback_store.run("gpt", metrics={"loss": "min"})
    for step, loss in enumerate([3.0, 2.0, 1.0, 4.0, 9.0]):
        run.save({"w": torch.full((10,), float(step))}, step=step, metrics={"loss": loss})
    return run


def _abandoned(run: ckptstore.Run) -> list[int]:
    return [version.step for version in run.versions() if version.abandoned]


def test_the_head_moves_and_the_rest_is_abandoned(run: ckptstore.Run) -> None:
    """Latest is the target, later versions are marked and still load, the trail is in the log."""
    target = run.rollback("best:loss", reason="diverged")

    assert (target.step, target.abandoned) == (2, False)
    assert run.head is not None
    assert run.head.id == target.id == run.resolve("latest").id
    assert _abandoned(run) == [3, 4]
    assert float(run.load(4)["w"][0]) == 4.0
    assert log(run._session)[-1].ops[0].reason == "diverged"  # type: ignore[attr-defined]
    assert run.resolve("~1").step == 1


def test_the_next_save_continues_the_target(run: ckptstore.Run) -> None:
    """Its parent is the target, it shares with it, and it is on the line of the run."""
    target = run.rollback(2)

    version = run.save({"w": torch.full((10,), 2.0), "v": torch.ones(5)}, step=3)

    assert version.parent == target.id
    assert sum(part.new for part in version.roles.values()) == 20
    assert _abandoned(run) == [3, 4]
    assert run.resolve(3).id == version.id  # of one step, the one on the line


def test_rolling_forward_again(run: ckptstore.Run) -> None:
    """The abandoned line comes back whole; what was saved instead is abandoned then."""
    last = run.head
    run.rollback(1)
    other = run.save({"w": torch.zeros(10)}, step=100)
    assert last is not None

    done = rollback(run._session.repo, "gpt", last.id)

    assert [version.step for version in done.abandoned] == [100]
    assert [version.step for version in done.returned] == [4, 3, 2]
    assert (done.target.id, done.head_before) == (last.id, other.id)
    assert _abandoned(run) == [100]
    undone = rollback(run._session.repo, "gpt", done.head_before)
    assert undone.target.id == other.id
    assert _abandoned(run) == [2, 3, 4]


def test_going_nowhere_commits_nothing(run: ckptstore.Run) -> None:
    """A rollback to the head is done already."""
    before = run._session.repo.catalog.number
    done = rollback(run._session.repo, "gpt", run.resolve("latest").id)

    assert run._session.repo.refresh().number == before
    assert done.head_before == done.target.id
    assert not done.abandoned + done.returned


def test_abandoned_versions_are_not_the_best(run: ckptstore.Run) -> None:
    """Refs by metric look at the line of the run."""
    run.rollback(1)

    assert run.resolve("best:loss").step == 1
    run.rollback(4)
    assert run.resolve("best:loss").step == 2


def test_a_fork_is_not_on_the_line_of_its_parent(rollback_store: Store, run: ckptstore.Run) -> None:
    """Rolling back a fork to its first version leaves the parent's run alone."""
    fork = rollback_store.fork("gpt@2", "ft")
    fork.save({"w": torch.zeros(3)}, step=9)
    fork.rollback(2)

    assert _abandoned(fork) == [9]
    assert _abandoned(run) == []


def test_refusals(rollback_store: Store, run: ckptstore.Run, memory: MemoryBackend) -> None:
    """Versions of other runs, deleted ones, none at all, and read-only stores."""
    other = rollback_store.run("other").save({"w": 1}, step=1)
    rollback_store.remove(["gpt@1"])
    with pytest.raises(errors.VersionNotFoundError):
        run.rollback(1)
    with pytest.raises(errors.VersionNotFoundError):
        run.rollback(77)
    with pytest.raises(errors.InvalidInputError):
        rollback(rollback_store.repo, "gpt", other.id)
    reader = Store(open_on(memory, options=Options(read_only=True)))
    with pytest.raises(errors.ReadOnlyError):
        reader.rollback("gpt@0")


def test_a_record_is_nothing_to_go_back_to(rollback_store: Store, run: ckptstore.Run) -> None:
    """Where only the record is kept, there is no state to continue."""
    rollback_store.run("gpt").retain({"full": ["last 1"], "record": ["all"]})
    assert run.resolve(1).level == "record"
    with pytest.raises(errors.VersionNotFoundError, match="only the record"):
        run.rollback(1)


class _Training:
    """A little training whose every step depends on weights, moments, generator and position."""

    def __init__(self) -> None:
        torch.manual_seed(5)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 1)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.9)
        generator = torch.Generator().manual_seed(1)
        self.data = torch.randn(40, 8, generator=generator)
        self.position = 0

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "rng": torch.get_rng_state(),
            "data": {"position": self.position},
        }

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["rng"])
        self.position = state["data"]["position"]

    def steps(self, count: int) -> list[float]:
        losses = []
        for _ in range(count):
            batch = self.data[self.position : self.position + 4]
            self.position = (self.position + 4) % 40
            self.optimizer.zero_grad()
            loss = (self.model(batch) - batch.sum(1, keepdim=True)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            losses.append(loss.item())
        return losses


def test_training_after_a_rollback_equals_one_that_never_went_astray(rollback_store: Store) -> None:
    """Weights, moments, schedule, generator and data position come back: losses are equal."""
    training = _Training()
    run = rollback_store.run("gpt", metrics={"loss": "min"})
    training.steps(4)
    run.save(training.state(), step=4, metrics={"loss": 1.0})
    expected = training.steps(6)
    run.save(training.state(), step=10, metrics={"loss": 5.0})
    training.steps(3)

    run.rollback("best:loss")
    training.load(run.load())
    found = training.steps(6)

    assert found == expected
    again = run.save(training.state(), step=10, metrics={"loss": 0.5})
    assert again.content == run.versions()[1].content  # bit for bit, what was abandoned
    assert sum(part.logical for part in again.roles.values()) > 0


def test_the_head_after_a_removal_can_be_loaded(store: Store) -> None:
    """A record of a later step has no state to go on with: the newest whole version is the head."""
    store.age(["gpt@3"], "record")
    store.remove(["gpt@4"], force=True)
    assert store.resolve("gpt@latest").step == 2
    assert store.load("gpt@latest")["model"]["w"].shape == (50, 50)
    store.remove(["gpt@0", "gpt@1", "gpt@2"], force=True)
    assert store.resolve("gpt@latest").step == 3
