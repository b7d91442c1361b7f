"""States determined by two numbers, and the comparison of two states bit by bit."""

from __future__ import annotations

from collections import OrderedDict
from functools import lru_cache
from typing import Any

import numpy as np
import torch

__all__ = ["differences", "state_of"]

_SHAPES: dict[type, type] = {list: list, tuple: tuple}


@lru_cache(maxsize=64)
def state_of(seed: int, *, elements: int = 20_000) -> dict[str, Any]:
    """Return the state of a seed, not to be changed: the same seed gives the same bits.

    One large tensor that changes, one that never does, small ones of many types, tied tensors, a
    view, NumPy arrays, long bytes and plain values.

    Parameters
    ----------
    elements
        Elements of each of the two large float32 tensors.
    """
    random = np.random.default_rng([seed, 1])
    changing = torch.from_numpy(random.standard_normal(elements, dtype=np.float32))
    frozen = torch.from_numpy(np.random.default_rng(7).standard_normal(elements, dtype=np.float32))
    embed = changing[:600].clone().reshape(20, 30)
    return {
        "model": OrderedDict(
            weight=changing, frozen=frozen, embed=embed, head=embed, part=embed[3:5],
            half=changing[:256].to(torch.bfloat16),
            scale=torch.tensor(float(seed), dtype=torch.float64),
            mask=torch.from_numpy(random.integers(0, 2, 77).astype(np.bool_)),
            empty=torch.empty(0, 3),
        ),
        "optimizer": {"step": seed, "moments": [changing[:64].clone(), changing[64:999].clone()]},
        "data": {
            "order": random.integers(0, 1 << 60, 500),
            "seen": (seed, None, True, 1.5, "text", b"\0\xff"),
            "blob": random.bytes(9000),
        },
    }  # fmt: skip


def differences(found: Any, meant: Any, path: str = "state") -> list[str]:  # noqa: ANN401
    """Return the paths at which two states differ in a single bit, in type or in order."""
    if type(found) is not type(meant):
        return [f"{path}: {type(found).__name__} instead of {type(meant).__name__}"]
    if isinstance(meant, dict):
        if list(found) != list(meant):
            return [f"{path}: other keys"]
        return [d for key in meant for d in differences(found[key], meant[key], f"{path}.{key}")]
    if type(meant) in _SHAPES:
        if len(found) != len(meant):
            return [f"{path}: other length"]
        pairs = enumerate(zip(found, meant, strict=True))
        return [d for at, (a, b) in pairs for d in differences(a, b, f"{path}[{at}]")]
    if isinstance(meant, torch.Tensor):
        same = found.dtype == meant.dtype and found.shape == meant.shape
        return [] if same and _octets(found) == _octets(meant) else [f"{path}: other bits"]
    if isinstance(meant, np.ndarray):
        same = found.dtype == meant.dtype and found.shape == meant.shape
        return [] if same and found.tobytes() == meant.tobytes() else [f"{path}: other bits"]
    return [] if found == meant else [f"{path}: {found!r:.60}"]


def _octets(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy())
