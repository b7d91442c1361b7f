"""States of torchao: optimizers with 8-bit, 4-bit and fp8 moments, and quantized weights."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint.state_dict_loader as loader
from torch.distributed.checkpoint.state_dict_saver import save

import ckptstore
from ckptstore.integrations.dcp import CkptStoreReader, CkptStoreWriter
from ckptstore.store import Run

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torchao")
    optim: Any = importlib.import_module("torchao.optim")
    quantization: Any = importlib.import_module("torchao.quantization")

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    """Compile nothing: the steps are few."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Return a run of a new store."""
    with ckptstore.open(tmp_path / "store", create=True) as store:
        yield store.run("one")


def described(value: Any) -> Any:
    """Return everything that tells a state from others, down to the bits of plain tensors."""
    if isinstance(value, dict):
        return {key: described(item) for key, item in value.items()}
    if isinstance(value, list):
        return [described(item) for item in value]
    if isinstance(value, torch.Tensor) and type(value) not in (torch.Tensor, torch.nn.Parameter):
        whole: Any = value
        names, context = whole.__tensor_flatten__()
        inner = {name: described(getattr(value, name)) for name in names}
        return type(value), value.dtype, value.shape, repr(context), inner
    if isinstance(value, torch.Tensor):
        bits = value.detach().reshape(-1).view(torch.uint8)
        return type(value), value.dtype, value.shape, bits.tolist()
    return value


def trained(kind: str, seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a layer and its optimizer after a step."""
    torch.manual_seed(seed)
    model = torch.nn.Linear(64, 64)
    optimizer = getattr(optim, kind)(model.parameters())
    model(torch.randn(2, 64)).square().sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("kind", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_optimizers(run: Run, kind: str) -> None:
    """By run.save and by dcp.save, in the types and bits of torchao; a step later still equal."""
    model, optimizer = trained(kind, 1)
    state = optimizer.state_dict()
    run.save(state, step=1)
    save({"state": state["state"]}, storage_writer=CkptStoreWriter(run, step=2))
    again, other = trained(kind, 2)
    into = {"state": {str(key): value for key, value in other.state_dict()["state"].items()}}
    loader.load(into, storage_reader=CkptStoreReader(run))

    assert described(run.load(1)) == described(state)
    assert described(into["state"]) == {str(k): v for k, v in described(state["state"]).items()}
    again.load_state_dict(model.state_dict())
    other.load_state_dict(run.load(1))
    for one in (model, again):
        one.zero_grad()
        one(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    other.step()
    assert described(other.state_dict()) == described(optimizer.state_dict())


@pytest.mark.parametrize(
    "config", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig", "IntxWeightOnlyConfig"]
)
def test_weights(run: Run, config: str) -> None:
    """Quantized weights, with the classes of torchao in their context."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64, dtype=torch.bfloat16))
    quantization.quantize_(model, getattr(quantization, config)())
    run.save(model.state_dict(), step=1)
    assert described(run.load()) == described(dict(model.state_dict()))
