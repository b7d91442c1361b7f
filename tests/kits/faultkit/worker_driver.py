"""Kills workers of an engine, or the whole coordinator, in the middle of maintenance.

Run as ``python -m faultkit.worker_driver FOLDER ROUNDS SEED VICTIM ENGINE`` with ``worker`` or
``coordinator``, and ``dask`` or ``pool``; prints figures as JSON. Each round takes a copy of a
store, begins one of the operations over two worker processes, and lets a worker or the coordinator
kill itself at a drawn one of its calls on files. If a worker of Dask was killed the operation must
end as if nothing had happened; if one of a pool was, by a typed error, and another pool must finish
it; if the coordinator was, the next one must finish it, over the same cluster. Always every visible
version loads bit by bit, and a last collection leaves exactly the needed objects.
"""

from __future__ import annotations

import importlib
import json
import os
import random  # noqa: TID251 - seeded
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

from enginetasks import number_of

import ckptstore
from ckptstore import limits
from ckptstore.engine.engine import EngineSpec
from ckptstore.errors import WorkerDiedError
from ckptstore.store import Store
from faultkit.tripwire import Fuse, Tripwire

__all__ = ["OPERATIONS", "main"]

_CHUNK_BYTES = 1 << 16
_VERSIONS = 16
_WORKERS = 2
_PATIENCE_S = 600.0
_FUSE: Final = "CKPTSTORE_TESTS_FUSE"
"""Variable that names the file of the workers' :class:`faultkit.tripwire.Fuse`."""
_CALLS_LOG2 = 8.0
"""Binary logarithm of the most calls of a worker before it dies."""
_SMALL: Final = {
    "GC_LIST_TOGETHER": 5, "GC_TASK_MANIFESTS": 3, "GC_TASK_DELETES": 4,
    "GC_TASK_COPY_BYTES_MIN": 1, "GC_TASK_COPY_BYTES_MAX": 200_000, "VERIFY_TASK_BYTES": 200_000,
    "VERIFY_TASK_PACKS": 3,
}  # fmt: skip
"""Limits under which a small store is work for many tasks."""


def _collect(store: Store, executor: EngineSpec, *, below: float | None) -> bool:
    report = store.gc(grace_s=0, orphan_age_s=0, repack_below=below, executor=executor)
    return not report.repacked.skipped


def _gc(store: Store, executor: EngineSpec) -> bool:
    return _collect(store, executor, below=None)


def _repack(store: Store, executor: EngineSpec) -> bool:
    return _collect(store, executor, below=1.0)


def _verify(store: Store, executor: EngineSpec) -> bool:
    return store.verify(executor=executor, record=True).ok


def _replicate(store: Store, executor: EngineSpec) -> bool:
    target = Path(store.url).parent / "second"
    return not store.replicate(target, executor=executor).failures


OPERATIONS: Final[dict[str, Callable[[Store, EngineSpec], bool]]] = {
    "gc": _gc, "repack": _repack, "verify": _verify, "replicate": _replicate,
}  # fmt: skip


