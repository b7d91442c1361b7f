"""Trainings on a CUDA device: resumed exactly, filled in place, of all kinds of tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore import errors
from ckptstore.integrations import randomness

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("generators_stay"),
]


@pytest.fixture
def store(tmp_path: Path) -> ckptstore.Store:
    """Return a new local store."""
    return ckptstore.open(tmp_path / "store", create=True)


class _Training:
    """A network with dropout in half precision: its losses depend on all that is saved."""

    def __init__(self, option: str) -> None:
        torch.manual_seed(3)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(64, 256), torch.nn.Dropout(0.5), torch.nn.Linear(256, 64)
        ).cuda()
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01, **{option: True})  # type: ignore[arg-type]
        self.scaler = torch.amp.GradScaler("cuda", init_scale=2.0**20, growth_interval=2)

    def losses(self, steps: int) -> list[float]:
        return [self._step() for _ in range(steps)]

    def _step(self) -> float:
        with torch.autocast("cuda", torch.float16):
            loss = self.net(torch.randn(32, 64, device="cuda")).square().mean()
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return float(loss.item())

    @property
    def state(self) -> dict[str, Any]:
        return {
            "net": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "rng": randomness.capture(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        randomness.restore(state["rng"])


@pytest.mark.parametrize("where", ["cuda", "cpu", {"cuda:0": "cuda:0"}], ids=str)
@pytest.mark.parametrize("option", ["fused", "foreach", "capturable"])
def test_a_resumed_training_has_the_same_losses(
    store: ckptstore.Store, option: str, where: str | dict[str, str]
) -> None:
    """Bit for bit, with generators of the device and a loss scale that changes."""
    training = _Training(option)
    training.losses(5)
    store.run("gpt").save(training.state, step=5)
    expected = training.losses(5)

    resumed = _Training(option)
    resumed.losses(1)
    resumed.restore(store.load("gpt", map_location=where))
    assert resumed.losses(5) == expected


def test_a_module_on_the_device_is_filled_in_place(store: ckptstore.Store) -> None:
    """By load_into, and bit for bit; its memory stays where it was."""
    training = _Training("fused")
    training.losses(2)
    store.run("gpt").save(training.state, step=2)
    fresh = _Training("fused").net
    places = [one.data_ptr() for one in fresh.parameters()]
    store.load_into("gpt", fresh, include=["net"], rename={"net": ""})

    assert [one.data_ptr() for one in fresh.parameters()] == places
    for one, other in zip(fresh.parameters(), training.net.parameters(), strict=True):
        assert torch.equal(one, other)


def test_all_kinds_of_tensors(store: ckptstore.Store) -> None:
    """Views of one storage, gaps, overlaps, sparse ones, complex ones, small and empty ones."""
    torch.manual_seed(1)
    base = torch.randn(64, 64, device="cuda")
    wave = torch.view_as_complex(torch.randn(8, 8, 2, device="cuda"))
    state = {
        "rows": [base[:8], base[4:12], base.t()[3]],
        "expanded": torch.randn(5, 1, device="cuda").expand(5, 7),
        "overlapping": torch.randn(40, device="cuda").as_strided((4, 4), (2, 3)),
        "sparse": base.relu().to_sparse(),
        "conj": wave.conj(),
        "neg": wave.conj().imag,
        "bool": base > 0,
        "float8": base.to(torch.float8_e4m3fn),
        "int4": torch.arange(16, device="cuda", dtype=torch.uint8).view(4, 4),
        "empty": torch.empty(0, 3, device="cuda"),
        "scalar": torch.tensor(2, device="cuda"),
        "parameter": torch.nn.Parameter(torch.ones(3, device="cuda")),
        "double": torch.randn(3, device="cuda", dtype=torch.float64),
    }
    store.run("gpt").save(state, step=1)
    for where in ("cuda", "cpu"):
        loaded = store.load("gpt", map_location=where)
        _compare(state, loaded, where)
    on_device = store.load("gpt", map_location="cuda", include=["rows"])["rows"]
    on_device[0][4].zero_()
    assert not on_device[1][0].any()


def _compare(saved: Any, loaded: Any, device: str) -> None:  # noqa: ANN401 - any state
    if isinstance(saved, list | dict):
        for key in saved if isinstance(saved, dict) else range(len(saved)):
            _compare(saved[key], loaded[key], device)
        return
    assert loaded.device.type == device
    assert loaded.dtype == saved.dtype
    assert loaded.layout == saved.layout
    assert type(loaded) is type(saved)
    one, other = saved.detach().cpu(), loaded.detach().cpu()
    if one.layout != torch.strided:
        one, other = one.to_dense(), other.to_dense()
    if one.dtype == torch.float8_e4m3fn:
        one, other = one.view(torch.uint8), other.view(torch.uint8)
    assert torch.equal(one, other)


@pytest.mark.parametrize("encoding", ["bf16", "fp16", "int8", "dynamic8"])
def test_encoded_tensors_are_the_same_on_both(store: ckptstore.Store, encoding: str) -> None:
    """What was rounded is rounded once: the device and the CPU get the same values."""
    state = {"w": torch.randn(1000, 70, device="cuda")}
    store.run("gpt").save(state, step=1, encodings={"w": encoding})
    there, here = store.load("gpt", map_location="cuda")["w"], store.load("gpt")["w"]

    assert there.is_cuda
    assert torch.equal(there.cpu(), here)
    assert not torch.equal(here, state["w"].cpu())
    assert torch.allclose(here, state["w"].cpu(), atol=0.05)


def test_too_little_memory_of_the_device_is_told(store: ckptstore.Store) -> None:
    """A load that does not fit fails with a typed error, and the next one that fits succeeds."""
    state = {f"w{i}": torch.full((1 << 24,), float(i)) for i in range(8)}  # 64 MiB each
    store.run("gpt").save(state, step=1)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    occupied = torch.empty(free - (200 << 20), dtype=torch.uint8, device="cuda")
    with pytest.raises(errors.LimitError, match="cuda"):
        store.load("gpt", map_location="cuda")
    torch.cuda.empty_cache()
    loaded = store.load("gpt", map_location="cuda", include=["w3"])
    assert torch.equal(loaded["w3"].cpu(), state["w3"])
    del occupied, loaded
    torch.cuda.empty_cache()
    assert store.load("gpt", map_location="cuda")["w7"].is_cuda
