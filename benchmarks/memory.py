"""Peak extra memory of saves and loads, for states of several sizes, each in its own process.

The child makes a state, does the same with a tiny one (so that imports, pools and caches are
paid for), resets the kernel's high-water mark of its resident memory, saves or loads, and reports
the rise of the mark. A save in the background stages a copy of the state, which is counted; the
own (anonymous) memory of its writing child is sampled every 5 ms.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import ckptstore
from benchmarks.disk import Workspace
from benchmarks.host import header
from benchmarks.measure import Measured, Result, say
from benchmarks.peers import PEERS, empty_like, quiet
from benchmarks.resident import extra_bytes, mark, resident_bytes
from benchmarks.states import state_bytes
from ckptstore import limits

__all__ = ["WAYS", "children_peak", "run"]

_REPO = Path(__file__).resolve().parent.parent
_RUN = "bench"
_TENSOR_BYTES = 64 << 20
_TIMEOUT_S = 300
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


def run(
    space: Workspace,
    *,
    sizes: Sequence[int] = (1 << 30, 2 << 30, 4 << 30),
    ways: Sequence[str] = WAYS,
) -> Result:
    """Run every way for every size; return the table ``peak``.

    Parameters
    ----------
    sizes
        Bytes of the states.
    ways
        Names out of :data:`WAYS`.
    """
    result = Result(
        benchmark="memory",
        header=header(space.root),
        parameters={"host_bytes": limits.HOST_BYTES_DEFAULT, "sizes": list(sizes)},
    )
    result.tables["peak"] = [_row(way, size, space) for way in ways for size in sizes]
    return result


def _row(way: str, size: int, space: Workspace) -> Measured:
    """Measure one way and size in a process of its own."""
    row = Measured(name=way, logical_bytes=size)
    folder = space.fresh()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.memory", way, str(size), str(folder)],
        cwd=_REPO,
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
        return _our_work(who.split()[1], action, state, folder)
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
    verb, _, engine = action.partition(", ")
    store = ckptstore.open(folder, create=True, codec=codec, engine=engine or "auto")
    run = store.run(_RUN)
    if verb == "save":
        return lambda: run.save(state, step=1)
    if verb == "save_async":
        return lambda: run.save_async(state, step=1).result()
    run.save(state, step=1)
    target = empty_like(state)
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
