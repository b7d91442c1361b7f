"""Accelerate on a store: everything prepared or registered comes back, bit for bit."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DataLoaderConfiguration

import ckptstore
from ckptstore.errors import InvalidInputError, StateError, VersionNotFoundError
from ckptstore.integrations import accelerate
from ckptstore.integrations.accelerate import has_version, load_state, save_state, save_state_async
from ckptstore.integrations.randomness import capture
from ckptstore.store import Store

pytestmark = pytest.mark.usefixtures("_nothing_pickled", "generators_stay")


class Counter:
    """An object that a training registers."""

    def __init__(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


class Training:
    """A tiny training with dropout, shuffling and draws from all generators."""

    def __init__(self, seed: int, **loading: Any) -> None:
        for singleton in (AcceleratorState, PartialState, GradientState):
            singleton._reset_state()
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.accelerator = Accelerator(
            cpu=True, dataloader_config=DataLoaderConfiguration(**loading)
        )
        net = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)
        )
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
        rows: Any = torch.linspace(-1, 1, 48).reshape(-1, 4)
        loader = torch.utils.data.DataLoader(rows, batch_size=2, shuffle=True)
        self.model, self.optimizer, self.loader, self.schedule = self.accelerator.prepare(
            net, optimizer, loader, schedule
        )
        self.counter = Counter()
        self.accelerator.register_for_checkpointing(self.counter)
        self.losses: list[float] = []

    def epoch(self) -> None:
        for batch in self.loader:
            noise = random.random() + float(np.random.rand())
            loss = self.model(batch + noise).square().mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            self.losses.append(loss.item())
            self.counter.seen += 1


@pytest.mark.parametrize("seedable", [False, True], ids=["generators", "seedable sampler"])
def test_a_resumed_training_has_the_same_losses(store: Store, seedable: bool) -> None:
    """Other seeds, new objects: after loading, the losses are those of the training before."""
    run = store.run("gpt")
    whole = Training(1, use_seedable_sampler=seedable)
    whole.epoch()
    assert not has_version(run)
    saved = save_state(whole.accelerator, run, step=6, metrics={"loss": whole.losses[-1]})
    whole.epoch()
    whole.epoch()

    resumed = Training(2, use_seedable_sampler=seedable)
    assert has_version(run)
    version = load_state(resumed.accelerator, run)
    assert resumed.counter.seen == 6
    resumed.epoch()
    resumed.epoch()

    assert version.id == saved.id
    assert resumed.losses == whole.losses[6:]
    assert resumed.counter.seen == 18
    for mine, other in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_older_versions_load_by_ref(store: Store) -> None:
    """Any ref of the run names what to go back to."""
    run = store.run("gpt", metrics={"loss": "min"})
    training = Training(1)
    for step, loss in ((1, 0.5), (2, 0.3), (3, 0.9)):
        training.epoch()
        save_state(training.accelerator, run, step=step, metrics={"loss": loss})

    assert load_state(training.accelerator, run, "best:loss").step == 2
    assert load_state(training.accelerator, run, 1).step == 1
    assert training.counter.seen == 6
    with pytest.raises(VersionNotFoundError):
        load_state(training.accelerator, run, 99)


def test_a_rank_that_was_not_saved_is_told(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As one that was added: it goes on with other random numbers than any training before."""
    run, training = store.run("gpt"), Training(1)
    save_state(training.accelerator, run, step=1)
    load_state(training.accelerator, run)
    assert "random state" not in caplog.text
    monkeypatch.setattr(accelerate, "capture_all", lambda: {"rank 1": capture()})
    save_state(training.accelerator, run, step=2)
    load_state(training.accelerator, run)
    assert "the version has no random state of this rank" in caplog.text


def test_saves_in_the_background(store: Store) -> None:
    """What is saved is the state of the call, whatever the training does meanwhile."""
    run = store.run("gpt")
    training = Training(1)
    training.epoch()
    before = training.model[0].weight.clone()
    pending = save_state_async(training.accelerator, run, step=1)
    training.epoch()

    assert pending is not None
    assert pending.result().step == 1
    assert torch.equal(run.load("latest")["models"][0]["0.weight"], before)


def test_a_version_of_another_training_is_refused_before_anything_changes(store: Store) -> None:
    """What was prepared must be what was saved; nothing is half loaded."""
    run = store.run("gpt")
    training = Training(1)
    save_state(training.accelerator, run, step=1)
    training.accelerator.register_for_checkpointing(Counter())
    before = training.model[0].weight.clone()

    with pytest.raises(StateError, match="holds 1 custom, the accelerator has 2"):
        load_state(training.accelerator, run)
    run.save({"model": {"w": torch.ones(2)}}, step=2)
    with pytest.raises(StateError, match="not saved from an accelerator"):
        load_state(training.accelerator, run)
    assert torch.equal(training.model[0].weight, before)


class Opaque:
    """An object whose state cannot be represented."""

    def state_dict(self) -> dict[str, Any]:
        return {"history": [object()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError(state)


def test_what_cannot_be_represented_is_named(store: Store) -> None:
    """Nothing is pickled: the error has the path, and no version appears."""
    training = Training(1)
    training.accelerator.register_for_checkpointing(Opaque())
    with pytest.raises(StateError, match=r"custom\.1\.history\.0"):
        save_state(training.accelerator, store.run("gpt"), step=1)
    assert store.versions() == []


def test_hooks_that_write_files_are_refused(store: Store) -> None:
    """There is no folder to give them; what they would write must not be lost in silence."""
    training = Training(1)
    training.accelerator.register_save_state_pre_hook(lambda *_: None)
    with pytest.raises(InvalidInputError, match="hooks"):
        save_state(training.accelerator, store.run("gpt"), step=1)


def test_what_is_no_run_is_refused(store: Store) -> None:
    """A name or a store in place of a run is told at once, with what to give."""
    accelerator = Accelerator(cpu=True)
    wrong: Any
    for wrong in ("small", store):
        for call in (
            lambda it: save_state(accelerator, it, step=1),
            lambda it: save_state_async(accelerator, it, step=1),
            lambda it: load_state(accelerator, it),
            has_version,
        ):
            with pytest.raises(InvalidInputError, match="run of a store") as told:
                call(wrong)
            assert "give store.run(" in (told.value.hint or "")
    assert store.runs() == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_ranks_resume_with_their_own_randomness(
    tmp_path: Path, ranks: Callable[[str, int], list[int]]
) -> None:
    """On two gloo ranks: one version, and each rank draws what it would have drawn."""
    ckptstore.open(tmp_path / "ckpts", create=True).close()

    assert ranks("accelerate_ranks.py", 2) == [0, 0]

    said = [json.loads((tmp_path / f"said-{rank}").read_text()) for rank in range(2)]
    for whole, resumed, error in said:
        assert resumed == whole
        assert error == "InvalidInputError"  # rank 0 failed: both raise
    assert said[0][0] != said[1][0]
    with ckptstore.open(tmp_path / "ckpts") as opened:
        assert [version.step for version in opened.versions("gpt")] == [6]
