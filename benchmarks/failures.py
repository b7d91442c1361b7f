"""Failures, and each tool's outcome: every row is provoked live and then described.

The rows are outcomes, not timings. Each gives the observation, in words that follow from counts
taken in this run; none is copied from reports about other runs.
"""

from __future__ import annotations

import errno
import os
import pickle
import resource
import signal
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import ckptstore
from benchmarks import peers
from benchmarks.disk import Workspace
from benchmarks.host import header
from benchmarks.http_failures import failures_over_http
from benchmarks.killed_saves import killed_saves
from benchmarks.measure import FAILURES, Result, say
from benchmarks.outcomes import Row, counted, row_of_saves, threads_may_die
from benchmarks.peers import PEERS, Peer, empty_like
from benchmarks.states import State, same, seeded_tensors

__all__ = ["run"]

_MIB = 1 << 20
_RUN = "bench"
_TRIES = 10
_FLIPS = 60


def run(space: Workspace, *, flips: int = _FLIPS, tries: int = _TRIES) -> Result:
    """Provoke all failures; return the rows as fact ``rows``.

    Parameters
    ----------
    flips
        Single-bit flips a tool.
    tries
        Saves for faults that depend on which thread is hit.
    """
    peers.quiet()
    rows: list[Row] = []
    parts: list[tuple[str, Callable[[], list[Row]]]] = [
        ("full disk in a writer thread", lambda: _no_space(space, tries)),
        ("file size limit in a writer thread", lambda: _size_limit(space, tries)),
        ("errors over HTTP", lambda: failures_over_http(space, tries=tries)),
        ("bit flips", lambda: _bit_flips(space, flips)),
        ("killed while saving over a checkpoint", lambda: killed_saves(space)),
        ("a pickle in the place of metadata", lambda: _pickles(space)),
    ]
    for name, part in parts:
        rows += part()
        say(f"failures: {name}")
    return Result(
        benchmark="failures",
        header=header(space.root),
        parameters={"flips": flips, "tries": tries},
        facts={"rows": [asdict(row) for row in rows]},
    )


# --- a writer thread fails --------------------------------------------------------------------


def _no_space(space: Workspace, tries: int) -> list[Row]:
    """Make the disk full for every thread but the main one."""
    fault = "ENOSPC in threads that the saver started"
    state = seeded_tensors(1)
    outcomes: Counter[str] = Counter()
    for _ in range(tries):
        with _full_for_threads():
            outcomes[_dcp_outcome(state, space.fresh(), threads=4)] += 1
    rows = [row_of_saves(fault, "DCP, 4 threads", outcomes)]
    outcomes = Counter(_store_without_space(state, space.fresh()) for _ in range(tries))
    return [*rows, row_of_saves(fault, "ckptstore", outcomes)]


@contextmanager
def _full_for_threads() -> Iterator[None]:
    """Make DCP's file system raise ENOSPC when a thread other than the main one opens a file."""
    genuine = FileSystem.create_stream

    def full(self: FileSystem, path: Any, mode: str) -> Any:  # noqa: ANN401 - DCP's own types
        if threading.current_thread() is not threading.main_thread():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return genuine(self, path, mode)

    with patch.object(FileSystem, "create_stream", full), threads_may_die():
        yield


def _dcp_outcome(state: State, folder: Path, *, threads: int) -> str:
    """Save with DCP and load again; return the outcome."""
    try:
        dcp_save(state, storage_writer=FileSystemWriter(folder, thread_count=threads), no_dist=True)
    except FAILURES:
        return "raised"
    target = empty_like(state)
    try:
        dcp_load(target, storage_reader=FileSystemReader(folder), no_dist=True)
    except FAILURES:
        return "returned success, cannot be loaded"
    return "returned success, loads" if same(state, target) else "returned success, loads wrong"


def _store_without_space(state: State, folder: Path) -> str:
    """Save with ckptstore while its files of data cannot grow; return the outcome."""
    with ckptstore.open(folder, create=True) as store:
        run = store.run(_RUN)
        run.save({"step": 0}, step=0)
        with patch("os.writev", side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))):
            try:
                run.save(state, step=1)
            except ckptstore.CkptStoreError:
                return "raised" if len(run.versions()) == 1 else "raised, but a version appeared"
    return "returned success, cannot be loaded"


