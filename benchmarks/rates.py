"""Size of a delta, by learning rate and by the steps between the version and its base.

The learning rate decides how far a weight moves, so one figure for "bf16 weights, ten steps apart"
says little: this suite gives the whole range. One training (:mod:`benchmarks.trajectories`)
continues from the end of its warm-up at several constant rates. After some steps in which the
moments settle, the last version is stored beside versions 1, 10, 40 and 120 steps before it, each
pair in a store of its own, and twelve versions 10 steps apart in one. Only bytes are measured.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch

from benchmarks.disk import Workspace
from benchmarks.host import header
from benchmarks.keepers import Stored
from benchmarks.measure import Result, say
from benchmarks.states import State, state_bytes
from benchmarks.training import Gpt, update
from benchmarks.trajectories import documentation

__all__ = ["RatesPlan", "run"]

_TIME, _BATCH = 128, 4
_LR_HIGH = 1e-3
_KINDS = ("bf16 weights", "fp32 weights", "first moments", "second moments")


@dataclass(frozen=True, slots=True, kw_only=True)
class RatesPlan:
    """Trainings to make, and versions of them to compare."""

    width: int = 256
    layers: int = 3
    warmup: int = 200
    """Steps before; the rate falls from 1e-3 to the middle one of `rates`."""
    rates: Sequence[float] = (1e-6, 3e-6, 1e-5, 3e-5, 1e-4)
    settle: int = 40
    """Steps at a rate before the first version."""
    apart: Sequence[int] = (1, 10, 40, 120)
    versions: int = 12
    interval: int = 10
    seed: int = 20260101


def run(space: Workspace, *, plan: RatesPlan | None = None) -> Result:
    """Train and store; facts are shares by kind and rate, one for each of ``apart``, and stores."""
    plan = plan or RatesPlan()
    result = Result(
        benchmark="rates",
        header=header(space.root),
        parameters={**asdict(plan), "text_bytes": len(documentation())},
        facts={"pairs": {}, "stores": {}},
    )
    before = torch.random.get_rng_state()
    torch.manual_seed(plan.seed)
    try:
        model, optimizer = _warm(plan)
        begins = torch.random.get_rng_state()
        for rate in plan.rates:
            torch.random.set_rng_state(begins)
            taken = _versions(plan, *copy.deepcopy((model, optimizer)), rate)
            _measure(space, plan, result, rate, taken)
            say(f"rates: {rate} is done")
    finally:
        torch.random.set_rng_state(before)
    return result


def _warm(plan: RatesPlan) -> tuple[Gpt, torch.optim.Optimizer]:
    text = documentation()
    model = Gpt(plan.width, plan.layers, _TIME)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR_HIGH, betas=(0.9, 0.95))
    low = plan.rates[len(plan.rates) // 2]
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, plan.warmup, eta_min=low)
    for _ in range(plan.warmup):
        update(model, optimizer, text, _TIME, _BATCH)
        schedule.step()
    return model, optimizer


def _versions(
    plan: RatesPlan, model: Gpt, optimizer: torch.optim.Optimizer, rate: float
) -> dict[int, dict[str, State]]:
    """Return the states of each kind, by the number of steps to the last one."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    text = documentation()
    wanted = {0, *plan.apart, *(place * plan.interval for place in range(plan.versions))}
    taken = {}
    for left in range(max(wanted) + plan.settle, -1, -1):
        if left in wanted:
            taken[left] = _state(model, optimizer)
        update(model, optimizer, text, _TIME, _BATCH)
    return taken


def _state(model: Gpt, optimizer: torch.optim.Optimizer) -> dict[str, State]:
    weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    moments = [
        {name: optimizer.state[value][key].clone() for name, value in model.named_parameters()}
        for key in ("exp_avg", "exp_avg_sq")
    ]
    rounded = {name: value.to(torch.bfloat16) for name, value in weights.items()}
    return dict(zip(_KINDS, (rounded, weights, *moments), strict=True))


def _measure(
    space: Workspace,
    plan: RatesPlan,
    result: Result,
    rate: float,
    taken: Mapping[int, Mapping[str, State]],
) -> None:
    """Record the share that the last version adds beside each other, and that of many together."""
    name = f"{rate:g}"
    for kind in _KINDS:
        pairs = [_shares(space, [taken[left][kind], taken[0][kind]])[-1] for left in plan.apart]
        result.facts["pairs"].setdefault(kind, {})[name] = pairs
        places = range((plan.versions - 1) * plan.interval, -1, -plan.interval)
        shares = _shares(space, [taken[left][kind] for left in places])
        result.facts["stores"].setdefault(kind, {})[name] = sum(shares) / len(shares)


def _shares(space: Workspace, states: Sequence[State]) -> list[float]:
    """Return the bytes that each version adds to a store of its own, as a share of its bytes."""
    folder = space.fresh()
    kept = Stored(folder, "delta")
    sizes = [0]
    for number, state in enumerate(states):
        kept.save(state, number)
        sizes.append(kept.stored_bytes())
    kept.close()
    space.discard(folder)
    each = state_bytes(states[0])
    return [(new - old) / each for old, new in itertools.pairwise(sizes)]
