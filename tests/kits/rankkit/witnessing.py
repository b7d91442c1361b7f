"""Jobs of ranks that prove their resume."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ckptstore
from ckptstore.errors import CkptStoreError
from rankkit.groups import Rank


def _training(me: Rank) -> tuple[nn.Module, torch.Generator]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    return model, torch.Generator().manual_seed(me.rank)


def _train(model: nn.Module, generator: torch.Generator, witness: ckptstore.Witness) -> None:
    for _ in range(3):
        batch = torch.randn(8, 4, generator=generator)
        loss = model(batch).square().mean()
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for one in model.parameters():
                assert one.grad is not None
                dist.all_reduce(one.grad)
                one.sub_(one.grad, alpha=0.1)
        witness.step(loss=loss, batch=batch)


def save(me: Rank, url: str) -> int:
    """Train on all ranks; the first one saves. Return the bytes of the witness."""
    model, generator = _training(me)
    model(torch.randn(8, 4, generator=generator))  # the statistics of each rank are its own
    with ckptstore.open(url) as store:
        run = store.run("r")
        with ckptstore.Witness(run, model=model, generator=generator) as witness:
            metadata = witness.metadata()
            states = [None] * dist.get_world_size()
            dist.all_gather_object(states, generator.get_state())
            if me.rank == 0:
                run.save(
                    {"model": model.state_dict(), "generators": states}, step=1, metadata=metadata
                )
            _train(model, generator, witness)
        return len(metadata["witness"])


def resume(me: Rank, url: str, forgetful: int) -> ckptstore.ResumeReport | None:
    """Resume on all ranks; one of them forgets its generator."""
    model, generator = _training(me)
    with ckptstore.open(url) as store:
        run = store.run("r")
        told: list[Any] = [run.load() if me.rank == 0 else None]  # one rank may load for all
        dist.broadcast_object_list(told)
        state = told[0]
        model.load_state_dict(state["model"])
        if me.rank != forgetful:
            generator.set_state(state["generators"][me.rank % len(state["generators"])])
        with ckptstore.Witness(run, model=model, generator=generator) as witness:
            _train(model, generator, witness)
        return witness.report


class _Broken:
    """Has a state that cannot be had."""

    def state_dict(self) -> dict[str, Any]:
        msg = "no state today"
        raise RuntimeError(msg)


def fail(me: Rank, url: str, victim: int) -> list[str]:
    """Have one rank fail at a save, and at a step; return what this rank raises."""
    with ckptstore.open(url) as store:
        healthy = me.rank != victim
        witness = ckptstore.Witness(store.run("r"), x={} if healthy else _Broken())
        said = [_said(witness.metadata)]
        with ckptstore.Witness(store.run("r"), x={}) as witness:
            witness.metadata()
            loss = torch.zeros(1 if healthy else 2)
            said.append(_said(lambda: witness.step(loss=loss)))
            witness.step(loss=1.0)
    return said


def _said(call: Callable[[], object]) -> str:
    try:
        call()
    except (CkptStoreError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""
