"""Diff: what differs by digest, without reading; how far apart, a window at a time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from metered import MeteredBackend

import ckptstore
from ckptstore.backends.memory import MemoryBackend
from ckptstore.errors import InvalidInputError, TensorNotFoundError
from ckptstore.limits import KIB
from ckptstore.repo import create_on
from ckptstore.states import compare


@pytest.fixture
def store(memory: MemoryBackend) -> ckptstore.Store:
    """Return a store in memory, with small chunks."""
    return ckptstore.Store(create_on(memory, chunk_bytes=64 * KIB))


def _paths(changes: Any) -> list[str]:  # noqa: ANN401 - changes
    return [change.path for change in changes]


def test_leaves_are_told_apart_by_digest(memory: MemoryBackend) -> None:
    """Added, removed, moved, changed, same; values that are no tensors; no pack is read."""
    metered = MeteredBackend(memory)
    store = ckptstore.Store(create_on(metered))
    run = store.run("gpt")
    kept, moved = torch.randn(100), torch.randn(60)
    before = {
        "kept": kept, "old.name": moved, "gone": torch.randn(5), "w": torch.zeros(50),
        "shape": torch.zeros(4), "dtype": torch.zeros(4, dtype=torch.int32),
        "opt": {"lr": 0.1, "betas": (0.9, 0.99), "step": 1},
    }  # fmt: skip
    after = {
        "kept": kept, "new.name": moved, "w": torch.ones(50), "shape": torch.zeros(2, 2),
        "dtype": torch.zeros(4), "fresh": torch.randn(7),
        "opt": {"lr": 0.2, "betas": (0.9, 0.99), "extra": None},
    }  # fmt: skip
    run.save(before, step=1)
    run.save(after, step=2)
    reads = metered.snapshot()["read_into"].calls  # the probe's

    report = store.diff("gpt@1", "gpt@2")

    assert _paths(report.same) == ["kept"]
    assert _paths(report.changed) == ["w", "shape", "dtype"]
    assert _paths(report.added) == ["fresh"]
    assert _paths(report.removed) == ["gone"]
    assert [(c.before and c.before.path, c.path) for c in report.moved] == [
        ("old.name", "new.name")
    ]
    assert not report.equal
    assert {(v.path, v.before, v.after) for v in report.values} == {
        ("opt.lr", "0.1", "0.2"),
        ("opt.step", "1", ""),
        ("opt.extra", "", "None"),
    }
    assert metered.snapshot()["read_into"].calls == reads
    assert store.diff("gpt@1", "gpt@1").equal
    backwards = store.diff("gpt@2", "gpt@1")
    assert (_paths(backwards.added), _paths(backwards.removed)) == (["gone"], ["fresh"])


def test_forks_and_their_parents(store: ckptstore.Store) -> None:
    """A whole fork equals its source; a renamed one moved, with the same content."""
    state = {"model": {"a": torch.randn(100), "b": torch.randn(100)}}
    store.run("gpt").save(state, step=1)
    store.fork("gpt", "same")
    store.fork("gpt", "named", rename={"model": "net"})

    assert store.diff("gpt", "same").equal
    assert _paths(store.diff("gpt", "named").moved) == ["net.a", "net.b"]


def test_same_bytes_counts_equal_pieces(store: ckptstore.Store) -> None:
    """One changed row leaves the other pieces as they are."""
    run = store.run("gpt")
    table = torch.randn(1000, 64)
    run.save({"t": table}, step=1)
    table[5] += 1
    run.save({"t": table}, step=2)

    (change,) = store.diff("gpt@1", "gpt@2").changed
    assert change.same_bytes == table.nbytes - 64 * KIB


DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8]


@pytest.mark.parametrize("window", [1 << 20, 5000], ids=["one window", "many"])
def test_errors_are_those_of_the_tensors(
    store: ckptstore.Store, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative L2 and largest difference equal what torch computes on the whole tensors."""
    monkeypatch.setattr(compare, "_WINDOW_ELEMENTS", window)
    torch.manual_seed(2)
    before: dict[str, torch.Tensor] = {}
    after: dict[str, torch.Tensor] = {}
    for dtype in DTYPES:
        for size in (3, 30_000):
            name = f"{dtype}".removeprefix("torch.") + f"_{size}"
            before[name] = (torch.randn(size, 2) * 20).abs().to(dtype)
            after[name] = before[name].clone()
            after[name][size // 2 :] += 1
    before["kind"], after["kind"] = torch.randn(70_000), torch.randn(70_000).half()
    before["complex"] = torch.randn(9000, dtype=torch.complex64)
    after["complex"] = before["complex"] * (1 + 0.5j)
    run = store.run("gpt")
    run.save(before, step=1)
    run.save(after, step=2)

    report = store.diff("gpt@1", "gpt@2")
    errors = report.errors()

    assert set(errors) == set(before) == {change.path for change in report.changed}
    for name, error in errors.items():
        wide = torch.complex128 if name == "complex" else torch.float64
        one, two = before[name].to(wide), after[name].to(wide)
        difference = one - two
        assert error is not None
        relative = (difference.abs().square().sum().sqrt() / one.abs().square().sum().sqrt()).item()
        assert error.relative_l2 == pytest.approx(relative, rel=1e-9)
        if name != "complex":
            assert error.max_abs == difference.abs().max().item()
            assert error.unequal == (one != two).sum().item()
            assert error.elements == one.numel()


def test_what_is_not_finite_is_counted_apart(store: ckptstore.Store) -> None:
    """NaN where NaN was is equal; NaN and infinities that appear do not hide the rest."""
    run = store.run("gpt")
    run.save({"w": torch.tensor([1.0, math.nan, 2.0, 3.0]), "z": torch.zeros(2)}, step=1)
    run.save({"w": torch.tensor([2.0, math.nan, math.nan, math.inf]), "z": torch.ones(2)}, step=2)

    errors = store.diff("gpt@1", "gpt@2").errors()

    assert errors["w"] == compare.TensorError(
        relative_l2=1.0, max_abs=1.0, elements=4, unequal=3, nonfinite=2
    )
    assert errors["z"] is not None
    assert errors["z"].relative_l2 == math.inf


def test_leaves_that_are_rebuilt_first(store: ckptstore.Store) -> None:
    """Views, arrays, transposed memory; bytes and generators have no values to subtract."""
    run = store.run("gpt")
    for step in (1, 2):
        base = torch.arange(400.0).reshape(20, 20) * step
        state = {
            "base": base,
            "rows": base[3:5],
            "array": np.arange(6.0) + step,
            "order": base.t().contiguous() if step == 1 else base.t(),
            "text": bytes([step]) * 10_000,
            "times": np.array([f"202{step}-01-01"], dtype="datetime64[s]"),
            "generator": torch.Generator().manual_seed(step),
        }
        run.save(state, step=step)

    errors = store.diff("gpt@1", "gpt@2").errors()

    for name in ("base", "rows", "order"):
        found = errors[name]
        assert found is not None
        assert found.relative_l2 == 1.0
    assert errors["array"] is not None
    assert errors["array"].max_abs == 1.0
    assert errors["text"] is errors["generator"] is None


def test_one_tensor_is_looked_at_alone(memory: MemoryBackend) -> None:
    """Only what is asked for is read; what did not change, or is not there, is refused."""
    metered = MeteredBackend(memory)
    store = ckptstore.Store(create_on(metered))
    run = store.run("gpt")
    run.save({"a": torch.zeros(100_000), "b": torch.zeros(100_000), "c": torch.ones(3)}, step=1)
    run.save({"a": torch.rand(100_000), "b": torch.rand(100_000), "c": torch.ones(3)}, step=2)
    report = store.diff("gpt@1", "gpt@2")

    assert list(report.errors("b")) == ["b"]
    assert metered.snapshot()["read_into"].bytes_moved < 500_000
    with pytest.raises(InvalidInputError, match="'c' is not a changed"):
        report.errors("c")
    with pytest.raises(TensorNotFoundError):
        report.errors("nothing")
