"""Every way to read a tensor gives the same elements, whatever recipe they follow from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from recipekit import Form, save, stored_bytes

import ckptstore
from ckptstore.checkpoint.content import read_content
from ckptstore.checkpoint.regions import Region, read_regions
from ckptstore.errors import CorruptTensorError

Stores = Callable[..., ckptstore.Store]

FORMS = {
    "model.weight": Form(of="optimizer.master"),
    "model.conv": Form(code="linear", block=64),
    "model.bias": Form(to="float8_e5m2"),
    "optimizer.m": Form(code="dynamic-signed"),
    "optimizer.v": Form(code="dynamic-unsigned", block=100),
    "optimizer.half": Form(to="bfloat16"),
    "optimizer.double": Form(to="float32"),
    "optimizer.brain": Form(code="linear", block=2048),
    "empty": Form(to="bfloat16"),
    "scalar": Form(code="linear"),
}


def state() -> dict[str, Any]:
    """Return tensors of many pieces, small ones, one in another order, an empty one."""
    random = torch.Generator().manual_seed(3)
    master = torch.randn(301, 403, generator=random)
    return {
        "model": {
            "weight": master.to(torch.bfloat16),
            "conv": torch.randn(8, 9, 31, 17, generator=random).contiguous(
                memory_format=torch.channels_last
            ),
            "bias": torch.randn(403, generator=random, dtype=torch.float16),
            "plain": torch.randn(70, 70, generator=random),
        },
        "optimizer": {
            "master": master,
            "m": torch.randn(301, 403, generator=random) * 1e-3,
            "v": torch.rand(301, 403, generator=random) ** 8,
            "half": torch.randn(301, 403, generator=random),
            "double": torch.randn(111, 113, generator=random, dtype=torch.float64),
            "brain": torch.randn(50_001, generator=random).to(torch.bfloat16),
        },
        "empty": torch.empty(0, 5),
        "scalar": torch.tensor(0.625),
        "step": 7,
    }


def leaf_of(loaded: dict[str, Any], name: str) -> torch.Tensor:
    """Return a tensor of a loaded state by its path."""
    for key in name.split("."):
        loaded = loaded[key]
    assert isinstance(loaded, torch.Tensor)
    return loaded


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Say whether two tensors are equal bit for bit, and laid out alike."""
    return one.dtype == other.dtype and stored_bytes(one) == stored_bytes(other)


@pytest.mark.parametrize("host_bytes", [1, 200_000, 1 << 28])
def test_a_whole_load_gives_back_what_the_recipes_say(stores: Stores, host_bytes: int) -> None:
    """Each tensor has the elements that its form keeps, and its place in memory, at any budget."""
    store = stores(host_bytes=host_bytes)
    given = state()
    _, expected = save(store, given, FORMS)

    loaded = store.load("gpt")

    for name, tensor in expected.items():
        assert same(leaf_of(loaded, name), tensor), name
        assert leaf_of(loaded, name).stride() == leaf_of(given, name).stride() or not tensor.numel()
    assert same(loaded["model"]["weight"], given["model"]["weight"])
    assert same(loaded["model"]["plain"], given["model"]["plain"])
    assert loaded["step"] == 7
