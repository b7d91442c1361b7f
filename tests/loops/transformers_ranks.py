"""One rank of a Hugging Face training: transformers_ranks.py FOLDER; RANK and so on are set.

Rank 1 alone gets SIGTERM. What both lost and resumed is written down.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import ckptstore
from ckptstore.integrations.preemption import Preemption
from ckptstore.integrations.transformers import StoreTrainerMixin
from ckptstore.store import Run


class Stored(StoreTrainerMixin, Trainer):  # type: ignore[misc]  # not followed by mypy
    """What a user writes."""


class Own(TrainerCallback):  # type: ignore[misc]  # not followed by mypy
    """Keeps what this rank lost at each step, before it is averaged; sends a signal."""

    def __init__(self, told_at: int | None = None) -> None:
        self.drawn: list[float] = []
        self._told_at = told_at

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # What dropout draws next is this rank's own.
        self.drawn.append(torch.get_rng_state().sum(dtype=torch.int64).item())
        if state.global_step == self._told_at and args.process_index == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def make(run: Run, folder: Path, watch: Own, preemption: Preemption | None = None) -> Stored:
    """Return a trainer of 8 steps with dropout."""
    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=16, n_positions=8, n_embd=16, n_layer=1, n_head=2,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    arguments = TrainingArguments(
        output_dir=str(folder / "out"), use_cpu=True, ddp_backend="gloo", report_to=[],
        disable_tqdm=True, per_device_train_batch_size=2, max_steps=8, logging_steps=1,
        save_strategy="no",
    )  # fmt: skip
    drawn = torch.Generator().manual_seed(3)
    rows = [torch.randint(0, 16, (8,), generator=drawn) for _ in range(24)]
    return Stored(
        GPT2LMHeadModel(config), arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in rows], callbacks=[watch],
        run=run, preemption=preemption,
    )  # fmt: skip


def main(folder: Path) -> None:
    """Train in one go; train until told; go on."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    first, second, third = Own(), Own(told_at=5), Own()
    with ckptstore.open(folder / "ckpts") as store:
        run = store.run("gpt")
        whole = make(run, folder, first)
        whole.train()
        with Preemption(deadline_s=240) as preemption:
            make(run, folder, second, preemption).train()
        resumed = make(run, folder, third)
        torch.rand(3 + rank)  # not where the others were
        resumed.train(resume_from_checkpoint=resumed.has_version)
    weights = [model.transformer.wte.weight for model in (whole.model, resumed.model)]
    said = {
        "whole": first.drawn, "ended": second.drawn, "resumed": third.drawn,
        "code": preemption.exit_code, "same": torch.equal(*weights),
    }  # fmt: skip
    (folder / f"said-{rank}").write_text(json.dumps(said), encoding="utf-8")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
