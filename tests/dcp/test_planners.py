"""Nothing that a planner does is passed over: it is saved and loaded, or refused by name."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint.state_dict_loader as loader
from rankkit.states import differences
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.state_dict_saver import save

from ckptstore.errors import LimitError
from ckptstore.integrations.dcp import CkptStoreReader, CkptStoreWriter
from ckptstore.store import Run

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def saved(run: Run, state: dict[str, Any], planner: Any) -> Any:  # noqa: ANN401
    """Save by a planner, and return what lies in the store."""
    save(state, storage_writer=CkptStoreWriter(run, step=1), planner=planner)
    return run.load()


class Adds(DefaultSavePlanner):
    """Changes numbers on the way to the storage."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: ANN401
        changed = object + 1000 if isinstance(object, int) else object
        return super().transform_object(write_item, changed)


class Looks(DefaultSavePlanner):
    """Finds other objects than the state's."""

    def lookup_object(self, index: MetadataIndex) -> Any:  # noqa: ANN401
        found = super().lookup_object(index)
        return "found" if isinstance(found, int) else found


class Resolves(DefaultSavePlanner):
    """Gives bytes of its own."""

    def resolve_data(self, write_item: WriteItem) -> Any:  # noqa: ANN401
        """Return the pickle of a word for ints."""
        if write_item.index.fqn != "step":
            return super().resolve_data(write_item)
        data = io.BytesIO()
        torch.save(("resolved", 1), data)
        return data


class Raw(DefaultSavePlanner):
    """Takes streams in the state for the bytes to write, as planners of Megatron-LM do."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: ANN401
        return object


@pytest.mark.parametrize(
    ("planner", "step"), [(Adds(), 1007), (Looks(), "found"), (Resolves(), ("resolved", 1))]
)
def test_values_are_those_that_the_planner_gives(run: Run, planner: Any, step: object) -> None:  # noqa: ANN401
    """Each hook of a save planner counts for values; what it leaves alone is kept in its type."""
    kept = {"w": torch.ones(2), "array": np.arange(3)}
    found = saved(run, {"step": 7, **kept}, planner)
    assert list(differences(found, {"step": step, **kept})) == []


def test_a_method_put_on_the_planner_counts_too(run: Run) -> None:
    """A hook that one planner was given, without a class of its own."""
    planner = DefaultSavePlanner()
    planner.lookup_object = lambda index: "mine"  # type: ignore[method-assign]
    assert saved(run, {"step": 7}, planner) == {"step": "mine"}


def test_a_stream_that_the_planner_hands_over_is_read(run: Run) -> None:
    """Where the planner gives the state's own stream as the bytes, what they hold is kept."""
    inner = io.BytesIO(b"extra")
    inner.seek(2)
    stream = io.BytesIO()
    torch.save({"n": [1, 2], "stream": inner}, stream)
    at = stream.tell()
    found = saved(run, {"object": stream}, Raw())["object"]

    assert (found["n"], found["stream"].getvalue(), found["stream"].tell()) == ([1, 2], b"extra", 2)
    assert stream.tell() == at, "the caller's stream is left as it was"


def test_bytes_that_are_no_pickle_are_refused_by_name(run: Run) -> None:
    """A planner with a format of its own is told, before anything is written."""
    with pytest.raises(CheckpointException, match="'object' is a pickle of the planner's"):
        saved(run, {"object": io.BytesIO(b"json")}, Raw())
    assert run.versions() == []


# --- containers that are not flattened --------------------------------------------------------
NESTED = {"a": torch.arange(3.0), "b": {"c": torch.ones(3), "n": [1, {"x": torch.ones(2)}]}}


def blank() -> dict[str, Any]:
    """Return a template of the nested state."""
    return {"a": torch.zeros(3), "b": {"c": torch.zeros(3), "n": [0, {"x": torch.zeros(2)}]}}


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("by", ["not flattening", "flattening", "run.save"])
def test_a_planner_that_does_not_flatten_is_given_containers(
    run: Run, by: str, partial: bool
) -> None:
    """However the version was saved, and whether or not names may be missing: all is loaded."""
    state, into = dict(NESTED), blank()
    if by == "run.save":
        state["empty"], into["empty"] = {}, {"gone": 1}
        run.save(state, step=1)
    else:
        planner = DefaultSavePlanner(flatten_state_dict=by == "flattening")
        save(state, storage_writer=CkptStoreWriter(run, step=1), planner=planner)
    # With flatten_sharded_tensors the planner fills a copy of the state, with every storage.
    loading = DefaultLoadPlanner(
        flatten_state_dict=False, flatten_sharded_tensors=False, allow_partial_load=partial
    )
    loader.load(into, storage_reader=CkptStoreReader(run), planner=loading)
    assert list(differences(into, state)) == []


