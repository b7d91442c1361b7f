"""Programs that test_jax starts, each with devices of its own: jax_programs.py NAME ARGUMENTS."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any
from unittest import mock

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
from metered import MeteredBackend

import ckptstore
from ckptstore.checkpoint.regions import read_regions
from ckptstore.errors import StateError
from ckptstore.integrations.jax import load, state_of

P = PartitionSpec


def mesh(url: str) -> None:
    """Save every sharding, and load each onto every other; then count what a load reads."""
    grid = jax.make_mesh((4, 2), ("x", "y"))
    specs = [P(), P("x"), P(None, "y"), P("y", "x"), P(("x", "y")), P(None, ("y", "x"))]
    shardings = [NamedSharding(grid, spec) for spec in specs]
    values = np.random.default_rng(1).integers(0, 255, (64, 24)).astype(np.float32)
    with ckptstore.open(url) as store:
        plain = store.run("plain").save(state_of({"w": jnp.asarray(values)}), step=1)
        for step, sharding in enumerate(shardings):
            tree = {
                "w": jax.device_put(values, sharding),
                "h": jax.device_put(values.astype(jnp.bfloat16), sharding),
                "key": jax.device_put(jax.random.key(step), NamedSharding(grid, P())),
            }
            store.run("moved").save(state_of(tree), step=step)
            only = store.run("only").save(state_of({"w": tree["w"]}), step=step)
            assert only.content == plain.content
            for other in shardings:
                like = jax.tree.map(
                    lambda one, to=other: jax.ShapeDtypeStruct(
                        one.shape, one.dtype, sharding=to if one.ndim else one.sharding
                    ),
                    tree,
                )
                found = load(store, f"moved@{step}", like=like)
                _check(found, tree, like)
            assert (np.asarray(load(store, "only")["w"]) == values).all()
        gone = jax.device_put(values, shardings[1])
        state = state_of({"w": gone})
        gone.delete()  # as a donation does
        with pytest.raises(StateError, match="'w' was deleted, or donated"):
            store.run("gone").save(state, step=1)
    for sharding in shardings:
        _read_once(url, sharding)
    _bounded(url, NamedSharding(grid, P("x")))
    sys.stdout.write("done\n")


def _check(found: Any, tree: Any, like: Any) -> None:
    for name, one in found.items():
        assert one.sharding == like[name].sharding, name
        assert one.dtype == tree[name].dtype
    assert (np.asarray(found["w"]) == np.asarray(tree["w"])).all()
    assert (np.asarray(found["h"]) == np.asarray(tree["h"])).all()
    for shard in found["w"].addressable_shards:
        assert (np.asarray(shard.data) == np.asarray(tree["w"])[shard.index]).all()


def _read_once(url: str, sharding: NamedSharding) -> None:
    """Count the bytes of a load onto 8 devices: those of one copy of the array, and a little."""
    values = np.random.default_rng(2).standard_normal((2048, 2048)).astype(np.float32)
    with ckptstore.open(url) as store:
        if "big" not in store:
            store.run("big").save(state_of({"w": jnp.asarray(values)}), step=1, codec="raw")
    with ckptstore.open(url, host_bytes=values.nbytes) as store:
        repo = store.repo
        meter = MeteredBackend(repo.load_backend)
        repo.__dict__["load_backend"] = meter
        found = load(store, "big", like=_like(values, sharding))
        assert (np.asarray(found["w"]) == values).all()
        moved = sum(one.bytes_moved for name, one in meter.snapshot().items() if "read" in name)
        assert values.nbytes <= moved < values.nbytes * 1.1, (sharding, moved)


def _bounded(url: str, sharding: NamedSharding) -> None:
    """Hold no more than the budget in host memory: one part at a time if it has room for one."""
    held: list[int] = []

    def counting(regions: Any, **options: Any) -> None:
        held.append(sum(region.out.nbytes for region in regions))
        read_regions(regions, **options)

    with (
        mock.patch("ckptstore.integrations.jax.read_regions", counting),
        ckptstore.open(url, host_bytes=5 << 20) as store,
    ):
        values = np.asarray(load(store, "big")["w"])
        found = load(store, "big", like=_like(values, sharding))
    assert (np.asarray(found["w"]) == values).all()
    assert held == [4 << 20] * 4, held


def _like(values: Any, sharding: NamedSharding) -> Any:
    return {"w": jax.ShapeDtypeStruct(values.shape, values.dtype, sharding=sharding)}


def job(url: str, address: str, rank: str) -> None:
    """Be one of two processes with 4 devices each: save what was gathered, load a half."""
    jax.distributed.initialize(address, 2, int(rank))
    grid = jax.make_mesh((8,), ("x",))
    values = np.arange(64.0, dtype=np.float32).reshape(16, 4)
    sharding = NamedSharding(grid, P("x"))
    array = jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])
    everywhere = jax.make_array_from_callback(
        values.shape, NamedSharding(grid, P()), lambda index: values[index]
    )
    with pytest.raises(StateError, match="only other processes reach") as error:
        state_of({"w": array})
    assert "process_allgather" in (error.value.hint or "")
    whole = multihost_utils.process_allgather({"w": array}, tiled=True)
    with ckptstore.open(url) as store:
        if rank == "0":
            store.run("job").save(state_of({**whole, "e": everywhere}), step=1)
        multihost_utils.sync_global_devices("saved")
        found = load(store, "job", like={"w": array, "e": everywhere})
    for name in ("w", "e"):
        for shard in found[name].addressable_shards:
            assert (np.asarray(shard.data) == values[shard.index]).all()
    assert found["w"].sharding == sharding
    assert len(found["w"].addressable_shards) == 4


class Model(nnx.Module):  # type: ignore[misc]  # not followed by mypy
    """A small model with dropout, whose stream of keys is a part of its state."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(8, 32, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.last = nnx.Linear(32, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return one number a row."""
        return self.last(self.dropout(nnx.relu(self.first(x))))


@nnx.jit  # type: ignore[untyped-decorator]  # not followed by mypy
def train_step(model: Model, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
    """Take one step; return the loss before it."""
    loss, gradients = nnx.value_and_grad(
        lambda one: jnp.mean((one(x) - x.sum(1, keepdims=True)) ** 2)
    )(model)
    optimizer.update(model, gradients)
    return loss


def train(url: str, name: str, steps: str, dies: str) -> None:
    """Train, saved every 10 steps; resume if there is a version; print the losses."""
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(
        model, optax.adamw(optax.cosine_decay_schedule(0.05, 30)), wrt=nnx.Param
    )
    losses = []
    with ckptstore.open(url) as store:
        run = store.run(name)
        first = 0
        if run.head is not None:
            like = {"model": nnx.state(model), "optimizer": nnx.state(optimizer)}
            found = load(run, like=like)
            nnx.update(model, found["model"])
            nnx.update(optimizer, found["optimizer"])
            first = run.head.step
        for step in range(first, int(steps)):
            if step == int(dies):
                os.kill(os.getpid(), signal.SIGKILL)
            x = jax.random.normal(jax.random.fold_in(jax.random.key(9), step), (16, 8))
            losses.append(float(train_step(model, optimizer, x)).hex())
            if (step + 1) % 10 == 0:
                tree = {"model": nnx.state(model), "optimizer": nnx.state(optimizer)}
                run.save_async(state_of(tree), step=step + 1).result()
    sys.stdout.write(json.dumps(losses))


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
