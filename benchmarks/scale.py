"""Expected figures at 1,000 ranks: the real log, under simulated clients.

The clients run the real ``ckptstore.catalog.log.Log``, against objects in memory, in virtual time
(:mod:`benchmarks.virtual`). So requests, conflicts and waiting are those of the code; the duration
of a request is assumed, and processor time is not part of it.
"""

from __future__ import annotations

import itertools
import pickle
import statistics
import time
import tracemalloc
from collections import Counter
from collections.abc import Sequence

import numpy as np
from metered import MeteredBackend

from benchmarks.disk import Workspace
from benchmarks.host import header
from benchmarks.measure import Measured, Result, say
from benchmarks.virtual import Client, Latency, Storage, VirtualTime
from ckptstore.backends.base import Backend, PutIfAbsent
from ckptstore.backends.memory import MemoryBackend
from ckptstore.catalog import run_ops
from ckptstore.catalog.log import Build, Log
from ckptstore.checkpoint.assemble import RankPart, ShardInfo, commit_parts
from ckptstore.checkpoint.request import WriteRequest
from ckptstore.checkpoint.write import shareable
from ckptstore.errors import CommitConflictError
from ckptstore.format.fields import ManifestPointer
from ckptstore.format.keys import manifest_key
from ckptstore.format.manifest import PieceTable
from ckptstore.model import RoleBytes
from ckptstore.objects.index import KnownPieces
from ckptstore.objects.piece_writer import Written
from ckptstore.repo import Finding, Repo, create_on

__all__ = ["run"]

_STORAGES = {
    "parallel file system, 2 ms": Latency(request_s=0.002, in_flight=16),
    "object store, 30 ms": Latency(request_s=0.030, in_flight=16),
}
_CHUNK = 4 << 20
_PACK = 64 << 20
_numbers = itertools.count()


def run(
    space: Workspace,
    *,
    writers: Sequence[int],
    trainings: int,
    intervals_s: Sequence[float],
    ranks: Sequence[int],
    seed: int = 0,
) -> Result:
    """Run everything; return the tables ``at once``, ``spread`` and ``one version``.

    Parameters
    ----------
    writers
        Numbers of clients that commit at the same moment, case by case.
    trainings, intervals_s
        Numbers of trainings that save into one store, and the intervals of their saves, at random
        moments; case by case.
    ranks
        Ranks of one sharded training, case by case; 10 GB each.
    """
    result = Result(
        benchmark="scale",
        header=header(space.root),
        parameters={"trainings": trainings, "seed": seed},
    )
    at_once: list[Measured] = []
    spread: list[Measured] = []
    for name, latency in _STORAGES.items():
        for count in writers:
            starts = [[0.0]] * count
            at_once.append(_simulate(name, latency, starts, seed, {"writers": count}))
        for interval in intervals_s:
            starts = _poisson(trainings, interval, seed)
            spread.append(_simulate(name, latency, starts, seed, {"interval_s": interval}))
    result.tables["at once"] = at_once
    result.tables["spread"] = spread
    result.tables["one version"] = [_one_version(count) for count in ranks]
    return result


def _poisson(trainings: int, interval_s: float, seed: int) -> list[list[float]]:
    """Return the moments of each training's saves: two each, at random moments of two intervals."""
    random = np.random.default_rng(seed)
    return [sorted(random.uniform(0.0, 2 * interval_s, 2).tolist()) for _ in range(trainings)]


def _simulate(
    name: str,
    latency: Latency,
    starts: Sequence[Sequence[float]],
    seed: int,
    numbers: dict[str, float],
) -> Measured:
    """Let one client for each of `starts` commit a save at each of its moments."""
    began = time.perf_counter()
    clock = VirtualTime(seed)
    backend = MemoryBackend(f"scale/{next(_numbers)}", environment=Client(clock))
    waited: list[float] = []
    requests: Counter[str] = Counter()
    ends: list[float] = []
    lost = 0

    def training(client: Client, number: int, moments: Sequence[float]) -> None:
        nonlocal lost
        storage = Storage(backend, client, latency)
        log = Log(storage, client, by=f"rank{number}@cluster 1")
        log.refresh()  # every training has opened the store when it began
        storage.requests.clear()
        for moment in moments:
            client.sleep(max(0.0, moment + 1.0 - client.monotonic()))
            start = client.monotonic()
            try:
                log.append(_save(client, f"run-{number:04d}"))
            except CommitConflictError:
                lost += 1
            waited.append(client.monotonic() - start)
            ends.append(client.monotonic())
        requests.update(storage.requests)

    for number, moments in enumerate(starts):
        clock.start(lambda client, n=number, m=moments: training(client, n, m))  # type: ignore[misc]
    clock.run()
    waited.sort()
    commits = len(waited) - lost
    one = Measured(name=name, seconds=[time.perf_counter() - began])
    one.numbers = {
        **numbers,
        "latency_s": latency.request_s,
        "commits": commits,
        "gave_up": lost,
        "all_s": max(ends) - 1.0,
        "median_s": statistics.median(waited),
        "p99_s": waited[min(len(waited) - 1, int(0.99 * len(waited)))],
        "max_s": waited[-1],
        **{f"{what} a commit": count / max(commits, 1) for what, count in requests.items()},
    }
    all_s, took_s = one.numbers["all_s"], one.seconds[0]
    say(f"scale: {name}, {numbers}: {all_s:.1f} virtual s in {took_s:.1f} s")
    return one


