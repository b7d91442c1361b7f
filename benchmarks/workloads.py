"""Saves, loads, verification and collection for named workloads, against peers in the same run.

For each workload (:mod:`benchmarks.workload_states`): durable saves of the whole state and loads
into tensors that exist, by ckptstore and by peers, interleaved; and operations of stores only: the
save after a step of the training, the save of an unchanged state, the stall of a save in the
background, a part of the state, verification, and the collection of a removed version.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import ckptstore
from benchmarks import peers
from benchmarks.disk import Workspace, chill, tree_bytes, warm
from benchmarks.host import header
from benchmarks.measure import Case, Measured, Result, run_cases, say, settle
from benchmarks.peers import PEERS, Peer, empty_like, touched
from benchmarks.resident import extra_bytes, mark
from benchmarks.states import State, flat_tensors, same, state_bytes
from benchmarks.workload_states import WORKLOADS, Workload, parameters

__all__ = [
    "against_peers",
    "describe",
    "load_case",
    "loader",
    "of_a_store",
    "run",
    "save_case",
    "store_load",
    "store_save",
]

_RUN = "bench"
_CODECS = ("auto", "planes")


def run(
    space: Workspace,
    *,
    rounds: int,
    shrink: int = 1,
    training_steps: int = 120,
    only: Sequence[str] = (),
) -> Result:
    """Run everything; return the tables ``NAME: save``, ``NAME: load`` and ``store: NAME``.

    Parameters
    ----------
    rounds
        Counted rounds of each case, after a warm-up.
    shrink
        Divisor of the models' widths; 1 for the published sizes.
    only
        Names of workloads; all by default.
    """
    peers.quiet()
    chosen = [one for one in WORKLOADS if not only or one.name in only]
    result = Result(
        benchmark="workloads",
        header=header(space.root),
        parameters={"rounds": rounds, "shrink": shrink, "torch_threads": torch.get_num_threads()},
        facts={"workloads": {}},
    )
    for workload in chosen:
        state = workload.build(shrink=shrink, training_steps=training_steps)
        describe(result, workload, state)
        against_peers(result, workload, state, space, rounds)
        of_a_store(result, workload, state, space, rounds)
    return result


def describe(result: Result, workload: Workload, state: State) -> None:
    """Record a description of a workload in the facts of a result."""
    say(f"{workload.name}: {state_bytes(state) / 1e6:.1f} MB")
    result.facts["workloads"][workload.name] = {
        "about": workload.about,
        "parameters": parameters(workload),
        "state_bytes": state_bytes(state),
        "tensors": len(list(flat_tensors(state))),
    }


# --- against peers ------------------------------------------------------------------------------


def against_peers(
    result: Result,
    workload: Workload,
    state: State,
    space: Workspace,
    rounds: int,
    *,
    only: Sequence[str] = (),
) -> None:
    """Add the tables ``NAME: save`` and ``NAME: load``; `only` names peers, all by default."""
    name = workload.name
    chosen = [peer for peer in PEERS if not only or peer.name in only]
    cases = [save_case(peer.name, peer.save, state) for peer in chosen]
    cases += [store_save(state, codec) for codec in _CODECS]
    result.tables[f"{name}: save"] = run_cases(f"{name} save", cases, space, rounds=rounds)
    target = empty_like(state)
    loads, folders = [], []
    for peer in chosen:
        folder = space.fresh()
        folders.append(folder)
        if not any(one.name == peer.name and one.error for one in result.tables[f"{name}: save"]):
            peer.save(state, folder)
            loads.append(load_case(peer.name, loader(peer, target), folder, state))
    for codec in _CODECS:
        folder = space.fresh()
        folders.append(folder)
        with ckptstore.open(folder, create=True, codec=codec) as store:
            store.run(_RUN).save(state, step=1)
        load = partial(store_load, target=target)
        loads.append(load_case(f"ckptstore {codec}", load, folder, state))
    result.tables[f"{name}: load"] = run_cases(f"{name} load", loads, space, rounds=rounds)
    result.tables[f"{name}: weights"] = _parts(name, folders[0], folders[-2], state, space, rounds)
    for folder in folders:
        space.discard(folder)


def save_case(name: str, save: Callable[[State, Path], None], state: State) -> Case:
    """Return the case of a peer's save into a new folder."""
    before: list[int] = []

    def prepare(_: Path) -> None:
        before[:] = [mark()]

    def after(folder: Path, _: object) -> Mapping[str, float]:
        return {"extra_bytes": extra_bytes(before[0]), "stored_bytes": tree_bytes(folder)}

    return Case(
        name=name,
        prepare=prepare,
        run=lambda folder: save(state, folder),
        after=after,
        logical_bytes=state_bytes(state),
    )


def store_save(state: State, codec: str) -> Case:
    """Return the case of the first save into a new store, which is open as in a training loop."""
    stores: list[ckptstore.Store] = []
    before: list[int] = []

    def prepare(folder: Path) -> None:
        stores.append(ckptstore.open(folder / "store", create=True, codec=codec))
        before[:] = [mark()]

    def after(folder: Path, _: object) -> Mapping[str, float]:
        extra = extra_bytes(before[0])
        stores.pop().close()
        return {"extra_bytes": extra, "stored_bytes": tree_bytes(folder)}

    return Case(
        name=f"ckptstore {codec}",
        prepare=prepare,
        run=lambda _: stores[-1].run(_RUN).save(state, step=1),
        after=after,
        logical_bytes=state_bytes(state),
    )


