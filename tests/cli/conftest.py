"""A store with a little history, and the command line run in this process."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore.cli.main import run

VAL_LOSSES = {100: 3.0, 200: 2.5, 300: float("nan"), 400: 2.2, 500: 2.4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one command line did."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """The JSON document on stdout, which holds nothing else."""
        found: dict[str, Any] = json.loads(self.out)
        return found

    @property
    def rows(self) -> list[list[str]]:
        """The lines of stdout, split at two or more spaces."""
        return [[cell for cell in line.split("  ") if cell] for line in self.out.splitlines()]


Cli = Callable[..., Outcome]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Return what runs a command line and gives its exit code and output."""
    monkeypatch.delenv("CKPTSTORE_URL", raising=False)
    monkeypatch.setenv("TERM", "dumb")

    def call(*arguments: object) -> Outcome:
        capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return Outcome(code=code, out=out, err=err)

    return call


@pytest.fixture(scope="session")
def history(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store that no test changes: a run of five versions, and one of one."""
    root = tmp_path_factory.mktemp("history") / "store"
    torch.manual_seed(3)
    weight = torch.randn(300, 100)
    with ckptstore.open(root, create=True) as store:
        gpt = store.run("gpt", metrics={"val_loss": "min"})
        for step, loss in VAL_LOSSES.items():
            model = {"embed": weight + step, "head": weight, "norm": torch.ones(4)}
            model["tied"] = model["embed"]
            gpt.save(
                {"model": model, "optimizer": {"m": torch.randn(300, 100)}, "epoch": 1},
                step=step,
                metrics={"val_loss": loss, "acc": step / 1000},
                tags=["first"] if step == 100 else (),
                metadata={"lr": 0.1, "note": "red \x1b[31m alert"},
            )
        store.run("lora").save({"a": torch.randn(8, 8)}, step=7)
    return root


@pytest.fixture
def store_path(history: Path, tmp_path: Path) -> Path:
    """Return a copy of the history that a test may change."""
    return Path(shutil.copytree(history, tmp_path / "store"))
