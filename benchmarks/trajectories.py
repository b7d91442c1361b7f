"""Versions of one real training, as a training loop would save them: the trajectory benchmark's.

A GPT over bytes learns the text of this project's documentation: AdamW, the learning rate falling
on a cosine to a low one, at which the training then continues while versions are taken from it,
every step, every 10 and every 40. The low one is 1e-5, which full fine-tunings take. The same
snapshots are given in three forms:

``fp32``   fp32 weights and AdamW's moments, 12 bytes a parameter;
``bf16``   the weights alone, rounded to bf16, as they are published or sampled from;
``mixed``  bf16 weights, the fp32 masters that they round, and the moments.

The computation itself is fp32 throughout: only the stored state of mixed precision is real,
and the relation between its parts. From the end of the fall, the same training goes on a second
time at 1e-6, which post-training by reinforcement takes: TRL's GRPOConfig and the actor of verl's
ppo_trainer.yaml have it as their default. That one gives the bf16 weights. A third fits LoRA
adapters to the frozen result of the first.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.measure import say
from benchmarks.states import State, state_bytes
from benchmarks.training import Gpt, update

__all__ = ["Plan", "Trajectory", "documentation", "trajectories"]

_REPO = Path(__file__).resolve().parent.parent
_TIME, _BATCH = 128, 4
_LR_HIGH = 1e-3
_LORA_LR = 2e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The training to make, and its versions to store."""

    width: int = 256
    layers: int = 3
    warmup: int = 200
    """Steps before the first version; over them the learning rate falls from 1e-3 to `lr`."""
    lr: float = 1e-5
    lr_post: float = 1e-6
    """Of the training that goes on a second time."""
    versions: int = 12
    intervals: Sequence[int] = (1, 10, 40)
    rank: int = 8
    """Of the LoRA adapters."""
    lora_interval: int = 10
    seed: int = 20260101


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """Some versions of one training, oldest first."""

    name: str
    versions: tuple[State, ...]
    interval: int
    """Steps from one version to the next."""
    adapter_bytes: int = 0
    """With LoRA: the new bytes of each version, with moments."""
    generator_bytes: int = 0
    """Of LoRA: the state of the random generator, which is new in each version, too."""

    @property
    def logical_bytes(self) -> int:
        """Bytes of the tensors of all versions."""
        return sum(map(state_bytes, self.versions))


def documentation() -> torch.Tensor:
    """Return the text of this project's documentation, one token a byte."""
    paths = [_REPO / "README.md", _REPO / "CONTRIBUTING.md"]
    paths += sorted((_REPO / "docs").rglob("*.md"))
    data = bytearray(b"\n".join(path.read_bytes() for path in paths))
    return torch.frombuffer(data, dtype=torch.uint8)


def trajectories(plan: Plan) -> list[Trajectory]:
    """Train, and return the trajectories: fp32 and mixed by interval, bf16 weights, and LoRA.

    Takes about 0.2 s a step on two cores, 1,200 steps by default.
    """
    before = torch.random.get_rng_state()
    torch.manual_seed(plan.seed)
    try:
        text = documentation()
        model = Gpt(plan.width, plan.layers, _TIME)
        snapshots, post = _snapshots(plan, model, text)
        made = [_fp32(plan, snapshots, interval) for interval in plan.intervals]
        made.append(_mixed(plan, snapshots, plan.intervals[1]))
        made += [_bf16(plan, snapshots, interval) for interval in plan.intervals[1:]]
        at = f", learning rate {plan.lr_post:g}"
        made += [_bf16(plan, post, interval, at) for interval in plan.intervals[1:]]
        made.append(_lora(plan, model, text))
    finally:
        torch.random.set_rng_state(before)
    return made


# --- the training -----------------------------------------------------------------------------


