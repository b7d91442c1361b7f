"""States of many tensors: what each tensor costs, in a save, a load and a lookup by its name.

Saves are durable; loads go into new memory, from files in the page cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

import ckptstore
from benchmarks import peers
from benchmarks.disk import Workspace
from benchmarks.host import header
from benchmarks.measure import Case, Measured, Result, run_cases
from benchmarks.peers import PEERS, touched
from benchmarks.states import State
from benchmarks.workloads import load_case, save_case, store_save

__all__ = ["SHAPES", "run"]

SHAPES = ((5_000, 13_312), (50_000, 64))
"""Numbers of tensors, and of the fp32 elements of each."""
_CODEC = "raw"
_LOOKUPS = 100
_PEERS = tuple(peer for peer in PEERS if peer.name in ("torch.save", "safetensors"))


def run(space: Workspace, *, rounds: int, shapes: Sequence[tuple[int, int]] = SHAPES) -> Result:
    """Run everything; return for each shape the tables ``TITLE: save``, ``load`` and ``lookup``.

    Parameters
    ----------
    rounds
        Counted rounds of each case, after a warm-up.
    shapes
        Of the states, as :data:`SHAPES`.
    """
    peers.quiet()
    result = Result(
        benchmark="many",
        header=header(space.root),
        parameters={"rounds": rounds, "codec": _CODEC, "torch_threads": torch.get_num_threads()},
        facts={"states": []},
    )
    for count, elements in shapes:
        title = f"{count:,} tensors of {elements} elements"
        result.facts["states"].append(title)
        draws = torch.Generator().manual_seed(count)
        tensors = {
            f"layer{at}.weight": torch.randn(elements, generator=draws) for at in range(count)
        }
        state = {"model": tensors}
        saves = [save_case(peer.name, peer.save, state) for peer in _PEERS]
        saves.append(store_save(state, _CODEC))
        result.tables[f"{title}: save"] = run_cases("save", saves, space, rounds=rounds)
        result.tables[f"{title}: load"], folders = _loads(state, space, rounds)
        result.tables[f"{title}: lookup"] = _lookups(folders, list(tensors), space, rounds)
    return result


def _loads(state: State, space: Workspace, rounds: int) -> tuple[list[Measured], dict[str, Path]]:
    """Time the loads; return their rows, and the folders by name."""
    folders = {name: space.fresh() for name in (*(peer.name for peer in _PEERS), "ckptstore")}
    cases: list[Case] = []
    for peer in _PEERS:
        peer.save(state, folders[peer.name])
        if peer.load is not None:
            cases.append(load_case(peer.name, touched(peer.load), folders[peer.name], state))
    with ckptstore.open(folders["ckptstore"], create=True, codec=_CODEC) as store:
        store.run("bench").save(state, step=1)
    cases.append(load_case(f"ckptstore {_CODEC}", _store_load, folders["ckptstore"], state))
    return run_cases("load", cases, space, rounds=rounds), folders


def _store_load(folder: Path) -> object:
    with ckptstore.open(folder, read_only=True) as store:
        return store.load("bench@latest")


def _lookups(
    folders: dict[str, Path], names: Sequence[str], space: Workspace, rounds: int
) -> list[Measured]:
    """Time lookups in a version, or a file, that is open and has answered once."""
    chosen = names[:: max(1, len(names) // _LOOKUPS)][:_LOOKUPS]
    with (
        ckptstore.open(folders["ckptstore"], read_only=True) as store,
        safe_open(folders["safetensors"] / "state.safetensors", framework="pt") as file,
    ):
        version = store.version("bench@latest")

        def of_store() -> list[object]:
            return [version[f"model.{name}"].shape for name in chosen]

        def of_file() -> list[object]:
            slices: list[Any] = [file.get_slice(f"model.{name}") for name in chosen]
            return [one.get_shape() for one in slices]

        cases = []
        for name, work in (("safetensors", of_file), ("ckptstore", of_store)):
            work()
            cases.append(_lookup(name, work, space))
        rows = run_cases("lookup", cases, space, rounds=rounds)
    for row in rows:
        row.numbers["names"] = len(chosen)
    return rows


def _lookup(name: str, work: Callable[[], object], space: Workspace) -> Case:
    return Case(name=name, run=lambda _: work(), folder=space.root, writes=False)
