"""The states of a process's random number generators, as values that a store can hold."""

from __future__ import annotations

import logging
import random  # noqa: TID251 - what users draw from is saved; nothing is drawn here
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ckptstore.integrations.ranks import gathered, place

_log = logging.getLogger("ckptstore")


def capture() -> dict[str, Any]:
    """Return the states of the global generators of Python, NumPy and torch, and of the devices.

    Devices: the current one if several processes train together, else all. A device that
    was not used yet is left out.
    """
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }
    devices = _devices()
    if devices is not None and devices.is_initialized():
        alone = place()[1] == 1
        state["device"] = devices.get_rng_state_all() if alone else [devices.get_rng_state()]
    return state


def restore(state: Mapping[str, Any]) -> None:
    """Set the global generators to the states that :func:`capture` returned."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    saved: Sequence[torch.Tensor] = state.get("device", ())
    devices = _devices() if saved else None
    if devices is None:
        return
    if len(saved) == 1:
        devices.set_rng_state(saved[0])
        return
    for index, one in enumerate(saved[: devices.device_count()]):
        devices.set_rng_state(one, index)


def capture_all() -> dict[str, Any]:
    """Return the states of all ranks: ``{"rank 0": ...}``. All ranks must call it."""
    return {f"rank {rank}": state for rank, state in enumerate(gathered(capture()))}


def restore_mine(states: Mapping[str, Any]) -> bool:
    """Set the generators to this rank's states; return False if it was not among those saved."""
    state = states.get(f"rank {place()[0]}")
    if state is None:
        return False
    restore(state)
    return True


def resume_random(states: Mapping[str, Any]) -> None:
    """Set the generators to this rank's states; warn if it was not among those saved."""
    if not restore_mine(states):
        _log.warning("the version has no random state of this rank: it goes on with another")


def _devices() -> Any:  # a module: torch.cuda, torch.xpu ...
    """Return the module of the machine's accelerator, if it has generators like CUDA's."""
    if not torch.accelerator.is_available():
        return None
    module = torch.get_device_module()
    return module if hasattr(module, "get_rng_state_all") else None  # MPS has one generator only
