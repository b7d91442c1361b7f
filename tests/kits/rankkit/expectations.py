"""Requirements of PyTorch's own tests on a storage with several ranks; tests/dcp runs them.

Each function is one case: it saves with :class:`CkptStoreWriter`, loads with
:class:`CkptStoreReader`, and returns the defects.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from shortening import sampled
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard as OldShard
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.two_tensor import TwoTensor

import ckptstore
from ckptstore.integrations.dcp import CkptStoreReader, CkptStoreWriter
from ckptstore.store import Run
from rankkit.groups import Rank
from rankkit.states import blank, differences, mesh_of, model_state, sharded

Problems = list[str]
Box = tuple[tuple[int, int], tuple[int, int], int]
"""Offsets, sizes and rank."""

WHOLE = torch.arange(200.0).reshape(10, 20)


PLANS = {
    "halves": "0 0 5 20 0, 5 0 5 20 1",
    "quarters": "0 0 3 20 0, 3 0 3 20 1, 6 0 3 20 1, 9 0 1 20 0",
    "uneven": "0 0 2 20 0, 2 0 1 20 1, 3 0 3 20 0, 6 0 3 20 1, 9 0 1 20 0",
    "turned": "0 0 8 20 1, 8 0 2 20 0",
    "columns": "0 0 10 11 0, 0 11 10 9 1",
    "tiles": "0 0 4 8 0, 0 8 4 12 1, 4 0 6 8 1, 4 8 6 12 0",
    "ladder": "0 0 4 20 0, 4 0 6 7 1, 4 7 2 13 0, 6 7 4 13 1",
}
"""Cuts of a tensor of 10 x 20: row, column, height, width and rank of each part."""


def _plan(name: str) -> list[Box]:
    parts = [[int(number) for number in part.split()] for part in PLANS[name].split(",")]
    return [((a, b), (height, width), rank) for a, b, height, width, rank in parts]


def _old_sharded(me: Rank, plan: str, whole: torch.Tensor) -> ShardedTensor:
    """Return a tensor of torch's older kind, cut by a plan."""
    every = [
        ShardMetadata(
            shard_offsets=list(offsets), shard_sizes=list(sizes), placement=f"rank:{rank}/cpu"
        )
        for offsets, sizes, rank in _plan(plan)
    ]
    mine = [
        OldShard(tensor=whole[o[0] : o[0] + n[0], o[1] : o[1] + n[1]].clone(), metadata=metadata)
        for (o, n, rank), metadata in zip(_plan(plan), every, strict=True)
        if rank == me.rank
    ]
    described = ShardedTensorMetadata(
        shards_metadata=every,
        size=whole.shape,
        tensor_properties=TensorProperties.create_from_tensor(whole),
    )
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        local_shards=mine, sharded_tensor_metadata=described
    )


def _same(tensor: ShardedTensor, whole: torch.Tensor) -> bool:
    return all(
        torch.equal(
            shard.tensor,
            whole[
                tuple(
                    slice(a, a + n)
                    for a, n in zip(
                        shard.metadata.shard_offsets, shard.metadata.shard_sizes, strict=True
                    )
                )
            ],
        )
        for shard in tensor.local_shards()
    )


def any_plan_is_read_by_any_other(me: Rank, run: Run) -> Problems:
    """ShardedTensor: chunked, enumerated, by columns, in tiles, and irregular: each by each."""
    problems = []
    for number, source in enumerate(PLANS):
        state = {"w": _old_sharded(me, source, WHOLE + number)}
        dcp_save(state, storage_writer=CkptStoreWriter(run, step=number))
        if not torch.equal(run.load(number)["w"], WHOLE + number):
            problems.append(f"{source}: whole")
        for target in PLANS:
            into = {"w": _old_sharded(me, target, torch.zeros(10, 20))}
            dcp_load(into, storage_reader=CkptStoreReader(run, number))
            if not _same(into["w"], WHOLE + number):
                problems.append(f"{source} into {target}")
    return problems


