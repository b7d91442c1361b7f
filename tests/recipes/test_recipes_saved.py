"""Recipes together with deltas, forks, ageing and collections, by the public calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import ckptstore

Stores = Callable[..., ckptstore.Store]

ENCODINGS = {"optimizer.*.m": "int8", "optimizer.*.v": "dynamic8", "ema.*": "bf16"}


def state(step: int) -> dict[str, Any]:
    """Return weights in bfloat16 with masters, moments and an average, as training leaves them."""
    random = torch.Generator().manual_seed(1)
    master = torch.randn(300, 400, generator=random) * 0.02
    moved = torch.randn(300, 400, generator=torch.Generator().manual_seed(100 + step))
    master = master + 1e-4 * step * moved
    return {
        "model": {"w": master.to(torch.bfloat16)},
        "optimizer": {
            "master": {"w": master},
            "w": {"m": moved * 1e-3, "v": moved.square() * 1e-6},
        },
        "ema": {"w": master * 0.99},
        "step": step,
    }


def flat(value: Any, name: str = "") -> dict[str, torch.Tensor]:  # noqa: ANN401
    """Return the tensors of a state by dotted path."""
    if isinstance(value, torch.Tensor):
        return {name[1:]: value}
    found = {}
    for key, item in value.items() if isinstance(value, dict) else ():
        found.update(flat(item, f"{name}.{key}"))
    return found


@pytest.mark.parametrize("codec", ["auto", "delta", "raw"])
def test_every_codec_and_every_way(stores: Stores, codec: str) -> None:
    """Versions in any codec load, slice and travel alike, and pass a full check."""
    here, there = stores(host_bytes=1 << 20), stores(chunk_bytes=1 << 17)
    run = here.run("gpt", encodings=ENCODINGS)
    for step in range(3):
        run.save(state(step), step=step, codec=codec)
    here.fork("gpt@1", "there", store=there)
    here.fork("gpt@2", "part", include=["model", "ema"])
    for step in range(3):
        given, loaded = flat(state(step)), flat(here.load(f"gpt@{step}"))
        lazy = here.version(f"gpt@{step}")
        assert loaded.keys() == given.keys()
        for name, tensor in loaded.items():
            exact = name in ("model.w", "optimizer.master.w")
            assert torch.equal(tensor, given[name]) == exact, name
            error = (tensor.float() - given[name].float()).norm() / given[name].float().norm()
            assert error < 0.02, name
            assert torch.equal(lazy[name][17:40, 5], tensor[17:40, 5]), name
    whole = flat(here.load("gpt@1"))
    assert all(torch.equal(t, whole[name]) for name, t in flat(there.load("there")).items())
    last = flat(here.load("gpt@2"))
    assert all(torch.equal(t, last[name]) for name, t in flat(here.load("part")).items())
    assert here.verify().ok
    assert there.verify().ok


def test_a_collection_keeps_what_is_hidden(stores: Stores) -> None:
    """Packs of codes and scales, and of masters that a part keeps hidden, outlive a collection."""
    store = stores()
    run = store.run("gpt", encodings=ENCODINGS)
    for step in range(3):
        run.save(state(step), step=step)
    store.fork("gpt@2", "part", include=["model.w", "optimizer.w"])
    expected = flat(store.load("part"))
    store.remove([f"gpt@{step}" for step in range(3)], force=True)
    store.gc(grace_s=0, orphan_age_s=0)
    store.gc(grace_s=0, orphan_age_s=0)

    assert store.verify().ok
    assert all(torch.equal(t, expected[name]) for name, t in flat(store.load("part")).items())


def test_ageing_keeps_the_bits_of_weights(stores: Stores) -> None:
    """Weights that follow from masters come back bit for bit from a version that lost the rest."""
    store = stores()
    run = store.run("gpt", encodings=ENCODINGS)
    for step in range(2):
        run.save(state(step), step=step)
    store.age(["gpt@0"], "weights")
    store.gc(grace_s=0, orphan_age_s=0)
    store.gc(grace_s=0, orphan_age_s=0)

    loaded = flat(store.load("gpt@0"))
    assert torch.equal(loaded["model.w"], state(0)["model"]["w"])
    assert not any(name.startswith("optimizer") for name in loaded)
    assert store.verify().ok
