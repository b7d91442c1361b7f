"""States: the same values unsharded, and as ranks hold them."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

__all__ = [
    "MODELS", "blank", "differences", "mesh_of", "model_state", "shard_model", "sharded",
    "state_of", "tensors", "values",
]  # fmt: skip

TILES = {1: (1, 1), 2: (2, 1), 3: (1, 3), 4: (2, 2), 8: (2, 4)}
"""Two-dimensional meshes by number of ranks."""

ROWS, COLUMNS = (Shard(0),), (Shard(1),)
PLACEMENTS: Mapping[str, Sequence[Any]] = {
    "rows": ROWS, "columns": COLUMNS, "few_rows": ROWS, "vector": ROWS, "replica": (Replicate(),),
    "tiles": (Shard(0), Shard(1)), "tiles_turned": (Shard(1), Shard(0)),
    "rows_twice": (Shard(0), Shard(0)), "hybrid": (Replicate(), Shard(0)),
    "hybrid_columns": (Replicate(), Shard(1)), "half": COLUMNS, "complex": ROWS,
    "complex_columns": COLUMNS, "float8": COLUMNS, "flags": ROWS, "deep": (Shard(2),),
    "large": ROWS, "large_columns": COLUMNS,
}  # fmt: skip
"""Placements of each tensor on a mesh of one dimension, or of two. Others are plain tensors."""


def tensors(seed: int = 1) -> dict[str, torch.Tensor]:
    """Return whole tensors: sizes that no number of ranks divides, every kind of element."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    return {
        "rows": normal(17, 9), "columns": normal(10, 19), "few_rows": normal(3, 50),
        "vector": torch.arange(13) + seed, "replica": normal(40, 41), "tiles": normal(21, 22),
        "tiles_turned": normal(21, 22), "rows_twice": normal(37, 5), "hybrid": normal(33, 6),
        "hybrid_columns": normal(6, 33), "half": normal(31, 7).to(torch.bfloat16),
        "complex": torch.randn(9, 8, dtype=torch.complex128, generator=random),
        "complex_columns": torch.randn(9, 8, dtype=torch.complex128, generator=random),
        "float8": normal(16, 18).to(torch.float8_e4m3fn), "flags": normal(50) > 0,
        "deep": normal(6, 5, 7), "large": normal(700, 301), "large_columns": normal(300, 701),
        "plain": normal(5, 6).t(), "scalar": torch.tensor(2.5 + seed), "empty": torch.empty(0, 4),
    }  # fmt: skip


@functools.cache  # the groups of its ranks are made once
def mesh_of(world: int, dims: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    """Return all ranks as a mesh of one or two dimensions."""
    shape = (world,) if dims == 1 else TILES[world]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def sharded(full: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any]) -> DTensor:
    """Return this rank's part of a tensor, without communication."""
    return DTensor.from_local(
        _part(full, mesh, placements).clone(), mesh, placements, run_check=False, shape=full.shape,
        stride=full.stride(),
    )  # fmt: skip


def _part(full: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any]) -> torch.Tensor:
    sizes, offsets = compute_local_shape_and_global_offset(full.shape, mesh, placements)
    return full[tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))]


def values(seed: int = 1) -> dict[str, Any]:
    """Return values that are no tensors, or hold some but stay whole in planners."""
    return {
        "step": seed, "lr": 0.1, "betas": (0.9, 0.999), "names": ["a", "b"], "none": None,
        "text": "grün", "big": 2**70, "bytes": bytes(range(256)) * 20,
        "numpy": np.arange(6).reshape(2, 3),
        "random": torch.Generator().manual_seed(seed).get_state(),
        "pair": (torch.arange(3.0), {"deep": torch.ones(2)}),
        "groups": [{"lr": 0.1, "weight": torch.full((3,), float(seed))}, {"lr": 0.2}],
        "set": {1, 2}, "size": torch.Size([2, 3]), "dtype": torch.bfloat16,
    }  # fmt: skip