def make(folder: Path) -> None:
    """Make a store in which every operation has much to do."""
    from faultkit.gc_driver import state_of

    with ckptstore.open(folder, create=True, chunk_bytes=_CHUNK_BYTES) as store:
        run = store.run("a")
        versions = [run.save(state_of(step), step=step) for step in range(_VERSIONS)]
        gone = [f"#{version.id}" for version in versions[: _VERSIONS // 2]]
        store.remove(gone, force=True)


def operate(operation: str, folder: Path, executor: EngineSpec) -> str:
    """Do one operation on the store in a folder; return its defect, empty if there is none."""
    for name, value in _SMALL.items():
        setattr(limits, name, value)
    with ckptstore.open(folder / "first") as store:
        return "" if OPERATIONS[operation](store, executor) else f"{operation} was not content"


def check(folder: Path) -> list[str]:
    """Return the defects of the stores of a folder."""
    from faultkit.gc_driver import same

    problems: list[str] = []
    for place in sorted(path.parent for path in folder.glob("*/store.json")):
        with ckptstore.open(place) as store:
            problems += [f"{place.name}: {one.message}" for one in store.verify().problems]
            versions = store.versions()
            whole = [version for version in versions if version.level != "record"]
            if place.name == "first" and len(whole) != _VERSIONS - _VERSIONS // 2:
                problems.append(f"{len(whole)} versions are there")
            problems += [
                f"{place.name} {version.step} is not what it was"
                for version in whole
                if not same(store.load(f"#{version.id}"), version.step)
            ]
            for _ in range(2):  # leftovers of dead workers, and objects that became unneeded
                store.gc(grace_s=0, orphan_age_s=0, repack_below=1.0)
            report = store.gc(grace_s=0, orphan_age_s=0, dry_run=True)
            if report.stored != report.live:
                problems.append(f"{place.name}: {report.stored} stored, {report.live} needed")
    return problems


class Cluster:
    """A scheduler and two worker processes, each on its own, as a batch system starts them."""

    recovers = True

    def __init__(self, folder: Path) -> None:
        distributed: Any = importlib.import_module("distributed")
        self.folder = folder
        self.file = folder / "scheduler.json"
        quiet = ["--no-dashboard", "--dashboard-address", "127.0.0.1:0"]
        told = ["--host", "127.0.0.1", "--port", "0", "--scheduler-file", str(self.file)]
        self.scheduler = self._begin("scheduler", *told, *quiet)
        end = time.monotonic() + _PATIENCE_S
        while not self.file.exists() and time.monotonic() < end:
            time.sleep(0.1)
        self.workers = [self._worker() for _ in range(_WORKERS)]
        self.client: Any = distributed.Client(scheduler_file=str(self.file), set_as_default=False)

    def _begin(self, *command: str) -> subprocess.Popen[bytes]:
        with (self.folder / "dask.log").open("ab") as log:
            return subprocess.Popen([sys.executable, "-m", "dask", *command], stderr=log)

    def _worker(self) -> subprocess.Popen[bytes]:
        told = ["--scheduler-file", str(self.file), "--nthreads", "1", "--memory-limit", "0"]
        here = ["--host", "127.0.0.1", "--no-nanny", "--no-dashboard", "--death-timeout", "600"]
        more = ["--local-directory", str(self.folder), "--preload", "faultkit.worker_driver"]
        return self._begin("worker", *told, *here, *more)

    @property
    def executor(self) -> str:
        """The engine, as a user names it."""
        address: str = json.loads(self.file.read_text())["address"]
        return address.replace("tcp://", "dask://")

    def wait(self) -> None:
        """Start others for workers that died; return when all have registered."""
        self.mend()
        self.client.wait_for_workers(_WORKERS, timeout=_PATIENCE_S)

    def mend(self) -> bool:
        """Start others for workers that died; return whether there were any."""
        dead = [number for number, one in enumerate(self.workers) if one.poll() is not None]
        for number in dead:
            self.workers[number] = self._worker()
        return bool(dead)

    def close(self) -> None:
        """Stop everything."""
        self.client.close()
        for process in (*self.workers, self.scheduler):
            process.kill()
            process.wait()


class Pool:
    """An executor of this process; a dead worker breaks it, and then there is another one."""

    recovers = False

    def __init__(self) -> None:
        self.executor = self._new()

    @staticmethod
    def _new() -> ProcessPoolExecutor:
        spawn, fuse = get_context("spawn"), os.environ[_FUSE]
        return ProcessPoolExecutor(_WORKERS, spawn, initializer=Fuse, initargs=(fuse,))

    def wait(self) -> None:
        """Start the workers; take another executor if this one is broken."""
        try:
            list(self.executor.map(number_of, range(_WORKERS)))
        except BrokenExecutor:
            self.close()
            self.executor = self._new()
            self.wait()

    def close(self) -> None:
        """Stop everything."""
        self.executor.shutdown()


def dask_setup(_worker: object) -> None:
    """Arm a worker of Dask, which loads this module before it works."""
    Fuse(os.environ[_FUSE])


def _objects(store: Path) -> set[str]:
    return {str(one.relative_to(store)) for one in store.rglob("*") if one.is_file()}


@dataclass(slots=True, kw_only=True)
class Campaign:
    """Rounds of kills; collects figures and problems."""

    folder: Path
    victim: str
    chance: random.Random
    cluster: Cluster | Pool
    calls: dict[str, int] = field(default_factory=dict)
    """Of the coordinator of each operation, undisturbed."""
    figures: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def fresh(self) -> Path:
        """Return a folder with a copy of the store."""
        place = self.folder / "round"
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(self.folder / "template", place / "first")
        return place

    def measure(self, operation: str) -> None:
        """Count the calls of the coordinator of an undisturbed operation."""
        place = self.fresh()
        with self._child(operation, place, 0) as child:
            told, _ = child.communicate(timeout=_PATIENCE_S)
        self.calls[operation] = int(told)
        self.problems += check(place)

    def round(self, operation: str) -> None:
        """Disturb an operation once, and check the outcome."""
        place = self.fresh()
        self.cluster.wait()
        if self.victim == "worker":
            self._kill_worker(operation, place)
        else:
            self._kill_coordinator(operation, place)
        self.figures["rounds"] += 1
        self.problems += [f"{operation}: {problem}" for problem in check(place)]

    def _kill_worker(self, operation: str, place: Path) -> None:
        fuse = Path(os.environ[_FUSE])
        fuse.write_text(str(int(2 ** self.chance.uniform(0, _CALLS_LOG2))))
        try:
            try:
                said = operate(operation, place, self.cluster.executor)
            except WorkerDiedError:
                if self.cluster.recovers:
                    raise
                self.figures["another pool had to finish it"] += 1
                self.figures[f"{operation}: at work"] += 1
                self.cluster.wait()
                said = operate(operation, place, self.cluster.executor)
            self.problems += [said] * bool(said)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is what was looked for
            self.problems.append(f"{operation}: {type(error).__name__}: {error}")
        finally:
            for file in fuse.parent.glob(f"{fuse.name}*"):
                file.unlink()
        if isinstance(self.cluster, Cluster):
            self.figures[f"{operation}: at work"] += self.cluster.mend()

    def _kill_coordinator(self, operation: str, place: Path) -> None:
        at = self.chance.randint(1, self.calls[operation])
        with self._child(operation, place, at) as child:
            child.communicate(timeout=_PATIENCE_S)
            status = child.returncode
        self.figures[f"{operation}: {'at work' if status < 0 else 'after the end'}"] += 1
        self.figures["killed after it had written"] += status < 0 and self._changed(place)
        if status > 0:
            self.problems.append(f"{operation}: it failed by itself")
        self.problems += [f"{operation}, killed: {problem}" for problem in seen(place)]
        said = operate(operation, place, self.cluster.executor)
        self.problems += [said] * bool(said)

    def _changed(self, place: Path) -> bool:
        """Return whether the objects differ from those at an operation's beginning."""
        template = self.folder / "template"
        before, now = (_objects(one) for one in (template, place / "first"))
        return before != now or bool(_objects(place / "second"))

    def _child(self, operation: str, place: Path, at: int) -> subprocess.Popen[bytes]:
        command = ["operate", operation, str(place), str(self.cluster.executor), str(at)]
        return subprocess.Popen(
            [sys.executable, "-m", "faultkit.worker_driver", *command], stdout=subprocess.PIPE
        )


def seen(place: Path) -> list[str]:
    """Return the versions of the second store that do not load: visible ones must be whole."""
    from faultkit.gc_driver import same

    if not (place / "second" / "store.json").exists():
        return []
    with ckptstore.open(place / "second", read_only=True) as store:
        return [
            f"second {version.step} is not what it was"
            for version in store.versions()
            if version.level != "record" and not same(store.load(f"#{version.id}"), version.step)
        ]


def main() -> None:
    """Run a campaign, or one operation."""
    if sys.argv[1] == "operate":
        operation, place, executor, at = sys.argv[2:]
        importlib.import_module("distributed")  # its calls are not the operation's
        wire = Tripwire(int(at), after=False)
        said = operate(operation, Path(place), executor)
        print(wire.seen)  # noqa: T201 - what the campaign reads
        sys.exit(said or 0)
    folder, rounds, seed = Path(sys.argv[1]), *map(int, sys.argv[2:4])
    victim, engine = sys.argv[4:]
    folder.mkdir(exist_ok=True)
    make(folder / "template")
    os.environ[_FUSE] = str(folder / "fuse")
    cluster = Cluster(folder) if engine == "dask" else Pool()
    try:
        campaign = Campaign(
            folder=folder, victim=victim, chance=random.Random(seed), cluster=cluster
        )
        for operation in OPERATIONS if victim == "coordinator" else ():
            campaign.measure(operation)
        for number in range(rounds):
            if campaign.problems:
                break
            campaign.round(list(OPERATIONS)[number % len(OPERATIONS)])
            print(number + 1, dict(campaign.figures), file=sys.stderr, flush=True)  # noqa: T201
    finally:
        cluster.close()
    found = {
        "problems": campaign.problems,
        "figures": dict(sorted(campaign.figures.items())),
        "calls": campaign.calls,
    }
    print(json.dumps(found))  # noqa: T201 - what the test reads


if __name__ == "__main__":
    main()
