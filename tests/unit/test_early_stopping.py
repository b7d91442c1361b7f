"""Early stopping and safe resumption: observers of a training that stop it or warn."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import ckptstore
from ckptstore.catalog.early_stopping import DivergenceGuard, EarlyStopping, Verdict
from ckptstore.checkpoint.content import read_content
from ckptstore.encodings.encoding_rules import Encodings
from ckptstore.errors import InvalidInputError, VersionNotFoundError

VALUES = st.lists(st.floats(width=16), max_size=30)


def _stops_at(stop: EarlyStopping, values: list[float]) -> int | None:
    """Return the place of the first value at which it says stop."""
    for place, value in enumerate(values):
        if stop.update(place, value):
            return place
    return None


@pytest.mark.parametrize(
    ("settings", "values", "place"),
    [
        ({"patience": 2}, [3, 2, 2, 2], 3),
        ({"patience": 2}, [3, 2, 2.5, 1, 1, 1], 5),
        ({"patience": 1}, [3, 3], 1),
        ({"patience": 2}, [3, 2, 1, 0], None),
        ({"patience": 2, "mode": "max"}, [1, 2, 2, 1], 3),
        ({"patience": 2, "min_delta": 0.5}, [3, 2.6, 2.4, 2.3, 2.2], 4),
        ({"patience": 2, "min_delta": 0.5}, [3, 2.5, 2.4, 1.9], None),
        ({"patience": 2, "min_delta": 0.1, "relative": True}, [100, 91, 92], 2),
        ({"patience": 2, "min_delta": 0.1, "relative": True}, [1, 0.85, 0.86], None),
        ({"patience": 2, "warmup": 3}, [1, 5, 5, 5, 5], 4),
        ({"patience": 9, "target": 0.5}, [3, 0.7, 0.5], 2),
        ({"patience": 9, "target": 0.5, "mode": "max"}, [0.3, 0.4, 0.6], 2),
        ({"patience": 3}, [math.nan, math.nan, math.nan], 2),
        ({"patience": 2}, [2, math.nan, math.nan], 2),
        ({"patience": 2}, [math.nan, 2, 3, 1], None),
        ({"patience": 2}, [math.inf, math.inf, 1, 0], None),
    ],
)
def test_when_it_stops(settings: dict[str, Any], values: list[float], place: int | None) -> None:
    """Patience, delta, warmup, target, direction; NaN is never an improvement."""
    stop = EarlyStopping("loss", **settings)
    assert _stops_at(stop, values) == place
    assert stop.should_stop == (place is not None)
    assert bool(stop.reason) == stop.should_stop


@given(VALUES, st.integers(1, 4), st.integers(0, 30), st.sampled_from(["min", "max"]))
def test_a_resumed_one_decides_alike(
    values: list[float], patience: int, cut: int, mode: str
) -> None:
    """State that went through JSON in between changes no decision."""
    whole = EarlyStopping("loss", mode=mode, patience=patience)
    first = EarlyStopping("loss", mode=mode, patience=patience)
    second = EarlyStopping("loss", mode=mode, patience=patience)
    expected = [whole.update(step, value) for step, value in enumerate(values)]
    found = [first.update(step, value) for step, value in enumerate(values[:cut])]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    rest = values[cut:]
    found += [second.update(step, value) for step, value in enumerate(rest, min(cut, len(values)))]
    assert found == expected
    assert second.state_dict() == whole.state_dict()


@given(VALUES)
def test_the_best_is_the_best(values: list[float]) -> None:
    """Without a delta it remembers the least number, the first of equals."""
    stop = EarlyStopping("loss", patience=99)
    for step, value in enumerate(values):
        stop.update(step, value)
    numbers = [value for value in values if not math.isnan(value)]
    assert stop.best_value == (min(numbers) if numbers else None)
    if numbers:
        assert stop.best_step == values.index(min(numbers))


@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "least"}, {"patience": 0}, {"warmup": -1}, {"min_delta": -1.0},
        {"min_delta": math.nan}, {"min_delta": math.inf},
    ],
)  # fmt: skip
def test_settings_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    """At once, not after a night of training."""
    with pytest.raises(InvalidInputError):
        EarlyStopping("loss", **settings)


def test_a_state_of_another_is_refused() -> None:
    """Of another metric, another direction, or of something else."""
    stop = EarlyStopping("loss")
    for state in (
        EarlyStopping("acc").state_dict(),
        EarlyStopping("loss", mode="max").state_dict(),
        {"best": 3},
    ):
        with pytest.raises(InvalidInputError):
            stop.load_state_dict(state)


# --- tied to a run ------------------------------------------------------------------------------
def _save(run: ckptstore.Run, step: int, loss: float | None = None) -> ckptstore.Version:
    metrics = {} if loss is None else {"loss": loss}
    return run.save({"step": torch.tensor(step)}, step=step, metrics=metrics)


def test_it_names_the_version_to_return_to(store: ckptstore.Store) -> None:
    """The version of the best step; the direction is the run's."""
    run = store.run("gpt", metrics={"loss": "min"})
    stop = ckptstore.EarlyStopping.for_run(run, "loss", patience=2)
    for step, loss in enumerate([3.0, 1.0, 2.0, 2.0]):
        _save(run, step, loss)
        stopped = stop.update(step, loss)
    assert stopped
    assert (stop.ref, stop.version().step) == ("gpt@1", 1)
    run.rollback(stop.version().step)
    assert run.head == stop.version()


