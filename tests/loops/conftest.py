"""A store for each test, and quiet training libraries."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from cirules import slowness
from ports import LOOPBACK
from torch._C._distributed_c10d import TCPStore

import ckptstore
from ckptstore.store import Store

# Set before transformers is imported: nothing here looks for models elsewhere.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Return a new store in a folder."""
    with ckptstore.open(tmp_path / "ckpts", create=True) as opened:
        yield opened


@pytest.fixture(autouse=True)
def _repeatable() -> Iterator[None]:
    """Begin with the same weights, make sums in one order, leave a processor to others."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(5)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def _nothing_pickled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make any attempt to write or read files of ``torch.save`` fail."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a file of torch.save")

    monkeypatch.setattr(torch, "save", refuse)
    monkeypatch.setattr(torch, "load", refuse)


@pytest.fixture
def ranks(tmp_path: Path) -> Callable[..., list[int]]:
    """Return a function that runs a program of this folder on ranks; gives their exit codes.

    Each gets the folder of the test and further arguments, and the environment that torchrun gives:
    the test listens where they meet, at a port that the kernel chooses.
    """

    def run(program: str, count: int, *more: str, python: str = sys.executable) -> list[int]:
        meeting = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
        around = {
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(meeting.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "WORLD_SIZE": str(count),
        }
        command = [python, str(Path(__file__).with_name(program)), str(tmp_path), *more]
        started = [
            subprocess.Popen(
                command,
                env={**os.environ, **around, "RANK": rank, "LOCAL_RANK": rank, "NODE_RANK": "0"},
            )
            for rank in map(str, range(count))
        ]
        try:
            return [each.wait(300 * slowness()) for each in started]
        finally:
            for each in started:
                each.kill()
                each.wait()

    return run