def _save(client: Client, run: str) -> Build:
    version = client.random_hex(16)
    pointer = ManifestPointer(key=manifest_key(version), stored_bytes=40_000, digest="1" * 64)
    sizes = RoleBytes(logical=10**10, new=10**10, stored=8 * 10**9)
    return lambda catalog: run_ops.save(
        catalog,
        run=run,
        version=version,
        step=0,
        manifest=pointer,
        content="2" * 64,
        roles={"weights": sizes},
        receipt={"writing_s": 1.5},
    )


# --- one version of many ranks ----------------------------------------------------------------


def _one_version(ranks: int, *, tensors: int = 600, rank_bytes: int = 10 * 10**9) -> Measured:
    """Let one rank assemble and commit the parts that `ranks` of them wrote.

    The state is cut over all ranks along its first dimension, as by FSDP. Each part is as after
    the writing of its packs; none exist.
    """
    each = -(-rank_bytes // _CHUNK // tensors)
    parts = [_part(rank, ranks, tensors, each) for rank in range(ranks)]
    paths = {f"t{place}": ("model", f"t{place}") for place in range(tensors)}
    meters = MeteredBackend(MemoryBackend(f"scale/{next(_numbers)}"))
    with create_on(meters, prober=_trusting) as repo:
        began = time.perf_counter()
        commit_parts(repo, parts, paths, WriteRequest(run="r", step=1), roles={})
        seconds = time.perf_counter() - began
        tracemalloc.start()
        version = commit_parts(repo, parts, paths, WriteRequest(run="r", step=2), roles={})
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        before = meters.snapshot()
        commit_parts(repo, parts, paths, WriteRequest(run="r", step=3), roles={})
        after = meters.snapshot()
        share_s, share_peak = _shared_by_a_rank(repo)
    asked = sum(meter.calls - before[name].calls for name, meter in after.items())
    one = Measured(name=f"{ranks:,} ranks", logical_bytes=ranks * tensors * each * _CHUNK)
    one.seconds = [seconds]
    packs = sum(part.written.packs_count for part in parts)
    one.numbers = {
        "ranks": ranks,
        "pieces": ranks * tensors * each,
        "packs": packs,
        "manifest_bytes": version.manifest_bytes,
        "part_bytes": len(pickle.dumps(parts[0])),
        "peak_bytes": peak,
        # Besides its packs, each rank lists the log, and reads the last commit and manifest.
        "requests": packs + asked + 3 * ranks,
        "share_s": share_s,
        "share_bytes": share_peak,
    }
    say(f"scale: one version of {one.name} in {seconds:.1f} s")
    return one


def _shared_by_a_rank(repo: Repo) -> tuple[float, int]:
    """Return seconds and memory of a rank for sharing with the version before."""
    version = repo.refresh().head("r")
    assert version is not None  # noqa: S101 - committed above
    began = time.perf_counter()
    KnownPieces(shareable(repo, version))
    seconds = time.perf_counter() - began
    tracemalloc.start()
    known = KnownPieces(shareable(repo, version))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    del known
    return seconds, peak


def _part(rank: int, ranks: int, tensors: int, each: int) -> RankPart:
    """Return a rank's part, with its shards: `each` pieces of 4 MiB of every tensor."""
    count = tensors * each
    rows = np.arange(count)
    random = np.random.default_rng(rank)
    per_pack = _PACK // _CHUNK
    packs = [random.bytes(16).hex() for _ in range(-(-count // per_pack))]
    sizes = np.full(count, _CHUNK, np.uint32)
    stored = random.integers(3 << 20, 4 << 20, count).astype(np.uint32)
    table = PieceTable(
        ids=random.integers(0, 256, (count, 32), dtype=np.uint8),
        raw=sizes,
        pack=(rows // per_pack).astype(np.uint32),
        offset=(32 + rows % per_pack * (_CHUNK + 64)).astype(np.uint64),
        stored=stored,
        inner=np.zeros(count, np.uint32),
        slab=sizes,
        packs=packs,
    )
    high = each * _CHUNK // 4096
    shards = tuple(
        ShardInfo(
            name=f"t{place}",
            dtype="float32",
            shape=(ranks * high, 1024),
            offsets=(rank * high, 0),
            sizes=(high, 1024),
            rows=(place * each, (place + 1) * each),
        )
        for place in range(tensors)
    )
    written = Written(
        table=table,
        first=tuple(range(0, count + 1, each)),
        is_new=np.ones(count, np.bool_),
        stored_new=stored.astype(np.float64),
        pack_bytes=int(stored.sum(dtype=np.uint64)),
        packs_count=len(packs),
    )
    return RankPart(shards=shards, values=(), written=written, looked=0, seconds=1.0)


def _trusting(_backend: Backend, _environment: object) -> Finding:
    return Finding(put_if_absent=PutIfAbsent.ATOMIC, report={})
