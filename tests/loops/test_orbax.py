"""Checkpoints that Orbax wrote, imported as versions: values, names and dtypes; damage is named."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from ckptstore import errors, limits
from ckptstore.cli.main import run as command
from ckptstore.integrations import orbax
from ckptstore.integrations.files import import_file
from ckptstore.integrations.jax import load, state_of
from ckptstore.store import Store

Save = Callable[[Path, Any], None]


def standard(path: Path, tree: Any) -> None:
    """Save in OCDBT, as most do."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)


def folders(path: Path, tree: Any) -> None:
    """Save one folder an array."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        checkpointer.save(path, tree)


def zarr3(path: Path, tree: Any) -> None:
    """Save in the third version of Zarr."""
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(path, tree)


def training() -> dict[str, Any]:
    """Return a tree such as a training has."""
    params = {
        "dense": {"kernel": jnp.arange(12.0).reshape(3, 4), "bias": jnp.zeros(4, jnp.bfloat16)},
        "codes": jnp.ones((2, 2), jnp.float8_e4m3fn),
    }
    return {"params": params, "opt": optax.adam(1e-3).init(params)}


def bits(tree: Any) -> list[tuple[str, Any, bytes]]:
    """Return the leaves of a tree: path, dtype and bytes."""
    return [
        (jax.tree_util.keystr(path), one.dtype, np.asarray(one).tobytes())
        for path, one in jax.tree.leaves_with_path(tree)
    ]


@pytest.mark.parametrize("save", [standard, folders, zarr3])
def test_every_layout(store: Store, tmp_path: Path, save: Save) -> None:
    """Each layout gives the version that a save of the same tree gives, chunk for chunk."""
    tree = training()
    save(tmp_path / "saved", tree)
    version = import_file(store, tmp_path / "saved", run="gpt", step=7)
    assert version.metadata["import"]["format"] == "orbax"
    direct = store.run("gpt").save(state_of(tree), step=8)
    assert direct.roles["weights"].new == direct.roles["optimizer"].new == 0
    found = load(store, "gpt@7", like=tree)
    again = load(store, "gpt@8", like=tree)
    assert bits(found) == bits(again) == bits(tree)
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    assert isinstance(found["opt"][0], optax.ScaleByAdamState)


def test_plain_values_and_containers(store: Store, tmp_path: Path) -> None:
    """Numbers, texts, sequences and empty containers come back; sequences as lists."""
    tree = {
        "step": 3, "rate": 0.5, "name": "small/model", "list": [jnp.ones(2), np.arange(3)],
        "tuple": (jnp.zeros(1), 4), "empty": [{}, None], "a/b": {"0": jnp.ones(())},
    }  # fmt: skip
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", tree)
    import_file(store, tmp_path / "saved", run="plain", step=1)
    state = store.load("plain")
    assert (state["step"], state["rate"], state["name"]) == (3, 0.5, "small/model")
    assert [one.tolist() for one in state["list"]] == [[1, 1], [0, 1, 2]]
    assert state["tuple"][0].tolist() == [0]
    assert state["tuple"][1] == 4
    assert state["empty"] == [{}, None]
    assert state["a/b"]["0"] == 1


def test_typed_keys_keep_their_implementation(store: Store, tmp_path: Path) -> None:
    """A PRNG key of Orbax draws the same after the import."""
    tree = {"key": jax.random.key(4, impl="rbg"), "w": jnp.ones(2)}
    standard(tmp_path / "saved", tree)
    import_file(store, tmp_path / "saved", run="keys", step=1)
    found = load(store, "keys", like=tree)["key"]
    drawn = [np.asarray(jax.random.normal(key, (5,))).tobytes() for key in (found, tree["key"])]
    assert drawn[0] == drawn[1]


def test_steps_of_a_manager(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest step by default, another by its number; steps and metrics are the manager's."""
    folder = tmp_path / "ckpts"
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"])
    with ocp.CheckpointManager(folder, options=options) as manager:
        for step in (5, 10, 100):
            tree = {"w": jnp.full(3, float(step))}
            args = ocp.args.StandardSave(tree)
            manager.save(step, args=args, metrics={"loss": 1 / step})
    (folder / "110.orbax-checkpoint-tmp-1").mkdir()
    newest = import_file(store, folder, run="gpt", directions={"loss": "min"})
    assert (newest.step, newest.metrics) == (100, {"loss": 0.01})
    assert store.load("gpt")["w"].tolist() == [100] * 3
    assert import_file(store, folder / "5", run="five").step == 5
    monkeypatch.setenv("CKPTSTORE_URL", store.url)
    assert command(["import", str(folder), "shell", "--step", "10"]) == 0
    assert store.run("shell").load()["w"].tolist() == [10] * 3
    with pytest.raises(errors.InvalidInputError, match="has no step 6") as error:
        import_file(store, folder, run="gpt", step=6)
    assert error.value.hint == "it has 5, 10, 100"


