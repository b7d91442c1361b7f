"""The catalog under load: several committing processes, very many versions, tiny tensors."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

import msgspec
import torch

import ckptstore
from benchmarks import lifecycle, peers
from benchmarks.command_line import time_ls
from benchmarks.disk import Workspace, tree_bytes
from benchmarks.host import header
from benchmarks.measure import FAILURES, Case, Measured, Result, run_cases, say
from benchmarks.peers import PEERS, Peer
from benchmarks.states import State
from ckptstore.catalog import run_ops, snapshots
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.commits import FORMAT, MAGIC, Commit, CommitBody, encode_commit, extended
from ckptstore.catalog.run_ops import Save
from ckptstore.format.fields import ManifestPointer
from ckptstore.format.keys import manifest_key
from ckptstore.model import RoleBytes

__all__ = ["fill_log", "run"]

_REPO = Path(__file__).resolve().parent.parent
_PROCESSES = (1, 2, 4, 8)
_RUNS = 50
_BATCH = 1000


def run(
    space: Workspace,
    *,
    versions: int,
    tensors: int,
    commits: int,
    rounds: int,
    chunks: int,
    histories: Sequence[tuple[int, int]],
    processes: Sequence[int] = _PROCESSES,
) -> Result:
    """Run everything; return the tables of :mod:`benchmarks.lifecycle` and of this module.

    Parameters
    ----------
    versions
        In the store that is opened and listed.
    tensors
        Of 64 bytes each, in the state with tiny tensors.
    commits
        That the processes of one round make together.
    chunks
        Of 4 MiB each, in the version that is forked.
    histories
        Versions ever saved, and versions alive, in the stores that are collected.
    processes
        How many commit at the same time, case by case.
    """
    peers.quiet()
    result = Result(
        benchmark="catalog",
        header=header(space.root),
        parameters={
            "versions": versions,
            "tiny_tensors": tensors,
            "commits": commits,
            "rounds": rounds,
            "tail": _tail(versions),
            "chunks_of_the_fork": chunks,
        },
    )
    result.tables["commits"] = _commits(space, commits, rounds, processes)
    result.tables["tiny tensors"] = _tiny(space, tensors, rounds)
    folder = space.fresh()
    began = time.perf_counter()
    fill_log(folder, versions)
    say(f"catalog: wrote {versions} commits in {time.perf_counter() - began:.0f} s")
    result.tables["many versions"] = _many(space, folder, versions, rounds)
    result.facts["ls"] = time_ls(folder, rounds=rounds)
    result.facts["cold ls"] = lifecycle.cold_ls(folder)
    result.facts["ls after a snapshot"] = time_ls(folder, rounds=rounds)
    result.facts["log_bytes"] = tree_bytes(folder / "commits")
    result.facts["snapshot_bytes"] = max(
        path.stat().st_size for path in (folder / "snapshots").iterdir()
    )
    space.discard(folder)
    result.tables["fork"] = lifecycle.fork_of_a_terabyte(space, chunks=chunks, rounds=rounds)
    result.tables["collections"] = lifecycle.collections(histories, rounds=min(rounds, 3))
    return result


def _tail(versions: int) -> int:
    """Return how many commits may follow the newest catalog snapshot at this length, at most.

    All of them have to be read one by one.
    """
    return min(snapshots.period(versions) - 1, versions // 2)


# --- commits by several processes -------------------------------------------------------------


def _commits(space: Workspace, commits: int, rounds: int, crews: Sequence[int]) -> list[Measured]:
    """Time the same number of durable commits by crews of several processes at once."""
    cases = []
    for processes in crews:
        crew = _Crew(processes, commits // processes)
        name = f"{processes} process{'es' if processes > 1 else ''}"
        cases.append(Case(name=name, prepare=crew.start, run=crew.work, after=crew.check))
    return run_cases("commits", cases, space, rounds=rounds)


class _Crew:
    """Processes that commit into one store at the same time, once they are told to begin."""

    def __init__(self, processes: int, each: int) -> None:
        self._processes = processes
        self._each = each
        self._members: list[subprocess.Popen[str]] = []

    def start(self, folder: Path) -> None:
        """Make a store with one version, start the processes and wait until all have opened it."""
        with ckptstore.open(folder / "store", create=True) as store:
            store.run("shared").save({"step": 0}, step=0)
        for member in range(self._processes):
            command = [sys.executable, "-m", "benchmarks.committer", str(folder / "store")]
            command += [f"m{member}", str(self._each)]
            self._members.append(
                subprocess.Popen(
                    command, cwd=_REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
            )
        for process in self._members:
            assert process.stdout is not None  # noqa: S101 - asked for above
            process.stdout.readline()

    def work(self, _: Path) -> None:
        """Let all begin; return when all have ended."""
        for process in self._members:
            assert process.stdin is not None  # noqa: S101 - asked for above
            process.stdin.write("go\n")
            process.stdin.flush()
        for process in self._members:
            assert process.stdout is not None  # noqa: S101 - asked for above
            process.stdout.readline()

    def check(self, folder: Path, _: object) -> Mapping[str, float]:
        """Count the commits: none is missing."""
        for process in self._members:
            process.communicate()
        self._members.clear()
        with ckptstore.open(folder / "store", read_only=True) as store:
            found = store.repo.refresh().number
        expected = 1 + self._processes * self._each
        if found != expected:
            msg = f"{found} commits are in the log, not {expected}"
            raise AssertionError(msg)
        return {"commits": found - 1}


# --- a hundred thousand versions --------------------------------------------------------------


def fill_log(folder: Path, versions: int) -> None:
    """Make a store whose log is as if this many versions had been saved, without their data.

    The commits are the ones that saves would have written, one version each, over 50 runs; they
    are written as plain files, and the catalog snapshot where a writer would have left it.
    """
    ckptstore.open(folder, create=True).close()
    (folder / "snapshots").mkdir(exist_ok=True)
    catalog, pending = Catalog(), cast("list[Commit]", [])
    previous = ""
    heads: dict[str, str] = {}
    tail = _tail(versions)
    for number in range(1, versions + 1):
        commit, data = _commit_of(catalog, number, previous, heads)
        path = folder / commit.key
        if number % _BATCH < 2:
            path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        previous = commit.digest
        pending.append(commit)
        if number == versions - tail or len(pending) == _BATCH or number <= _RUNS:
            catalog, error = extended(catalog, pending)
            if error is not None:
                raise error
            pending.clear()
        if number == versions - tail:
            with ckptstore.open(folder) as store:
                snapshots.write(store.repo.backend, catalog)


def _commit_of(
    catalog: Catalog, number: int, previous: str, heads: dict[str, str]
) -> tuple[Commit, bytes]:
    """Return the commit of one version, and its bytes."""
    run, version = f"run-{number % _RUNS:02d}", f"{number * 0x9E3779B97F4A7C15 % 2**128:032x}"
    ops = run_ops.save(
        catalog,
        run=run,
        version=version,
        step=number // _RUNS * 100,
        manifest=ManifestPointer(key=manifest_key(version), stored_bytes=40_000, digest="1" * 64),
        content=f"{number:064x}",
        directions={"val_loss": "min"},
        metrics={"val_loss": 2.0 + 1000.0 / (number + 1000)},
        roles={
            "weights": RoleBytes(logical=10**9, new=10**9, stored=650_000_000),
            "optimizer": RoleBytes(logical=6 * 10**9, new=6 * 10**9, stored=4_900_000_000),
        },
        receipt={"prepare_s": 0.01, "packs_s": 1.2, "manifest_s": 0.01, "pack_bytes": 5.5e9},
    )
    save = cast("Save", ops[-1])
    ops[-1] = msgspec.structs.replace(save, parent=heads.get(run, ""))
    heads[run] = version
    body = CommitBody(
        magic=MAGIC,
        format=FORMAT,
        number=number,
        previous=previous,
        write_id=f"{number:032x}",
        at_ms=1_767_225_600_000 + 60_000 * number,
        by="bench@host 1",
        ops=tuple(ops),
    )
    data, commit = encode_commit(body)
    return commit, data


def _many(space: Workspace, folder: Path, versions: int, rounds: int) -> list[Measured]:
    """Time opening a store with many versions, and asking it."""

    def opened(work: Callable[[ckptstore.Store], object]) -> Callable[[Path], object]:
        def timed(path: Path) -> object:
            with ckptstore.open(path, read_only=True) as store:
                return work(store)

        return timed

    questions: dict[str, Callable[[ckptstore.Store], object]] = {
        "open and fold the catalog": lambda store: store.repo.refresh().number,
        "open and resolve run@latest": lambda store: store.resolve("run-07@latest"),
        "open and resolve run@best:val_loss": lambda store: store.resolve("run-07@best:val_loss"),
        "open and list one run": lambda store: len(store.versions("run-07")),
        "open and list all versions": lambda store: len(store.versions()),
    }

    def check(_: Path, answer: object) -> Mapping[str, float]:
        if answer is None or (isinstance(answer, int) and not 0 < answer <= versions):
            msg = f"the store answered {answer!r}"
            raise AssertionError(msg)
        return {}

    cases = [
        Case(name=name, run=opened(work), after=check, folder=folder, writes=False)
        for name, work in questions.items()
    ]
    return run_cases("many versions", cases, space, rounds=rounds)


# --- tiny tensors -----------------------------------------------------------------------------


def _tiny(space: Workspace, count: int, rounds: int) -> list[Measured]:
    """Time saving and loading many tensors of 64 bytes; count their bytes on the disk."""
    generator = torch.Generator().manual_seed(1)
    weights = {
        f"layer{place}.lora.weight": torch.randn(16, generator=generator) for place in range(count)
    }
    state: State = {"model": weights}
    cases = [_tiny_save(peer, state, count) for peer in PEERS]
    cases.append(_tiny_save(_STORE, state, count))
    cases += [case for peer in (*PEERS, _STORE) for case in _tiny_loads(peer, state, space)]
    return run_cases("tiny tensors", cases, space, rounds=rounds)


def _store_save(state: State, folder: Path) -> None:
    with ckptstore.open(folder, create=True) as store:
        store.run("tiny").save(state, step=0)


def _store_load(folder: Path) -> object:
    with ckptstore.open(folder, read_only=True) as store:
        return store.load("tiny@latest")


_STORE = Peer(name="ckptstore auto", save=_store_save, load=_store_load)


def _tiny_save(peer: Peer, state: State, count: int) -> Case:
    def after(folder: Path, _: object) -> Mapping[str, float]:
        stored = tree_bytes(folder)
        return {"stored_bytes": stored, "bytes_per_tensor": stored / count - 64}

    return Case(
        name=f"{peer.name}, save",
        run=lambda folder: peer.save(state, folder),
        after=after,
        logical_bytes=64 * count,
    )


def _tiny_loads(peer: Peer, state: State, space: Workspace) -> list[Case]:
    """Return the case of loading what a peer saved; none if it does not even save."""
    folder = space.fresh()
    try:
        peer.save(state, folder)
    except FAILURES as error:
        say(f"{peer.name} does not save: {error}")
        return []
    load: Callable[[Path], object]
    if peer.load is not None:
        load = peer.load
    elif peer.load_into is not None:
        into, target = peer.load_into, peers.empty_like(state)
        load = lambda path: into(path, target)  # noqa: E731
    else:
        return []
    name = f"{peer.name}, load"
    return [Case(name=name, run=load, folder=folder, writes=False)]
