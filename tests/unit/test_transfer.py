"""Loading into a different model: what fits is filled in place, what does not is reported."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckptstore
from ckptstore.backends.memory import MemoryBackend
from ckptstore.backends.metered import MeteredBackend
from ckptstore.config import Options
from ckptstore.errors import InvalidInputError, TensorNotFoundError
from ckptstore.repo import create_on


def _model(outputs: int = 10, *, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(300, 300), nn.BatchNorm1d(300), nn.Linear(300, outputs))


@pytest.fixture
def store(memory: MemoryBackend) -> ckptstore.Store:
    """Return a store in memory with a version of a model, with a budget of little memory."""
    store = ckptstore.Store(create_on(memory, options=Options(host_bytes=100_000)))
    model = _model()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 300)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "lr": 0.1}
    store.run("gpt").save(state, step=1)
    return store


def _same(model: nn.Module, saved: dict[str, torch.Tensor], *, but: str = "-") -> None:
    for name, value in model.state_dict().items():
        if not name.startswith(but):
            assert torch.equal(value, saved[name].to(value.dtype)), name


def test_a_module_is_filled_in_place(store: ckptstore.Store) -> None:
    """Parameters and buffers keep their identity, and have the version's values."""
    model = _model(seed=1)
    before = dict(model.named_parameters())

    report = store.load_into("gpt", model, include=["model"], rename={"model": ""}, strict=True)

    assert report.complete
    assert set(report.loaded) == set(model.state_dict())
    assert dict(model.named_parameters()) == before
    assert all(parameter.requires_grad for parameter in model.parameters())
    _same(model, store.load("gpt")["model"])
    assert report.version.step == 1


def test_what_does_not_fit_is_reported_and_left_alone(store: ckptstore.Store) -> None:
    """Shapes that differ, names that one of them lacks: the rest is loaded."""
    model = _model(12, seed=1)
    model.append(nn.Linear(12, 3))
    head = model.state_dict()["2.weight"].clone()

    report = store.run("gpt").load_into("latest", {"model": model})

    assert [item.name for item in report.mismatched] == ["model.2.weight", "model.2.bias"]
    assert report.mismatched[0].why == "shape"
    assert (report.mismatched[0].version_shape, report.mismatched[0].target_shape) == (
        (10, 300),
        (12, 300),
    )
    assert report.missing == ("model.3.weight", "model.3.bias")
    assert all(path.startswith("optimizer.state.") for path in report.unexpected)
    assert len(report.unexpected) == 18
    assert torch.equal(model.state_dict()["2.weight"], head)
    assert "2 missing: model.3.weight" in str(report)
    assert "float32[10, 300] into float32[12, 300]" in str(report)
    _same(model[:2], store.load("gpt", include=["model"])["model"])


def test_names_are_renamed_to_the_targets(store: ckptstore.Store) -> None:
    """Prefixes, inside of keys too."""
    model = nn.ModuleDict({"body": _model()[0], "norm": _model()[1]})

    report = store.load_into(
        "gpt",
        model,
        include=["model"],
        rename={"model.0": "body", "model.1": "norm", "model": "rest"},
    )

    assert report.missing == ()
    assert report.unexpected == ("model.2.weight", "model.2.bias")
    assert torch.equal(model.state_dict()["body.weight"], store.load("gpt")["model"]["0.weight"])
    with pytest.raises(TensorNotFoundError, match="modle"):
        store.load_into("gpt", model, rename={"modle": ""})
    with pytest.raises(InvalidInputError, match=r"would both be 'x\.weight'"):
        store.load_into("gpt", model, rename={"model.0": "x", "model.1": "x"})


def test_values_are_cast_to_the_targets_dtype(store: ckptstore.Store) -> None:
    """Where torch can; what would lose its kind is a mismatch, and so is all if it is unwanted."""
    model = _model(seed=1).half()
    saved = store.load("gpt")["model"]

    report = store.load_into("gpt", {"model": model}, include=["model"])

    assert report.cast["model.0.weight"] == ("float32", "float16")
    assert "model.1.num_batches_tracked" not in report.cast
    _same(model, saved)
    target = {"model": {"0.bias": torch.zeros(300, dtype=torch.int32)}}
    (wrong,) = store.load_into("gpt", target, include=["model.0.bias"]).mismatched
    assert (wrong.why, wrong.version_dtype, wrong.target_dtype) == ("dtype", "float32", "int32")
    report = store.load_into("gpt", {"model": _model().half()}, include=["model"], cast=False)
    assert report.loaded == ("model.1.num_batches_tracked",)


