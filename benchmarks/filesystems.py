"""Saves and loads of one state on CephFS and on NFS, which the storage laboratory starts.

Needs root on Debian 12 (``tests/lab``); systems that do not start are left out with a message.
CephFS is one node with a ceph-fuse mount, all on this machine. NFS is a Linux server and a Linux
client, each a small host of its own (user-mode Linux, one processor), in which Python runs: its
figures are those of that host, and compare only with each other.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

import ckptstore
from benchmarks import peers
from benchmarks.disk import Workspace, workspace
from benchmarks.host import header
from benchmarks.measure import Case, Measured, Result, run_cases, say
from benchmarks.peers import PEERS, empty_like
from benchmarks.states import State, StateSpec, make_state, state_bytes
from benchmarks.workloads import load_case, loader, save_case, store_load, store_save

__all__ = ["measure", "run"]

_REPO = Path(__file__).resolve().parent.parent
_LAB = _REPO / "tests" / "kits"
_PEERS = ("torch.save", "safetensors", "DCP", "torch_checkpointing")
_CODECS = ("auto", "planes", "raw")
_RUN = "bench"
_MARK = "measured: "
_GUEST_MEMORY = "3072M"


def run(
    space: Workspace,
    *,
    bytes_min: int,
    guest_bytes_min: int,
    rounds: int,
    training_steps: int = 120,
    systems: Sequence[str] = ("CephFS", "NFS"),
) -> Result | None:
    """Run everything; return the tables ``SYSTEM: save`` and ``SYSTEM: load``.

    Parameters
    ----------
    bytes_min, guest_bytes_min
        The state has at least this many bytes on CephFS, and on NFS.
    rounds
        Counted rounds of each case.
    systems
        Names of the systems to start.

    Returns
    -------
    Result or None
        None if this machine can start none of them.
    """
    peers.quiet()
    if os.geteuid() != 0:
        say("filesystems: needs root: left out")
        return None
    result = Result(
        benchmark="filesystems",
        header=header(space.root),
        parameters={"rounds": rounds, "training_steps": training_steps},
    )
    starts = {
        "CephFS": partial(_ceph, space, bytes_min, rounds, training_steps),
        "NFS": partial(_nfs, space, guest_bytes_min, rounds, training_steps),
    }
    for system in systems:
        try:
            tables = starts[system]()
        except (OSError, RuntimeError, _lab_error()) as error:
            say(f"filesystems: {system} is left out: {error}")
            continue
        result.tables |= {f"{system}: {name}": rows for name, rows in tables.items()}
    return result if result.tables else None


def measure(
    state: State, space: Workspace, rounds: int, *, label: str = ""
) -> dict[str, list[Measured]]:
    """Return the tables ``save`` and ``load`` of a state in a workspace on any file system."""
    chosen = [peer for peer in PEERS if peer.name in _PEERS]
    cases = [save_case(peer.name, peer.save, state) for peer in chosen]
    cases += [store_save(state, codec) for codec in _CODECS]
    saves = run_cases(f"{label} save", cases, space, rounds=rounds)
    target = empty_like(state)
    loads: list[Case] = []
    folders: list[Path] = []
    for peer in chosen:
        folders.append(space.fresh())
        peer.save(state, folders[-1])
        loads.append(load_case(peer.name, loader(peer, target), folders[-1], state, cold=True))
    for codec in _CODECS:
        folders.append(space.fresh())
        with ckptstore.open(folders[-1], create=True, codec=codec) as store:
            store.run(_RUN).save(state, step=1)
        load = partial(store_load, target=target)
        loads.append(load_case(f"ckptstore {codec}", load, folders[-1], state, cold=True))
    tables = {"save": saves, "load": run_cases(f"{label} load", loads, space, rounds=rounds)}
    for folder in folders:
        space.discard(folder)
    return tables


# --- the systems --------------------------------------------------------------------------------


def _systems() -> Any:  # noqa: ANN401 - a module of the laboratory, which is not installed
    if str(_LAB) not in sys.path:
        sys.path.insert(0, str(_LAB))
    from labkit import systems

    return systems


def _lab_error() -> type[Exception]:
    error: type[Exception] = _systems().LabError
    return error


def _ceph(
    space: Workspace, bytes_min: int, rounds: int, steps: int
) -> Mapping[str, list[Measured]]:
    """Measure on a ceph-fuse mount of a cluster of one node."""
    state = make_state(StateSpec(bytes_min=bytes_min, training_steps=steps))
    say(f"filesystems: CephFS, {state_bytes(state) / 1e6:.0f} MB")
    ceph = _systems().Ceph(space.root / "ceph")
    ceph.start()
    try:
        with workspace(ceph.mounts[0]) as mounted:
            return measure(state, mounted, rounds, label="CephFS")
    finally:
        ceph.stop()


def _nfs(space: Workspace, bytes_min: int, rounds: int, steps: int) -> Mapping[str, list[Measured]]:
    """Measure on a client with a kernel of its own; the state reaches it as a file."""
    state = make_state(StateSpec(bytes_min=bytes_min, training_steps=steps))
    say(f"filesystems: NFS 4.2, {state_bytes(state) / 1e6:.0f} MB")
    file = space.fresh() / "state.pt"
    torch.save(state, file)
    nfs = _systems().Nfs(space.root / "nfs", VERSION="4.2", CLIENT_MEMORY=_GUEST_MEMORY)
    nfs.start()
    try:
        said = nfs.tell(
            *("exec", "c1", "env", "-C", str(_REPO), sys.executable, "-m"),
            *("benchmarks.filesystems", nfs.mount, str(file), str(rounds)),
            timeout_s=900,
        )
    finally:
        nfs.stop()
    line = next(line for line in said.splitlines() if line.startswith(_MARK))
    found = json.loads(line.removeprefix(_MARK))
    return {name: [Measured(**row) for row in rows] for name, rows in found.items()}


def _in_guest(mount: str, file: str, rounds: int) -> None:
    """Measure below a mount point of the host that this runs in, and print the tables."""
    peers.quiet()
    state = torch.load(file, weights_only=True)
    with workspace(Path(mount)) as space:
        tables = measure(state, space, rounds, label="NFS")
    print(
        _MARK + json.dumps({name: [asdict(row) for row in rows] for name, rows in tables.items()})
    )


if __name__ == "__main__":
    _in_guest(sys.argv[1], sys.argv[2], int(sys.argv[3]))