def test_where_the_best_step_was_not_saved(store: ckptstore.Store) -> None:
    """The best one that was, up to then; else what there is; else an error."""
    run = store.run("gpt", metrics={"loss": "min"})
    stop = EarlyStopping.for_run(run, "loss", patience=2)
    stop.update(5, 1.0)
    with pytest.raises(VersionNotFoundError, match="no version to return to"):
        stop.version()
    _save(run, 9)
    assert stop.version().step == 9, "without metrics: the head"
    _save(run, 2, 3.0)
    _save(run, 4, 2.0)
    _save(run, 8, 1.5)
    assert stop.version().step == 4


def test_versions_without_the_metric_are_chosen_by_their_step(store: ckptstore.Store) -> None:
    """The newest before the best step, not the head, which is trained too long; no record."""
    run = store.run("gpt", metrics={"loss": "min"})
    stop = EarlyStopping.for_run(run, "loss")
    for step in (250, 500, 750, 1000):
        _save(run, step)
    stop.update(600, 1.0)
    assert stop.version().step == 500
    run.rollback(250)
    assert stop.version().step == 250, "what a rollback abandoned is not returned to"


def test_the_mode_counts_where_the_run_has_no_direction(store: ckptstore.Store) -> None:
    """The best version by the metric is found all the same."""
    run = store.run("gpt")
    stop = EarlyStopping.for_run(run, "loss", mode="max")
    for step, value in ((1, 1.0), (2, 3.0), (3, 2.0)):
        _save(run, step, value)
    stop.update(9, 5.0)
    assert stop.version().step == 2


def test_a_step_that_was_saved_again_is_named_by_its_id(store: ckptstore.Store) -> None:
    """The ref means the version, not only the step."""
    run = store.run("gpt", metrics={"loss": "min"})
    stop = EarlyStopping.for_run(run, "loss")
    _save(run, 1, 1.0)
    stop.update(1, 1.0)
    newer = _save(run, 1, 5.0)
    assert stop.ref == "gpt@1"
    assert stop.version().id == newer.id


def test_for_run_wants_a_direction_and_version_wants_a_run(store: ckptstore.Store) -> None:
    """Neither is guessed."""
    run = store.run("gpt")
    with pytest.raises(InvalidInputError, match="no direction for 'loss'"):
        EarlyStopping.for_run(run, "loss")
    assert EarlyStopping.for_run(run, "loss", mode="max").mode == "max"
    with pytest.raises(InvalidInputError, match="not tied to a run"):
        EarlyStopping("loss").version()


# --- divergence ---------------------------------------------------------------------------------
def _curve(count: int) -> list[float]:
    """Return a loss that falls, with noise that is the same each time."""
    return [2 * math.exp(-step / 200) + 0.05 * math.sin(12.9898 * step) for step in range(count)]


def _kinds(guard: DivergenceGuard, values: list[float]) -> list[str]:
    return [guard.update(step, value).kind for step, value in enumerate(values)]


def test_a_falling_noisy_loss_is_no_divergence() -> None:
    """Nor is a flat one, nor one that improves all of a sudden."""
    assert set(_kinds(DivergenceGuard("loss"), _curve(500))) == {"ok"}
    assert set(_kinds(DivergenceGuard("loss"), [1.0] * 100)) == {"ok"}
    assert set(_kinds(DivergenceGuard("loss"), [*_curve(100), 0.001])) == {"ok"}
    rising = [-value for value in _curve(300)]
    assert set(_kinds(DivergenceGuard("acc", mode="max"), rising)) == {"ok"}


