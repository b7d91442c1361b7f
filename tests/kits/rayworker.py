"""The program of Ray Train's workers in the tests; workers import it by its name."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rankkit.groups import Rank
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ckptstore
from ckptstore.integrations.dcp import CkptStoreReader, CkptStoreWriter
from ckptstore.integrations.ray_train import report, reported
from ckptstore.model import Version
from ckptstore.store import Run

__all__ = ["alone", "train"]

STEPS = 20
Report = Callable[[Run, Version | None, dict[str, Any]], None]


def train(config: dict[str, Any]) -> None:
    """Train as a worker of Ray; the result is a file for each rank."""
    told = loop(config, reported, report)
    Path(config["out"]).with_suffix(f".{dist.get_rank()}").write_text(json.dumps(told))


def alone(me: Rank, store: str) -> dict[str, Any]:
    """Train without Ray, as a rank."""
    del me
    config = {"store": store, "options": {}, "dies": f"{store}-dies"}
    return loop(config, lambda _: None, lambda *_: None)


def loop(
    config: dict[str, Any], resume: Callable[[Run], Version | None], tell: Report
) -> dict[str, Any]:
    """Train to step 20; save and report each fifth step; return losses and weights.

    Rank 1 is killed in the save of step 15 if the file `dies` is there, which it removes.
    """
    torch.set_num_threads(1)
    torch.manual_seed(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = {}
    with ckptstore.open(config["store"], **config["options"]) as store:
        run = store.run("gpt")
        version = resume(run)
        began = 0
        if version is not None:
            weights, moments = get_state_dict(model, optimizer)
            state = {"model": weights, "optimizer": moments}
            state_dict_loader.load(state, storage_reader=CkptStoreReader(run, f"#{version.id}"))
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
            began = version.step
        for step in range(began + 1, STEPS + 1):
            rows = torch.full((2, 4), step / STEPS + dist.get_rank())
            loss = model(rows).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[step] = loss.item()
            if step % 5 == 0:
                weights, moments = get_state_dict(model, optimizer)
                writer = CkptStoreWriter(run, step=step)
                if step == 15 and dist.get_rank() == 1 and _taken(config["dies"]):
                    writer.write_data = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign,assignment]
                state_dict_saver.save(
                    {"model": weights, "optimizer": moments}, storage_writer=writer
                )
                tell(run, writer.version, {"loss": losses[step], "step": step})
        parts: dict[str, Any] = model.state_dict()
        whole = b"".join(one.full_tensor().detach().numpy().tobytes() for one in parts.values())
    told = {str(step): loss for step, loss in losses.items()}
    return {"began": began, "losses": told, "weights": hashlib.sha256(whole).hexdigest()}


def _taken(path: str) -> bool:
    """Remove a file; return whether it was there."""
    try:
        Path(path).unlink()
    except FileNotFoundError:
        return False
    return True
