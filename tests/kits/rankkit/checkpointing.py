"""Trainings with FSDP2 whose states torch_checkpointing saves and reshards, on gloo ranks.

All of the library is as released, but for the exchange of metadata, which it does on CUDA.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ckptstore
from ckptstore.integrations.ranks import gathered as gathered_values
from rankkit.groups import Rank
from rankkit.trainers import gathered

__all__ = ["train"]

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def manager_of(url: str) -> Any:  # noqa: ANN401 - of the library, untyped
    """Return a manager that saves at once; after its first save it would write no metadata."""
    from torch_checkpointing import CheckpointManager, ItemSpec
    from torch_checkpointing.config import SyncCheckpointSaverConfig
    from torch_checkpointing.default_resharder import DefaultResharder
    from torch_checkpointing.metadata_manager import DefaultMetadataManager

    from ckptstore.integrations.torch_checkpointing import CkptStoreStorageConfig

    # The library gathers it on CUDA.
    DefaultMetadataManager._all_gather_pickled_data = lambda _, data, _group: dict(
        enumerate(gathered_values(data))
    )
    return CheckpointManager(
        CheckpointManager.Config(
            items={name: ItemSpec(resharder=DefaultResharder()) for name in ("model", "optimizer")},
            save=SyncCheckpointSaverConfig(),
            storage_config=CkptStoreStorageConfig(url=url, run="gpt"),
        )
    )


def train(me: Rank, url: str, plan: dict[str, Any]) -> tuple[list[float], list[dict[str, Any]]]:
    """Train to step 20, saving each fifth; return losses, and on rank 0 the states at those steps.

    Parameters
    ----------
    plan
        ``saves``; ``dies``: the last rank is killed in the save of this step; ``resume``.
    """
    from ckptstore.integrations.file_streams import FileWriter
    from ckptstore.integrations.torch_checkpointing import path_of

    torch.manual_seed(99 if plan.get("resume") else 1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (me.world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def state() -> dict[str, Any]:
        moments = get_optimizer_state_dict(model, optimizer, options=_FLAT)
        return {"model": get_model_state_dict(model), "optimizer": moments}

    began = 0
    if plan.get("resume"):
        into = state()
        with ckptstore.open(url) as store:
            version = store.run("gpt").resolve()
        manager_of(url).load(path_of(version), into=into, strict=True)
        set_optimizer_state_dict(model, optimizer, into["optimizer"], options=_FLAT)
        began = version.step
    losses, states = [], [gathered(model, optimizer)]
    for step in range(began + 1, 21):
        loss = model(torch.full((2, 4), step / 20 + me.rank)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 5 == 0:
            states.append(gathered(model, optimizer))
            if plan.get("dies") == step and me.rank == me.world - 1:
                FileWriter.close = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign,assignment]
            if plan.get("saves"):
                manager_of(url).save(f"/ckpts/step_{step}", state())
    return losses, states