def loader(peer: Peer, target: State) -> Callable[[Path], object]:
    """Return a peer's load function: into existing tensors if possible, else into new memory."""
    into, new = peer.load_into, peer.load
    if into is not None:
        return lambda folder: into(folder, target)

    assert new is not None  # noqa: S101 - a peer has one or the other
    return touched(new)


def store_load(folder: Path, target: State) -> object:
    """Open a store, and fill a state from its newest version."""
    with ckptstore.open(folder, read_only=True) as store:
        return store.load(f"{_RUN}@latest", into=target)


def load_case(
    name: str, load: Callable[[Path], object], folder: Path, state: State, *, cold: bool = False
) -> Case:
    """Return the case of a load, compared once with the saved state."""
    before: list[int] = []
    checked: list[bool] = []

    def prepare(path: Path) -> None:
        (chill if cold else warm)(path)
        before[:] = [mark()]

    def after(_: Path, loaded: object) -> Mapping[str, float]:
        extra = extra_bytes(before[0])
        if not checked:
            checked.append(True)
            if not same(state, loaded):
                msg = "what was loaded is not what was saved"
                raise AssertionError(msg)
        return {"extra_bytes": extra}

    return Case(
        name=name,
        prepare=prepare,
        run=load,
        after=after,
        folder=folder,
        writes=False,
        logical_bytes=state_bytes(state),
    )


def _parts(
    name: str, files: Path, stored: Path, state: State, space: Workspace, rounds: int
) -> list[Measured]:
    """Time loading the weights alone into new memory: with torch.load all of it has to be read."""
    weights = {"model": state["model"]}

    def whole(folder: Path) -> object:
        return {"model": torch.load(folder / "state.pt", weights_only=True)["model"]}

    def mapped(folder: Path) -> object:
        loaded = torch.load(folder / "state.pt", weights_only=True, mmap=True)["model"]
        return {"model": {key: tensor.clone() for key, tensor in loaded.items()}}

    def included(folder: Path) -> object:
        with ckptstore.open(folder, read_only=True) as store:
            return store.load(f"{_RUN}@latest", include=["model"])

    cases = [
        load_case("torch.load", whole, files, weights),
        load_case("torch.load, mapped", mapped, files, weights),
        load_case("ckptstore", included, stored, weights),
    ]
    return run_cases(f"{name} weights", cases, space, rounds=rounds)


# --- operations of stores only ------------------------------------------------------------------


def of_a_store(
    result: Result, workload: Workload, state: State, space: Workspace, rounds: int
) -> None:
    """Add the table ``store: NAME``; makes further steps of the state."""
    folder = space.fresh()
    timed = _Timed(state_bytes(state))
    turn = 0
    with (
        ckptstore.open(folder / "auto", create=True) as auto,
        ckptstore.open(folder / "delta", create=True, codec="delta") as delta,
        ckptstore.open(folder / "async", create=True) as behind,
    ):
        stores = {"next save": auto, "next save, delta": delta}
        for store in stores.values():
            store.run(_RUN).save(state, step=0)
        for number in range(-1 if rounds > 1 else 0, rounds):
            turn += 1
            workload.step(state, turn)
            timed.counts = number >= 0
            for label, store in stores.items():
                before = tree_bytes(folder)
                timed.run(label, partial(store.run(_RUN).save, state, step=turn))
                timed.rows[label].numbers["stored_bytes"] = tree_bytes(folder) - before
            before = tree_bytes(folder)
            timed.run("nothing changed", partial(auto.run(_RUN).save, state, step=turn))
            timed.rows["nothing changed"].numbers["stored_bytes"] = tree_bytes(folder) - before
            _stall(timed, behind, state, turn)
            timed.run("verify", lambda: auto.verify([f"{_RUN}@latest"]))
        first = auto.run(_RUN).versions()[0]
        auto.remove([f"#{first.id}"])
        timed.counts = True
        timed.run("collect", lambda: auto.gc(grace_s=0, orphan_age_s=0))
    space.discard(folder)
    result.tables[f"store: {workload.name}"] = list(timed.rows.values())
    say(f"{workload.name}: store")


class _Timed:
    """Rows of cases that are timed alone, one after the other."""

    def __init__(self, size: int) -> None:
        self.rows: dict[str, Measured] = {}
        self.counts = True
        """False during the warm-up."""
        self._size = size

    def run(self, name: str, work: Callable[[], Any]) -> Any:  # noqa: ANN401 - what `work` returns
        """Time one call, after all earlier writes are on the disk."""
        row = self.rows.setdefault(name, Measured(name=name, logical_bytes=self._size))
        settle()
        began = time.perf_counter()
        made = work()
        seconds = time.perf_counter() - began
        if self.counts:
            row.seconds.append(seconds)
        return made


def _stall(timed: _Timed, store: ckptstore.Store, state: State, turn: int) -> None:
    """Time the stall of a save in the background, and the time until it is durable."""
    pending = timed.run("stall", lambda: store.run(_RUN).save_async(state, step=turn))
    staged = time.perf_counter()
    pending.result()
    timed.rows["stall"].numbers["behind_s"] = time.perf_counter() - staged
