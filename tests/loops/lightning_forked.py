"""A fit in two forked workers, as notebooks run it: lightning_forked.py FOLDER."""

from __future__ import annotations

import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

import ckptstore
from ckptstore.integrations.lightning import CkptStoreCallback, CkptStoreIO


def main(folder: Path) -> None:
    """Fit; hold that this process has the weights of the worker, which are those of the version."""
    torch.set_num_threads(1)
    with ckptstore.open(folder / "ckpts", create=True) as store:
        io = CkptStoreIO(store, "gpt")
        trainer = pl.Trainer(
            accelerator="cpu", devices=2, strategy="ddp_fork", max_epochs=2, limit_train_batches=2,
            limit_val_batches=1, plugins=[io], callbacks=[CkptStoreCallback(io)], logger=False,
            enable_progress_bar=False, default_root_dir=folder,
        )  # fmt: skip
        model = BoringModel()
        before = {name: one.clone() for name, one in model.state_dict().items()}
        trainer.fit(model)
        (version,) = store.versions("gpt")
        assert version.step == 4
        saved = store.load("gpt")["state_dict"]
        for name, one in model.state_dict().items():
            assert torch.equal(one, saved[name])
            assert not torch.equal(one, before[name])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
