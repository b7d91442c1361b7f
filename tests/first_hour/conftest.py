"""A store as it is after the first minutes, and lines typed at it: Python, or a command."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import os
import pickle
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptstore
from ckptstore.cli.main import run as run_command
from ckptstore.integrations import files


class Mode(enum.Enum):
    """An enum as scripts have them."""

    TRAIN = "train"


@dataclasses.dataclass
class Config:
    """A configuration as scripts have them."""

    lr: float = 0.1
    mode: Mode = Mode.TRAIN


@pytest.fixture(scope="session")
def first_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a working directory with a store, which no test changes."""
    folder = tmp_path_factory.mktemp("first")
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    with ckptstore.open(folder / "ckpts", create=True) as store:
        run = store.run("gpt", metrics={"val_loss": "min"})
        for step, loss in ((100, 2.0), (120, 1.2), (140, 1.5)):
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            run.save(
                {**state, "half": torch.ones(3).bfloat16()}, step=step, metrics={"val_loss": loss}
            )
        run.tag(120, "release")
        store.run("lora").save({"a": torch.ones(2)}, step=1)
    torch.save(model.state_dict(), folder / "model.pt")
    torch.save({"config": Config()}, folder / "pickled.pt")
    for step in (10, 20):
        (folder / "outputs" / f"checkpoint-{step}").mkdir(parents=True)
        torch.save(
            model.state_dict(), folder / "outputs" / f"checkpoint-{step}" / "pytorch_model.bin"
        )
        logged = f'{{"log_history": [{{"step": {step}, "eval_loss": {step / 10}, "epoch": 1.0}}]}}'
        (folder / "outputs" / f"checkpoint-{step}" / "trainer_state.json").write_text(logged)
    return folder


@pytest.fixture
def names(first_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the names that a script has, in a working directory with a copy of the store."""
    folder = Path(shutil.copytree(first_store, tmp_path / "work"))
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("CKPTSTORE_URL", "ckpts")
    monkeypatch.setenv("COLUMNS", "120")
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    store = ckptstore.open("ckpts")
    return {
        "argparse": argparse, "ckptstore": ckptstore, "files": files, "np": np, "os": os,
        "pickle": pickle, "torch": torch, "Path": Path,
        "Config": Config, "Mode": Mode, "folder": folder, "model": model, "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0),
        "state": {"model": model.state_dict(), "step": 1}, "store": store, "run": store.run("gpt"),
    }  # fmt: skip


Typed = Callable[[str], tuple[int, str, str]]


@pytest.fixture
def typed(capsys: pytest.CaptureFixture[str]) -> Typed:
    """Return what runs a line of a shell that begins with ``ckptstore``, in this process."""

    def call(line: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = run_command(shlex.split(line)[1:])
        out, err = capsys.readouterr()
        return code, out, err

    return call
