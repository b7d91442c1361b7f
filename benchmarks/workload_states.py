"""Named workloads: states of models that people train, seeded, and the effect of a step on them.

Values are drawn from a real short training, as in :mod:`benchmarks.states`; a *step* is AdamW's
arithmetic with a made gradient, whose size follows from the second moments, at a learning rate of
1e-4: so versions differ from each other as in a training. The three models of the
WEKA whitepaper on NeMo have the shapes of FastPitch (Lancucki 2020, with the aligner of NeMo's
version), of QuartzNet 15x5 (Kriman et al. 2019: the paper says "ASR" and no more) and of Megatron's
BERT of 345 M parameters (Shoeybi et al. 2019), in fp32 with Adam's moments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from benchmarks.states import State, make_values
from benchmarks.training import Trained, train

__all__ = ["PAPER", "WORKLOADS", "Workload", "named", "parameters"]

_SEED = 20260101
_LR, _BETA1, _BETA2, _EPS = 1e-4, 0.9, 0.95, 1e-8
_NOISE = 1 << 20
_TOUCHED_ROWS = 0.02

Shapes = Iterator[tuple[str, tuple[int, ...]]]
Form = Literal["fp32", "mixed", "adapters", "experts", "rows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One named workload."""

    name: str
    about: str
    shapes: Callable[[int], Shapes]
    """Gets a divisor of the widths, 1 for the published size; yields names and shapes."""
    form: Form
    """``fp32`` and ``mixed``: all is trained. ``adapters``: tensors not named ``lora`` are frozen,
    in bf16. ``experts``: mixed, and a step reaches half of the experts. ``rows``: fp32, and a step
    reaches 2 % of the rows of tensors named ``table``."""
    every_s: float = 0.0
    """For the models of the paper: seconds from a save to the next."""

    def build(self, *, shrink: int = 1, training_steps: int = 120) -> State:
        """Return the state before its first step."""
        trained = train(seed=_SEED, steps=training_steps)
        shapes = list(self.shapes(shrink))

        def values(place: int) -> Sequence[torch.Tensor]:
            name, shape = shapes[place]
            return make_values(trained, _kind(trained, name, shape), shape, seed=(_SEED, place))

        with ThreadPoolExecutor(2) as pool:
            made = dict(
                zip((name for name, _ in shapes), pool.map(values, range(len(shapes))), strict=True)
            )
        return self._state(made)

    def _state(self, made: dict[str, Sequence[torch.Tensor]]) -> State:
        trained = [name for name in made if self.form != "adapters" or "lora" in name]
        moments = {
            place: {
                "step": torch.tensor(1000.0),
                "exp_avg": made[name][1],
                "exp_avg_sq": made[name][2],
            }
            for place, name in enumerate(trained)
        }
        group = {"lr": _LR, "betas": [_BETA1, _BETA2], "params": list(range(len(trained)))}
        optimizer: State = {"state": moments, "param_groups": [group]}
        model = {name: three[0] for name, three in made.items()}
        if self.form in {"mixed", "experts"}:
            optimizer = {"master": model, **optimizer}
            model = {name: value.to(torch.bfloat16) for name, value in model.items()}
        elif self.form == "adapters":
            model = {
                name: value if "lora" in name else value.to(torch.bfloat16)
                for name, value in model.items()
            }
        return {"model": model, "optimizer": optimizer, "step": 1000}

    def step(self, state: State, turn: int) -> None:
        """Change a state in place as a step of the training does; `turn` counts them."""
        draws = np.random.Generator(np.random.SFC64((_SEED, turn)))
        noise = torch.from_numpy(draws.standard_normal(_NOISE, dtype=np.float32))
        optimizer = state["optimizer"]
        weights = optimizer.get("master", state["model"])
        trained = [name for name in weights if self.form != "adapters" or "lora" in name]
        reached = _experts(trained, draws) if self.form == "experts" else set(trained)
        for place, name in enumerate(trained):
            if name not in reached:
                continue
            moments = optimizer["state"][place]
            moments["step"] += 1
            rows = None
            if self.form == "rows" and "table" in name:
                rows = _rows(len(weights[name]), draws)
            _adam(weights[name], moments["exp_avg"], moments["exp_avg_sq"], noise, rows)
            if weights is not state["model"]:
                state["model"][name].copy_(weights[name])
        state["step"] += 1


