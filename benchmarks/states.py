"""The state that the benchmarks save: mixed precision, with Adam, seeded, of any size.

It has the shape of a GPT's training state: bf16 weights, and for each parameter an fp32 master, a
first and a second moment, and a step counter; beside them a scheduler's dict, a random generator's
state, and where the data loader stands. The values come from a short real training
(:mod:`benchmarks.training`): each element is drawn from the trained parameters of its kind, master
and moments of one and the same trained element together, from a window of 256 neighbours, so that
rows keep their scale; and every value is then multiplied by 1 +- 2**-8 (uniform), so that mantissas
are fresh and no stretch of bytes occurs twice. bf16 weights are the masters, rounded: the relation
that mixed-precision training has. The state named ``nearly`` has 366 tensors, and masters that went
one step of Adam further than the bf16 weights: most elements still follow, and no tensor does.
`fidelity` in the results of ``benchmarks.codecs`` compares how
well trained and made values compress.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from benchmarks.training import Trained, kind_of, train

__all__ = [
    "State",
    "StateName",
    "StateSpec",
    "flat_tensors",
    "make_state",
    "make_values",
    "same",
    "seeded_tensors",
    "state_bytes",
]

State = dict[str, Any]

_BYTES_PER_PARAMETER = 2 + 4 + 4 + 4
_WINDOW = 256
_JITTER = 2.0**-8
_BATCH = 1 << 20
# Learning rate of the step that masters of ``nearly`` are ahead. Source: the end of a cosine that
# decays to a six-hundredth; about one bf16 weight in 100 differs then (measured on this state).
_LAST_LR = 1e-6
_NEARLY_LAYERS = 12


StateName = Literal["follows", "nearly"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpec:
    """Parameters of the state to make."""

    bytes_min: int
    """At least this many bytes of tensors; layers are added until it is reached."""
    seed: int = 20260101
    training_steps: int = 120
    """Of the training that gives the values."""
    name: StateName = "follows"
    """``follows``: bf16 weights are the masters, rounded. ``nearly``: they were, a step ago."""

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Width, vocabulary and context: GPT-2 small's width, or less for a small state."""
        if self.name == "nearly":
            parameters = self.bytes_min / _BYTES_PER_PARAMETER
            width = math.ceil(math.sqrt(parameters / (_NEARLY_LAYERS * 12)) / 8) * 8
            return width, 256, 0
        if self.bytes_min >= 256 << 20:
            return 768, 24_000, 1024
        return (128, 2_000, 1024) if self.bytes_min >= 16 << 20 else (32, 256, 64)


def make_state(spec: StateSpec) -> State:
    """Return the state of a spec: equal specs give equal bytes on one version of torch."""
    trained = train(seed=spec.seed, steps=spec.training_steps)
    shapes = list(_shapes(spec))

    def values(place: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        name, shape = shapes[place]
        return make_values(trained, kind_of(name), shape, seed=(spec.seed, place))

    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(values, range(len(shapes))))
    names = [name for name, _ in shapes]
    masters = {name: three[0] for name, three in zip(names, made, strict=True)}
    step = float(spec.training_steps)
    moments = {
        place: {"step": torch.tensor(step), "exp_avg": three[1], "exp_avg_sq": three[2]}
        for place, three in enumerate(made)
    }
    weights = {name: master.to(torch.bfloat16) for name, master in masters.items()}
    if spec.name == "nearly":
        for master, first, second in made:
            master.addcdiv_(first, second.sqrt().add_(1e-8), value=-_LAST_LR)
    group = {"lr": 6e-4, "betas": [0.9, 0.95], "eps": 1e-8, "params": list(range(len(masters)))}
    return {
        "model": weights,
        "optimizer": {"master": masters, "state": moments, "param_groups": [group]},
        "scheduler": {"last_epoch": spec.training_steps, "_last_lr": [6e-4], "eta_min": 6e-5},
        "rng": {"torch": torch.Generator().manual_seed(spec.seed).get_state()},
        "data": {"epoch": 0, "position": 123_456, "files": ["train-000.bin", "train-001.bin"]},
        "step": spec.training_steps,
    }


