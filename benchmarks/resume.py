"""Quality of a training that is resumed from states with lossy encodings.

A GPT over bytes learns the text of this project's documentation with AdamW, and its state is saved
in several forms. From each the training is resumed several times, each time with another order of
the data, and its loss on held-out text is measured at intervals. The spread of full-precision
resumes over the orders of the data is the yardstick: a form is as good if its curves lie within it.

The store refuses to write one form, second moments in evenly spaced 8-bit codes. It is made
by hand, to show why.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional

import ckptstore
from benchmarks.disk import Workspace
from benchmarks.host import header
from benchmarks.measure import Measured, Result, say
from benchmarks.states import State, state_bytes
from benchmarks.training import Gpt, update
from benchmarks.trajectories import documentation
from ckptstore.checkpoint.content import read_content
from ckptstore.encodings.coding import Form, decode_elements
from ckptstore.encodings.encoding import Encoding
from ckptstore.encodings.encoding_rules import Encodings

__all__ = ["FORMS", "REFUSED", "ResumePlan", "run"]

_HELD_OUT = 0.1
"""Share of the text, its end, that is never trained on."""
_WEIGHTS: Encodings = {"model.*": "bf16:rel_l2=0.004"}
_MOMENTS: Encodings = {"*.exp_avg": "int8:rel_l2=0.02", "*.exp_avg_sq": "dynamic8:rel_l2=0.02"}
_FULL = "full precision"
REFUSED = "second moments in int8 (refused)"
FORMS: Mapping[str, Encodings] = {
    _FULL: {},
    "bf16 weights": _WEIGHTS,
    "8-bit moments": _MOMENTS,
    "bf16 weights, 8-bit moments": {**_MOMENTS, **_WEIGHTS},
}
"""Encodings by form; bounds are those of the errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePlan:
    """The training to make, and the number of resumes."""

    width: int = 128
    layers: int = 2
    time: int = 64
    batch: int = 8
    warmup: int = 1500
    """Steps before the save; over them the learning rate falls from 2e-3 to `lr`."""
    lr: float = 5e-4
    steps: int = 120
    """Of each resumed training."""
    every: int = 10
    """Steps between two looks at the loss."""
    seeds: int = 6
    """Orders of the data."""
    rows: int = 64
    """Of the text that is held out, by which the loss is taken."""


def run(space: Workspace, *, plan: ResumePlan | None = None) -> Result:
    """Train, save in each form, resume from each with each seed; return tables and curves.

    The table ``forms`` has a row for each; the fact ``curves`` has, by form, the loss of each seed
    at the steps of the fact ``steps``.
    """
    plan = plan or ResumePlan()
    text = documentation()
    border = int(len(text) * (1 - _HELD_OUT))
    result = Result(
        benchmark="resume",
        header=header(space.root),
        parameters={**asdict(plan), "text_bytes": len(text)},
    )
    before, threads = torch.random.get_rng_state(), torch.get_num_threads()
    torch.set_num_threads(1)  # sums are then taken in one order: equal runs give equal curves
    try:
        state = _trained(plan, text[:border])
        say(f"resume: trained for {plan.warmup} steps")
        rows, states = _saved(space, plan, state)
        curves: dict[str, list[list[float]]] = {}
        for form, given in states.items():
            curves[form] = [
                _resumed(plan, given, text[:border], text[border:], seed)
                for seed in range(plan.seeds)
            ]
            say(f"resume: {form}: {statistics.mean(one[-1] for one in curves[form]):.4f}")
    finally:
        torch.random.set_rng_state(before)
        torch.set_num_threads(threads)
    for row in rows:
        row.numbers |= _compared(curves[row.name], curves[_FULL])
    result.tables["forms"] = rows
    result.facts["curves"] = curves
    result.facts["steps"] = list(range(0, plan.steps + 1, plan.every))
    return result


# --- the training -------------------------------------------------------------------------------


def _made(plan: ResumePlan) -> tuple[Gpt, torch.optim.AdamW]:
    model = Gpt(plan.width, plan.layers, plan.time)
    return model, torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))


def _trained(plan: ResumePlan, text: torch.Tensor) -> State:
    torch.manual_seed(20260102)
    model, optimizer = _made(plan)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, plan.warmup, eta_min=plan.lr)
    for _ in range(plan.warmup):
        update(model, optimizer, text, plan.time, plan.batch)
        schedule.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": plan.warmup}


