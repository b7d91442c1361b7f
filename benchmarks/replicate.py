"""Replication from a local store to S3, against the rate at which clients move the same bytes.

The bytes are those of the source's packs. Clients have them ready in memory, in objects of 64 MiB,
with as many requests in flight as ckptstore has; ckptstore reads them from its store, checks each
chunk, regroups them, and commits. *Read back* is the default of replication: written objects are
read again from the target before a version counts; clients then download their objects.

Beside the rates: the requests of a first and of a repeated replication, the peak memory, and the
cost of single requests in time and in processor time of the client.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import Executor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import ckptstore
from benchmarks import peers
from benchmarks.coordinator import coordination
from benchmarks.disk import Workspace
from benchmarks.endpoint import Bucket, endpoint
from benchmarks.host import header
from benchmarks.measure import Case, Measured, Result, run_cases, say
from benchmarks.replicate_requests import counted_requests, request_costs
from benchmarks.resident import extra_bytes, mark
from benchmarks.s3_ways import GETS, PUTS, Plain, Way, count_bytes, plain_ways
from benchmarks.states import StateSpec, make_state, state_bytes
from ckptstore import limits

__all__ = ["ENGINES", "client_case", "make_source", "packs_of", "run", "store_case"]

_REPO = Path(__file__).resolve().parent.parent
_RUN: Final = "bench"
_WORKERS: Final = 2
_TIMEOUT_S: Final = 600
ENGINES: Final = ("threads", "2 processes", "Dask, 2 workers")


def run(
    space: Workspace,
    *,
    bytes_min: int,
    rounds: int,
    calls: int = 20,
    versions: tuple[int, ...] = (4, 8),
    chunks: int = 250_000,
    training_steps: int = 120,
) -> Result | None:
    """Run everything; return the result, or None without an endpoint.

    Parameters
    ----------
    calls
        Requests of each kind whose cost is measured.
    versions, chunks
        Sizes of the stores whose collection is measured: numbers of versions, and chunks of each.
    """
    peers.quiet()
    with endpoint(space) as server:
        if server is None:
            say("replicate: no AWS_ENDPOINT_URL, and no Ceph here: left out")
            return None
        bucket = Bucket()
        try:
            spec = StateSpec(bytes_min=bytes_min, training_steps=training_steps)
            result = _measure(space, bucket, server, spec, rounds, calls)
            result.tables["coordinator"] = coordination(space, versions=versions, chunks=chunks)
            return result
        finally:
            bucket.remove()


def _measure(
    space: Workspace, bucket: Bucket, server: str, spec: StateSpec, rounds: int, calls: int
) -> Result:
    head = header(space.root)
    source = space.fresh() / "store"
    size = make_source(source, spec)
    plain = Plain(packs_of(source))
    result = Result(
        benchmark="replicate",
        header=head,
        parameters={
            "state_bytes": size,
            "pack_bytes": sum(map(len, plain.parts)),
            "seed": spec.seed,
            "rounds": rounds,
            "server": server,
            "puts_at_once": PUTS,
            "gets_at_once": GETS,
            "host_bytes": limits.HOST_BYTES_DEFAULT,
        },
    )
    ways = plain_ways(bucket.client, plain)
    with ExitStack() as stack:
        engines = _engines(stack)
        for table, check in (("replicate", False), ("replicate, read back", True)):
            cases = [client_case(way, bucket, plain, check=check) for way in ways]
            cases += [
                store_case(name, executor, source, bucket, plain, check=check)
                for name, executor in engines.items()
            ]
            result.tables[table] = run_cases(table, cases, space, rounds=rounds)
    result.tables["peak memory"] = [
        _peak(source, bucket, engine) for engine in ("threads", "processes")
    ]
    result.tables["one request"] = request_costs(f"s3://{bucket.fresh()}", calls=calls)
    result.facts["requests"] = counted_requests(source, f"s3://{bucket.fresh()}")
    return result


# --- the bytes to move ------------------------------------------------------------------------


def make_source(folder: Path, spec: StateSpec) -> int:
    """Make a store with one version of raw chunks; return the bytes of its state."""
    state = make_state(spec)
    with ckptstore.open(folder, create=True, codec="raw") as store:
        store.run(_RUN, metrics={"loss": "min"}).save(state, step=1, metrics={"loss": 1.0})
    return state_bytes(state)


def packs_of(folder: Path) -> bytes:
    """Return the bytes of all packs of a store."""
    return b"".join(path.read_bytes() for path in sorted(folder.glob("packs/*/*.pack")))


def _processes() -> Executor:
    """Return a pool of processes, which its first tasks start."""
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    return ProcessPoolExecutor(_WORKERS, mp_context=get_context("spawn"))


def _engines(stack: ExitStack) -> dict[str, Executor | None]:
    """Return the engines of replication, by name; all are started before any clock."""
    found: dict[str, Executor | None] = {ENGINES[0]: None}
    found[ENGINES[1]] = stack.enter_context(_processes())
    try:
        distributed: Any = importlib.import_module("distributed")
    except ImportError:
        say("replicate: Dask is not installed, and left out")
        return found
    cluster = stack.enter_context(
        distributed.LocalCluster(
            n_workers=_WORKERS,
            threads_per_worker=1,
            host="127.0.0.1",
            dashboard_address="127.0.0.1:0",
            memory_limit=None,
        )
    )
    found[ENGINES[2]] = stack.enter_context(distributed.Client(cluster)).get_executor(pure=False)
    return found


# --- cases ------------------------------------------------------------------------------------


def client_case(way: Way, bucket: Bucket, plain: Plain, *, check: bool) -> Case:
    """Return a case that moves the same bytes by a client: up, and with `check` down again."""
    places: list[str] = []
    size = sum(map(len, plain.parts))

    def prepare(_: Path) -> None:
        places[:] = [bucket.fresh()]

    def work(_: Path) -> object:
        way.save({}, places[0])
        load = way.load
        assert load is not None  # noqa: S101 - every client of plain bytes loads them
        return load(places[0]) if check else None

    def after(_: Path, found: object) -> Mapping[str, float]:
        if check and count_bytes(found) != size:
            msg = "what came back is not what was sent"
            raise AssertionError(msg)
        return _stored(bucket, places[0])

    return Case(
        name=way.name, prepare=prepare, run=work, after=after, logical_bytes=size, note=way.note
    )


def store_case(
    name: str, executor: Executor | None, source: Path, bucket: Bucket, plain: Plain, *, check: bool
) -> Case:
    """Return a case that replicates the store to a new one."""
    places: list[str] = []

    def prepare(_: Path) -> None:
        places[:] = [bucket.fresh()]
        ckptstore.open(f"s3://{places[0]}", create=True).close()

    def work(_: Path) -> object:
        with ckptstore.open(source) as store:
            return store.replicate(f"s3://{places[0]}", check=check, executor=executor)

    def after(_: Path, report: Any) -> Mapping[str, float]:  # noqa: ANN401 - a ReplicateReport
        if len(report.copied) != 1 or report.checked != check:
            msg = f"not what was asked for: {report}"
            raise AssertionError(msg)
        return _stored(bucket, places[0])

    return Case(
        name=f"replicate, {name}",
        prepare=prepare,
        run=work,
        after=after,
        logical_bytes=sum(map(len, plain.parts)),
        note="read back, each chunk checked" if check else "each chunk checked on the way",
    )


def _stored(bucket: Bucket, place: str) -> Mapping[str, float]:
    found = bucket.objects(place)
    bucket.clear(place)
    return {"stored_bytes": sum(size for _, size in found), "objects": len(found)}


# --- memory -----------------------------------------------------------------------------------


def _peak(source: Path, bucket: Bucket, engine: str) -> Measured:
    """Measure one replication in a process of its own: its memory above its budget's floor."""
    place = bucket.fresh()
    row = Measured(name=f"replicate, {engine}")
    command = [sys.executable, "-m", "benchmarks.replicate", str(source), place, engine]
    done = subprocess.run(
        command, cwd=_REPO, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
    )
    if done.returncode:
        said = done.stderr.strip().splitlines()
        row.error = said[-1] if said else f"status {done.returncode}"
    else:
        row.numbers = json.loads(done.stdout.splitlines()[-1])
        row.logical_bytes = int(row.numbers["pack_bytes"])
        row.seconds.append(row.numbers.pop("seconds"))
    bucket.clear(place)
    say(f"peak memory: {row.name}")
    return row


def _child(source: str, place: str, engine: str) -> None:
    """Replicate a tiny store, to pay for imports and pools; then measure the real one."""
    import torch

    from benchmarks.memory import children_peak

    more: dict[str, Any] = {} if engine == "threads" else {"executor": _processes()}
    small = Path(source).parent / f"small-{engine}"
    with ckptstore.open(small, create=True) as store:
        store.run(_RUN).save({"w": torch.ones(1000)}, step=1)
        store.replicate(f"s3://{place}/small", **more)
    with ckptstore.open(source) as store:
        before = mark()
        with children_peak() as children:
            began = time.perf_counter()
            report = store.replicate(f"s3://{place}/large", **more)
            seconds = time.perf_counter() - began
    numbers = {
        "extra_bytes": extra_bytes(before),
        "child_bytes": children[0],
        "pack_bytes": report.chunk_bytes,
        "seconds": seconds,
    }
    print(json.dumps(numbers))


if __name__ == "__main__":
    _child(*sys.argv[1:4])
