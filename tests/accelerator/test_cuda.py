"""States that live on a CUDA device: saved from it, loaded to it, and never read too early.

Skipped as a whole on a machine without such a device: run this folder on one before a release.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def run(tmp_path: Path) -> ckptstore.Run:
    """Return a run of a new local store."""
    return ckptstore.open(tmp_path / "store", create=True).run("gpu")


def _state() -> dict[str, object]:
    torch.manual_seed(5)
    weight = torch.randn(1000, 1200, device="cuda")
    return {
        "model": {
            "weight": weight,
            "tied": weight,
            "half": torch.randn(700, 300, device="cuda").bfloat16(),
            "channels": torch.randn(4, 3, 40, 40, device="cuda").to(
                memory_format=torch.channels_last
            ),
            "gappy": torch.randn(300, 300, device="cuda")[::2, ::3],
            "scalar": torch.tensor(3.5, device="cuda"),
        },
        "rng": {"cuda": torch.cuda.get_rng_state(), "cpu": torch.get_rng_state()},
        "host": torch.arange(10),
    }


def _same(saved: object, loaded: object) -> None:
    if isinstance(saved, dict):
        assert isinstance(loaded, dict)
        assert list(saved) == list(loaded)
        for key, value in saved.items():
            _same(value, loaded[key])
    else:
        assert isinstance(saved, torch.Tensor)
        assert isinstance(loaded, torch.Tensor)
        assert torch.equal(saved.cpu(), loaded.cpu())
        assert saved.dtype == loaded.dtype


def test_a_state_on_the_device_comes_back_bit_for_bit(run: ckptstore.Run) -> None:
    """Saved from the device and loaded to the CPU and to the device, all values are equal."""
    state = _state()
    run.save(state, step=1)

    _same(state, run.load())
    loaded = run.load(map_location="cuda")
    _same(state, loaded)
    assert loaded["model"]["weight"].is_cuda
    assert loaded["model"]["weight"].data_ptr() == loaded["model"]["tied"].data_ptr()
    assert loaded["model"]["channels"].is_contiguous(memory_format=torch.channels_last)
    assert not loaded["rng"]["cpu"].is_cuda
    torch.cuda.set_rng_state(loaded["rng"]["cuda"])


def test_loading_into_tensors_on_the_device(run: ckptstore.Run) -> None:
    """Existing tensors on the device receive the values in place."""
    state = _state()
    run.save(state, step=1)
    target = torch.zeros(1000, 1200, device="cuda")
    pointer = target.data_ptr()
    result = run.load(include=["model.weight"], into={"model": {"weight": target}})

    assert result["model"]["weight"] is target
    assert pointer == target.data_ptr()
    assert torch.equal(target, state["model"]["weight"])  # type: ignore[index]


def test_loading_into_tensors_of_other_layouts(run: ckptstore.Run) -> None:
    """Tied tensors, views, other strides, other devices: each target keeps its place."""
    base = torch.randn(32, 16, device="cuda")
    wave = torch.randn(8, 8, dtype=torch.complex64, device="cuda")
    numbers = torch.arange(6)
    state: dict[str, Any] = {
        "tied": [base, base], "rows": [base[:4], base[2:6]], "wave": wave,
        "channels": torch.randn(2, 3, 5, 5, device="cuda").to(memory_format=torch.channels_last),
        "numbers": [numbers, numbers.numpy()], "scalar": torch.tensor(4, device="cuda"),
    }  # fmt: skip
    run.save(state, step=1)
    room = torch.zeros(40, 32, device="cuda")
    tied = torch.zeros(32, 16, device="cuda")
    into: dict[str, Any] = {
        "tied": [tied, tied],
        "rows": [room[:4, :16], torch.zeros(4, 16)],
        "wave": torch.zeros_like(wave).conj(),
        "channels": torch.zeros(2, 3, 5, 5, device="cuda"),
        "numbers": [torch.zeros(6, dtype=torch.int64, device="cuda")],
        "scalar": torch.zeros((), dtype=torch.int64, device="cuda"),
    }
    loaded = run.load(into=into)

    for name in ("tied", "rows"):
        for at in (0, 1):
            assert loaded[name][at] is into[name][at]
            assert torch.equal(loaded[name][at].cpu(), state[name][at].cpu())
    for name in ("wave", "channels", "scalar"):
        assert loaded[name] is into[name]
        assert torch.equal(loaded[name], state[name])
    assert loaded["numbers"][0].tolist() == loaded["numbers"][1].tolist() == numbers.tolist()
    assert not room[4:].any()
    assert not room[:, 16:].any()


def test_queued_work_is_waited_for(run: ckptstore.Run) -> None:
    """A save called while kernels are queued on the caller's stream stores their results."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    value = torch.zeros(4096, 4096, device="cuda")
    factor = torch.ones(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(200):
            value = value + factor @ factor / 4096
        run.save({"value": value}, step=1)

    assert torch.equal(value.cpu(), run.load()["value"])


def test_host_memory_stays_bounded_when_loading_to_the_device(tmp_path: Path) -> None:
    """Tensors for the device pass through host memory in batches, not all at once."""
    store = ckptstore.open(tmp_path / "s", create=True, host_bytes=64 << 20)
    state = {f"w{i}": torch.randn(4 << 20, device="cuda") for i in range(24)}  # 16 MiB each
    store.run("gpu").save(state, step=1)
    torch.cuda.empty_cache()
    before = torch.cuda.memory.host_memory_stats()["allocated_bytes.peak"]
    loaded = store.load("gpu", map_location="cuda")

    _same(state, loaded)
    target = {name: torch.zeros_like(value) for name, value in state.items()}
    _same(state, store.load("gpu", into=target))
    assert torch.cuda.memory.host_memory_stats()["allocated_bytes.peak"] - before <= 160 << 20