def test_spikes_and_numbers_that_are_none_are_found() -> None:
    """At the value itself, in the direction that is worse."""
    values = _curve(100)
    assert _kinds(DivergenceGuard("loss"), [*values, 9.0])[-1] == "spike"
    for bad in (math.nan, math.inf, -math.inf):
        assert _kinds(DivergenceGuard("loss"), [*values, bad, 1.2])[-2:] == ["nan", "ok"]
    found = DivergenceGuard("loss").update(0, math.nan)
    assert found
    assert found.limit is None
    flipped = [-value for value in values]
    assert _kinds(DivergenceGuard("acc", mode="max"), [*flipped, -9.0])[-1] == "spike"


def test_outliers_before_do_not_hide_one(store: ckptstore.Store) -> None:
    """Where mean and standard deviation would be drawn along, median and MAD are not."""
    values = _curve(100)
    for place in range(60, 100, 10):
        values[place] = 50.0
    assert _kinds(DivergenceGuard("loss"), [*values, 9.0])[-1] == "spike"


def test_the_limit_is_its_formula() -> None:
    """Median plus factor times 1.4826 MAD, by hand."""
    guard = DivergenceGuard("loss", window=5, factor=3.0, warmup=5)
    for step, value in enumerate([100.0, 1.0, 2.0, 3.0, 4.0, 100.0]):
        guard.update(step, value)
    # The window holds 1 2 3 4 100: the median is 3, deviations are 2 1 0 1 97, their median is 1.
    assert guard.limit() == pytest.approx(3 + 3 * 1.4826)


def test_patience_and_warmup() -> None:
    """Single bad values may pass; the first values say little."""
    values = [*_curve(100), 9.0, 1.2, 9.0, 9.0, 9.0]
    assert _kinds(DivergenceGuard("loss", patience=2), values)[-5:] == ["ok"] * 4 + ["spike"]
    assert set(_kinds(DivergenceGuard("loss", warmup=20), [1.0] * 19 + [50.0])) == {"ok"}


def test_a_rollback_begins_the_warmup_anew(store: ckptstore.Store) -> None:
    """The values after it are judged once there are as many as at the beginning."""
    run = store.run("gpt", metrics={"loss": "min"})
    _save(run, 0)
    guard = DivergenceGuard.for_run(run, "loss", rollback_to="latest")
    for step, value in enumerate(_curve(100), 1):
        guard.update(step, value)
    assert guard.update(101, math.nan).version == run.head
    for step in range(1, 20):
        assert guard.update(step, 3.0 + step * 1e-4).limit is None
    guard.update(20, 3.0)
    assert guard.update(21, 50.0).kind == "spike"


def test_it_rolls_back_by_itself(store: ckptstore.Store) -> None:
    """The head moves, the reason stands in the log, and what came after it is forgotten."""
    run = store.run("gpt", metrics={"loss": "min"})
    guard = ckptstore.DivergenceGuard.for_run(run, "loss", rollback_to="best:loss", warmup=4)
    verdict = Verdict(kind="ok", step=0, value=0, limit=None)
    for step, loss in enumerate([5.0, 4.0, 3.0, 2.0, 2.5, math.nan]):
        verdict = guard.update(step, loss)
        if not verdict:
            _save(run, step, loss)
    assert verdict.kind == "nan"
    assert verdict.version is not None
    assert verdict.version.step == 3
    assert run.head == verdict.version
    assert "loss is nan at step 5" in store.log()[-1].ops[0].reason  # type: ignore[attr-defined]
    assert run.load(f"#{verdict.version.id}")["step"].item() == 3
    assert guard.state_dict()["recent"] == [[0, 5.0], [1, 4.0], [2, 3.0], [3, 2.0]]


def test_it_gives_up_and_does_not_forget_that(store: ckptstore.Store) -> None:
    """After some rollbacks it says stop, even if its state is loaded from before them."""
    run = store.run("gpt", metrics={"loss": "min"})
    guard = DivergenceGuard.for_run(run, "loss", rollback_to="latest", rollbacks_max=2)
    _save(run, 0, 1.0)
    early = guard.state_dict()
    for _ in range(2):
        assert guard.update(1, math.nan).version is not None
        guard.load_state_dict(json.loads(json.dumps(early)))
        assert not guard.should_stop
    verdict = guard.update(1, math.nan)
    assert verdict
    assert verdict.version is None
    assert guard.should_stop


