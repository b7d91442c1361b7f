"""Saves from a GPU and loads to it: their time, and how long a save in the background stalls.

All values are on the current CUDA device, which is synchronized before the clock starts and before
it stops. Without such a device the suite prints a line and has no result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save

import ckptstore
from benchmarks import peers
from benchmarks.disk import Workspace, warm
from benchmarks.host import header
from benchmarks.measure import Case, Measured, Result, run_cases, say
from benchmarks.peers import PEERS, empty_like
from benchmarks.states import State, StateSpec, flat_tensors, make_state, same, state_bytes
from benchmarks.workloads import save_case, store_save
from ckptstore.saver.pending import PendingSave

__all__ = ["run"]

_RUN = "bench"
_ENGINES = ("thread", "process")
_CODECS = ("raw", "planes")
_PEERS = tuple(peer for peer in PEERS if peer.name in ("torch.save", "safetensors", "DCP"))


def run(
    space: Workspace, *, bytes_min: int, rounds: int, training_steps: int = 120
) -> Result | None:
    """Run everything; return the tables ``save``, ``stall`` and ``load``.

    Parameters
    ----------
    bytes_min
        The state has at least this many bytes of tensors.
    rounds
        Counted rounds of each case.
    """
    if not torch.cuda.is_available():
        say("gpu: left out, for there is no CUDA device")
        return None
    peers.quiet()
    head = header(space.root)
    say(f"gpu: making a state of {bytes_min / 1e9:.2f} GB")
    host = make_state(StateSpec(bytes_min=bytes_min, training_steps=training_steps))
    state = _moved(host, "cuda")
    size = state_bytes(state)
    result = Result(
        benchmark="gpu",
        header=head,
        parameters={
            "state_bytes": size,
            "tensors": len(list(flat_tensors(state))),
            "rounds": rounds,
            "device": torch.cuda.get_device_name(),
            "cuda": torch.version.cuda,
        },
    )
    saves = [save_case(peer.name, peer.save, state) for peer in _PEERS]
    saves += [store_save(state, codec) for codec in _CODECS]
    result.tables["save"] = run_cases("save", saves, space, rounds=rounds)
    result.tables["stall"] = _stalls(state, size, space, rounds)
    result.tables["load"] = _loads(host, state, size, space, rounds)
    return result


def _moved(state: Any, device: str) -> Any:  # noqa: ANN401 - a state of the same shape
    if isinstance(state, torch.Tensor):
        return state.to(device)
    if isinstance(state, Mapping):
        return {key: _moved(value, device) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(_moved(value, device) for value in state)
    return state


def _synced(work: Callable[[Path], object]) -> Callable[[Path], object]:
    """Return a call whose time includes what it queued on the device."""

    def run(folder: Path) -> object:
        found = work(folder)
        torch.cuda.synchronize()
        return found

    return run


# --- the stall of a save in the background --------------------------------------------------------


def _stalls(state: State, size: int, space: Workspace, rounds: int) -> list[Measured]:
    """Time the calls; a training goes on, and may change the state, when they have returned."""
    pinned = _pinned(state)

    def copy() -> None:
        for (_, source), (_, target) in zip(flat_tensors(state), flat_tensors(pinned), strict=True):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    def dcp(folder: Path) -> object:
        writer = FileSystemWriter(folder, sync_files=True, thread_count=2)
        return dcp_async_save(state, storage_writer=writer, no_dist=True)

    def dcp_end(_: Path, future: object) -> Mapping[str, float]:
        assert isinstance(future, Future)  # noqa: S101 - the default stager's answer
        future.result()
        return {}

    stores = {
        engine: ckptstore.open(space.fresh(), create=True, engine=engine) for engine in _ENGINES
    }
    began = [0.0]

    def case(engine: str, stage: Any) -> Case:  # noqa: ANN401 - a literal
        def save(_: Path) -> object:
            began[0] = time.perf_counter()
            return stores[engine].run(_RUN).save_async(state, step=1, stage=stage)

        def end(_: Path, pending: object) -> Mapping[str, float]:
            assert isinstance(pending, PendingSave)  # noqa: S101 - what save_async returned
            pending.wait_staged()
            staged_s = time.perf_counter() - began[0]
            pending.result()
            return {"staged_s": staged_s, "durable_s": time.perf_counter() - began[0]}

        return Case(
            name=f"ckptstore, {engine}, stage={stage}",
            prepare=lambda _: _touch(state),
            run=save,
            after=end,
            logical_bytes=size,
        )

    cases = [
        Case(name="copy to pinned memory", run=lambda _: copy(), logical_bytes=size),
        Case(name="copy to new memory", run=lambda _: _moved(state, "cpu"), logical_bytes=size),
        Case(name="DCP async_save", run=dcp, after=dcp_end, logical_bytes=size),
    ]
    cases += [case(engine, stage) for engine in _ENGINES for stage in ("now", "background")]
    try:
        return run_cases("stall", cases, space, rounds=rounds)
    finally:
        for store in stores.values():
            store.close()


def _pinned(state: State) -> Any:  # noqa: ANN401 - a state of the same shape
    found = _moved(state, "cpu")
    return {path: tensor.pin_memory() for path, tensor in flat_tensors(found)}


def _touch(state: State) -> None:
    """Change an element of every piece of 4 MiB, so that nothing is shared with earlier saves."""
    for _, tensor in flat_tensors(state):
        if tensor.numel() > 1:
            tensor.reshape(-1).view(torch.uint8)[:: 1 << 19] ^= 1
    torch.cuda.synchronize()


# --- loads ----------------------------------------------------------------------------------------


def _loads(host: State, state: State, size: int, space: Workspace, rounds: int) -> list[Measured]:
    """Time loads of files that are in the page cache."""
    target = empty_like(state)
    del state
    cases: list[Case] = []

    def add(name: str, folder: Path, load: Callable[[Path], object]) -> None:
        checked: list[bool] = []

        def check(_: Path, loaded: object) -> Mapping[str, float]:
            if not checked and not same(host, _moved(loaded, "cpu")):
                msg = "what was loaded is not what was saved"
                raise AssertionError(msg)
            checked.append(True)
            return {}

        cases.append(
            Case(
                name=name,
                prepare=warm,
                run=_synced(load),
                after=check,
                folder=folder,
                writes=False,
                logical_bytes=size,
            )
        )

    for peer in _PEERS:
        folder = space.fresh()
        peer.save(host, folder)
        if peer.name == "torch.save":
            add("torch.load, new", folder, lambda path: _torch_load(path, mmap=False))
            add("torch.load, mmap, new", folder, lambda path: _torch_load(path, mmap=True))
        elif peer.name == "safetensors":
            file = next(folder.glob("*.safetensors")).name
            add("safetensors, new (its tensors alone)", folder, partial(_safetensors_load, file))
        elif peer.load_into is not None:
            add(f"{peer.name}, into", folder, partial(_given, peer.load_into, target))
    for codec in _CODECS:
        folder = space.fresh()
        with ckptstore.open(folder, create=True, codec=codec) as store:
            store.run(_RUN).save(host, step=1)
        add(f"ckptstore {codec}, new", folder, lambda path: _store_load(path, map_location="cuda"))
        add(f"ckptstore {codec}, into", folder, lambda path: _store_load(path, into=target))
    return run_cases("load", cases, space, rounds=rounds)


def _safetensors_load(file: str, folder: Path) -> object:
    return load_file(folder / file, device="cuda")


def _given(load_into: Callable[[Path, State], object], target: State, folder: Path) -> object:
    return load_into(folder, target)


def _torch_load(folder: Path, *, mmap: bool) -> object:
    return torch.load(folder / "state.pt", map_location="cuda", mmap=mmap, weights_only=True)


def _store_load(folder: Path, **options: Any) -> object:  # noqa: ANN401 - of Store.load
    with ckptstore.open(folder, read_only=True) as store:
        return store.load(f"{_RUN}@latest", **options)
