"""Train the demo's GPT, saving to a store; killed at any moment and started again, it goes on.

    python docs/demo/train.py STORE RUN --losses FILE

This is how ckptstore looks in a training loop: :func:`full_state`, one ``run.save`` and one
``run.load``. The rest is training.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpt import Batches, Gpt, library_text

import ckptstore

CONTEXT = 64
VALIDATION_SHARE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How long to train, and how often to save."""

    steps: int
    save_every: int
    width: int
    batch: int


class Training:
    """Everything that training changes, so that all of it can be saved."""

    def __init__(self, plan: Plan) -> None:
        torch.set_num_threads(1)  # a sum in another order is another sum
        torch.use_deterministic_algorithms(mode=True)
        torch.manual_seed(20)
        text = library_text()
        cut = int(len(text) * (1 - VALIDATION_SHARE))
        self.model = Gpt(width=plan.width, context=CONTEXT)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=4e-3)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, plan.steps)
        self.batches = Batches(text[:cut], batch=plan.batch, context=CONTEXT, seed=1)
        self._held_out = Batches(text[cut:], batch=32, context=CONTEXT, seed=2).next()
        self.step = 0

    def train_step(self) -> float:
        """Train on one batch; return its loss."""
        loss = self.model.loss(self.batches.next())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.step += 1
        return loss.item()

    def validate(self) -> float:
        """Return the loss on text that is never trained on."""
        self.model.eval()
        with torch.no_grad():
            loss = self.model.loss(self._held_out).item()
        self.model.train()
        return loss

    def full_state(self) -> dict[str, Any]:
        """Return everything that the next step depends on."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "rng": {"torch": torch.get_rng_state()},
            "data": self.batches.state_dict(),
            "step": self.step,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Become what was saved."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["rng"]["torch"])
        self.batches.load_state_dict(state["data"])
        self.step = state["step"]


def train(store_url: str, run_name: str, plan: Plan, losses: Path, hold_in_save: int) -> None:
    """Train to the end of the plan, from the newest version of the run if it has one.

    With `hold_in_save`, the save at that step stops for good when half of its bytes are done, so
    that whoever started this process can kill it there.
    """
    training = Training(plan)
    with ckptstore.open(store_url, create=True) as store, losses.open("a", encoding="utf-8") as log:
        run = store.run(run_name, metrics={"val_loss": "min"})
        if run.head is not None:
            training.restore(run.load("latest"))
            print(f"resumed {run_name}@latest at step {training.step}", flush=True)
        while training.step < plan.steps:
            loss = training.train_step()
            print(json.dumps({"step": training.step, "loss": loss.hex()}), file=log, flush=True)
            if training.step % plan.save_every == 0:
                val_loss = training.validate()
                held = training.step == hold_in_save
                run.save(
                    training.full_state(),
                    step=training.step,
                    metrics={"val_loss": val_loss},
                    progress=stop_half_way if held else go_on,
                )
                print(
                    f"saved {run_name}@{training.step}: training loss {loss:.4f}, "
                    f"validation loss {val_loss:.4f}",
                    flush=True,
                )


def go_on(_: ckptstore.Progress) -> None:
    """Let the save run."""


def stop_half_way(progress: ckptstore.Progress) -> None:
    """Say that half of a save is written, and wait to be killed."""
    if 2 * progress.done >= progress.total:
        print(f"half-way {progress.done} {progress.total}", flush=True)
        sys.stdin.read()


def main() -> None:
    """Read the arguments and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("store", help="path or URL of the store")
    parser.add_argument("run", help="name of the run")
    parser.add_argument("--losses", type=Path, required=True, help="file for the loss of each step")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--save-every", type=int, default=60)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--hold-in-save", type=int, default=-1, help="step whose save never ends")
    given = parser.parse_args()
    plan = Plan(
        steps=given.steps, save_every=given.save_every, width=given.width, batch=given.batch
    )
    train(given.store, given.run, plan, given.losses, given.hold_in_save)


if __name__ == "__main__":
    main()