def _snapshots(
    plan: Plan, model: Gpt, text: torch.Tensor
) -> tuple[dict[int, State], dict[int, State]]:
    """Return the fp32 state after each step from which some trajectory takes a version.

    By the steps since the warm-up; the second at the lower rate, on the same batches.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR_HIGH, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, plan.warmup, eta_min=plan.lr)
    for _ in range(plan.warmup):
        update(model, optimizer, text, _TIME, _BATCH)
        schedule.step()
    say(f"trajectory: {plan.warmup} steps of warm-up are done")
    begins, (other, its_optimizer) = torch.random.get_rng_state(), copy.deepcopy((model, optimizer))
    taken = _taken(plan, model, optimizer, text, _wanted(plan, plan.intervals))
    for group in its_optimizer.param_groups:
        group["lr"] = plan.lr_post
    with torch.random.fork_rng(devices=[]):
        torch.random.set_rng_state(begins)
        post = _taken(plan, other, its_optimizer, text, _wanted(plan, plan.intervals[1:]))
    return taken, post


def _wanted(plan: Plan, intervals: Sequence[int]) -> set[int]:
    return {place * every for every in intervals for place in range(plan.versions)}


def _taken(
    plan: Plan,
    model: Gpt,
    optimizer: torch.optim.Optimizer,
    text: torch.Tensor,
    wanted: Collection[int],
) -> dict[int, State]:
    """Continue training, and return the states after these steps."""
    taken = {}
    for step in range(max(wanted, default=-1) + 1):
        if step in wanted:
            taken[step] = _state(model, optimizer, plan.warmup + step)
        update(model, optimizer, text, _TIME, _BATCH)
    say(f"trajectory: {len(taken)} versions of {max(wanted, default=0)} steps are taken")
    return taken


def _state(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> State:
    """Return a copy of the training's state, as a training loop passes it to a save."""
    return {
        "model": {name: value.detach().clone() for name, value in model.named_parameters()},
        "optimizer": _copy(optimizer.state_dict()),
        "rng": {"torch": torch.random.get_rng_state()},
        "step": step,
    }


def _copy(value: object) -> Any:  # noqa: ANN401 - whatever a state holds
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_copy(item) for item in value]
    return value


# --- the forms --------------------------------------------------------------------------------


def _named(form: str, interval: int) -> str:
    return f"{form}, every {interval} steps" if interval > 1 else f"{form}, every step"


def _chosen(plan: Plan, snapshots: Mapping[int, State], interval: int) -> list[State]:
    return [snapshots[place * interval] for place in range(plan.versions)]


def _fp32(plan: Plan, snapshots: Mapping[int, State], interval: int) -> Trajectory:
    return Trajectory(
        name=_named("fp32 + AdamW", interval),
        interval=interval,
        versions=tuple(_chosen(plan, snapshots, interval)),
    )


def _mixed(plan: Plan, snapshots: Mapping[int, State], interval: int) -> Trajectory:
    versions = [
        {
            **state,
            "model": _rounded(state),
            "optimizer": {"master": state["model"], **state["optimizer"]},
        }
        for state in _chosen(plan, snapshots, interval)
    ]
    return Trajectory(
        name=_named("mixed precision", interval), interval=interval, versions=tuple(versions)
    )


def _bf16(plan: Plan, snapshots: Mapping[int, State], interval: int, at: str = "") -> Trajectory:
    versions = [
        {"model": _rounded(state), "step": state["step"]}
        for state in _chosen(plan, snapshots, interval)
    ]
    return Trajectory(
        name=_named("bf16 weights", interval) + at, interval=interval, versions=tuple(versions)
    )


def _rounded(state: State) -> dict[str, torch.Tensor]:
    return {name: value.to(torch.bfloat16) for name, value in state["model"].items()}


# --- LoRA -------------------------------------------------------------------------------------


class _Lora(nn.Module):
    """A frozen linear layer and its low-rank correction (Hu et al. 2021, section 4.1)."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.lora_a = nn.Parameter(torch.randn(rank, base.in_features) / rank)
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.base(x) + x @ self.lora_a.T @ self.lora_b.T
        return y


def _lora(plan: Plan, model: Gpt, text: torch.Tensor) -> Trajectory:
    """Fit adapters to the frozen model; each version holds the model and the adapters."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for block in model.blocks:
        for name in ("qkv", "up"):
            setattr(block, name, _Lora(getattr(block, name), plan.rank))
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=_LORA_LR)
    versions = []
    for step in range((plan.versions - 1) * plan.lora_interval + 1):
        update(model, optimizer, text, _TIME, _BATCH)
        if step % plan.lora_interval == 0:
            versions.append(_state(model, optimizer, step))
    trained = {name: value for name, value in versions[0]["model"].items() if ".lora_" in name}
    return Trajectory(
        name=_named("LoRA on a frozen base", plan.lora_interval),
        interval=plan.lora_interval,
        versions=tuple(versions),
        adapter_bytes=state_bytes(trained) + state_bytes(versions[0]["optimizer"]),
        generator_bytes=state_bytes(versions[0]["rng"]),
    )
