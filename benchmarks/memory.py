"""Peak extra memory of saves and loads, for states of several sizes, each in its own process.

The child makes a state, does the same with a tiny one (so that imports, pools and caches are
paid for), resets the kernel's high-water mark of its resident memory, saves or loads, and reports
the rise of the mark. A save in the background stages a copy of the state, which is counted; the
own (anonymous) memory of its writing child is sampled every 5 ms.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from paced_s3 import Pace

import ckptstore
from benchmarks.disk import Workspace
from benchmarks.host import header
from benchmarks.measure import Measured, Result, say
from benchmarks.paced import paced_server
from benchmarks.peers import PEERS, empty_like, quiet
from benchmarks.resident import extra_bytes, mark, resident_bytes
from benchmarks.states import state_bytes
from ckptstore import limits

__all__ = ["WAYS", "children_peak", "run"]

_REPO = Path(__file__).resolve().parent.parent
_RUN = "bench"
_TENSOR_BYTES = 64 << 20
_TIMEOUT_S = 600
_SAMPLE_S = 0.005

WAYS = (
    "ckptstore planes: save",
    "ckptstore raw: save",
    "ckptstore planes: save_async, process",
    "ckptstore planes: save_async, thread",
    "ckptstore planes: load into",
    "ckptstore raw: load into",
    "torch.save: save",
    "torch.save: load",
    "DCP: save",
    "DCP: load into",
)
_ON_S3 = ("ckptstore raw, S3: save", "ckptstore raw, S3: load into")
_SPARE = 6 << 30
"""Memory of the machine that a state on S3 must leave, for the server's files too."""


def run(
    space: Workspace,
    *,
    sizes: Sequence[int] = (1 << 30, 2 << 30, 4 << 30),
    ways: Sequence[str] = WAYS,
    s3_sizes: Sequence[int] = (1 << 30, 4 << 30, 16 << 30),
) -> Result:
    """Run every way for every size; return the table ``peak``.

    Parameters
    ----------
    sizes
        Bytes of the states.
    ways
        Names out of :data:`WAYS`.
    s3_sizes
        Bytes of the states that are saved to an S3 server without a limit and loaded from it, 64
        requests at once. Those that the machine has no memory for are left out.
    """
    result = Result(
        benchmark="memory",
        header=header(space.root),
        parameters={"host_bytes": limits.HOST_BYTES_DEFAULT, "sizes": list(sizes)},
    )
    result.tables["peak"] = [_row(way, size, space) for way in ways for size in sizes]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for size in s3_sizes:
        if size + _SPARE > memory:
            say(f"memory: {size / 2**30:.0f} GiB to S3 are left out, the machine has too little")
            continue
        folder = space.fresh()
        with paced_server(Pace(file=str(folder / "bodies"))) as server:
            around = server.environment
            result.tables["peak"] += [_row(way, size, space, around) for way in _ON_S3]
        space.discard(folder)
    return result


def _row(
    way: str, size: int, space: Workspace, environment: Mapping[str, str] = MappingProxyType({})
) -> Measured:
    """Measure one way and size in a process of its own, with these variables set."""
    row = Measured(name=way, logical_bytes=size)
    folder = space.fresh()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.memory", way, str(size), str(folder)],
        cwd=_REPO,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=_TIMEOUT_S,
    )
    if done.returncode:
        said = done.stderr.strip().splitlines()
        row.error = said[-1] if said else f"status {done.returncode}"
    else:
        row.numbers = json.loads(done.stdout.splitlines()[-1])
        row.logical_bytes = int(row.numbers["state_bytes"])
        row.seconds.append(row.numbers.pop("seconds"))
    space.discard(folder)
    say(f"memory: {way}, {size / 2**30:.2f} GiB")
    return row


# --- in the child -------------------------------------------------------------------------------


def _state(size: int) -> dict[str, dict[str, torch.Tensor]]:
    """Return a state whose tensors differ, quickly made."""
    torch.manual_seed(0)
    each = min(_TENSOR_BYTES, size)
    block = torch.randn(each // 4).mul_(0.02)
    return {"model": {f"w{n}": block * (1 + n / 1000) for n in range(max(1, size // each))}}


def _child(way: str, size: int, folder: Path) -> None:
    quiet()
    who, _, action = way.partition(": ")
    small, large = folder / "small", folder / "large"
    small.mkdir()
    large.mkdir()
    _work(who, action, _state(1 << 22), small)()
    state = _state(size)
    work = _work(who, action, state, large)
    before = mark()
    with children_peak() as peak:
        began = time.perf_counter()
        work()
        seconds = time.perf_counter() - began
    numbers = {
        "extra_bytes": extra_bytes(before),
        "child_bytes": peak[0],
        "state_bytes": state_bytes(state),
        "seconds": seconds,
    }
    print(json.dumps(numbers))


def _work(who: str, action: str, state: dict[str, Any], folder: Path) -> Callable[[], object]:
    """Return the function to measure, after preparing it."""
    if who.startswith("ckptstore"):
        return _our_work(who.split(" ", 1)[1], action, state, folder)
    peer = next(peer for peer in PEERS if peer.name == who)
    if action == "save":
        return lambda: peer.save(state, folder)
    peer.save(state, folder)
    if action == "load":
        load = peer.load
        assert load is not None  # noqa: S101 - WAYS names what the peer has
        return lambda: load(folder)
    into, target = peer.load_into, empty_like(state)
    assert into is not None  # noqa: S101 - WAYS names what the peer has
    return lambda: into(folder, target)


def _our_work(codec: str, action: str, state: object, folder: Path) -> Callable[[], object]:
    codec, _, place = codec.partition(", ")
    verb, _, engine = action.partition(", ")
    where = f"s3://bench/{os.getpid()}-{folder.name}" if place else folder
    store = ckptstore.open(where, create=True, codec=codec, engine=engine or "auto")
    run = store.run(_RUN)
    if verb == "save":
        return lambda: run.save(state, step=1)
    if verb == "save_async":
        return lambda: run.save_async(state, step=1).result()
    run.save(state, step=1)
    target = state if place else empty_like(state)  # the largest fits the memory once
    return lambda: run.load(into=target)


@contextmanager
def children_peak() -> Iterator[list[int]]:
    """Yield a list whose only item is the peak of the children's own memory so far."""
    peak = [0]
    ended = threading.Event()

    def sample() -> None:
        while not ended.wait(_SAMPLE_S):
            peak[0] = max(peak[0], sum(map(_own_bytes, _child_ids())))

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()


def _child_ids() -> list[str]:
    found: list[str] = []
    for task in Path("/proc/self/task").iterdir():
        try:
            found += (task / "children").read_text().split()
        except OSError:
            continue  # the thread has just ended
    return found


def _own_bytes(process: str) -> int:
    try:
        return resident_bytes("RssAnon", process)
    except (OSError, RuntimeError):
        return 0  # it has just ended


if __name__ == "__main__":
    _child(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
