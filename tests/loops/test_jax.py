"""Pytrees of JAX: saved by the names of their key paths, loaded with every bit, by others too."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
import torch
from ports import LOOPBACK, free_port

from ckptstore.errors import InvalidInputError, LimitError, StateError, TensorNotFoundError
from ckptstore.integrations.jax import load, state_of
from ckptstore.saver.saver import Stage
from ckptstore.store import Store
from ckptstore.tensors.tensor_bytes import as_elements

PROGRAMS = Path(__file__).with_name("jax_programs.py")
DTYPES = [
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32"),
    *("float16", "bfloat16", "float32", "complex64"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *("int4", "uint4", "int2", "uint2"),
]


class Pair(NamedTuple):
    """A node of which only the names of its children are stored."""

    left: Any
    right: Any


def run_program(*arguments: object, env: dict[str, str] | None = None) -> str:
    """Return the output of a program of jax_programs.py."""
    command = [sys.executable, str(PROGRAMS), *map(str, arguments)]
    around = {**os.environ, "JAX_PLATFORMS": "cpu", **(env or {})}
    done = subprocess.run(command, env=around, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def bits(array: Any) -> bytes:
    """Return the bytes of an array or key of JAX, or of what NumPy takes."""
    if isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.asarray(array).tobytes()


def assert_same(tree: Any, expected: Any) -> None:
    """Compare structure, types, dtypes, shapes and bits."""
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True):
        assert isinstance(one, jax.Array) == isinstance(other, jax.Array)
        if hasattr(other, "dtype"):
            assert (one.dtype, one.shape, bits(one)) == (other.dtype, other.shape, bits(other))
        else:
            assert one == other


@pytest.mark.short(sample=4)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_that_both_have(store: Store, dtype: str) -> None:
    """Bits, dtype and shape come back, with and without a tree to look like; torch has them too."""
    numbers = np.random.default_rng(3).integers(0, 2, (5, 3, 2))
    tree = {
        "plain": jnp.asarray(numbers).astype(dtype),
        "one": jnp.ones((), dtype),
        "none": jnp.zeros((0, 4), dtype),
        "host": np.asarray(numbers).astype(jnp.dtype(dtype)),
    }
    store.run("all").save(state_of(tree), step=1)
    assert_same(load(store, "all", like=tree), tree)
    found = load(store, "all")
    assert {name: bits(one) for name, one in found.items()} == {
        name: bits(one) for name, one in tree.items()
    }
    tensor = store.load("all")["plain"]
    assert tensor.dtype == getattr(torch, dtype)
    assert as_elements(tensor).tobytes() == bits(tree["plain"])


def test_states_of_optax_and_flax_keep_names_and_structure(store: Store) -> None:
    """Named tuples, states, variables and key arrays come back by the tree that they look like."""
    model = nnx.Sequential(nnx.Linear(4, 8, rngs=nnx.Rngs(0)), nnx.BatchNorm(8, rngs=nnx.Rngs(1)))
    dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(7))
    params = {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.zeros(3, jnp.bfloat16)}
    chain = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(1, 0, 9)))
    tree = {
        "model": nnx.state(model), "dropout": nnx.state(dropout), "params": params,
        "opt": chain.init(params),
        "pair": Pair([1, 2.5, "text", None, b"raw"], (jnp.ones(2), np.arange(3))), "step": 7,
        "empty": [{}, (), [], None],
    }  # fmt: skip
    run = store.run("gpt")
    run.save(state_of(tree), step=1)
    assert_same(load(run, "latest", like=tree), tree)
    abstract = jax.eval_shape(lambda: {"opt": chain.init(params)})
    assert_same(load(run, 1, like=abstract), {"opt": tree["opt"]})
    names = run.version("latest").keys()
    assert {"params.w", "opt.1.0.mu.w", "model.layers.0.kernel.value"} <= {*names}
    assert {tensor.role for tensor in run.version().tensors() if tensor.path.startswith("opt")} == {
        "optimizer"
    }


def test_a_tied_array_is_stored_once(store: Store) -> None:
    """One array at two places takes the space of one, as a tied tensor of torch does."""
    array = jnp.arange(4096.0)
    version = store.run("tied").save(state_of({"a": array, "b": [array]}), step=1)
    assert len(store.version("tied").tensors()) == 1
    torch_one = torch.arange(4096.0)
    other = store.run("torch").save({"a": torch_one, "b": [torch_one]}, step=1)
    assert version.content == other.content
    assert_same(load(store, "tied"), {"a": array, "b": [array]})


@pytest.mark.parametrize("kind", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_typed_keys_go_on_with_their_implementation(store: Store, kind: str) -> None:
    """A loaded key draws what the saved one does; another implementation is refused."""
    tree = {"key": jax.random.key(5, impl=kind), "many": jax.random.split(jax.random.key(1), 3)}
    store.run("keys").save(state_of(tree), step=1)
    for found in (load(store, "keys", like=tree), load(store, "keys")):
        assert_same(found, tree)
        assert bits(jax.random.normal(found["key"], (9,))) == bits(
            jax.random.normal(tree["key"], (9,))
        )
    assert store.load("keys")["key"]["prng_impl"] == kind
    other = {"key": jax.random.key(5, impl="rbg" if kind != "rbg" else "threefry2x32")}
    with pytest.raises(InvalidInputError, match="'key' is key<"):
        load(store, "keys", like=other)
    with pytest.raises(InvalidInputError, match=r"is uint32\[3, 2\] in the version, but key<"):
        load(store, "keys", like={"many": {"key_data": tree["key"]}})
    with pytest.raises(InvalidInputError, match=r"'many\.prng_impl' is no array"):
        load(store, "keys", like={"many": {"prng_impl": tree["key"]}})


def test_the_same_values_of_torch_take_no_bytes(store: Store) -> None:
    """Names, chunks and content are those of torch: each library loads what the other saved."""
    values = np.random.default_rng(0).standard_normal((300, 1000)).astype(np.float32)
    ours = {"model": {"w": jnp.asarray(values), "h": jnp.asarray(values).astype(jnp.bfloat16)}}
    theirs = {
        "model": {"w": torch.from_numpy(values), "h": torch.from_numpy(values).to(torch.bfloat16)}
    }
    run = store.run("both")
    first = run.save(theirs, step=1)
    second = run.save(state_of(ours), step=2)
    assert second.content == first.content
    assert second.roles["weights"].new == 0
    assert run.save(theirs, step=3).roles["weights"].new == 0
    assert_same(load(run, 1, like=ours), ours)
    assert run.load(2)["model"]["h"].equal(theirs["model"]["h"])
    target = {"model": {"w": torch.zeros(300, 1000)}}
    run.load(2, include=["model.w"], into=target)
    assert target["model"]["w"].equal(theirs["model"]["w"])


def test_what_cannot_be_stored_is_named_before_anything_is_written(store: Store) -> None:
    """Elements without a stored dtype, deleted arrays, cycles: typed errors with path and way."""
    for dtype in ("float8_e4m3", "float8_e3m4", "float8_e4m3b11fnuz", "float4_e2m1fn"):
        with pytest.raises(StateError, match=rf"'a\.b' has the dtype {dtype}") as error:
            store.run("gpt").save(state_of({"a": {"b": jnp.ones(2, dtype)}}), step=1)
        assert "float8_e4m3fn" in (error.value.hint or "")
    gone = jnp.ones(3)
    gone.delete()
    with pytest.raises(StateError, match="'x' was deleted, or donated"):
        state_of({"x": gone})
    with pytest.raises(StateError, match="save state_of"):
        store.run("gpt").save({"x": jnp.ones(3)}, step=1)
    ring: list[Any] = []
    ring.append(ring)
    with pytest.raises(LimitError, match="nested deeper"):
        state_of(ring)
    with pytest.raises(StateError, match=r"'f' is a builtin|'f' is a function"):
        store.run("gpt").save(state_of({"f": lambda: 0}), step=1)
    assert not store.versions()


def test_what_does_not_fit_is_refused(store: Store) -> None:
    """A missing leaf, another shape or dtype, 64 bits that JAX would shorten: named, not cast."""
    state = {"w": torch.ones(2, 3), "n": torch.arange(4), "k": np.arange(4)}
    store.run("gpt").save(state, step=1)
    with pytest.raises(TensorNotFoundError, match="v"):
        load(store, "gpt", like={"v": jnp.ones(2)})
    with pytest.raises(InvalidInputError, match=r"'w' is float32\[2, 3\] in the version, but"):
        load(store, "gpt", like={"w": jnp.ones((3, 2))})
    with pytest.raises(InvalidInputError, match=r"'w' is float32\[2, 3\] in the version, but"):
        load(store, "gpt", like={"w": jnp.ones((2, 3), jnp.bfloat16)})
    for like in ({"n": jax.ShapeDtypeStruct((4,), np.int64)}, None):
        with pytest.raises(InvalidInputError, match="'n' is int64, which JAX would shorten"):
            load(store, "gpt", like=like)
    assert bits(load(store, "gpt", like={"n": np.arange(4)})["n"]) == bits(np.arange(4))
    with pytest.raises(InvalidInputError, match="a run of a store is needed"):
        load("gpt")  # type: ignore[arg-type]


def test_donated_arrays_do_not_reach_a_background_save(store: Store) -> None:
    """A step may donate the arrays right after the call: saved is what they were."""
    step = jax.jit(lambda tree: jax.tree.map(lambda one: one + 1, tree), donate_argnums=0)
    tree = {"w": jnp.zeros((512, 512)), "b": jnp.zeros(3)}
    run = store.run("gpt")
    pending = []
    for number in range(6):
        stage: Stage = "background" if number % 2 else "now"
        state = state_of(tree)
        pending.append(run.save_async(state, step=number, stage=stage))
        del state
        tree = step(tree)
    for number, one in enumerate(pending):
        one.result()
        found = load(run, number)
        assert all(bool((leaf == number).all()) for leaf in found.values())
    pending.clear()
    old, tree = tree, step(tree)
    assert old["w"].is_deleted()  # nothing holds its memory any more
    with pytest.raises(StateError, match="'b' was deleted, or donated"):
        state_of(old)


def test_a_state_that_was_described_before_a_donation_stays_what_it_was(store: Store) -> None:
    """A description holds the memory: a later computation does not write to it."""
    step = jax.jit(lambda one: one + 1, donate_argnums=0)
    array = jnp.zeros((512, 512))
    state = state_of({"w": array})
    after = step(array)
    store.run("gpt").save(state, step=1)
    assert not load(store, "gpt")["w"].any()
    assert bool((after == 1).all())


@pytest.mark.slow
def test_without_jax_a_version_loads_as_torch_and_numpy(store: Store, tmp_path: Path) -> None:
    """A process that has neither jax nor ml_dtypes gets every value; the integration says why."""
    tree = {"w": jnp.arange(5.0), "h": jnp.arange(5.0, dtype=jnp.bfloat16), "o": Pair(1, {})}
    store.run("gpt").save(state_of({**tree, "key": jax.random.key(3)}), step=1)
    program = f"""
