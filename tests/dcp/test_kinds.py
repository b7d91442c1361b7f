"""Streams, tensors made of others, and tensors of adapters by torch.distributed.checkpoint."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict_loader as loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.two_tensor import TwoTensor

from ckptstore.errors import CorruptObjectError
from ckptstore.integrations.dcp import CkptStoreReader, CkptStoreWriter, import_directory
from ckptstore.integrations.dcp.flat_version import Adapted
from ckptstore.store import Run, Store
from ckptstore.tensors.adapters import TypeAdapter

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:Sparse:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.quantize:UserWarning"),
]


@pytest.fixture
def alone() -> Iterator[None]:
    """Be the one rank of a group."""
    dist.init_process_group(
        "gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


def two(a: torch.Tensor, b: torch.Tensor) -> Any:  # noqa: ANN401
    """Return a tensor of torch's own that is made of two."""
    return TwoTensor(a, b)  # type: ignore[no-untyped-call]


def stream(data: bytes, at: int) -> io.BytesIO:
    """Return a stream that stands at a place."""
    made = io.BytesIO(data)
    made.seek(at)
    return made


class Trainer:
    """A trainer whose losses are bytes in its state, as in torch's own end-to-end tests."""

    def __init__(self) -> None:
        self.step = 0
        self.losses: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        """Return the step, and the losses as a stream of torch.save."""
        data = io.BytesIO()
        torch.save(self.losses, data)
        return {"step": torch.tensor(self.step), "losses": data}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])
        state["losses"].seek(0)
        self.losses = torch.load(state["losses"], weights_only=True)


@pytest.mark.parametrize("way", ["save", "async_save"])
def test_a_stateful_with_streams(run: Run, alone: None, way: str) -> None:
    """A trainer that keeps values in BytesIO comes back, with and without a thread."""
    trainer = Trainer()
    trainer.step, trainer.losses = 3, [0.5, 0.25]
    writer = CkptStoreWriter(run, step=3)
    if way == "save":
        save({"trainer": trainer}, storage_writer=writer)
    else:
        pending: Any = async_save({"trainer": trainer}, storage_writer=writer)
        trainer.losses = [9.0]
        pending.result()
    again = Trainer()
    loader.load({"trainer": again}, storage_reader=CkptStoreReader(run))
    assert (again.step, again.losses) == (3, [0.5, 0.25])


def test_streams_keep_bytes_and_position(run: Run) -> None:
    """Short and long ones, through planners and by run.load."""
    state = {
        "short": stream(b"abc", 2),
        "long": stream(b"xyz" * 5000, 15000),
        "none": stream(b"", 0),
    }
    save(dict(state), storage_writer=CkptStoreWriter(run, step=1))
    into: dict[str, Any] = dict.fromkeys(state)
    loader.load(into, storage_reader=CkptStoreReader(run))
    for found in (into, run.load()):
        assert {name: (type(v), v.getvalue(), v.tell()) for name, v in found.items()} == {
            name: (io.BytesIO, v.getvalue(), v.tell()) for name, v in state.items()
        }


def test_a_directory_of_torch_with_streams(run: Run, tmp_path: Path) -> None:
    """What torch's own storage wrote of such a state is imported."""
    state = {"w": torch.ones(3), "extra": stream(b"state", 1)}
    save(state, storage_writer=FileSystemWriter(tmp_path / "dcp"), no_dist=True)
    import_directory(Store(run._session), tmp_path / "dcp", run="old", step=1)
    found = Store(run._session).load("old")["extra"]
    assert (found.getvalue(), found.tell()) == (b"state", 1)


def parts(tensor: torch.Tensor) -> list[Any]:
    """Return everything that tells a tensor from others, down to plain tensors."""
    head = [type(tensor), tensor.dtype, tensor.shape, tensor.layout]
    whole: Any = tensor
    if isinstance(tensor, TwoTensor):
        return [*head, parts(whole.a), parts(whole.b)]
    if tensor.layout == torch.sparse_coo:
        return [*head, parts(whole._indices()), parts(whole._values())]
    if tensor.layout == torch.sparse_csr:
        inner = (whole.crow_indices(), whole.col_indices(), whole.values())
        return [*head, *map(parts, inner)]
    if tensor.is_quantized:
        scales = (whole.q_per_channel_scales(), whole.q_per_channel_zero_points())
        return [*head, *map(parts, (whole.int_repr(), *scales)), whole.q_per_channel_axis()]
    return [*head, tensor.tolist()]


def quantized(factor: float) -> torch.Tensor:
    """Return a tensor quantized by channel."""
    scales, zeros = torch.arange(1, 5) * factor, torch.arange(4)
    return torch.quantize_per_channel(
        torch.arange(8.0).reshape(4, 2), scales, zeros, 0, torch.qint8
    )


def made(*, blank: bool) -> dict[str, Any]:
    """Return tensors that are made of others, or the same with other values."""
    a, b = torch.arange(6.0).reshape(2, 3), torch.ones(2, 3)
    if blank:
        a, b = torch.zeros(2, 3), torch.zeros(2, 3)
    dense = torch.eye(3) * (2 if blank else 5)
    return {
        "two": two(a, b),
        "sparse": torch.zeros(3, 3).to_sparse() if blank else dense.to_sparse(),
        "csr": (torch.zeros(3, 3) if blank else dense).to_sparse_csr(),
        "quantized": quantized(1.0 if blank else 0.25),
        "list": [two(b, a), torch.ones(2)],
    }


