"""What PyTorch's own tests ask of a storage of torch.distributed.checkpoint, asked of this one.

Cases of several ranks are in ``rankkit.expectations``; those of one rank are here. PyTorch's tests,
and the property that stands for them (in another file where one is named):

- test_file_system_checkpoint_cpu: tensors only, blobs, ``Stateful``: a module's state comes back,
  and bytes, values and objects with ``state_dict``; dtype mismatch: a version is read into tensors
  of other dtypes, cast; ``ShardedTensor``, chunked and enumerated plans: any plan reads any other
- test_checkpoint: every rank raises, with the failing rank named (test_many_ranks)
- test_dtensor_checkpoint, test_dtensor_resharding, test_hsdp_checkpoint, test_tp_checkpoint,
  test_fsdp_model_state, test_fsdp_optim_state, test_2d_*, test_fsdp_tp_checkpoint_conversion:
  bit-identical at 1, 2, 3 and 8 ranks, from each layout to each (test_resharding)
- test_state_dict: options of ``get_state_dict`` and planners pass through
- test_save_load_api, test_planner: errors are the planner's; ``allow_partial_load`` (test_planners)
- test_e2e_save_and_load: a state comes back as it was at the save (streams: test_kinds); the same
  step saved again is a further version, instead of ``overwrite=False``
- test_nested_dict, test_traverse: the nested state comes back
- test_dcp_to_torch_save, test_list_stored_state_dict: whole states without a template, single keys
- test_pg_aware_planner, test_async_executor: a subgroup saves and loads
- test_restricted_metadata_unpickler: hostile metadata is refused (test_import_directory)
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint.state_dict_loader as loader
from rankkit.expectations import CASES, every_case
from rankkit.groups import run_ranks
from rankkit.states import differences
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_saver import async_save, save

import ckptstore
from ckptstore.errors import InvalidInputError, PolicyError
from ckptstore.integrations.dcp import CkptStoreReader, CkptStoreWriter
from ckptstore.store import Run, Store
from ckptstore.tensors.adapters import TypeAdapter

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


def load(state: dict[str, Any], run: Run, ref: str | int = "latest", **words: Any) -> None:  # noqa: ANN401
    """Load a version as torch does."""
    loader.load(state, storage_reader=CkptStoreReader(run, ref), **words)


class Model(nn.Module):
    """Layers of some kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(5, 5)
        self.two = nn.Linear(5, 1)
        self.embed = nn.EmbeddingBag(5, 10)


class Blob:
    """An object with a state of its own."""

    def __init__(self, value: bytes) -> None:
        self.state: dict[str, Any] = {"blob": value, "deep": {"n": [1, 2]}}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = dict(state)


@pytest.mark.slow
def test_cases_of_four_ranks(tmp_path: Path) -> None:
    """Resharding, other placements, options, groups, submeshes, what is missing: all of them."""
    url = str(tmp_path / "store")
    ckptstore.open(url, create=True, chunk_bytes=65536).close()
    many = [name for name in CASES if name.startswith(("any", "sharded"))]
    two = run_ranks(every_case, 2, url, many)
    four = run_ranks(every_case, 4, url, [name for name in CASES if name not in many])

    for found in (*two, *four):
        assert {name: problems for name, problems in found.items() if problems} == {}


def test_tensors_only(run: Run) -> None:
    """A module's state, loaded into another's."""
    one, other = Model().state_dict(), Model().state_dict()
    save(one, storage_writer=CkptStoreWriter(run, step=1))
    assert list(differences(other, one)) != []
    load(other, run)

    assert list(differences(other, one)) == []


def test_objects_with_states_and_bytes(run: Run) -> None:
    """What has ``state_dict`` is asked for it on saving, and given it on loading."""
    model, blob = Model(), Blob(b"x" * 10_000)
    save({"model": model, "blob": blob, "n": 1}, storage_writer=CkptStoreWriter(run, step=1))
    fresh, empty = Model(), Blob(b"")
    state: dict[str, Any] = {"n": 0, "blob": empty, "model": fresh}  # in another order
    load(state, run)

    assert list(differences(fresh.state_dict(), model.state_dict())) == []
    assert empty.state == blob.state
    assert state["n"] == 1