def test_a_planner_that_forgets_what_it_reads_is_told(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    """Torch's planner fills a copy, and returns; a state of tensors alone is filled."""
    run.save(NESTED, step=1)
    forgetful = DefaultLoadPlanner(flatten_state_dict=False)
    loader.load({"a": torch.zeros(3)}, storage_reader=CkptStoreReader(run), planner=forgetful)
    assert not [record for record in caplog.records if record.name == "ckptstore"]
    loader.load(blank(), storage_reader=CkptStoreReader(run), planner=forgetful)
    (warning,) = [found.getMessage() for found in caplog.records if found.name == "ckptstore"]
    assert "DefaultLoadPlanner of torch reads 'b', and does not put it into the state" in warning
    assert "flatten_sharded_tensors=False" in warning


def test_containers_are_not_listed(run: Run) -> None:
    """Who lists the names of a version, or flattens, sees its leaves alone."""
    run.save(NESTED, step=1)
    names = CkptStoreReader(run).read_metadata().state_dict_metadata
    assert [*names] == ["a", "b.c", "b.n.0", "b.n.1.x"]
    assert "b" in names
    with pytest.raises(KeyError):
        names["nothing"]


def test_a_planner_that_flattens_gets_no_container_for_a_value(run: Run) -> None:
    """A value where the version has a dict is an error, and stays where names may be missing."""
    run.save(NESTED, step=1)
    with pytest.raises(CheckpointException, match="'b' is a container in this version"):
        loader.load({"b": 5}, storage_reader=CkptStoreReader(run))
    into = {"a": torch.zeros(3), "b": 5}
    planner = DefaultLoadPlanner(allow_partial_load=True)
    loader.load(into, storage_reader=CkptStoreReader(run), planner=planner)
    assert into["b"] == 5
    assert list(differences(into["a"], NESTED["a"])) == []


def test_keys_that_are_no_text_are_refused_where_nothing_flattens(run: Run) -> None:
    """The name would be an int, which no one finds again."""
    with pytest.raises(CheckpointException, match="key 1 as a name, which must be text"):
        saved(run, {1: torch.ones(2)}, DefaultSavePlanner(False, False))  # type: ignore[dict-item]


# --- metadata ---------------------------------------------------------------------------------
class Extra(DefaultSavePlanner):
    """Puts data of its own into the metadata."""

    def __init__(self, data: Any, *, merge: bool, attribute: Any = None) -> None:  # noqa: ANN401
        super().__init__()
        self.extra, self.merge, self.attribute = data, merge, attribute

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        data = {**metadata.planner_data, **self.extra} if self.merge else self.extra
        metadata = dataclasses.replace(metadata, planner_data=data)
        if self.attribute is not None:
            metadata.mcore_data = self.attribute  # type: ignore[attr-defined]
        return plans, metadata


STATE = {"w": torch.ones(2), "deep": {"n": 3}}


def test_planner_data_comes_back(run: Run) -> None:
    """In place of the mapping of names, beside it, and as an attribute of the metadata."""
    saved(run, STATE, Extra(["rank 0", {"a": 1}], merge=False))
    assert CkptStoreReader(run).read_metadata().planner_data == ["rank 0", {"a": 1}]
    found = saved(
        run, STATE, Extra({"w": {"kind": "q"}, "mine": [1]}, merge=True, attribute={"b": 2})
    )
    metadata: Any = CkptStoreReader(run).read_metadata()

    assert list(differences(found, STATE)) == []
    assert metadata.planner_data == {"w": {"kind": "q"}, "deep.n": ("deep", "n"), "mine": [1]}
    assert metadata.mcore_data == {"b": 2}


@pytest.mark.parametrize("data", [torch.ones(1), [(1, 2)], {1: "a"}, [float("nan")]])
def test_planner_data_that_cannot_be_kept_is_refused(run: Run, data: Any) -> None:  # noqa: ANN401
    """The error says that it is the planner's; there is no version."""
    with pytest.raises(CheckpointException, match="the planner put planner_data into the metadata"):
        saved(run, STATE, Extra(data, merge=False))
    assert run.versions() == []


def test_what_a_store_says_of_metadata_changes_no_field(run: Run) -> None:
    """Only attributes that torch's metadata does not have are taken from a version."""
    own = {"storage_data": 1, "__class__": 2, "_private": 3, "more": 4}
    run.save(STATE, step=1, metadata={"torch.distributed.checkpoint": own})
    metadata: Any = CkptStoreReader(run).read_metadata()
    assert (metadata.storage_data, metadata.more) == (None, 4)
    assert not hasattr(metadata, "_private")


def test_the_version_of_the_metadata_is_torchs(run: Run) -> None:
    """By it torch tells old names from new ones; on save and on load."""
    metadata = save(STATE, storage_writer=CkptStoreWriter(run, step=1))
    assert metadata.version == filesystem.CURRENT_DCP_VERSION
    assert CkptStoreReader(run).read_metadata().version == filesystem.CURRENT_DCP_VERSION


# --- depth ------------------------------------------------------------------------------------
@pytest.mark.parametrize("leaf", [torch.ones(2), [[1]]], ids=["tensor", "value"])
def test_nesting_beyond_the_limit_is_told_before_anything_is_written(
    run: Run,
    tmp_path: Path,
    leaf: Any,  # noqa: ANN401
) -> None:
    """The limit is that of run.save, whatever planners make one name of; no pack is written."""
    state: Any = leaf
    for _ in range(66 - (2 if isinstance(leaf, list) else 0)):
        state = {"k": state}
    with pytest.raises(LimitError):
        run.save(state, step=1)
    with pytest.raises(CheckpointException) as told:
        save(state, storage_writer=CkptStoreWriter(run, step=1))
    error = next(iter(told.value.failures.values()))[0]

    assert isinstance(error, LimitError)
    assert "k.k.k" in error.message
    assert not [*(tmp_path / "store").rglob("*.pack")]


def test_nesting_within_the_limit_is_kept(run: Run) -> None:
    """As deep as run.save allows."""
    state: Any = torch.ones(2)
    for _ in range(63):
        state = {"k": state}
    save(state, storage_writer=CkptStoreWriter(run, step=1))
    assert list(differences(run.load(), state)) == []