def test_items_of_a_step(store: Store, tmp_path: Path) -> None:
    """Trees and JSON of a step come together; an item of another kind is named, not left out."""
    with ocp.CheckpointManager(tmp_path / "ckpts") as manager:
        args = ocp.args.Composite(
            params=ocp.args.StandardSave({"w": jnp.ones(2)}),
            config=ocp.args.JsonSave({"width": 2, "names": ["a"]}),
        )
        manager.save(3, args=args)
    import_file(store, tmp_path / "ckpts", run="gpt")
    state = store.load("gpt")
    assert state["params"]["w"].tolist() == [1, 1]
    assert state["config"] == {"width": 2, "names": ["a"]}
    (tmp_path / "ckpts" / "3" / "iterator").mkdir()
    with pytest.raises(errors.InvalidInputError, match="iterator is neither") as error:
        import_file(store, tmp_path / "ckpts", run="gpt")
    assert "one by one" in (error.value.hint or "")
    item = tmp_path / "ckpts" / "3" / "params"
    assert import_file(store, item, run="one", step=3, under="params").step == 3


@pytest.mark.parametrize("save", [standard, folders])
def test_damage_is_named(store: Store, tmp_path: Path, save: Save) -> None:
    """A truncated or missing file of data ends the import without a version."""
    save(tmp_path / "saved", {"w": jnp.arange(50_000.0)})
    files = [one for one in (tmp_path / "saved").rglob("*") if one.is_file()]
    largest = max(files, key=lambda one: one.stat().st_size)
    data = largest.read_bytes()
    largest.write_bytes(data[: len(data) // 2])
    with pytest.raises(errors.FormatError, match="'w'"):
        import_file(store, tmp_path / "saved", run="gpt", step=1)
    largest.unlink()
    with pytest.raises(errors.FormatError, match="'w'"):
        import_file(store, tmp_path / "saved", run="gpt", step=1)
    assert not store.versions()


def test_hostile_descriptions_are_refused(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names that leave the folder, gaps, doubles, wrong JSON: typed errors, nothing read."""
    folder = tmp_path / "saved"
    folders(folder, {"w": [jnp.ones(2)]})
    file = folder / "_METADATA"
    good = json.loads(file.read_text())
    (entry,) = good["tree_metadata"].values()

    def refused(text: str, match: str, kind: type[Exception] = errors.FormatError) -> None:
        file.write_text(text)
        with pytest.raises(kind, match=match):
            import_file(store, folder, run="gpt", step=1)

    def with_keys(*keys: tuple[str, int]) -> str:
        named = [{"key": key, "key_type": kind} for key, kind in keys]
        changed = {**entry, "key_metadata": named}
        return json.dumps({**good, "tree_metadata": {"a": changed}})

    refused(with_keys(("../saved/w", 2), ("0", 2)), "names the folder '../saved/w.0'")
    refused(with_keys(("/etc", 2)), "names the folder '/etc'")
    refused(with_keys(("x", 2)), "no sound array 'x'")
    (folder / "w.5").symlink_to("w.0")
    refused(with_keys(("w", 2), ("5", 1)), "a sequence with gaps")
    refused(json.dumps({**good, "tree_metadata": {"a": entry, "b": entry}}), "'w.0' twice")
    refused(with_keys(*[("x", 2)] * 100), "nested deeper", errors.LimitError)
    refused("{", "is not an index of a checkpoint")
    refused('{"tree_metadata": {"a": 1}}', "is not an index of a checkpoint")
    monkeypatch.setattr(limits, "SHARD_INDEX_BYTES_MAX", 10)
    refused(json.dumps(good), "more than 10 bytes", errors.LimitError)
    assert not store.versions()


def test_other_dtypes_are_named(store: Store, tmp_path: Path) -> None:
    """An array that no stored dtype holds is refused by its name."""
    standard(tmp_path / "saved", {"a": {"b": jnp.ones(2, jnp.float8_e4m3b11fnuz)}})
    with pytest.raises(errors.StateError, match=r"'a\.b' has the dtype float8_e4m3b11fnuz"):
        import_file(store, tmp_path / "saved", run="gpt", step=1)


def test_arrays_are_let_go_when_they_are_stored(store: Store, tmp_path: Path) -> None:
    """After an import no array is in memory any more, though its tree is."""
    tree = {str(at): jnp.full((256, 1024), float(at)) for at in range(4)}
    standard(tmp_path / "saved", tree)
    state, step, metrics = orbax.read_checkpoint(tmp_path / "saved")
    assert (step, metrics) == (None, {})
    store.run("gpt").save(state, step=1)
    assert [one.payload._data for one in state.values()] == [None] * 4
    assert bits(load(store, "gpt")) == bits(tree)


@pytest.mark.slow
def test_the_import_needs_neither_jax_nor_orbax(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorStore is enough; without it the error names what to install."""
    standard(tmp_path / "saved", {"w": jnp.ones(2)})
    program = f"""
import sys
sys.modules.update(dict.fromkeys(["jax", "jaxlib", "orbax", "flax"]))
import ckptstore
from ckptstore.integrations.files import import_file
with ckptstore.open({store.url!r}) as store:
    import_file(store, {str(tmp_path / "saved")!r}, run="gpt", step=1)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert store.load("gpt")["w"].tolist() == [1, 1]
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    with pytest.raises(errors.MissingDependencyError) as error:
        import_file(store, tmp_path / "saved", run="gpt", step=2)
    assert "ckptstore[orbax]" in (error.value.hint or "")