def sharded_and_plain_tensors_are_read_as_each_other(me: Rank, run: Run) -> Problems:
    """ShardedTensor, DTensor and plain tensors: each is loaded from the saved form of another."""
    mesh = mesh_of(me.world, 1)
    made: dict[str, Callable[[torch.Tensor], Any]] = {
        "old": lambda whole: _old_sharded(me, "uneven", whole),
        "rows": lambda whole: sharded(whole, mesh, [Shard(0)]),
        "columns": lambda whole: sharded(whole, mesh, [Shard(1)]),
        "replicas": lambda whole: sharded(whole, mesh, [Replicate()]),
        "plain": lambda whole: whole.clone(),
    }
    problems = []
    for number, (source, make) in enumerate(made.items()):
        dcp_save({"w": make(WHOLE)}, storage_writer=CkptStoreWriter(run, step=number))
        for target, make_target in made.items():
            into = {"w": make_target(torch.zeros(10, 20))}
            dcp_load(into, storage_reader=CkptStoreReader(run, number))
            found = into["w"]
            fits = (
                _same(found, WHOLE)
                if isinstance(found, ShardedTensor)
                else not list(differences(found, WHOLE))
            )
            problems += [] if fits else [f"{source} into {target}"]
    return problems


def dtensors_of_one_and_two_dimensions(me: Rank, run: Run) -> Problems:
    """1-d to 1-d, 1-d to 2-d, 2-d to 1-d, 2-d to 2-d, with empty shards."""
    layouts: list[tuple[int, Sequence[Any]]] = [
        (1, [Shard(0)]), (1, [Shard(1)]), (1, [Replicate()]), (2, [Shard(0), Shard(1)]),
        (2, [Shard(1), Shard(0)]), (2, [Shard(0), Replicate()]), (2, [Replicate(), Shard(1)]),
        (2, [Shard(1), Shard(1)]), (2, [Replicate(), Replicate()]),
    ]  # fmt: skip
    wholes = {"wide": torch.randn(5, 16), "one_row": torch.randn(1, 13), "tall": torch.randn(9, 2)}
    for whole in wholes.values():
        dist.broadcast(whole, 0)
    problems = []
    for number, (dims, placements) in enumerate(layouts):
        mesh = mesh_of(me.world, dims)
        state = {name: sharded(whole, mesh, placements) for name, whole in wholes.items()}
        dcp_save(state, storage_writer=CkptStoreWriter(run, step=number))
        for target_dims, target in sampled(layouts, f"layout {number}"):
            target_mesh = mesh_of(me.world, target_dims)
            into = {
                name: sharded(torch.zeros_like(whole), target_mesh, target)
                for name, whole in wholes.items()
            }
            dcp_load(into, storage_reader=CkptStoreReader(run, number))
            problems += [f"{placements} {d}" for d in differences(into, wholes, str(target))]
    return problems


def a_model_on_other_placements(me: Rank, run: Run) -> Problems:
    """FSDP to tensor-parallel, HSDP to FSDP, and back: a model and its optimizer."""
    kinds = ("fsdp", "hsdp", "tensor_parallel")
    meant = model_state("fsdp", 0, seed=4)
    problems = []
    for number, source in enumerate(kinds):
        dcp_save(
            model_state(source, me.world, seed=4), storage_writer=CkptStoreWriter(run, step=number)
        )
        for target in sampled(kinds, source):
            into = blank(model_state(target, me.world, seed=5))
            dcp_load(into, storage_reader=CkptStoreReader(run, number))
            problems += [f"{source} to {target}{d}" for d in differences(into, meant)]
    return problems


class Small(nn.Module):
    """Layers, a frozen parameter and a buffer."""

    def __init__(self, fill: float) -> None:
        super().__init__()
        self.one = nn.Linear(6, 10)
        self.two = nn.Linear(10, 4)
        self.register_buffer("seen", torch.full((3,), fill))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(fill)
        self.two.bias.requires_grad_(False)


