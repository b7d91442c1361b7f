"""State of the golden store of arranged deltas: numbers that change as in a training."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def arranged_state(step: int) -> dict[str, Any]:
    """Return tensors for which a save chooses each form, over some odd numbers.

    Weights take the order of exponents, in bf16 with half bytes where few have moved; second
    moments a turn. The last piece of each has an odd number of elements.
    """
    old, by = (np.random.default_rng(seed).standard_normal(36_001) for seed in (1, 2))
    odd = [0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf, 1e-45, -1e-45]
    weights = np.concatenate([odd, old * 0.02])

    def moved(scale: float) -> np.ndarray[Any, Any]:
        with np.errstate(invalid="ignore"):
            made: np.ndarray[Any, Any] = weights + np.concatenate([np.zeros(8), by * scale * step])
        return made

    squares = np.exp(old * 2 - 20)
    ordered = squares.astype(np.float32).view(np.uint32).astype(np.int64)
    bits = ordered + (np.random.default_rng(3).laplace(0, 1 << 21, old.size) * step).astype(int)
    return {
        "float32": torch.from_numpy(moved(1e-5)[:20_009].astype(np.float32)),
        "float64": torch.from_numpy(moved(1e-9)[:9_001]),
        "few": torch.from_numpy(moved(2e-5)).to(torch.bfloat16),
        "many": torch.from_numpy(moved(2e-3)).to(torch.bfloat16),
        "squares": torch.from_numpy(bits[:18_001].astype(np.int32)).view(torch.float32),
    }
