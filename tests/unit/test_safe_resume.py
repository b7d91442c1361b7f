"""A training resumed from rounded weights and 8-bit moments goes on as from full precision."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptstore
from ckptstore.checkpoint.content import read_content
from ckptstore.encodings.encoding_rules import Encodings

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
