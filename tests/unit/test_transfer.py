"""Loading into a different model: what fits is filled in place, what does not is reported."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from metered import MeteredBackend
from torch import nn

import ckptstore
from ckptstore.backends.memory import MemoryBackend
from ckptstore.config import Options
from ckptstore.errors import InvalidInputError, TensorNotFoundError
from ckptstore.repo import create_on
from ckptstore.states import rename_hints


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
    """Where it is wanted; what has another dtype is a mismatch if it is not."""
    model = _model(seed=1).half()
    saved = store.load("gpt")["model"]

    report = store.load_into("gpt", {"model": model}, include=["model"])

    assert report.cast["model.0.weight"] == ("float32", "float16")
    assert "model.1.num_batches_tracked" not in report.cast
    _same(model, saved)
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


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_leaves_of_other_kinds(memory: MemoryBackend) -> None:
    """Views and arrays have values of their own; quantized ones and bytes have no place."""
    store = ckptstore.Store(create_on(memory))
    base = torch.randn(20, 20)
    state = {
        "base": base, "rows": base[3:5], "array": np.arange(6.0).reshape(2, 3),
        "times": np.array(["2020-01-01"], dtype="datetime64[s]"), "text": b"x" * 10_000,
        "quantized": torch.quantize_per_tensor(base, 0.1, 0, torch.qint8),
    }  # fmt: skip
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


@pytest.mark.parametrize("strict", [None, False, True])
def test_names_of_which_none_fits_are_an_error(store: ckptstore.Store, strict: bool | None) -> None:
    """Nothing would be loaded: that is never what was meant, and the target is as it was."""
    model = _model(seed=1)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    with pytest.raises(InvalidInputError, match="gpt@1 has nothing that fits the target") as told:
        store.load_into("gpt", model, strict=strict)

    assert told.value.hint == "pass rename={'model': ''}"
    assert "0 loaded; 9 missing: 0.weight, 0.bias, " in told.value.message
    assert " and 4 more" in told.value.message
    _same(model, before)
    report = store.load_into("gpt", model, rename={"model": ""}, strict=False)
    assert report.missing == ()


def test_shapes_of_which_none_fits_are_an_error(store: ckptstore.Store) -> None:
    """The names are the same, and still nothing would be loaded."""
    with pytest.raises(InvalidInputError, match=r"float32\[10\] into float32\[3\]") as told:
        store.run("gpt").load_into(1, {"model": {"2.bias": torch.zeros(3)}}, strict=False)
    assert told.value.hint == "rename, or compare the names"


@pytest.mark.parametrize(
    ("saved", "wanted", "rename"),
    [
        ("model.{}.w", "{}.w", {"model": ""}),
        ("{}.w", "model.{}.w", {"": "model"}),
        ("model.module.{}.w", "model.{}.w", {"model.module": "model"}),
        ("model.{}.w", "_orig_mod.{}.w", {"model": "_orig_mod"}),
        ("net.body.{}.norm.w", "encoder.{}.norm.w", {"net.body": "encoder"}),
        ("layers.{}.X.w", "layers.{}.w", {"*.X.*": "*.*"}),
        ("layers.{}.w", "layers.{}.X.w", {"layers.*.*": "layers.*.X.*"}),
        ("model.X.layers.{}.X.w", "layers.{}.w", {"model": "", "*.X.*": "*.*"}),
        ("net.layers.{}.X.a.X.w", "net.layers.{}.a.w", {"*.X.*": "*.*"}),
    ],
)
@pytest.mark.parametrize("wrapper", rename_hints._WRAPPERS)
def test_the_message_names_the_renaming_that_fits(
    memory: MemoryBackend, saved: str, wanted: str, rename: dict[str, str], wrapper: str
) -> None:
    """A prefix, a wrapper of each layer or both: with the hint's argument, all names load."""
    saved, wanted = saved.replace("X", wrapper), wanted.replace("X", wrapper)
    argument: Any = {k.replace("X", wrapper): v.replace("X", wrapper) for k, v in rename.items()}
    store = ckptstore.Store(create_on(memory))
    state = {saved.format(n): torch.full((2,), 1.0 + n) for n in range(12)}
    store.run("r").save({**state, "other.1.bias": torch.ones(3)}, step=1)
    target = {wanted.format(n): torch.zeros(2) for n in range(12)}

    with pytest.raises(InvalidInputError, match="nothing that fits") as told:
        store.load_into("r", target)
    report = store.load_into("r", target, rename=argument, strict=False)

    assert told.value.hint == f"pass rename={argument!r}"
    assert report.missing == ()
    assert [value.tolist() for value in target.values()] == [[1.0 + n] * 2 for n in range(12)]


def test_new_layers_do_not_hide_the_renaming(store: ckptstore.Store) -> None:
    """The version has nothing like some of the target's names, the deepest and first among them."""
    target = {"body": _model(seed=1), "a": {"new": {"layer": {"weight": torch.zeros(1)}}}}
    with pytest.raises(InvalidInputError, match="nothing that fits") as told:
        store.load_into("gpt", target, strict=False)
    assert told.value.hint == "pass rename={'model': 'body'}"


def test_a_target_that_is_filled_in_part_is_named_in_one_warning(
    store: ckptstore.Store, caplog: pytest.LogCaptureFixture
) -> None:
    """Names of either side that the other lacks: a few, and a count; silent if so wished."""
    model = _model(seed=1)
    model.append(nn.Linear(10, 3))

    store.load_into("gpt", {"model": model}, strict=False)
    store.load_into("gpt", {"model": model[:3]}, include=["model"])
    assert not caplog.records
    store.load_into("gpt", {"model": model})

    (warning,) = caplog.messages
    assert warning.startswith("gpt@1 fits the target in part: 9 loaded; 2 missing: model.3.weight")
    assert "18 unexpected: optimizer.state.0.step" in warning
    assert "and 13 more -- strict=False says that this is meant" in warning


def test_a_device_that_is_not_there_is_told_by_every_load(
    memory: MemoryBackend, store: ckptstore.Store
) -> None:
    """A store, a run and a lazy version: an error of the call, and no tensor was read."""
    metered = MeteredBackend(memory)
    where = "hpu"
    with ckptstore.Store(create_on(metered, exist_ok=True)) as reader:
        run = reader.run("gpt")
        for load in (run.load, run.version().load, lambda **how: reader.load("gpt", **how)):
            with pytest.raises(InvalidInputError, match="map_location is 'hpu', a device that"):
                load(map_location=where)
        with pytest.raises(InvalidInputError, match="map_location is 'gpu', which names no device"):
            run.load("latest-valid", map_location="gpu")

    assert "read_into" not in metered.snapshot()
