"""Habits from other tools: keeping the last few, plain values, folders of checkpoints."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import json
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.dlpack import from_dlpack

import ckptstore
from ckptstore.errors import ConflictError, FormatError, InvalidInputError, LimitError, StateError
from ckptstore.integrations.files import import_folder
from ckptstore.integrations.folder_import import find_checkpoints


class Mode(enum.StrEnum):
    """An enum that is a text too."""

    TRAIN = "train"


@dataclasses.dataclass
class Inner:
    """A dataclass within another one."""

    weight: torch.Tensor
    itself: object = None


@pytest.fixture
def store(tmp_path: Path) -> Any:  # noqa: ANN401 - an iterator of a store
    """Yield an empty store."""
    with ckptstore.open(tmp_path / "store", create=True) as opened:
        yield opened


def _steps(run: ckptstore.Run) -> list[int]:
    return [version.step for version in run]


# --- keep_last, keep_best -----------------------------------------------------------------------
def test_a_run_keeps_the_last_and_the_best(store: ckptstore.Store) -> None:
    """After each save the newest N and the best N stay; tagged ones too; undelete works."""
    run = store.run("gpt", metrics={"loss": "min"}, keep_last=2, keep_best=1)
    for step, loss in enumerate([5.0, 1.0, 4.0, 3.0, 2.0]):
        run.save({"w": torch.ones(2)}, step, metrics={"loss": loss}, tags=["t"] * (step == 2))
    assert _steps(run) == [1, 2, 3, 4]
    store.undelete(["gpt@0"])
    assert 0 in run
    run.save_async({"w": torch.ones(2)}, 5).result()
    store.wait()
    assert _steps(run) == [1, 2, 4, 5]


def test_an_object_without_the_wish_deletes_nothing(store: ckptstore.Store) -> None:
    """The policy is the run's; only saves with the object that was given it carry it out."""
    store.run("gpt", keep_last=1)
    run = store.run("gpt")
    for step in range(3):
        run.save({"w": [1.0]}, step)
    assert _steps(run) == [0, 1, 2]
    kept = store.run("gpt", keep_last=1)
    kept.save({"w": [1.0]}, 3, retain=False)
    assert _steps(run) == [0, 1, 2, 3]
    kept.save({"w": [1.0]}, 4)
    assert _steps(run) == [4]


def test_only_a_policy_of_the_same_kind_is_replaced(store: ckptstore.Store) -> None:
    """Another number replaces the number; a policy that keeps more in another way stays."""
    store.run("gpt", keep_last=1)
    number = store.repo.refresh().number
    store.run("gpt", keep_last=1)
    assert store.repo.refresh().number == number  # nothing to commit
    store.run("gpt", keep_last=5)
    assert store.run("gpt").info.policy == {"full": ["last 5"]}
    store.run("gpt").set_policy({"full": "last 5", "weights": "all"})
    with pytest.raises(InvalidInputError, match="another policy") as caught:
        store.run("gpt", keep_last=1)
    assert "set_policy(None)" in caught.value.hint
    assert store.run("gpt").info.policy == {"full": ["last 5"], "weights": ["all"]}


@pytest.mark.parametrize("count", [0, -1, True, 1.5, "3"])
def test_a_count_that_is_none_is_refused(store: ckptstore.Store, count: Any) -> None:  # noqa: ANN401
    """Nothing is stored for it."""
    with pytest.raises(InvalidInputError, match="keep_last"):
        store.run("gpt", keep_last=count)
    assert "gpt" not in store


# --- plain --------------------------------------------------------------------------------------
def test_plain_values_in_place_of_classes(store: ckptstore.Store) -> None:
    """Nested dataclasses, enums and namespaces come back as dicts and values; tensors stay."""
    weight = torch.arange(3.0)
    state = {
        "inner": Inner(weight, itself=[Mode.TRAIN]),
        "args": argparse.Namespace(lr=0.1, more=types.SimpleNamespace(mode=Mode.TRAIN)),
    }
    run = store.run("gpt")
    with pytest.raises(StateError, match="'inner'"):
        run.save(state, 1)
    run.save_async(state, 1, plain=True).result()
    found = run.load()
    assert found["inner"].pop("weight").equal(weight)
    assert found == {"inner": {"itself": ["train"]}, "args": {"lr": 0.1, "more": {"mode": "train"}}}
    assert type(found["inner"]["itself"][0]) is str
    assert "inner.weight" in run["latest"]


def test_plain_values_without_end_are_refused(store: ckptstore.Store) -> None:
    """A dataclass that holds itself names its path; other classes are refused as before."""
    one = Inner(torch.ones(1))
    one.itself = one
    with pytest.raises((StateError, LimitError), match="itself"):
        store.run("gpt").save({"one": one}, 1, plain=True)
    with pytest.raises(StateError, match="'kind'"):
        store.run("gpt").save({"kind": Inner}, 1, plain=True)