def test_other_dtypes_are_cast(run: Run) -> None:
    """Loading into tensors of another dtype casts, both ways."""
    wide = torch.randn(40, 30)
    save({"w": wide, "h": wide.bfloat16()}, storage_writer=CkptStoreWriter(run, step=1))
    into = {"w": torch.zeros(40, 30, dtype=torch.bfloat16), "h": torch.zeros(40, 30)}
    load(into, run)

    assert torch.equal(into["w"], wide.bfloat16())
    assert torch.equal(into["h"], wide.bfloat16().float())


def test_targets_of_any_memory(run: Run) -> None:
    """Strided, transposed, expanded by nothing, conjugated, Parameters that require grad."""
    whole = torch.randn(30, 20)
    waves = torch.randn(6, dtype=torch.complex64)
    state = {"a": whole, "b": whole, "c": whole, "waves": waves}
    save(state, storage_writer=CkptStoreWriter(run, step=1))
    big = torch.zeros(60, 40)
    into = {
        "a": big[::2, ::2],
        "b": torch.zeros(20, 30).t(),
        "c": nn.Parameter(torch.zeros(30, 20)),
        "waves": torch.zeros(6, dtype=torch.complex64).conj(),
    }
    load(into, run)

    assert (
        list(differences({name: into[name] for name in "abc"}, dict.fromkeys("abc", whole))) == []
    )
    assert torch.equal(into["waves"].resolve_conj(), waves)
    assert bool((big[1::2] == 0).all())


def test_parts_and_strictness(run: Run) -> None:
    """More in the version is fine; more in the state is refused, or left with a lenient planner."""
    save({"a": torch.ones(3), "b": torch.ones(4)}, storage_writer=CkptStoreWriter(run, step=1))
    part = {"a": torch.zeros(3)}
    load(part, run)
    more = {"a": torch.zeros(3), "new": torch.full((2,), 7.0)}
    with pytest.raises(CheckpointException, match="new"):
        load(more, run)
    load(more, run, planner=DefaultLoadPlanner(allow_partial_load=True))

    assert part["a"].tolist() == [1, 1, 1]
    assert (more["a"].tolist(), more["new"].tolist()) == ([1, 1, 1], [7, 7])


def test_flat_and_nested_planners(run: Run) -> None:
    """A planner that does not flatten keeps the top-level names; values may hold anything."""
    flat = {"a": torch.arange(3.0), "config": {"lr": 0.1, "layers": [1, {"x": torch.ones(2)}]}}
    planner = DefaultSavePlanner(flatten_state_dict=False)
    save(flat, storage_writer=CkptStoreWriter(run, step=1), planner=planner)
    assert list(differences(run.load(), flat)) == []


def test_lists_dicts_and_values_in_each_other(run: Run) -> None:
    """Lists in dicts in lists, values beside tensors: the nested state, and each part of it."""
    state = {
        "list": [torch.ones(2), {"x": torch.zeros(1), "y": [3, 4]}, 5, [torch.full((2,), 6.0)]],
        "plain": [1, [2, 3]],
        "empty_list": [],
        "dots.in.keys": {"a.b": torch.ones(1)},
        "tuple": (torch.ones(1), 2),
    }
    save(state, storage_writer=CkptStoreWriter(run, step=1))
    into = {
        "list": [torch.zeros(2), {"x": torch.ones(1), "y": None}, None, [torch.zeros(2)]],
        "plain": None, "empty_list": None, "dots.in.keys": {"a.b": torch.zeros(1)}, "tuple": None,
    }  # fmt: skip
    load(into, run)

    assert list(differences(run.load(), state)) == []
    assert list(differences(into, state)) == []


