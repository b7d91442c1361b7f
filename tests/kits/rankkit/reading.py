"""A rank that takes some batches of its data, and saves its position."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

import ckptstore
from ckptstore.errors import StateError
from ckptstore.integrations.data_position import ElasticLoader, per_rank, this_rank
from rankkit.groups import Rank

__all__ = ["take_and_save"]

ROWS: Any = range(48)


def loader_of(rank: int, ranks: int) -> StatefulDataLoader[Any]:
    """Return the loader of a rank."""
    sampler = StatefulDistributedSampler(ROWS, num_replicas=ranks, rank=rank, seed=3)
    return StatefulDataLoader(ROWS, batch_size=2, sampler=sampler)


def take_and_save(me: Rank, url: str, steps: int) -> list[int]:
    """Take some batches after resuming, save with rank 0 alone; return the rows."""
    loader = ElasticLoader(loader_of)
    with ckptstore.open(url) as store:
        run = store.run("gpt")
        if run.head is not None:
            state = run.load()
            loader.load_state_dict(state["data"])
            with pytest.raises(StateError, match=f"this training has {me.world}"):
                this_rank(state["own"])
        batches = list(itertools.islice(loader, steps))
        state = {"data": loader.state_dict(), "own": per_rank({"rank": me.rank})}
        assert this_rank(state["own"]) == {"rank": me.rank}
        if me.rank == 0:
            run.save(state, step=len(run))
    return [row for batch in batches for row in batch.tolist()]
