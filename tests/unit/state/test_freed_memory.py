"""Memory of tensors: freed memory is refused, and a save or load leaves memory resizable."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore.errors import StateError
from ckptstore.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Return a new store."""
    with ckptstore.open(tmp_path / "s", create=True) as opened:
        yield opened


def _freed(tensor: torch.Tensor, left: int = 0) -> torch.Tensor:
    tensor.untyped_storage().resize_(left)
    return tensor


@pytest.mark.parametrize(
    "make",
    [
        lambda: _freed(torch.ones(5)),
        lambda: _freed(torch.ones(300_000)),
        lambda: _freed(torch.ones(300_000), left=1_199_999),
        lambda: _freed(torch.ones(600, 500).T),
        lambda: _freed(torch.ones(100)[40:80:2], left=79 * 4 - 1),
        lambda: torch.nn.Parameter(_freed(torch.ones(64))),
        lambda: _freed(torch.ones(64, dtype=torch.complex64).conj()),
    ],
    ids=["tiny", "large", "a byte short", "transposed", "sliced", "parameter", "conjugated"],
)
def test_freed_memory_is_refused(store: Store, make: Callable[[], torch.Tensor]) -> None:
    """Neither garbage nor a crash: the error names the tensor, and there is no version."""
    state = {"kept": torch.ones(8), "model": {"w": make()}}
    run = store.run("r")
    with pytest.raises(StateError, match=r"'model\.w': its memory was freed"):
        run.save(state, step=1)
    with pytest.raises(StateError, match=r"'model\.w': its memory was freed"):
        run.save_async(state, step=1)
    assert run.versions() == []


def test_a_freed_target_is_refused(store: Store) -> None:
    """A load into freed memory fails before a byte is written."""
    store.run("r").save({"w": torch.ones(300_000), "x": torch.ones(8)}, step=1)
    into = {"w": _freed(torch.ones(300_000)), "x": torch.zeros(8)}
    with pytest.raises(StateError, match="its memory was freed"):
        store.load("r@1", into=into)
    assert into["w"].untyped_storage().nbytes() == 0


def _state() -> dict[str, torch.Tensor]:
    base = torch.randn(300_000)
    return {
        "large": base,
        "half": base.bfloat16(),
        "tiny": torch.randn(5),
        "flag": torch.ones(3, dtype=torch.bool),
        "transposed": torch.randn(600, 500).T,
        "strided": torch.randn(90_000)[::3],
        "complex": torch.randn(100, 100, dtype=torch.complex128).T,
        "conjugated": torch.randn(1000, dtype=torch.complex64).conj(),
        "empty": torch.zeros(0, 3),
    }


def _resize(tensors: dict[str, Any]) -> None:
    for name, tensor in tensors.items():
        tensor.untyped_storage().resize_(0)
        assert tensor.untyped_storage().nbytes() == 0, name


@pytest.mark.parametrize("codec", ["raw", "planes"])
def test_memory_of_a_state_can_be_resized_afterwards(store: Store, codec: str) -> None:
    """A save, a background save and loads of both kinds leave all storages as they were."""
    run = store.run("r")
    state, staged, into = _state(), _state(), _state()
    run.save(state, step=1, codec=codec)
    run.save_async(staged, step=2, codec=codec).result()
    store.load("r@1", into=into)
    loaded = store.load("r@1")
    for name, tensor in state.items():
        assert torch.equal(into[name], tensor), name
        assert torch.equal(loaded[name], tensor), name
    for tensors in (state, staged, into, loaded):
        _resize(tensors)