def test_strict_refuses_before_anything_is_read(
    memory: MemoryBackend, store: ckptstore.Store
) -> None:
    """No tensor of the target is touched, and no pack is read."""
    metered = MeteredBackend(memory)
    model = _model(12, seed=1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with (
        ckptstore.Store(create_on(metered, exist_ok=True)) as reader,
        pytest.raises(InvalidInputError, match="2 mismatched"),
    ):
        reader.load_into("gpt", {"model": model}, include=["model"], strict=True)

    assert "read_into" not in metered.snapshot()
    _same(model, before)


def test_only_what_is_needed_is_read(memory: MemoryBackend, store: ckptstore.Store) -> None:
    """One small tensor costs one chunk, not the version."""
    metered = MeteredBackend(memory)
    target = {"2.bias": torch.zeros(10)}
    with ckptstore.Store(create_on(metered, exist_ok=True)) as reader:
        report = reader.load_into("gpt", target, include=["model.2.bias"], rename={"model": ""})

    assert report.read_bytes == 40
    assert metered.snapshot()["read_into"].bytes_moved < 30_000
    assert torch.equal(target["2.bias"], store.load("gpt")["model"]["2.bias"])


def test_tied_and_strided_targets(store: ckptstore.Store) -> None:
    """One memory is filled once; what lies in memory otherwise is filled through a copy."""
    saved = store.load("gpt")["model"]["0.weight"]
    tied = torch.zeros(300, 300)
    target: dict[str, Any] = {
        "model": {"0.weight": tied, "alias": tied},
        "again": torch.zeros(300, 600)[:, ::2],
    }

    report = store.load_into("gpt", target, include=["model.0.weight"])
    assert set(report.loaded) == {"model.0.weight", "model.alias"}
    assert report.missing == ("again",)
    assert torch.equal(tied, saved)
    report = store.load_into(
        "gpt", target, include=["model.0.weight"], rename={"model.0.weight": "again"}
    )
    assert torch.equal(target["again"], saved)

    clash = {"model": {"0.bias": tied[0], "1.weight": tied[0]}}
    report = store.load_into("gpt", clash, include=["model.0.bias", "model.1.weight"])
    assert [(item.name, item.why) for item in report.mismatched] == [("model.1.weight", "shared")]
    assert torch.equal(tied[0], store.load("gpt")["model"]["0.bias"])


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_leaves_of_other_kinds(memory: MemoryBackend) -> None:
    """Views and arrays have values of their own; quantized ones and bytes have no place."""
    store = ckptstore.Store(create_on(memory))
    base = torch.randn(20, 20)
    state = {
        "base": base,
        "rows": base[3:5],
        "array": np.arange(6.0).reshape(2, 3),
        "times": np.array(["2020-01-01"], dtype="datetime64[s]"),
        "text": b"x" * 10_000,
        "quantized": torch.quantize_per_tensor(base, 0.1, 0, torch.qint8),
    }
    store.run("r").save(state, step=1)
    target = {
        "rows": torch.zeros(2, 20, dtype=torch.float64),
        "array": torch.zeros(2, 3),
        "times": torch.zeros(1, dtype=torch.int64),
        "quantized": torch.zeros(20, 20),
        "meta": torch.zeros(2, device="meta"),
    }

    report = store.load_into("r", target)

    assert set(report.loaded) == {"rows", "array"}
    assert torch.equal(target["rows"], base[3:5].double())
    assert torch.equal(target["array"], torch.arange(6.0).reshape(2, 3))
    assert {item.name: item.why for item in report.mismatched} == {
        "times": "numpy in the version",
        "quantized": "quantized in the version",
    }
    assert report.unexpected == ("base",)
    assert report.missing == ("meta",)


def test_a_target_without_tensors_is_a_mistake(store: ckptstore.Store) -> None:
    """Nothing could ever be loaded into it."""
    with pytest.raises(InvalidInputError, match="no tensor in the target, a dict"):
        store.load_into("gpt", {})
