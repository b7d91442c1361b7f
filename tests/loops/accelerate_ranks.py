"""One rank of a training under Accelerate: accelerate_ranks.py FOLDER; RANK and so on are set."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

import ckptstore
from ckptstore.integrations.accelerate import load_state, save_state


def main(folder: Path) -> None:
    """Train an epoch, save, train another; load, and train that again."""
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    torch.manual_seed(rank)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
    rows: Any = torch.linspace(-1, 1, 96).reshape(-1, 4)
    model, optimizer, loader = accelerator.prepare(
        net,
        torch.optim.AdamW(net.parameters(), lr=0.01),
        torch.utils.data.DataLoader(rows, batch_size=2, shuffle=True),
    )

    def epoch() -> list[float]:
        losses = []
        for batch in loader:
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    with ckptstore.open(folder / "ckpts") as store:
        run = store.run("gpt")
        epoch()
        save_state(accelerator, run, step=6)
        whole = epoch()
        torch.manual_seed(1000 + rank)
        load_state(accelerator, run)
        resumed = epoch()
        error = ""
        try:
            save_state(accelerator, run, step=7, roles={"nothing": "nonsense"})
        except Exception as failure:  # noqa: BLE001 - its class is what is looked at
            error = type(failure).__name__
    (folder / f"said-{rank}").write_text(json.dumps([whole, resumed, error]), encoding="utf-8")
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
