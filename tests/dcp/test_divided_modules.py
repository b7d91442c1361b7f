"""Modules whose parameters are divided among two ranks, as targets of ``load_into``."""

from __future__ import annotations

from pathlib import Path

import torch
from rankkit.groups import Rank, run_ranks
from rankkit.states import MODELS, Net, shard_model
from torch.distributed.tensor import DTensor, distribute_tensor

import ckptstore
from ckptstore.errors import InvalidInputError


def _net(kind: str, world: int, dtype: torch.dtype = torch.float32, hidden: int = 0) -> Net:
    torch.manual_seed(world)
    even = kind == "fsdp_and_tensor_parallel"
    net = (Net(16, hidden or 32) if even else Net(10, hidden or 21)).to(dtype)
    if world:
        shard_model(net, kind, world)
    return net


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def fill(me: Rank, url: str) -> list[str]:
    """Load each kind of model; return those that differ from what ``load_state_dict`` makes."""
    wrong = []
    with ckptstore.open(url, read_only=True) as store:
        for kind in MODELS:
            for dtype in (torch.float32, torch.bfloat16):
                mine, theirs = _net(kind, me.world, dtype), _net(kind, me.world, dtype)
                given = store.load(kind)
                for name, own in theirs.state_dict().items():
                    if isinstance(own, DTensor):
                        place = own.device_mesh, own.placements
                        given[name] = distribute_tensor(given[name], *place)
                theirs.load_state_dict(given)
                report = store.load_into(kind, mine, strict=True)
                pairs = zip(mine.state_dict().values(), theirs.state_dict().values(), strict=True)
                same = all(torch.equal(_local(one), _local(other)) for one, other in pairs)
                if not same or bool(report.cast) != (dtype == torch.bfloat16):
                    wrong.append(f"{kind} {dtype}: {report}")
            other = _net(kind, me.world, hidden=48)
            before = [_local(one).clone() for one in other.state_dict().values()]
            try:
                wrong.append(f"{kind}: {store.load_into(kind, other, strict=True)}")
            except InvalidInputError as error:
                after = [_local(one) for one in other.state_dict().values()]
                if "up.weight (shape" not in str(error) or not all(map(torch.equal, before, after)):
                    wrong.append(f"{kind}: {error}")
    return wrong


def test_divided_modules_load_as_by_load_state_dict(tmp_path: Path) -> None:
    """FSDP2, HSDP and tensor parallel: to the bit, cast too; another shape is refused untouched."""
    url = str(tmp_path / "store")
    with ckptstore.open(url, create=True) as store:
        for kind in MODELS:
            store.run(kind).save(_net(kind, 0).state_dict(), step=1)

    assert run_ranks(fill, 2, url) == [[], []]
