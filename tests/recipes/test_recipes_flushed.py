"""Derived tensors of a process whose processor flushes denormal numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckptstore


@pytest.mark.parametrize("flushed_when_saved", [True, False])
def test_what_is_derived_is_read_whatever_becomes_of_denormals(
    tmp_path: Path, *, flushed_when_saved: bool
) -> None:
    """A float32 copy of float64 masters loads bit for bit where the processor is set otherwise."""
    seed = torch.Generator().manual_seed(5)
    masters = torch.randn(4096, dtype=torch.float64, generator=seed)
    masters[::3] *= 1e-40
    if not torch.set_flush_denormal(flushed_when_saved):
        pytest.skip("this processor cannot")
    try:
        state = {"masters": masters, "weights": masters.to(torch.float32)}
        with ckptstore.open(tmp_path / "s", create=True) as store:
            store.run("r").save(state, step=1)
        torch.set_flush_denormal(not flushed_when_saved)
        with ckptstore.open(tmp_path / "s") as store:
            found = store.load("r")
    finally:
        torch.set_flush_denormal(False)
    for name, tensor in state.items():
        assert found[name].numpy().tobytes() == tensor.numpy().tobytes()