def options_of_state_dicts(me: Rank, run: Run) -> Problems:
    """Full states, flattened and offloaded optimizers, without frozen parameters: and set again."""
    options = [
        StateDictOptions(full_state_dict=True, cpu_offload=True),
        StateDictOptions(flatten_optimizer_state_dict=True),
        StateDictOptions(cpu_offload=True),
        StateDictOptions(ignore_frozen_params=True),
    ]
    problems = []
    for number, option in enumerate(options):
        model, optimizer = _trained(me, 2.0)
        weights, moments = get_state_dict(model, optimizer, options=option)
        state = {"model": weights, "optimizer": moments}
        if option.full_state_dict and me.rank:
            state = {}  # torch gives it to rank 0 alone
        dcp_save(state, storage_writer=CkptStoreWriter(run, step=number))
        fresh, other = _trained(me, 5.0)
        filtered = option.flatten_optimizer_state_dict or option.ignore_frozen_params
        pair = get_state_dict(fresh, other, options=option if filtered else None)
        into: dict[str, Any] = dict(zip(("model", "optimizer"), pair, strict=True))
        dcp_load(into, storage_reader=CkptStoreReader(run, number))
        strict = not option.ignore_frozen_params
        how = StateDictOptions(
            flatten_optimizer_state_dict=option.flatten_optimizer_state_dict, strict=strict
        )
        set_state_dict(
            fresh, other, model_state_dict=into["model"], optim_state_dict=into["optimizer"],
            options=how,
        )  # fmt: skip
        for (name, found), meant in zip(fresh.named_parameters(), model.parameters(), strict=True):
            frozen = option.ignore_frozen_params and name == "two.bias"
            same = torch.equal(_local(found), _local(meant))
            problems += [] if same or frozen else [f"{number}: {name}"]
        for group in zip(optimizer.state.values(), other.state.values(), strict=True):
            moment = [_local(entry["exp_avg"]) for entry in group]
            problems += [] if torch.equal(*moment) else [f"{number}: moments"]
    return problems


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _trained(me: Rank, fill: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Small(fill)
    fully_shard(model, mesh=mesh_of(me.world, 1))
    wanted = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(wanted, lr=0.1, foreach=False)
    for parameter in wanted:
        parameter.grad = parameter.detach() * 0.5
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def a_broadcast_of_what_one_rank_loaded(me: Rank, run: Run) -> Problems:
    """Rank 0 loads the whole without torch.distributed, and torch shards it for all."""
    model, _ = _trained(me, 3.0)
    state = {"model": get_model_state_dict(model)}
    dcp_save(state, storage_writer=CkptStoreWriter(run, step=1))
    fresh, _ = _trained(me, 6.0)
    whole = run.load()["model"] if me.rank == 0 else {}
    set_model_state_dict(
        fresh, whole, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    )
    pairs = zip(fresh.parameters(), model.parameters(), strict=True)
    return [] if all(torch.equal(_local(a), _local(b)) for a, b in pairs) else ["not broadcast"]


def a_group_of_some_ranks(me: Rank, run: Run) -> Problems:
    """Save and load with a subgroup alone, whose first rank is the coordinator."""
    ranks = [me.world - 2, me.world - 1]
    group = dist.new_group(ranks)
    problems = []
    if me.rank in ranks:
        whole = torch.arange(12.0).reshape(6, 2)
        half = whole[:3] if me.rank == ranks[0] else whole[3:]
        boxes = [((0, 0), (3, 2), ranks[0]), ((3, 0), (3, 2), ranks[1])]
        every = [
            ShardMetadata(list(offsets), list(sizes), f"rank:{rank}/cpu")
            for offsets, sizes, rank in boxes
        ]
        mine = OldShard(tensor=half.clone(), metadata=every[me.rank - ranks[0]])
        described = ShardedTensorMetadata(
            shards_metadata=every,
            size=whole.shape,
            tensor_properties=TensorProperties.create_from_tensor(whole),
        )
        part = ShardedTensor._init_from_local_shards_and_global_metadata(
            local_shards=[mine], sharded_tensor_metadata=described, process_group=group
        )
        writer = CkptStoreWriter(run, step=1)
        dcp_save({"w": part}, storage_writer=writer, process_group=group)
        if (writer.version is not None) != (me.rank == ranks[0]):
            problems.append("another coordinator")
        part.local_shards()[0].tensor.zero_()
        dcp_load({"w": part}, storage_reader=CkptStoreReader(run), process_group=group)
        if not torch.equal(part.local_shards()[0].tensor, half):
            problems.append("other values")
    dist.barrier()
    if not torch.equal(run.load()["w"], torch.arange(12.0).reshape(6, 2)):
        problems.append("another whole")
    return problems


def a_mesh_of_some_ranks(me: Rank, run: Run) -> Problems:
    """Save DTensors on a submesh, which the other ranks are not part of."""
    both = init_device_mesh("cpu", (2, me.world // 2), mesh_dim_names=("stage", "shard"))
    stage = both["shard"]
    whole = torch.arange(30.0).reshape(10, 3)
    name = f"stage{me.rank // (me.world // 2)}"
    state = {name: sharded(whole + me.rank // (me.world // 2), stage, [Shard(0)])}
    dcp_save(state, storage_writer=CkptStoreWriter(run, step=1))
    found = run.load()
    problems = list(differences(found, {"stage0": whole, "stage1": whole + 1}))
    into = {name: sharded(torch.zeros_like(whole), stage, [Shard(0)])}
    dcp_load(into, storage_reader=CkptStoreReader(run))
    return problems + list(differences(into, {name: found[name]}))


def what_is_missing_or_differs(me: Rank, run: Run) -> Problems:
    """Missing keys and other sizes are refused on every rank, by name."""
    mesh = mesh_of(me.world, 1)
    state = {"w": sharded(WHOLE, mesh, [Shard(0)]), "n": 1}
    dcp_save(state, storage_writer=CkptStoreWriter(run, step=1))
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"other": torch.zeros(2)}, "other"),
        ({"w": sharded(torch.zeros(11, 20), mesh, [Shard(0)])}, "Size mismatch"),
        ({"w": 3}, "w"),
        ({"n": torch.zeros(1) if me.rank == 0 else 1, "missing": 1}, "missing"),
    ]
    problems = []
    for into, text in wrong:
        try:
            dcp_load(into, storage_reader=CkptStoreReader(run))
        except CheckpointException as error:
            problems += [] if text in str(error) else [f"{text}: {error}"]
        else:
            problems.append(f"{text}: loaded")
    try:
        dcp_load({"n": 0}, storage_reader=CkptStoreReader(run, "no-such-tag"))
    except CheckpointException as error:
        problems += [] if "no-such-tag" in str(error) else [str(error)]
    else:
        problems.append("a ref that names nothing was loaded")
    return problems


def tensors_made_of_others(me: Rank, run: Run) -> Problems:
    """Replicas of a subclass and of a sparse tensor, and a stream of each rank, come back."""
    mesh = init_device_mesh("cpu", (me.world,))

    def state(fill: float) -> dict[str, Any]:
        two: Any = TwoTensor(torch.full((3,), fill), torch.arange(3.0) * fill)  # type: ignore[no-untyped-call]
        every = {f"rank {rank}": io.BytesIO() for rank in range(me.world)} if not fill else {}
        stream = io.BytesIO(b"%d" % me.rank)
        sparse = (torch.eye(3) * fill).to_sparse()
        rows = sharded(WHOLE * fill, mesh, (Shard(0),))
        return {"two": two, "sparse": sparse, "rows": rows, **every, f"rank {me.rank}": stream}

    dcp_save(state(2.0), storage_writer=CkptStoreWriter(run, step=1))
    into, meant = state(0.0), state(2.0)
    dcp_load(into, storage_reader=CkptStoreReader(run, 1))
    problems = [*differences(into["rows"], WHOLE * 2)]
    problems += [*differences(into["two"].a, meant["two"].a)]
    problems += [*differences(into["two"].b, meant["two"].b)]
    problems += [*differences(into["sparse"].to_dense(), torch.eye(3) * 2)]
    for rank in range(me.world):
        problems += [*differences(into[f"rank {rank}"].getvalue(), b"%d" % rank)]
    return problems


CASES: dict[str, Callable[[Rank, Run], Problems]] = {
    case.__name__: case
    for case in (
        any_plan_is_read_by_any_other, sharded_and_plain_tensors_are_read_as_each_other,
        dtensors_of_one_and_two_dimensions, a_model_on_other_placements, options_of_state_dicts,
        a_broadcast_of_what_one_rank_loaded, a_group_of_some_ranks, a_mesh_of_some_ranks,
        tensors_made_of_others, what_is_missing_or_differs,
    )
}  # fmt: skip


def every_case(me: Rank, url: str, names: Sequence[str]) -> dict[str, Problems]:
    """Run some cases, each in a run of its own."""
    found: dict[str, Problems] = {}
    with ckptstore.open(url) as store:
        for name in names:
            found[name] = CASES[name](me, store.run(name))
            dist.barrier()
    return found