# --- lazy tensors as arrays ---------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.bfloat16])
def test_a_lazy_tensor_is_an_array(store: ckptstore.Store, dtype: torch.dtype) -> None:
    """Torch reads it whole, of any dtype; NumPy where it has the dtype."""
    tensor = torch.arange(6).reshape(2, 3).to(dtype)
    store.run("gpt").save({"w": tensor, "p": torch.nn.Parameter(torch.ones(2))}, 1)
    lazy = store.version("gpt")["w"]
    for found in (torch.as_tensor(lazy), torch.tensor(lazy), from_dlpack(lazy)):
        assert found.dtype == dtype
        assert found.equal(tensor)
    assert torch.as_tensor(store.version("gpt")["p"]).equal(torch.ones(2))
    if dtype == torch.bfloat16:
        with pytest.raises(InvalidInputError, match="NumPy has no array"):
            np.asarray(lazy)
        return
    np.testing.assert_array_equal(np.asarray(lazy), tensor.numpy())
    np.testing.assert_array_equal(lazy.numpy(), tensor.numpy())
    assert np.asarray(lazy, dtype=np.float64).dtype == np.float64
    with pytest.raises(InvalidInputError, match="always a copy"):
        np.asarray(lazy, copy=False)


# --- folders of checkpoints ---------------------------------------------------------------------
def _weights(path: Path, value: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"w": torch.full((2,), value)}, path)


def test_a_folder_of_the_trainer(store: ckptstore.Store, tmp_path: Path) -> None:
    """By number, not by name; the metrics of each step come from the log, NaN among them."""
    for step in (9, 10, 100):
        folder = tmp_path / "out" / f"checkpoint-{step}"
        _weights(folder / "pytorch_model.bin", step)
        log = [{"step": 9, "loss": 3.0}, {"step": step, "eval_loss": float("nan"), "epoch": 1.0}]
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": log}))
    (tmp_path / "out" / "runs").mkdir()
    found = import_folder(store, tmp_path / "out", run="gpt", directions={"eval_loss": "min"})
    assert [version.step for version in found] == [9, 10, 100]
    assert found[0].metrics["loss"] == 3.0
    assert found[1].metrics.keys() == {"eval_loss"}
    assert store.load("gpt@100")["w"].tolist() == [100, 100]
    assert store.run("gpt").head.id == found[-1].id  # type: ignore[union-attr]
    assert [v.parent for v in found[1:]] == [v.id for v in found[:-1]]


@pytest.mark.parametrize(
    ("name", "step", "metrics"),
    [
        ("epoch=3-step=500.ckpt", 500, {}),
        ("epoch=3-step=500-val_loss=1.25.ckpt", 500, {"val_loss": 1.25}),
        ("epoch=3-val_loss=-1e-3.ckpt", 3, {"val_loss": -0.001}), ("step_500.pt", 500, {}),
        ("step-0500.safetensors", 500, {}), ("checkpoint_12.pth", 12, {}), ("iter_0000042", 42, {}),
        ("global_step7", 7, {}), ("last.ckpt", None, {}), ("model.safetensors", None, {}),
        ("steps_are_here.txt", None, {}),
    ],
)  # fmt: skip
def test_names_say_steps_and_metrics(
    tmp_path: Path, name: str, step: int | None, metrics: dict[str, float]
) -> None:
    """The names of Lightning, Transformers, Megatron and of scripts."""
    (tmp_path / name).touch()
    found = find_checkpoints(tmp_path)
    assert [one.step for one in found] == ([] if step is None else [step])
    assert [dict(one.metrics) for one in found] == ([] if step is None else [metrics])


def test_an_interrupted_import_goes_on(store: ckptstore.Store, tmp_path: Path) -> None:
    """What is there is not imported again; a damaged file stops it, and the call goes on there."""
    for step in (1, 2, 3):
        _weights(tmp_path / "out" / f"step_{step}.pt", step)
    good = (tmp_path / "out" / "step_2.pt").read_bytes()
    (tmp_path / "out" / "step_2.pt").write_bytes(good[:100])
    with pytest.raises((FormatError, ckptstore.CkptStoreError), match="step_2"):
        import_folder(store, tmp_path / "out", run="gpt")
    first = store.resolve("gpt@1").id
    (tmp_path / "out" / "step_2.pt").write_bytes(good)
    found = import_folder(store, tmp_path / "out", run="gpt")
    assert [version.step for version in found] == [1, 2, 3]
    assert found[0].id == first
    assert len(store.run("gpt")) == 3


def test_a_step_from_elsewhere_is_a_conflict(store: ckptstore.Store, tmp_path: Path) -> None:
    """A version that was not imported from this name is not taken for it."""
    _weights(tmp_path / "out" / "step_1.pt", 1)
    store.run("gpt").save({"w": [1.0]}, 1)
    with pytest.raises(ConflictError, match="gpt@1"):
        import_folder(store, tmp_path / "out", run="gpt")


def test_two_of_one_step_are_refused(store: ckptstore.Store, tmp_path: Path) -> None:
    """The step alone could not tell them apart: nothing is imported, and both are named."""
    for name in ("step_1.pt", "epoch=0-step=1.ckpt"):
        _weights(tmp_path / "out" / name, 1)
    with pytest.raises(InvalidInputError, match=r"epoch=0-step=1\.ckpt and step_1\.pt"):
        import_folder(store, tmp_path / "out", run="gpt")
    assert "gpt" not in store


def test_a_log_that_is_none_is_named(store: ckptstore.Store, tmp_path: Path) -> None:
    """A ``trainer_state.json`` of another form is an error with its path."""
    _weights(tmp_path / "out" / "checkpoint-1" / "pytorch_model.bin", 1)
    for text in ("[", "[]", '{"log_history": [3]}', '{"log_history": null}'):
        (tmp_path / "out" / "checkpoint-1" / "trainer_state.json").write_text(text)
        with pytest.raises(FormatError, match=r"trainer_state\.json"):
            import_folder(store, tmp_path / "out", run="gpt")