def make_values(
    trained: Trained, kind: str, shape: tuple[int, ...], *, seed: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return master, first and second moments of one parameter, drawn from the trained ones."""
    sources = [values.numpy() for values in trained.values[kind]]
    draws = np.random.Generator(np.random.SFC64(seed))
    window = min(_WINDOW, sources[0].size)
    count = math.prod(shape)
    made = [np.empty(count, np.float32) for _ in sources]
    for begin in range(0, count, _BATCH):
        size = min(_BATCH, count - begin)
        blocks = -(-size // window)
        starts = draws.integers(0, sources[0].size - window + 1, (blocks, 1), dtype=np.int32)
        within = draws.integers(0, window, (blocks, window), dtype=np.int32)
        index = (starts + within).reshape(-1)[:size]
        for source, out in zip(sources, made, strict=True):
            noise = draws.random(size, dtype=np.float32)
            noise *= 2 * _JITTER
            noise += 1 - _JITTER
            np.multiply(source[index], noise, out=out[begin : begin + size])
    first, second, third = (torch.from_numpy(values.reshape(shape)) for values in made)
    return first, second, third


def _shapes(spec: StateSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the parameters of a GPT with as many layers as needed; of ``nearly``, 73 in 12."""
    width, vocabulary, context = spec.sizes
    if spec.name == "nearly":
        yield "embed.weight", (vocabulary, width)
        for layer in range(_NEARLY_LAYERS):
            for name, shape in _block(width):
                if name.endswith("weight"):
                    yield f"blocks.{layer}.{name}", shape
        return
    yield "embed.weight", (vocabulary, width)
    yield "position.weight", (context, width)
    yield "ln.weight", (width,)
    yield "ln.bias", (width,)
    done = (vocabulary + context + 2) * width * _BYTES_PER_PARAMETER
    layer = 0
    while done < spec.bytes_min or not layer:
        for name, shape in _block(width):
            yield f"blocks.{layer}.{name}", shape
        done += (12 * width + 13) * width * _BYTES_PER_PARAMETER
        layer += 1


def _block(width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    for norm in ("ln1", "ln2"):
        yield f"{norm}.weight", (width,)
        yield f"{norm}.bias", (width,)
    linear = {"qkv": (3, 1), "proj": (1, 1), "up": (4, 1), "down": (1, 4)}
    for name, (rows, columns) in linear.items():
        yield f"{name}.weight", (rows * width, columns * width)
        yield f"{name}.bias", (rows * width,)


def flat_tensors(state: object, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a nested state with their dotted paths, in order."""
    if isinstance(state, torch.Tensor):
        yield path, state
    elif isinstance(state, Mapping):
        for key, value in state.items():
            yield from flat_tensors(value, f"{path}.{key}" if path else str(key))
    elif isinstance(state, list | tuple):
        for place, value in enumerate(state):
            yield from flat_tensors(value, f"{path}.{place}" if path else str(place))


def seeded_tensors(seed: int, *, count: int = 4, elements: int = 1 << 16) -> State:
    """Return a small state of `count` float32 tensors, each filled from the seed."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {f"w{place}": torch.randn(elements, generator=generator) for place in range(count)}
    return {"model": tensors}


def state_bytes(state: object) -> int:
    """Return the bytes of all tensors."""
    return sum(tensor.nbytes for _, tensor in flat_tensors(state))


def same(first: object, second: object) -> bool:
    """Return whether two states hold the same tensors at the same paths, bit for bit."""
    left, right = dict(flat_tensors(first)), dict(flat_tensors(second))
    if left.keys() != right.keys():
        return False
    return all(_equal_bits(tensor, right[path]) for path, tensor in left.items())


def _equal_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    return torch.equal(first.reshape(-1).view(torch.uint8), second.reshape(-1).view(torch.uint8))