def _size_limit(space: Workspace, tries: int) -> list[Row]:
    """Make the kernel refuse files beyond 8 MiB (``ulimit -f``): no tool is patched."""
    fault = "file size limit (ulimit -f) hit by one of two files"
    generator = torch.Generator().manual_seed(2)
    large = torch.randn(16 * _MIB // 4, generator=generator)
    state: State = {"model": {"large": large, "small": torch.randn(1 << 16, generator=generator)}}
    outcomes: Counter[str] = Counter()
    stored: Counter[str] = Counter()
    with _files_up_to(8 * _MIB), threads_may_die():
        for _ in range(tries):
            outcomes[_dcp_outcome(state, space.fresh(), threads=2)] += 1
            stored[_store_outcome(state, space.fresh())] += 1
    return [
        row_of_saves(fault, "DCP, 2 threads", outcomes),
        row_of_saves(fault, "ckptstore", stored),
    ]


@contextmanager
def _files_up_to(size: int) -> Iterator[None]:
    """Limit the size of files that this process writes, in bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def _store_outcome(state: State, folder: Path) -> str:
    with ckptstore.open(folder, create=True) as store:
        run = store.run(_RUN)
        run.save({"step": 0}, step=0)
        try:
            run.save(state, step=1, codec="raw")
        except ckptstore.CkptStoreError:
            return "raised" if len(run.versions()) == 1 else "raised, but a version appeared"
        loads = same(state, run.load())
    return "returned success, loads" if loads else "returned success, loads wrong"


# --- bit flips --------------------------------------------------------------------------------


def _store_save(state: State, folder: Path) -> None:
    with ckptstore.open(folder, create=True) as store:
        store.run(_RUN).save(state, step=1)


def _store_load(folder: Path) -> object:
    with ckptstore.open(folder, read_only=True) as store:
        return store.load(f"{_RUN}@latest")


_STORE = Peer(name="ckptstore", save=_store_save, load=_store_load)
# Files that hold tensors. Other files of the peers are left alone: flipping bits of a pickle and
# unpickling it would be another experiment.
_DATA = ("*.pt", "*.safetensors", "*.distcp", "*.pack", "snapshot/**/[!.]*")


def _bit_flips(space: Workspace, flips: int) -> list[Row]:
    """Flip one bit of the files with data, load, flip it back, and repeat."""
    state = seeded_tensors(3, count=6, elements=50_000)
    rows = []
    for peer in (*PEERS, _STORE):
        folder = space.fresh()
        peer.save(state, folder)
        found = {path for pattern in _DATA for path in folder.rglob(pattern) if path.is_file()}
        rows.append(_flip_all(peer, state, folder, sorted(found), flips, "of a file with data"))
        if peer is _STORE:
            every = sorted(path for path in folder.rglob("*") if path.is_file())
            rows.append(_flip_all(peer, state, folder, every, flips, "of any file"))
    return rows


def _flip_all(
    peer: Peer, state: State, folder: Path, files: Sequence[Path], flips: int, where: str
) -> Row:
    draws = np.random.default_rng(4)
    sizes = np.array([path.stat().st_size for path in files], np.float64)
    outcomes: Counter[str] = Counter()
    for turn in range(flips):
        if where == "of any file":  # each file in turn, or the large ones would get all
            path = files[turn % len(files)]
        else:
            path = files[int(draws.choice(len(files), p=sizes / sizes.sum()))]
        place, bit = int(draws.integers(path.stat().st_size)), int(draws.integers(8))
        _flip(path, place, bit)
        outcomes[_load_outcome(peer, state, folder)] += 1
        _flip(path, place, bit)
    return Row(
        fault=f"one bit flipped {where}",
        tool=peer.name,
        observed=counted(outcomes),
        silent="loads wrong values" in outcomes,
    )


def _flip(path: Path, place: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0] ^ (1 << bit)
        file.seek(place)
        file.write(bytes([byte]))


def _load_outcome(peer: Peer, state: State, folder: Path) -> str:
    try:
        if peer.load is not None:
            loaded = peer.load(folder)
        elif peer.load_into is not None:
            loaded = peer.load_into(folder, empty_like(state))
        else:
            raise TypeError(peer.name)
        right = same(state, loaded)
    except FAILURES:
        return "raises"
    return "loads right values" if right else "loads wrong values"


# --- pickles ----------------------------------------------------------------------------------


class _Hostile:
    """Makes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Callable[..., object], tuple[Path]]:
        return Path.touch, (self._mark,)


def _pickles(space: Workspace) -> list[Row]:
    """Replace each tool's own records by a pickle that runs code; then load."""
    state = seeded_tensors(7)
    folder, mark = space.fresh(), space.fresh() / "executed"
    hostile = pickle.dumps(_Hostile(mark))
    (folder / "state.pt").write_bytes(hostile)
    dcp_save(state, storage_writer=FileSystemWriter(folder / "dcp"), no_dist=True)
    (folder / "dcp" / ".metadata").write_bytes(hostile)
    _store_save(state, folder / "store")
    for manifest in (folder / "store").rglob("*.manifest"):
        manifest.write_bytes(hostile)
    reader = FileSystemReader(folder / "dcp")
    loads: dict[str, Callable[[], object]] = {
        "torch.load(weights_only=True)": lambda: torch.load(folder / "state.pt", weights_only=True),
        "DCP, .metadata": lambda: dcp_load(empty_like(state), storage_reader=reader, no_dist=True),
        "ckptstore, manifest": lambda: _store_load(folder / "store"),
    }
    return [_after_pickle(tool, load, mark) for tool, load in loads.items()]


def _after_pickle(tool: str, load: Callable[[], object], mark: Path) -> Row:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            load()
        ended = "loads"
    except FAILURES as error:
        ended = f"raises {type(error).__name__}"
    executed = mark.exists()
    mark.unlink(missing_ok=True)
    what = "the code in it was executed" if executed else "nothing was executed"
    return Row(
        fault="a pickle that runs code, in the place of the file",
        tool=tool,
        observed=f"{what}; {ended}",
        silent=executed,
    )