class Net(nn.Module):
    """A small model with odd sizes."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(23, width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)
        self.norm = nn.LayerNorm(width)


MODELS = ("fsdp", "hsdp", "tensor_parallel", "fsdp_and_tensor_parallel")
_PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def model_state(kind: str, world: int, *, seed: int = 1) -> dict[str, Any]:
    """Return the state of a model and of its optimizer after two steps.

    Gradients are made from the weights, element by element: they, and so the result, are the same
    bits under any sharding. `world` 0 is a model that is not sharded at all.
    """
    torch.manual_seed(seed)
    even = kind == "fsdp_and_tensor_parallel"
    model = Net(16, 32) if even else Net(10, 21)
    if world:
        shard_model(model, kind, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = parameter.detach() * 0.1
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def shard_model(model: Net, kind: str, world: int) -> None:
    """Divide a model among ranks."""
    if kind == "tensor_parallel":
        parallelize_module(model, mesh_of(world, 1), _PLAN)
        return
    if kind == "fsdp":
        mesh = mesh_of(world, 1)
    elif kind == "hsdp":
        mesh = mesh_of(world, 2, ("replicate", "shard"))
    else:
        both = mesh_of(world, 2, ("dp", "tp"))
        parallelize_module(model, both["tp"], _PLAN)
        mesh = both["dp"]
    for layer in (model.up, model.down):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def state_of(world: int, *, seed: int = 1, models: Sequence[str] = MODELS) -> dict[str, Any]:
    """Return the whole state, as a rank of `world` holds it; unsharded for 0."""
    found: dict[str, Any] = {"tensors": {}, "values": values(seed)}
    for name, full in tensors(seed).items():
        placements = PLACEMENTS.get(name)
        if not world or placements is None:
            found["tensors"][name] = full
        else:
            mesh = mesh_of(world, len(placements))
            found["tensors"][name] = sharded(full, mesh, placements)
    for kind in models:
        found[kind] = model_state(kind, world, seed=seed)
    return found


def blank(value: Any) -> Any:  # noqa: ANN401 - any state
    """Overwrite every tensor of a state in place; return it with other plain values."""
    if isinstance(value, DTensor):
        blank(value.to_local())
        return value
    if isinstance(value, torch.Tensor):
        value.detach().copy_(torch.zeros_like(value))
        return value
    if isinstance(value, dict):
        return {key: blank(item) for key, item in value.items()}
    if isinstance(value, list) and any(isinstance(item, dict | torch.Tensor) for item in value):
        return [blank(item) for item in value]
    return "not loaded"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def differences(found: Any, meant: Any, path: str = "") -> Iterator[str]:  # noqa: ANN401
    """Yield paths where a state differs from an unsharded one in a bit; of shards this rank's."""
    if isinstance(meant, torch.Tensor):
        if isinstance(found, DTensor):
            meant = _part(meant, found.device_mesh, found.placements)
            found = found.to_local()
        if not isinstance(found, torch.Tensor):
            yield f"{path}: {type(found)}"
        elif (found.dtype, found.shape) != (meant.dtype, meant.shape):
            yield f"{path}: {found.dtype}{list(found.shape)} {meant.dtype}{list(meant.shape)}"
        elif found.numel() and not torch.equal(_bits(found), _bits(meant)):
            yield f"{path}: other bits"
    elif isinstance(meant, dict):
        if not isinstance(found, dict) or set(found) != set(meant):
            yield f"{path}: keys {sorted(set(found) ^ set(meant))}"
            return
        for key, item in meant.items():
            yield from differences(found[key], item, f"{path}.{key}")
    elif isinstance(meant, list | tuple):
        if type(found) is not type(meant) or len(found) != len(meant):
            yield f"{path}: {found!r:.80}"
            return
        for place, item in enumerate(meant):
            yield from differences(found[place], item, f"{path}[{place}]")
    elif isinstance(meant, np.ndarray):
        if not np.array_equal(found, meant):
            yield f"{path}: {found!r:.80}"
    elif type(found) is not type(meant) or found != meant:
        yield f"{path}: {found!r:.80}"
