"""Requests of a replication, by kind, and the cost of each kind to the client.

Time is the wait of one client, one request at a time; processor time is that of this process, all
its threads: the server's own is not in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from metered import Meter, MeteredBackend

from benchmarks.measure import Measured, say
from ckptstore.backends.base import Backend
from ckptstore.backends.registry import open_backend
from ckptstore.repo import create_on, open_on
from ckptstore.store.store import Store

__all__ = ["counted_requests", "request_costs"]

_PACK = 64 << 20
_RANGE = 16 << 20
_SMALL = 2 << 10
_PAGE = 1000
"""Objects of a page of a listing."""


def counted_requests(source: Path, url: str) -> dict[str, dict[str, int]]:
    """Return the calls to the target's backend, by operation: of a first replication, and others.

    ``again`` is a replication of existing versions; ``opening`` is the additional cost of opening
    that store in a new process.
    """
    found: dict[str, dict[str, int]] = {}
    with Store(open_on(open_backend(str(source)))) as store:
        meter = MeteredBackend(open_backend(url))
        with Store(create_on(meter)) as target:
            before = meter.snapshot()
            store.replicate(target)
            found["first"] = _calls(before, meter.snapshot())
        meter = MeteredBackend(open_backend(url))
        with Store(open_on(meter)) as target:
            target.versions()
            before = meter.snapshot()
            found["opening"] = _calls({}, before)
            report = store.replicate(target)
            found["again"] = _calls(before, meter.snapshot())
            if report.copied:
                msg = f"an unchanged store was copied again: {report}"
                raise AssertionError(msg)
    return found


def _calls(before: Mapping[str, Meter], after: Mapping[str, Meter]) -> dict[str, int]:
    counts = {name: meter.calls - before.get(name, Meter()).calls for name, meter in after.items()}
    return {name: count for name, count in counts.items() if count and name != "writer.write"}


def request_costs(url: str, *, calls: int) -> list[Measured]:
    """Return a row for each kind of request, with the seconds of each call and ``cpu_s`` a call."""
    backend = open_backend(url)
    rows = []
    try:
        for name, size, work, count in _kinds(backend, calls):
            rows.append(_row(name, size, work, count))
            say(f"one request: {name}")
    finally:
        backend.close()
    return rows


def _kinds(backend: Backend, calls: int) -> Iterator[tuple[str, int, Callable[[int], object], int]]:
    pack, small = bytes(_PACK), bytes(_SMALL)
    memory = memoryview(bytearray(_RANGE))
    few = max(2, calls // 4)

    def write(turn: int) -> None:
        with backend.open_writer(f"large/{turn}") as writer:
            writer.write(pack)
            writer.commit()

    def page(_: int) -> int:
        return sum(1 for _ in backend.list("small/"))

    yield "PUT of a pack of 64 MiB", _PACK, write, few
    yield (
        "GET of a range of 16 MiB",
        _RANGE,
        lambda turn: backend.read_into("large/0", _RANGE * (turn % 4), [memory]),
        calls,
    )
    yield (
        "PUT of 2 KiB, only if absent",
        _SMALL,
        lambda turn: backend.put_if_absent(f"commit/{turn}", small),
        calls,
    )
    yield "GET of 2 KiB", _SMALL, lambda _: backend.get("commit/0", bytes_max=_SMALL), calls
    yield "HEAD", 0, lambda _: backend.stat("commit/0"), calls
    objects = _PAGE if calls >= 20 else calls
    for number in range(objects):
        backend.put(f"small/{number:04d}", b"x")
    yield f"LIST of {objects} objects", 0, page, calls
    yield "DELETE", 0, lambda turn: backend.delete(f"small/{turn:04d}"), calls


def _row(name: str, size: int, work: Callable[[int], object], count: int) -> Measured:
    row = Measured(name=name, logical_bytes=size)
    began = time.process_time()
    for turn in range(count):
        start = time.perf_counter()
        work(turn)
        row.seconds.append(time.perf_counter() - start)
    row.numbers["cpu_s"] = (time.process_time() - began) / count
    return row
