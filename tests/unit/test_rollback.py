"""Rollback: the head moves, what came after is abandoned and can come back, training goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ckptstore
from ckptstore.backends.memory import MemoryBackend
from ckptstore.config import Options
from ckptstore.errors import InvalidInputError, ReadOnlyError, VersionNotFoundError
from ckptstore.maintenance.retention.rollback import rollback
from ckptstore.repo import create_on, open_on
from ckptstore.store.checking import log


@pytest.fixture
def store(memory: MemoryBackend) -> ckptstore.Store:
    """Return a store in memory."""
    return ckptstore.Store(create_on(memory))


@pytest.fixture
def run(store: ckptstore.Store) -> ckptstore.Run:
    """Return a run of five versions, the third the best."""
    run = store.run("gpt", metrics={"loss": "min"})
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


def test_a_fork_is_not_on_the_line_of_its_parent(
    store: ckptstore.Store, run: ckptstore.Run
) -> None:
    """Rolling back a fork to its first version leaves the parent's run alone."""
    fork = store.fork("gpt@2", "ft")
    fork.save({"w": torch.zeros(3)}, step=9)
    fork.rollback(2)

    assert _abandoned(fork) == [9]
    assert _abandoned(run) == []


def test_refusals(store: ckptstore.Store, run: ckptstore.Run, memory: MemoryBackend) -> None:
    """Versions of other runs, deleted ones, none at all, and read-only stores."""
    other = store.run("other").save({"w": 1}, step=1)
    store.remove(["gpt@1"])
    with pytest.raises(VersionNotFoundError):
        run.rollback(1)
    with pytest.raises(VersionNotFoundError):
        run.rollback(77)
    with pytest.raises(InvalidInputError):
        rollback(store.repo, "gpt", other.id)
    reader = ckptstore.Store(open_on(memory, options=Options(read_only=True)))
    with pytest.raises(ReadOnlyError):
        reader.rollback("gpt@0")


def test_a_record_is_nothing_to_go_back_to(store: ckptstore.Store, run: ckptstore.Run) -> None:
    """Where only the record is kept, there is no state to continue."""
    store.run("gpt").retain({"full": ["last 1"], "record": ["all"]})
    assert run.resolve(1).level == "record"
    with pytest.raises(VersionNotFoundError, match="only the record"):
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


def test_training_after_a_rollback_equals_one_that_never_went_astray(
    store: ckptstore.Store,
) -> None:
    """Weights, moments, schedule, generator and data position come back: losses are equal."""
    training = _Training()
    run = store.run("gpt", metrics={"loss": "min"})
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
