"""One rank of a fit of Lightning with DDP: lightning_ranks.py FOLDER; RANK and so on are set.

Rank 1 alone gets SIGTERM, in the middle of an epoch.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

import ckptstore
from ckptstore.integrations.lightning import CkptStoreCallback, CkptStoreIO
from ckptstore.integrations.preemption import Preemption


class Tiny(pl.LightningModule):  # type: ignore[misc]  # not followed by mypy
    """One layer; rank 1 is told to end at its third batch of the second epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        if self.current_epoch == 1 and number == 2 and self.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        loss: torch.Tensor = self.layer(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def main(folder: Path) -> None:
    """Train until told."""
    torch.set_num_threads(1)
    rows: Any = torch.linspace(-1, 1, 80).reshape(-1, 4)
    with ckptstore.open(folder / "ckpts") as store, Preemption(deadline_s=240) as preemption:
        io = CkptStoreIO(store, "gpt")
        trainer = pl.Trainer(
            accelerator="cpu", devices=2, strategy="ddp", max_epochs=100, plugins=[io],
            callbacks=[CkptStoreCallback(io, preemption=preemption)], logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            default_root_dir=folder,
        )  # fmt: skip
        loader = torch.utils.data.DataLoader(rows, batch_size=2, shuffle=True)
        trainer.fit(Tiny(), loader, ckpt_path=io.resume)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
