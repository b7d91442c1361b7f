"""Saves and loads of one mixed-precision training state on a local disk, against five peers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import ckptstore
from benchmarks import peers
from benchmarks.command_line import time_ls
from benchmarks.disk import Workspace, chill, disk_reads, tree_bytes, warm
from benchmarks.host import header
from benchmarks.measure import FAILURES, Case, Measured, Result, run_cases, say
from benchmarks.peak import peak_of_saves
from benchmarks.peers import PEERS, TORCH_MMAP, Peer, empty_like, touched
from benchmarks.states import (
    State,
    StateName,
    StateSpec,
    flat_tensors,
    make_state,
    same,
    state_bytes,
)

__all__ = ["run"]

_RUN = "bench"
# "auto" in a new store, without measurements, and the two ways that it chooses between.
_CODECS = ("auto", "raw", "planes")
# The tensor whose row is read: the largest of the state, an fp32 embedding.
_LARGE = "optimizer.master.embed.weight"
_ROW = 123


def run(
    space: Workspace,
    *,
    bytes_min: int,
    rounds: int,
    training_steps: int = 120,
    state_name: StateName = "follows",
    peaks: Sequence[str] = (),
) -> Result:
    """Run everything; return the tables ``save``, ``load warm``, ``load cold``, ``row``, ``peak``.

    Parameters
    ----------
    bytes_min
        The state has at least this many bytes of tensors.
    rounds
        Counted rounds of each case.
    state_name
        Of the state; results of another one than ``follows`` get a file of their own.
    peaks
        Ways to save whose peak memory is measured; all by default.
    """
    peers.quiet()
    spec = StateSpec(bytes_min=bytes_min, training_steps=training_steps, name=state_name)
    head = header(space.root)
    say(f"local: making a state of {bytes_min / 1e9:.2f} GB")
    state = make_state(spec)
    size = state_bytes(state)
    tensors = [tensor for _, tensor in flat_tensors(state)]
    result = Result(
        benchmark="local" if state_name == "follows" else f"local-{state_name}",
        header=head,
        parameters={
            "state_bytes": size,
            "state": state_name,
            "tensors": len(tensors),
            "seed": spec.seed,
            "training_steps": spec.training_steps,
            "rounds": rounds,
            "torch_threads": torch.get_num_threads(),
        },
    )
    result.tables["save"] = _saves(state, space, rounds)
    saved = _saved_once(state, space)
    result.tables["load, warm cache"] = _loads(state, saved, space, rounds, cold=False)
    result.tables["load, cold cache"] = _loads(state, saved, space, rounds, cold=True)
    result.tables["one row"] = _rows(state, saved, space, rounds)
    result.facts["ls"] = time_ls(saved["ckptstore auto"], rounds=rounds)
    del state, tensors
    result.tables["peak memory of a save"] = peak_of_saves(
        saved["torch.save"] / "state.pt", space, peaks
    )
    return result


# --- saves ------------------------------------------------------------------------------------


def _saves(state: State, space: Workspace, rounds: int) -> list[Measured]:
    size = state_bytes(state)
    cases = [_peer_save(peer, state, size) for peer in PEERS]
    cases += [_store_save(state, size, codec) for codec in _CODECS]
    kept = _Kept(state, space)
    cases += [kept.unchanged(size), kept.one_changed(size)]
    try:
        rows = run_cases("save", cases, space, rounds=rounds)
    finally:
        kept.close()
    for row in rows:
        if row.name == "ckptstore auto" and "auto_planes" in row.numbers:
            row.note = f"chose {'planes' if row.numbers['auto_planes'] else 'raw'}"
    return rows


def _peer_save(peer: Peer, state: State, size: int) -> Case:
    return Case(
        name=peer.name,
        run=lambda folder: peer.save(state, folder),
        after=lambda folder, _: {"stored_bytes": tree_bytes(folder)},
        logical_bytes=size,
    )


def _store_save(state: State, size: int, codec: str) -> Case:
    """Return the case of a first save into a new store, which is open as in a training loop."""
    stores: list[ckptstore.Store] = []

    def prepare(folder: Path) -> None:
        stores.append(ckptstore.open(folder / "store", create=True, codec=codec))

    def after(folder: Path, version: object) -> Mapping[str, float]:
        stores.pop().close()
        return {"stored_bytes": tree_bytes(folder), **_receipt(version)}

    return Case(
        name=f"ckptstore {codec}",
        prepare=prepare,
        run=lambda _: stores[-1].run(_RUN).save(state, step=1),
        after=after,
        logical_bytes=size,
    )


def _receipt(version: object) -> Mapping[str, float]:
    """Return the figures that a save reports."""
    if not isinstance(version, ckptstore.Version):
        msg = f"a save returned {version!r}"
        raise TypeError(msg)
    return version.receipt


class _Kept:
    """A store that stays open over all rounds, for saves that follow another save."""

    def __init__(self, state: State, space: Workspace) -> None:
        self._state = state
        self._folder = space.fresh()
        self._stores = {
            name: ckptstore.open(self._folder / name, create=True) for name in ("same", "changed")
        }
        for store in self._stores.values():
            store.run(_RUN).save(state, step=0)
        self._changed = state
        self._step = 0

    def close(self) -> None:
        """Close the stores."""
        for store in self._stores.values():
            store.close()

    def unchanged(self, size: int) -> Case:
        """Return the case of saving the same state again."""
        return self._case("same", "ckptstore auto, nothing changed", lambda: self._state, size)

    def one_changed(self, size: int) -> Case:
        """Return the case of a save in which one fp32 tensor differs from the save before."""
        path = "blocks.0.up.weight"

        def change() -> State:
            self._step += 1
            masters = dict(self._state["optimizer"]["master"])
            masters[path] = masters[path] * (1 + self._step / 64)
            return {**self._state, "optimizer": {**self._state["optimizer"], "master": masters}}

        nbytes = self._state["optimizer"]["master"][path].nbytes
        note = f"the tensor has {nbytes / 1e6:.1f} MB"
        return self._case("changed", "ckptstore auto, one tensor changed", change, size, note)

    def _case(
        self, store: str, name: str, next_state: Callable[[], State], size: int, note: str = ""
    ) -> Case:
        run = self._stores[store].run(_RUN)
        pending: list[Any] = []

        def prepare(_: Path) -> None:
            pending[:] = [next_state(), tree_bytes(self._folder / store)]

        def after(_: Path, version: object) -> Mapping[str, float]:
            added = tree_bytes(self._folder / store) - pending[1]
            return {"stored_bytes": added, **_receipt(version)}

        return Case(
            name=name,
            prepare=prepare,
            run=lambda _: run.save(pending[0], step=1),
            after=after,
            folder=self._folder,
            logical_bytes=size,
            note=note,
        )


# --- loads ------------------------------------------------------------------------------------


def _saved_once(state: State, space: Workspace) -> dict[str, Path]:
    """Save the state once in every way; return the folders by name. A peer that fails is absent."""
    saved: dict[str, Path] = {}
    for peer in PEERS:
        folder = space.fresh()
        try:
            peer.save(state, folder)
        except FAILURES as error:
            say(f"{peer.name} does not save: {error}")
            continue
        saved[peer.name] = folder
    for codec in _CODECS:
        folder = space.fresh()
        with ckptstore.open(folder, create=True, codec=codec) as store:
            store.run(_RUN).save(state, step=1)
        saved[f"ckptstore {codec}"] = folder
    return saved


def _loads(
    state: State, saved: dict[str, Path], space: Workspace, rounds: int, *, cold: bool
) -> list[Measured]:
    """Time whole loads, first into new memory, then into tensors that exist."""
    size = state_bytes(state)
    target = empty_like(state)
    cases: list[Case] = []

    def add(name: str, folder: Path, load: Callable[[Path], object], note: str = "") -> None:
        cases.append(
            Case(
                name=name,
                prepare=lambda path: chill(path) if cold else warm(path),
                run=load,
                after=_check_against(state),
                folder=folder,
                writes=False,
                logical_bytes=size,
                note=note,
            )
        )

    for peer in (*PEERS, TORCH_MMAP):
        folder = saved.get(peer.name)
        if folder is None:
            continue
        name = "torch.load" if peer.name == "torch.save" else peer.name
        if peer.load is not None:
            how, note = ("mapped", "read, not copied") if peer.mapped else ("new", "")
            add(f"{name}, {how}", folder, touched(peer.load), note)
        if peer.load_into is not None:
            add(f"{name}, into", folder, _into(peer.load_into, target))
    for name in (f"ckptstore {codec}" for codec in _CODECS):
        add(f"{name}, new", saved[name], touched(_store_load), "verified")
        add(f"{name}, into", saved[name], _into(_store_load_into, target), "verified")
    return run_cases("load cold" if cold else "load warm", cases, space, rounds=rounds)


def _into(load: Callable[[Path, State], object], target: State) -> Callable[[Path], object]:
    return lambda folder: load(folder, target)


def _store_load(folder: Path) -> object:
    with ckptstore.open(folder, read_only=True) as store:
        return store.load(f"{_RUN}@latest")


def _store_load_into(folder: Path, state: State) -> object:
    with ckptstore.open(folder, read_only=True) as store:
        return store.load(f"{_RUN}@latest", into=state)


def _check_against(state: State) -> Callable[[Path, object], Mapping[str, float]]:
    """Return a check that runs once a case: the first load equals the state, bit for bit."""
    checked: list[bool] = []

    def check(_: Path, loaded: object) -> Mapping[str, float]:
        if not checked:
            checked.append(True)
            if not same(state, loaded):
                msg = "what was loaded is not what was saved"
                raise AssertionError(msg)
        return {}

    return check


# --- one row ----------------------------------------------------------------------------------


def _rows(state: State, saved: dict[str, Path], space: Workspace, rounds: int) -> list[Measured]:
    """Time reading one row of a large tensor from a cold cache, with nothing open before."""
    expected = dict(flat_tensors(state))[_LARGE][_ROW].clone()
    readers: dict[str, tuple[Path, Callable[[Path, str, int], torch.Tensor]]] = {
        peer.name: (saved[peer.name], peer.row)
        for peer in PEERS
        if peer.row is not None and peer.name in saved
    }
    for name in (f"ckptstore {codec}" for codec in _CODECS):
        readers[name] = (saved[name], _store_row)
    cases = [_row_case(name, folder, read, expected) for name, (folder, read) in readers.items()]
    return run_cases("one row", cases, space, rounds=rounds)


def _row_case(
    name: str, folder: Path, read: Callable[[Path, str, int], torch.Tensor], expected: torch.Tensor
) -> Case:
    before = [0]

    def prepare(path: Path) -> None:
        chill(path)
        before[0] = disk_reads()

    def after(_: Path, row: object) -> Mapping[str, float]:
        if not isinstance(row, torch.Tensor) or not torch.equal(row, expected):
            msg = "the row is not the one that was saved"
            raise AssertionError(msg)
        return {"read_bytes": disk_reads() - before[0]}

    return Case(
        name=name,
        prepare=prepare,
        run=lambda path: read(path, _LARGE, _ROW),
        after=after,
        folder=folder,
        writes=False,
        logical_bytes=expected.nbytes,
    )


def _store_row(folder: Path, path: str, row: int) -> torch.Tensor:
    with ckptstore.open(folder, read_only=True) as store:
        found: torch.Tensor = store.version(f"{_RUN}@latest")[path][row]
    return found
