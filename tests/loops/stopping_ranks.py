"""One rank of the trainings that test_preemption ends: stopping_ranks.py FOLDER RANK SIZE."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import ckptstore
from ckptstore.integrations.preemption import Preemption
from ckptstore.store import Store

STEPS_MAX = 1_000_000


def train(store: Store, folder: Path, name: str, *, first: int = 0, check_every: int = 1) -> int:
    """Train until told to stop; return the step. Rank 1 is told at its step 5, or from outside."""
    rank = dist.get_rank()
    weight = torch.zeros(8)
    step = first
    with Preemption(deadline_s=240, check_every=check_every) as preemption:
        while step < STEPS_MAX:
            weight += 1
            step += 1
            if step == 5 and rank == 1:
                if name == "outside":
                    (folder / "outside-1").touch()
                else:
                    os.kill(os.getpid(), signal.SIGTERM)
            if preemption.should_stop(step):
                break
        if rank == 0:
            preemption.secure(store.run(name), {"w": weight, "step": step}, step=step)
        dist.barrier()
        assert preemption.exit_code == 128 + signal.SIGTERM
    return step


def on_devices(store: Store, folder: Path) -> int:
    """Train where the default group cannot reduce on the CPU, as NCCL's."""
    asked = dist.get_backend_config
    dist.get_backend_config = lambda group=None: "cuda:nccl" if group is None else asked(group)
    try:
        return train(store, folder, "on-devices")
    finally:
        dist.get_backend_config = asked


def main(folder: Path, rank: int, size: int) -> int:
    """Run the trainings, and write down at which step each stopped."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=size
    )
    with ckptstore.open(folder / "ckpts") as store:
        said = {
            "in-step": train(store, folder, "in-step"),
            "apart": train(store, folder, "apart", first=rank),
            "asked-seldom": train(store, folder, "asked-seldom", check_every=4),
            "on-devices": on_devices(store, folder),
            "outside": train(store, folder, "outside"),
        }
    (folder / f"said-{rank}").write_text(json.dumps(said), encoding="utf-8")
    dist.destroy_process_group()
    return 143


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
