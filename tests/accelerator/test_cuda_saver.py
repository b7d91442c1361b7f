"""Saves in the background from CUDA: copies on a stream of their own, into pinned memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckptstore
from ckptstore.errors import TornStateError

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize("engine", ["thread", "process"])
def test_what_was_queued_before_the_call_is_saved(tmp_path: Path, engine: str) -> None:
    """Kernels that still run at the call are waited for; what comes later is in no version."""
    with ckptstore.open(tmp_path / "s", create=True, engine=engine) as store:
        run = store.run("gpt")
        weight = torch.zeros(4096, 4096, device="cuda")
        strided = torch.randn(512, 512, device="cuda")[::2, 1:]
        for step in range(3):
            for _ in range(50):
                weight += 1
            pending = run.save_async({"w": weight, "s": strided, "cpu": torch.ones(5)}, step=step)
            weight += 1000
            weight -= 1000
            assert pending.staged
        pending.result()
        for step in range(3):
            loaded = run.load(step, map_location="cpu")
            assert torch.equal(loaded["w"], torch.full((4096, 4096), 50.0 * (step + 1)))
            assert torch.equal(loaded["s"], strided.cpu())


@pytest.mark.parametrize("engine", ["thread", "process"])
def test_staging_beside_the_training(tmp_path: Path, engine: str) -> None:
    """The call returns before the copy is done; a change without `wait_staged` is refused."""
    with ckptstore.open(tmp_path / "s", create=True, engine=engine) as store:
        run = store.run("gpt")
        weight = torch.randn(8192, 8192, device="cuda")
        meant = weight.cpu()
        pending = run.save_async({"w": weight}, step=1, stage="background")
        assert pending.wait_staged()
        weight.zero_()
        pending.result()
        assert torch.equal(run.load(map_location="cpu")["w"], meant)

        torn = run.save_async({"w": weight}, step=2, stage="background")
        weight.add_(1)
        with pytest.raises(TornStateError, match="'w' was changed"):
            torn.result()