@given(VALUES, st.integers(0, 30))
def test_a_resumed_guard_decides_alike(values: list[float], cut: int) -> None:
    """State that went through JSON in between changes no verdict."""
    whole, first, second = (DivergenceGuard("loss", window=6, warmup=4) for _ in range(3))
    expected = _kinds(whole, values)
    found = _kinds(first, values[:cut])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    found += _kinds(second, values[cut:])
    assert found == expected


def test_settings_of_the_guard_are_checked() -> None:
    """A window of one has no deviation."""
    for settings in ({"window": 3}, {"factor": 0.0}, {"patience": -1}, {"mode": "up"}):
        with pytest.raises(InvalidInputError):
            DivergenceGuard("loss", **settings)
    with pytest.raises(InvalidInputError):
        DivergenceGuard("loss").load_state_dict(DivergenceGuard("acc").state_dict())


_RULES: Encodings = {
    "*.exp_avg": "int8:rel_l2=0.03",
    "*.exp_avg_sq": "dynamic8:rel_l2=0.02",
    "role:weights": "bf16:rel_l2=0.004",
}
_SEEDS = range(4)
_WIDTH = 96


@pytest.fixture(autouse=True)
def _one_order() -> Iterator[None]:
    """Have all sums taken in one order, so that the curves do not change from run to run."""
    threads, state = torch.get_num_threads(), torch.random.get_rng_state()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.random.set_rng_state(state)


class _Training:
    """A small network learns a function of a larger one, from noisy batches."""

    def __init__(self) -> None:
        torch.manual_seed(11)
        self.teacher = nn.Sequential(nn.Linear(24, 64), nn.Tanh(), nn.Linear(64, 8))
        self.held_out = torch.randn(512, 24)
        self.model = nn.Sequential(
            nn.Linear(24, _WIDTH), nn.GELU(), nn.Linear(_WIDTH, _WIDTH), nn.GELU(),
            nn.Linear(_WIDTH, _WIDTH), nn.GELU(), nn.Linear(_WIDTH, 8),
        )  # fmt: skip
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3)

    def steps(self, count: int, *, seed: int) -> None:
        torch.manual_seed(seed)
        for _ in range(count):
            x = torch.randn(16, 24)
            with torch.no_grad():
                y = self.teacher(x) + 0.3 * torch.randn(16, 8)
            loss = (self.model(x) - y).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()

    def loss(self) -> float:
        with torch.no_grad():
            off = self.model(self.held_out) - self.teacher(self.held_out)
        return float(off.square().mean())

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def resume(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))


def _ends(state: dict[str, Any]) -> list[float]:
    """Return the loss of resumed trainings, by the order of their data."""
    found = []
    for seed in _SEEDS:
        training = _Training()
        training.resume(state)
        training.steps(60, seed=seed)
        found.append(training.loss())
    return found


@pytest.mark.slow
def test_a_resume_from_fewer_bytes_is_within_the_spread_of_seeds(tmp_path: Path) -> None:
    """At most 0.45 of the bytes, every error within its bound, and the loss no other one."""
    training = _Training()
    training.steps(300, seed=100)
    with ckptstore.open(tmp_path / "ckpts", create=True) as store:
        run = store.run("net")
        run.save(training.state(), step=1)
        version = run.save(training.state(), step=2, encodings=_RULES, codec="raw")
        full, rounded = run.load(1), run.load(2)
        tensors = read_content(store.repo.manifests.load(version)).tensors()
    sizes = version.roles.values()
    assert sum(role.stored for role in sizes) <= 0.45 * sum(role.logical for role in sizes)
    lossy = [one for one in tensors if one.encoding != "lossless"]
    assert {one.encoding for one in lossy} == {"bf16", "int8", "dynamic8"}
    assert all(0 < one.rel_l2 <= (one.rel_l2_bound or 0) for one in lossy)
    wanted, found = _ends(full), _ends(rounded)
    spread = max(wanted) - min(wanted)
    assert spread > 0
    assert min(wanted) <= sum(found) / len(found) <= max(wanted)
    differences = [abs(ours - theirs) for ours, theirs in zip(found, wanted, strict=True)]
    assert max(differences) < spread / 2
