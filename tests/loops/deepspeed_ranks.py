"""Training with DeepSpeed's ZeRO on gloo ranks: ``deepspeed_ranks.py FOLDER STAGE TAG OUT``.

With a tag of ``FOLDER/exported`` it resumes from that universal checkpoint, else it begins. It does
4 steps; the states at the first and last of them go to OUT, whole, and their losses.
"""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state


def whole(engine: Any) -> dict[str, torch.Tensor]:
    """Return parameters and states of the optimizer, gathered. All ranks call it."""
    found = {}
    for name, one in engine.module.named_parameters():
        found[name] = safe_get_full_fp32_param(one).clone()
        for key in ("exp_avg", "exp_avg_sq"):
            found[f"{name}.{key}"] = safe_get_full_optimizer_state(one, key).clone()
    return found


def main(folder: str, stage: str, tag: str, out: str) -> None:
    """Train, and save a checkpoint of ZeRO's if this is the beginning."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    deepspeed.init_distributed("gloo")
    layers = torch.nn.Linear(7, 9), torch.nn.Tanh(), torch.nn.Linear(9, 5), torch.nn.LayerNorm(5)
    model = torch.nn.Sequential(*layers)
    adam = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
    config = {
        "train_batch_size": 8,
        "bf16": {"enabled": True},
        "optimizer": adam,
        "zero_optimization": {"stage": int(stage), "stage3_param_persistence_threshold": 0},
        "checkpoint": {"load_universal": tag != "-"},
    }
    parameters = model.parameters()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=config)
    if tag != "-":
        engine.load_checkpoint(f"{folder}/exported", tag=tag)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    result: dict[str, Any] = {"losses": torch.zeros(4), "steps": torch.zeros(2)}
    if tag != "-":  # before the first step ZeRO 3 has no states
        result["first"] = whole(engine)
    result["steps"][0] = engine.global_steps
    for at in range(4):
        batch = torch.randn(8, 7, generator=torch.Generator().manual_seed(engine.global_steps))
        loss = engine(batch.chunk(world)[rank].bfloat16()).float().square().mean()
        engine.backward(loss)
        engine.step()
        result["losses"][at] = loss.detach()
    result["steps"][1] = engine.global_steps
    result["last"] = whole(engine)
    if tag == "-":
        engine.save_checkpoint(f"{folder}/zero")
    if rank == 0:
        torch.save(result, out)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # some threads of DeepSpeed run until the process ends, which may abort it