def _resumed(
    plan: ResumePlan, state: State, text: torch.Tensor, held_out: torch.Tensor, seed: int
) -> list[float]:
    """Return the loss on held-out text, before the first step and then at intervals."""
    model, optimizer = _made(plan)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.manual_seed(seed)
    losses = [_loss(plan, model, held_out)]
    for step in range(1, plan.steps + 1):
        update(model, optimizer, text, plan.time, plan.batch)
        if step % plan.every == 0:
            losses.append(_loss(plan, model, held_out))
    return losses


@torch.no_grad()
def _loss(plan: ResumePlan, model: Gpt, text: torch.Tensor) -> float:
    last = text.numel() - plan.time - 1
    at = torch.arange(plan.rows) * last // max(1, plan.rows - 1)
    rows = text[at[:, None] + torch.arange(plan.time + 1)].long()
    logits = model(rows[:, :-1])
    loss = functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    return float(loss)


# --- the forms ----------------------------------------------------------------------------------


def _saved(
    space: Workspace, plan: ResumePlan, state: State
) -> tuple[list[Measured], dict[str, State]]:
    """Save the state in each form; return the measurements, and the state loaded from each."""
    rows, states = [], {}
    size = state_bytes(state)
    for form, encodings in FORMS.items():
        folder = space.fresh()  # a store of its own: forms share chunks
        with ckptstore.open(folder, create=True) as store:
            run = store.run("gpt", encodings=encodings)
            version = run.save(state, step=plan.warmup, codec="planes")
            states[form] = run.load()
            row = Measured(name=form, logical_bytes=size)
            row.numbers = {
                "stored_bytes": version.receipt["stored_bytes"] + version.manifest_bytes,
                **_errors(store, version, encodings),
            }
        rows.append(row)
        space.discard(folder)
    states[REFUSED] = _spoiled(states[_FULL])
    row = Measured(name=REFUSED, logical_bytes=size, note="made by hand")
    rows.append(row)
    return rows, states


def _errors(
    store: ckptstore.Store, version: ckptstore.Version, encodings: Encodings
) -> dict[str, float]:
    """Return the number of lossily stored tensors, and the worst error over its bound."""
    tensors = read_content(store.repo.manifests.load(version)).tensors()
    lossy = [one for one in tensors if one.encoding not in ("lossless", "derived")]
    shares = [one.rel_l2 / one.rel_l2_bound for one in lossy if one.rel_l2_bound]
    kept = len(version.metadata.get("kept_lossless", ()))
    return {
        "lossy_tensors": float(len(lossy)),
        "kept_lossless": float(kept),
        "rel_l2_max": max((one.rel_l2 for one in lossy), default=0.0),
        "of_bound_max": max(shares, default=0.0) if encodings else 0.0,
    }


def _spoiled(state: State) -> State:
    """Return a state whose second moments were stored in even steps, block by block."""
    moments = state["optimizer"]["state"]
    return {
        **state,
        "optimizer": {
            **state["optimizer"],
            "state": {
                place: {**one, "exp_avg_sq": _even(one["exp_avg_sq"])}
                for place, one in moments.items()
            },
        },
    }


def _even(tensor: torch.Tensor) -> torch.Tensor:
    form = Form.of(Encoding("int8"), signed=False)
    raw = tensor.reshape(-1).numpy().view(np.uint32)
    coded = form.encode("float32", raw)
    assert coded.scales is not None  # noqa: S101 - for the type checker
    out = np.empty_like(raw)
    codes, scales = coded.codes.view(np.uint8).data, coded.scales.view(np.uint8).data
    decode_elements(
        form.kind,
        form.code,
        form.block,
        "float32",
        form.dtype,
        0,
        codes,
        scales,
        out.data.cast("B"),
    )
    return torch.from_numpy(out.view(np.float32)).reshape(tensor.shape)


def _compared(curves: Sequence[Sequence[float]], full: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return figures that compare the curves of a form with those of full precision."""
    looks = range(1, len(full[0]))
    spread = [max(one[at] for one in full) - min(one[at] for one in full) for at in looks]
    means = [statistics.mean(one[at] for one in curves) for at in looks]
    inside = [
        min(one[at] for one in full) <= mean <= max(one[at] for one in full)
        for at, mean in zip(looks, means, strict=True)
    ]
    paired = [
        abs(ours[at] - theirs[at])
        for ours, theirs in zip(curves, full, strict=True)
        for at in looks
    ]
    return {
        "first_loss": statistics.mean(one[0] for one in curves),
        "last_loss": statistics.mean(one[-1] for one in curves),
        "inside_share": sum(inside) / len(inside),
        "spread": statistics.median(spread),
        "same_seed_difference": statistics.median(paired),
        "same_seed_difference_max": max(paired),
    }