@pytest.mark.parametrize("by", ["dcp.save", "run.save"])
def test_tensors_made_of_others(run: Run, by: str) -> None:
    """Subclasses, sparse and quantized ones are read into those of the state, bit by bit."""
    state = made(blank=False)
    if by == "run.save":
        run.save(state, step=1)
    else:
        save(state, storage_writer=CkptStoreWriter(run, step=1))
    into = made(blank=True)
    two, lists = into["two"], into["list"][0]
    loader.load(into, storage_reader=CkptStoreReader(run))
    again = run.load()

    assert into["two"] is two
    assert into["list"][0] is lists
    for found in (into, again):
        for name in ("two", "sparse", "csr", "quantized"):
            assert parts(found[name]) == parts(state[name]), name
        assert parts(found["list"][0]) == parts(state["list"][0])


def test_they_are_read_some_at_a_time(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more at once than the host memory of the store; each arrives."""
    state = {f"t{n}": two(torch.full((50,), 1.0 * n), torch.ones(50)) for n in range(5)}
    save(state, storage_writer=CkptStoreWriter(run, step=1))
    batches: list[int] = []
    built = CkptStoreReader._built

    def counting(self: CkptStoreReader, content: Any, nodes: Sequence[Any]) -> list[Any]:  # noqa: ANN401
        """Note how many are read at once."""
        batches.append(len(nodes))
        return built(self, content, nodes)

    monkeypatch.setattr(CkptStoreReader, "_built", counting)
    reader = CkptStoreReader(run)
    repo = reader._session.repo
    monkeypatch.setattr(repo, "options", replace(repo.options, host_bytes=1000))
    into = {name: two(torch.zeros(50), torch.zeros(50)) for name in state}
    loader.load(into, storage_reader=reader)

    assert batches == [2, 2, 1]
    assert [parts(into[name]) for name in state] == [parts(state[name]) for name in state]


def test_a_quantized_tensor_is_not_read_into_another_kind(run: Run) -> None:
    """Where the state is made of names alone there is no scheme to read into: told, by name."""
    save({"q": quantized(0.5)}, storage_writer=CkptStoreWriter(run, step=1))
    planner = _EmptyStateDictLoadPlanner()  # type: ignore[no-untyped-call]
    with pytest.raises(CheckpointException, match="'q' is quantized"):
        loader._load_state_dict({}, CkptStoreReader(run), planner=planner, no_dist=True)


def test_distributed_tensors_over_subclasses(run: Run, alone: None) -> None:
    """One shard that is the whole is kept; a part of a tensor is refused by name."""
    mesh = init_device_mesh("cpu", (1,))
    local = two(torch.arange(4.0), torch.ones(4))
    state = {"w": DTensor.from_local(local, mesh, [Shard(0)])}
    save(state, storage_writer=CkptStoreWriter(run, step=1))
    assert parts(run.load()["w"]) == parts(local)

    class Half(DefaultSavePlanner):
        """Says that there is more of each tensor on another rank."""

        def create_local_plan(self) -> SavePlan:
            plan = super().create_local_plan()
            data = cast("Any", plan.items[0].tensor_data)
            item = replace(plan.items[0], tensor_data=replace(data, size=torch.Size([8])))
            return replace(plan, items=[item])

    with pytest.raises(CheckpointException, match="'w' is a part of a tensor"):
        save({"w": local}, storage_writer=CkptStoreWriter(run, step=2), planner=Half())


@pytest.mark.parametrize(
    "state",
    [
        3, ["t", 1], ["d", ["t", 1], 2], ["d", "dtype", ["dt", "int8"]],
        ["d", "dtype", 1, "shape", 2],
    ],
    ids=str,
)  # fmt: skip
def test_hostile_states_of_tensors(state: Any) -> None:  # noqa: ANN401
    """A tensor in parts of which a store does not say what it is: told, with the path."""
    adapted = Adapted((), lambda node: torch.ones(1))
    with pytest.raises(CorruptObjectError, match=r"'a\.w' is a tensor without dtype or shape"):
        adapted.describe(["x", "ckptstore.sparse", state], ("a", "w"))


class Own(torch.Tensor):
    """A subclass without __tensor_flatten__."""


def test_adapters_reach_tensor_subclasses(run: Run) -> None:
    """An adapter that the caller wrote: on save, and on load into the tensor that is there."""
    adapter = TypeAdapter(
        name="own",
        type=Own,
        to_state=lambda value: [value.as_subclass(torch.Tensor)],
        from_state=lambda state: state[0].as_subclass(Own),
    )
    state = {"w": torch.arange(4.0).as_subclass(Own), "n": [torch.ones(1).as_subclass(Own)]}
    save(state, storage_writer=CkptStoreWriter(run, step=1, adapters=[adapter]))
    into: dict[str, Any] = {
        "w": torch.zeros(4).as_subclass(Own),
        "n": [torch.zeros(1).as_subclass(Own)],
    }
    target = into["w"]
    loader.load(into, storage_reader=CkptStoreReader(run, adapters=[adapter]))

    assert into["w"] is target
    assert (target.tolist(), into["n"][0].tolist()) == ([0.0, 1.0, 2.0, 3.0], [1.0])
    with pytest.raises(CheckpointException, match=r"'w' is a .*Own, which cannot be stored"):
        save({"w": target}, storage_writer=CkptStoreWriter(run, step=2))