def test_the_whole_without_a_template(run: Run) -> None:
    """The planner that builds the state of the metadata; single keys, and prefixes."""
    state = {"model": {"w": torch.randn(70, 40), "n": 3}, "opt": [{"m": torch.ones(2)}]}
    save(state, storage_writer=CkptStoreWriter(run, step=1))
    found = []
    for keys in (None, {"model"}, {"opt.0.m"}):
        into: dict[str, Any] = {}
        planner: Any = _EmptyStateDictLoadPlanner(keys=keys)  # type: ignore[no-untyped-call]
        reader = CkptStoreReader(run)
        loader._load_state_dict(into, storage_reader=reader, no_dist=True, planner=planner)
        found.append(into)

    assert list(differences(found[0], state)) == []
    assert list(differences(found[1], {"model": state["model"]})) == []
    assert list(differences(found[2], {"opt": state["opt"]})) == []


def test_a_state_on_the_meta_device(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the meta device are made where the process group's device is."""
    from torch.distributed import distributed_c10d

    monkeypatch.setattr(distributed_c10d, "_get_pg_default_device", lambda: torch.device("cpu"))
    one = Model().state_dict()
    save(one, storage_writer=CkptStoreWriter(run, step=1))
    with torch.device("meta"):
        other = dict(Model().state_dict())
    load(other, run)

    assert list(differences(other, dict(one))) == []


def test_versions_that_run_save_saved(run: Run) -> None:
    """Tied tensors, views, Parameters, int keys, tuples, NumPy: loaded by torch's names."""
    import numpy as np

    tied = torch.randn(50, 40)
    state: dict[str, Any] = {
        "model": {"embed": tied, "head": tied, "part": tied[10:20, ::2]},
        "weight": nn.Parameter(torch.ones(3)),
        "optimizer": {"state": {0: {"m": torch.ones(2), "step": 3}}},
        "numpy": np.arange(4),
        "turned": torch.randn(8, 9).t(),
        "counts": (1, 2),
    }
    run.save(state, step=1)
    into: dict[str, Any] = {
        "model": {"embed": torch.zeros(50, 40), "head": torch.zeros(50, 40)},
        "weight": torch.zeros(3), "optimizer": {"state": {"0": {"m": torch.zeros(2), "step": 0}}},
        "numpy": None, "turned": torch.zeros(9, 8), "counts": None,
    }  # fmt: skip
    into["model"]["part"] = torch.zeros(10, 20)
    load(into, run)

    assert torch.equal(into["model"]["embed"], tied)
    assert torch.equal(into["model"]["head"], tied)
    assert torch.equal(into["model"]["part"], tied[10:20, ::2])
    assert torch.equal(into["turned"], state["turned"])
    assert into["optimizer"]["state"]["0"]["step"] == 3
    assert into["optimizer"]["state"]["0"]["m"].tolist() == [1, 1]
    assert (into["numpy"].tolist(), into["counts"]) == ([0, 1, 2, 3], (1, 2))
    run.save({"d": {1: 0, "1": 1}}, step=2)
    with pytest.raises(CheckpointException, match=r"'d\.1'"):
        load({}, run)


def test_a_writer_and_a_reader_for_many_saves(run: Run) -> None:
    """The step may come as the checkpoint's id; saving it again makes a further version."""
    writer, reader = CkptStoreWriter(run, metrics={"loss": 1.0}), CkptStoreReader(run)
    steps: list[Any] = ["5", 6, "one@7", "7"]
    for number, step in enumerate(steps):
        save({"n": number}, checkpoint_id=step, storage_writer=writer)
    into = {"n": -1}
    for one in ("6", 6, f"{run.name}@6"):  # whatever the writer takes
        into["n"] = 0
        loader.load(into, checkpoint_id=one, storage_reader=reader)
        assert into["n"] == 1
    loader.load({"n": 0}, storage_reader=reader)

    assert into == {"n": 1}
    assert reader.version is not None
    assert reader.version.id == run.resolve().id
    assert [version.step for version in run.versions()] == [5, 6, 7, 7]
    for wrong in ("five", "two@5", "best:loss"):
        with pytest.raises(InvalidInputError, match="step"):
            save({"n": 1}, checkpoint_id=wrong, storage_writer=writer)
    with pytest.raises(InvalidInputError, match="writer is of 3"):
        save({"n": 1}, checkpoint_id="4", storage_writer=CkptStoreWriter(run, step=3))


def test_what_ids_are_told_to_be() -> None:
    """Steps and refs with one are ids of a writer; anything but nothing may be one of a reader."""
    assert CkptStoreWriter.validate_checkpoint_id("12")
    assert CkptStoreWriter.validate_checkpoint_id("run@12")
    assert not CkptStoreWriter.validate_checkpoint_id("s3://bucket/x")
    assert CkptStoreReader.validate_checkpoint_id("run@best:loss")


def test_in_the_background_without_ranks(run: Run) -> None:
    """An asynchronous save with no process group; its error arrives with the result."""
    w = torch.ones(50_000)
    pending: Any = async_save({"w": w}, storage_writer=CkptStoreWriter(run, step=1))
    w.zero_()
    pending.result()
    failing: Any = async_save({"f": print}, storage_writer=CkptStoreWriter(run, step=2))
    with pytest.raises(CheckpointException, match="'f'"):
        failing.result()

    assert bool((run.load()["w"] == 1).all())
    assert [version.step for version in run.versions()] == [1]


class OnlyBytes(DefaultSavePlanner):
    """A planner of the interface alone: it has no objects to look up."""

    lookup_object = None  # type: ignore[assignment]

    def resolve_data(self, write_item: WriteItem) -> Any:  # noqa: ANN401
        value = self.state_dict[write_item.index.fqn]
        if isinstance(value, torch.Tensor):
            return value
        data = io.BytesIO()
        torch.save(value, data)
        return data


def test_planners_that_give_pickles(run: Run) -> None:
    """Plain values in them are read with weights_only, the state's own are kept, others refused."""
    state = {"w": torch.ones(2), "n": 5, "names": ["a"], "array": np.arange(3)}
    save(state, storage_writer=CkptStoreWriter(run, step=1), planner=OnlyBytes())
    writer = CkptStoreWriter(run, step=2)
    with pytest.raises(CheckpointException, match="'blob' is a type, which cannot"):
        save({"blob": Money}, storage_writer=writer, planner=OnlyBytes())

    assert list(differences(run.load(), state)) == []


class Money:
    """A type of a user's own."""

    def __init__(self, cents: int) -> None:
        self.cents = cents


def test_adapters(run: Run) -> None:
    """Objects of other types travel through their adapter, both ways."""
    money = TypeAdapter(
        name="money",
        type=Money,
        to_state=lambda value: {"cents": torch.tensor(value.cents)},
        from_state=lambda state: Money(int(state["cents"])),
    )
    writer = CkptStoreWriter(run, step=1, adapters=[money])
    save({"m": Money(7), "w": torch.ones(2)}, storage_writer=writer)
    into: dict[str, Any] = {"m": None, "w": torch.zeros(2)}
    loader.load(into, storage_reader=CkptStoreReader(run, adapters=[money]))

    assert into["m"].cents == 7
    assert run.load(adapters=[money])["m"].cents == 7


def test_writers_travel_and_readers_do_not(run: Run) -> None:
    """A writer that was pickled saves to the same run; a reader says what to do instead."""
    writer = CkptStoreWriter(run, step=3, tags=["sent"], metrics={"loss": 0.5})
    again = pickle.loads(pickle.dumps(writer))  # noqa: S301 - our own bytes
    save({"n": 1}, storage_writer=again)
    version = run.resolve()

    assert (version.step, version.tags, version.metrics) == (3, ("sent",), {"loss": 0.5})
    with pytest.raises(InvalidInputError, match="make one there"):
        pickle.dumps(CkptStoreReader(run))


def test_what_is_no_run_is_refused(run: Run) -> None:
    """A name or a store in place of a run is told at once, and a store's reader needs a ref."""
    run.save({"n": 3}, step=1)
    wrong: Any
    for wrong in ("small", Store(run._session)):
        with pytest.raises(InvalidInputError, match="run of a store") as told:
            CkptStoreWriter(wrong, step=1)
        assert "give store.run(" in (told.value.hint or "")
    wrong = "small"
    with pytest.raises(InvalidInputError, match="run of a store"):
        CkptStoreReader(wrong)
    with pytest.raises(CheckpointException, match="name a run: RUN@latest"):
        loader.load({"n": 0}, storage_reader=CkptStoreReader(Store(run._session)))
    into = {"n": 0}
    loader.load(
        into, checkpoint_id="one@latest", storage_reader=CkptStoreReader(Store(run._session))
    )
    assert into == {"n": 3}


def test_one_commit_needs_collectives(run: Run) -> None:
    """Without them no one could commit for all: refused before anything is written."""
    with pytest.raises(InvalidInputError, match="use_collectives"):
        CkptStoreWriter(run, step=1).set_up_storage_writer(True, rank=0, use_collectives=False)


def test_read_only_stores_are_refused_at_once(run: Run, tmp_path: Path) -> None:
    """Nothing is written where nothing may be."""
    run.save({"n": 1}, step=0)
    with ckptstore.open(tmp_path / "store", read_only=True) as store:
        with pytest.raises(CheckpointException, match="read-only"):
            save({"n": 2}, storage_writer=CkptStoreWriter(store.run("one"), step=1))
        assert len(store.versions()) == 1


def test_what_is_on_storage_is_no_pickle(run: Run, tmp_path: Path) -> None:
    """No object of the store is, or holds, a pickle: values are those of the skeleton."""
    save({"a": {"b": (1, "x")}, "w": torch.ones(9)}, storage_writer=CkptStoreWriter(run, step=1))
    for path in (tmp_path / "store").rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            assert b"ctorch" not in data
            assert b"PK\x03\x04" not in data
            assert not data.startswith(b"\x80")
    assert PolicyError.kind  # what a pickle would be refused with


@pytest.mark.slow
def test_small_tensors_cost_little(run: Run, tmp_path: Path) -> None:
    """2,000 tensors of 64 bytes cost under 100 bytes each besides; with torch's own it is 1,829."""
    state = {f"layer.{n}.bias": torch.full((16,), float(n)) for n in range(2000)}
    save(state, storage_writer=CkptStoreWriter(run, step=1, codec="raw"))
    store = tmp_path / "store"
    files = [*(store / "packs").rglob("*.pack"), *(store / "manifests").rglob("*.manifest")]
    total = sum(path.stat().st_size for path in files)

    assert total <= 2000 * (64 + 100)


def test_a_flipped_bit_is_noticed_and_named(run: Run, tmp_path: Path) -> None:
    """Damage raises with the tensor's name; what is not damaged loads."""
    save(
        {"first": torch.randn(100_000), "second": torch.randn(100_000)},
        storage_writer=CkptStoreWriter(run, step=1, codec="raw"),
    )
    lazy = run.version()
    manifest = lazy._content.manifest
    row = manifest.first[lazy["second"]._leaf.index]
    pack = manifest.pieces.packs[int(manifest.pieces.pack[row])]
    path = tmp_path / "store" / "packs" / pack[:2] / f"{pack}.pack"
    data = bytearray(path.read_bytes())
    data[int(manifest.pieces.offset[row]) + 64 + 1000] ^= 4
    path.chmod(0o644)
    path.write_bytes(bytes(data))

    with pytest.raises(CheckpointException, match="tensor second"):
        load({"second": torch.zeros(100_000)}, run)
    load({"first": torch.zeros(100_000)}, run)
