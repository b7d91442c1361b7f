"""Random states: of all generators, of devices too, each as it was."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from ckptstore.integrations import randomness
from ckptstore.store import Store

pytestmark = pytest.mark.usefixtures("generators_stay")


def _draw() -> list[float]:
    return [random.random(), random.gauss(0, 1), float(np.random.rand()), torch.rand(()).item()]


def test_what_was_captured_is_drawn_again(store: Store) -> None:
    """Also after a trip through a store, and in the middle of a pair of normal numbers."""
    random.gauss(0, 1)
    np.random.standard_normal()
    saved = store.run("gpt").save({"rng": randomness.capture_all()}, step=1)
    first = _draw(), np.random.standard_normal()

    state = store.load(f"#{saved.id}")["rng"]
    assert randomness.restore_mine(state)
    assert (_draw(), np.random.standard_normal()) == first


def test_a_rank_without_a_state_is_told() -> None:
    """A rank that was not there when it was saved keeps its own, and the caller knows."""
    before = randomness.capture()
    assert not randomness.restore_mine({"rank 7": before})
    assert torch.equal(torch.get_rng_state(), before["torch"])


class Devices:
    """Two devices whose states are single numbers."""

    def __init__(self, *, initialized: bool = True) -> None:
        self.states = [torch.tensor(1), torch.tensor(2)]
        self._initialized = initialized

    def is_initialized(self) -> bool:
        return self._initialized

    def device_count(self) -> int:
        return len(self.states)

    def get_rng_state(self) -> torch.Tensor:
        return self.states[0]

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return list(self.states)

    def set_rng_state(self, state: torch.Tensor, index: int = 0) -> None:
        self.states[index] = state


def test_all_devices_of_a_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their states come back on a process that has not used them yet."""
    monkeypatch.setattr(randomness, "_devices", Devices)
    state = randomness.capture()
    later = Devices(initialized=False)
    later.states = [torch.tensor(0), torch.tensor(0)]
    monkeypatch.setattr(randomness, "_devices", lambda: later)

    randomness.restore(state)
    assert [one.item() for one in later.states] == [1, 2]


def test_only_the_own_device_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ranks share a machine, none reaches for the devices of the others."""
    monkeypatch.setattr(randomness, "_devices", Devices)
    monkeypatch.setattr(randomness, "place", lambda: (1, 2))
    state = randomness.capture()

    assert [one.item() for one in state["device"]] == [1]


def test_a_device_that_was_not_used_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """To ask a device for its state would make a context on it."""
    monkeypatch.setattr(randomness, "_devices", lambda: Devices(initialized=False))
    assert "device" not in randomness.capture()