def _adam(
    weight: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    noise: torch.Tensor,
    rows: torch.Tensor | None,
) -> None:
    """Make AdamW's update (Loshchilov and Hutter 2019), of all rows or of some."""
    if rows is not None:
        parts = [tensor[rows] for tensor in (weight, first, second)]
        _adam(parts[0], parts[1], parts[2], noise, None)
        for tensor, part in zip((weight, first, second), parts, strict=True):
            tensor[rows] = part
        return
    flat = [tensor.view(-1) for tensor in (weight, first, second)]
    for begin in range(0, weight.numel(), _NOISE):
        w, m, v = (tensor[begin : begin + _NOISE] for tensor in flat)
        gradient = v.sqrt().mul_(noise[: len(v)])
        m.mul_(_BETA1).add_(gradient, alpha=1 - _BETA1)
        v.mul_(_BETA2).addcmul_(gradient, gradient, value=1 - _BETA2)
        w.addcdiv_(m, v.sqrt().add_(_EPS), value=-_LR)


def _experts(names: Sequence[str], draws: np.random.Generator) -> set[str]:
    """Return the parameters that a step reaches: all but half of the experts, without a token."""
    experts = sorted({name.rsplit(".", 2)[0] for name in names if ".experts." in name})
    idle = set(draws.choice(experts, len(experts) // 2, replace=False))
    return {name for name in names if name.rsplit(".", 2)[0] not in idle}


def _rows(count: int, draws: np.random.Generator) -> torch.Tensor:
    """Return the rows that a step reaches: few ids are frequent (Zipf), the ids are shuffled."""
    wanted = max(1, int(count * _TOUCHED_ROWS))
    ranks = np.unique(draws.zipf(1.1, wanted * 40) % count)[:wanted]
    shuffled = np.random.Generator(np.random.SFC64(_SEED)).permutation(count)
    return torch.from_numpy(shuffled[ranks])


def _kind(trained: Trained, name: str, shape: tuple[int, ...]) -> str:
    """Return the kind of trained parameter whose values a parameter gets."""
    if len(shape) == 1:
        return "up.bias" if name.endswith("bias") else "ln1.weight"
    kind = name.rsplit(".", 2)[-2] + ".weight"
    if "embed" in name or "table" in name:
        kind = "embed.weight"
    return kind if kind in trained.values else "up.weight"


# --- shapes -------------------------------------------------------------------------------------


def _layer(name: str, width: int) -> Shapes:
    for part, (rows, columns) in {
        "qkv": (3, 1),
        "proj": (1, 1),
        "up": (4, 1),
        "down": (1, 4),
    }.items():
        yield f"{name}.{part}.weight", (rows * width, columns * width)
        yield f"{name}.{part}.bias", (rows * width,)
    for part in ("ln1", "ln2"):
        yield f"{name}.{part}.weight", (width,)
        yield f"{name}.{part}.bias", (width,)


def _gpt(width: int, layers: int, vocabulary: int, context: int = 512) -> Shapes:
    yield "embed.weight", (vocabulary, width)
    yield "position_embed.weight", (context, width)
    for layer in range(layers):
        yield from _layer(f"blocks.{layer}", width)


def _tiny(shrink: int) -> Shapes:
    yield from _gpt(128 // shrink, 3, 256)


def _medium(shrink: int) -> Shapes:
    yield from _gpt(512 // shrink, 6, 8_000 // shrink)


def _lora(shrink: int) -> Shapes:
    width, layers = 768 // shrink, 8
    yield from _gpt(width, layers, 16_000 // shrink)
    for layer in range(layers):
        for part, rows in (("qkv", 3), ("up", 4)):
            yield f"blocks.{layer}.{part}.lora_a.weight", (8, width)
            yield f"blocks.{layer}.{part}.lora_b.weight", (rows * width, 8)


def _moe(shrink: int) -> Shapes:
    width = 256 // shrink
    yield "embed.weight", (8_000 // shrink, width)
    for layer in range(4):
        name = f"blocks.{layer}"
        yield f"{name}.router.weight", (8, width)
        for part, (rows, columns) in {"qkv": (3, 1), "proj": (1, 1)}.items():
            yield f"{name}.{part}.weight", (rows * width, columns * width)
        for expert in range(8):
            yield f"{name}.experts.{expert}.up.weight", (4 * width, width)
            yield f"{name}.experts.{expert}.down.weight", (width, 4 * width)


def _embeddings(shrink: int) -> Shapes:
    yield "table.weight", (200_000 // shrink, 64)
    for layer, (rows, columns) in enumerate(((512, 64), (512, 512), (1, 512))):
        yield f"tower.{layer}.up.weight", (rows, columns)
        yield f"tower.{layer}.up.bias", (rows,)


def _convolution(name: str, outputs: int, inputs: int, width: int) -> Shapes:
    yield f"{name}.weight", (outputs, inputs, width)
    yield f"{name}.bias", (outputs,)


def _predictor(name: str, width: int) -> Shapes:
    yield from _convolution(f"{name}.0", 256, width, 3)
    yield from _convolution(f"{name}.1", 256, 256, 3)
    for layer in range(2):
        yield f"{name}.{layer}.ln1.weight", (256,)
        yield f"{name}.{layer}.ln1.bias", (256,)
    yield f"{name}.fc.weight", (1, 256)


def _fastpitch(shrink: int) -> Shapes:
    """Yield encoder and decoder (six layers, one head of 64, kernels of 3), predictors, aligner."""
    width, inner = 384 // shrink, 1536 // shrink
    yield "encoder.embed.weight", (148, width)
    for side in ("encoder", "decoder"):
        for layer in range(6):
            name = f"{side}.layers.{layer}"
            yield f"{name}.qkv.weight", (192, width)
            yield f"{name}.qkv.bias", (192,)
            yield f"{name}.proj.weight", (width, 64)
            yield from _convolution(f"{name}.up", inner, width, 3)
            yield from _convolution(f"{name}.down", width, inner, 3)
            for part in ("ln1", "ln2"):
                yield f"{name}.{part}.weight", (width,)
                yield f"{name}.{part}.bias", (width,)
    yield from _predictor("duration", width)
    yield from _predictor("pitch", width)
    yield from _convolution("pitch_embed", width, 1, 3)
    yield "mel.weight", (80, width)
    yield from _convolution("aligner.key.0", 2 * width, width, 3)
    yield from _convolution("aligner.key.1", 80, 2 * width, 1)
    yield from _convolution("aligner.query.0", 160, 80, 3)
    yield from _convolution("aligner.query.1", 80, 160, 1)
    yield from _convolution("aligner.query.2", 80, 80, 1)


def _quartznet(shrink: int) -> Shapes:
    """Yield five groups of three blocks of five separable convolutions: table 1 of the paper."""
    groups = ((33, 256), (39, 256), (51, 512), (63, 512), (75, 512))
    channels = 256 // shrink
    yield from _separable("first", channels, 64, 33)
    for group, (kernel, full) in enumerate(groups):
        outputs = full // shrink
        for block in range(3):
            name = f"blocks.{group}.{block}"
            yield from _convolution(f"{name}.residual", outputs, channels, 1)
            for repeat in range(5):
                yield from _separable(f"{name}.{repeat}", outputs, channels, kernel)
                channels = outputs
    yield from _separable("second", 512 // shrink, channels, 87)
    yield from _convolution("third", 1024 // shrink, 512 // shrink, 1)
    yield from _convolution("decoder", 29, 1024 // shrink, 1)


def _separable(name: str, outputs: int, inputs: int, kernel: int) -> Shapes:
    yield f"{name}.depth.weight", (inputs, 1, kernel)
    yield f"{name}.point.weight", (outputs, inputs, 1)
    yield f"{name}.norm.weight", (outputs,)
    yield f"{name}.norm.bias", (outputs,)


def _bert(shrink: int) -> Shapes:
    """Yield 24 layers of width 1024, Megatron's padded vocabulary of 30,592."""
    width = 1024 // shrink
    yield from _gpt(width, 24, 30_592 // shrink)
    yield "token_type_embed.weight", (2, width)
    yield "pooler.weight", (width, width)
    yield "head.dense.weight", (width, width)
    yield "head.bias", (30_592 // shrink,)


WORKLOADS = (
    Workload(
        name="tiny", about="a GPT of 0.7 M parameters, fp32 + AdamW", shapes=_tiny, form="fp32"
    ),
    Workload(
        name="lora",
        about="adapters of rank 8 with AdamW on a frozen base of 69 M parameters in bf16",
        shapes=_lora,
        form="adapters",
    ),
    Workload(
        name="adamw", about="a GPT of 23 M parameters, fp32 + AdamW", shapes=_medium, form="fp32"
    ),
    Workload(
        name="mixed",
        about="the same GPT: bf16 weights, fp32 masters, AdamW",
        shapes=_medium,
        form="mixed",
    ),
    Workload(
        name="moe",
        about="four layers of eight experts, mixed precision; half of them get no token in a step",
        shapes=_moe,
        form="experts",
    ),
    Workload(
        name="embeddings",
        about="a table of 200,000 rows, of which a step reaches 2 %, and a small tower, fp32",
        shapes=_embeddings,
        form="rows",
    ),
)
PAPER = (
    Workload(name="FastPitch", about="text to speech", shapes=_fastpitch, form="fp32", every_s=5.0),
    Workload(name="QuartzNet", about="the ASR model", shapes=_quartznet, form="fp32", every_s=4.0),
    Workload(name="BERT", about="Megatron's, fp32", shapes=_bert, form="fp32", every_s=15.0),
)


def named(name: str) -> Workload:
    """Return a workload by its name."""
    return next(one for one in (*WORKLOADS, *PAPER) if one.name == name)


def parameters(workload: Workload) -> int:
    """Return the number of the model's parameters at its published size."""
    return sum(math.prod(shape) for _, shape in workload.shapes(1))