import sys
sys.modules.update(dict.fromkeys(["jax", "jaxlib", "ml_dtypes"]))
import ckptstore, torch
from ckptstore.errors import MissingDependencyError
with ckptstore.open({store.url!r}) as store:
    state = store.load("gpt")
assert state["w"].numpy().tolist() == [0, 1, 2, 3, 4]
assert state["h"].dtype == torch.bfloat16 and state["h"].sum() == 10
assert state["o"] == {{"left": 1, "right": {{}}}}
assert state["key"]["prng_impl"] == "threefry2x32"
try:
    import ckptstore.integrations.jax
except MissingDependencyError as error:
    assert "ckptstore[jax]" in error.hint
else:
    raise SystemExit("imported")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sharded_arrays_move_to_other_shardings(store: Store) -> None:
    """On 8 devices: any sharding to any other; each byte read once, memory within the budget."""
    assert run_program("mesh", store.url, env=_devices(8)).splitlines()[-1] == "done"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_processes_of_one_job_load_their_own_parts(store: Store) -> None:
    """Two processes: a save names the way for arrays of both; each then reads its half only."""
    port = free_port()
    started = [
        subprocess.Popen(
            [sys.executable, str(PROGRAMS), "job", store.url, f"{LOOPBACK}:{port}", str(rank)],
            env={**os.environ, **_devices(4), "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for one in started:
            said, _ = one.communicate()
            assert one.returncode == 0, said
    finally:
        for one in started:
            one.kill()
            one.wait()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_training_resumes_with_the_same_losses(store: Store, tmp_path: Path) -> None:
    """Flax NNX with dropout and optax: after a kill -9 the losses are those of the whole run."""
    whole = json.loads(run_program("train", store.url, "whole", 20, 99))
    command = [sys.executable, str(PROGRAMS), "train", store.url, "cut", "20", "14"]
    killed = subprocess.run(command, capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert [version.step for version in store.run("cut").versions()] == [10]
    resumed = json.loads(run_program("train", store.url, "cut", 20, 99))
    assert len(whole) == 20
    assert resumed == whole[10:]
    assert_same(load(store, "cut@20"), load(store, "whole@20"))


def _devices(count: int) -> dict[str, str]:
    return {"XLA_FLAGS": f"--xla_force_host_platform_device_count={count}"}


def test_arrays_of_ml_dtypes_in_host_memory_are_tensors_too(store: Store) -> None:
    """NumPy arrays of bfloat16, which NumPy itself cannot name, are kept with their order."""
    array = np.arange(12).reshape(3, 4).astype(ml_dtypes.bfloat16).T
    store.run("np").save(state_of({"a": array}), step=1)
    assert store.load("np")["a"].tolist() == array.tolist()
    found = load(store, "np", like={"a": array})["a"]
    assert type(found) is np.ndarray
    assert found.dtype == array.dtype
    assert found.tolist() == array.tolist()
