"""One save or one load of a client, in a process of its own: seconds, processor time, memory.

The child does the same with a tiny state before, so that imports and pools are paid for, and tells
the server to begin its counts. A load is compared with what was saved.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.paced import Paced
from benchmarks.resident import extra_bytes, mark

__all__ = ["ACTIONS", "Task", "do_task"]

ACTIONS: Final = ("save", "load, new", "load, into")
_REPO: Final = Path(__file__).resolve().parent.parent
_TIMEOUT_S: Final = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Task of one child."""

    way: str
    action: str
    """One of :data:`ACTIONS`."""
    width: int | None
    """None for the client's default."""
    state_file: str
    """Written by torch.save."""
    place: str
    """``bucket/prefix``."""


def do_task(task: Task, server: Paced) -> dict[str, Any]:
    """Run a task against a server; return its numbers.

    Raises
    ------
    RuntimeError
        It failed; with the last line that it printed.
    """
    command = [sys.executable, "-m", "benchmarks.width_one", json.dumps(asdict(task))]
    try:
        done = subprocess.run(
            command,
            cwd=_REPO,
            env={**os.environ, **server.environment},
            capture_output=True,
            text=True,
            check=False,
            timeout=_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        msg = f"not done after {_TIMEOUT_S:.0f} s"
        raise RuntimeError(msg) from None
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        raise RuntimeError(said[-1][:200] if said else f"status {done.returncode}")
    numbers: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return numbers


# --- in the child -------------------------------------------------------------------------------


def _child(task: Task) -> None:
    import torch

    from benchmarks.peers import empty_like, quiet
    from benchmarks.states import same, state_bytes
    from benchmarks.width_ways import WAYS, state_as_bytes

    quiet()
    way = WAYS[task.way]
    tiny = {"model": {"w": torch.arange(1 << 16, dtype=torch.float32)}}
    warm = f"{task.place}-warm"
    way.begin(warm)
    way.save(state_as_bytes(tiny) if way.plain else tiny, warm, task.width)
    into = task.action == "load, into"
    load = way.load_into if into else way.load
    if task.action != "save":
        assert load is not None  # noqa: S101 - the suite asks for what the way has
        load(warm, task.width, *([empty_like(tiny)] if into else []))

    state = torch.load(task.state_file, weights_only=True)
    total = state_bytes(state)
    if load is None or task.action == "save":
        data = state_as_bytes(state) if way.plain else state
        way.begin(task.place)
        numbers = _measured(lambda: way.save(data, task.place, task.width))
        print(json.dumps({**numbers, "state_bytes": total}))
        return
    target = [empty_like(state)] if into else []
    del state  # its memory is not to help the load
    gc.collect()
    found: list[Any] = []
    numbers = _measured(lambda: found.append(load(task.place, task.width, *target)))
    state = torch.load(task.state_file, weights_only=True)
    right = b"".join(found[0]) == state_as_bytes(state) if way.plain else same(state, found[0])
    if not right:
        msg = "what was loaded is not what was saved"
        raise AssertionError(msg)
    above = numbers["extra_bytes"] - (0 if into else total)
    print(json.dumps({**numbers, "extra_bytes": max(0, above), "state_bytes": total}))


def _measured(work: Callable[[], object]) -> dict[str, Any]:
    server = Paced.of_environment()
    server.begin()
    before, busy = mark(), _processor_s()
    began = time.perf_counter()
    work()
    seconds = time.perf_counter() - began
    counts = server.counts()
    return {
        "seconds": seconds,
        "processor_s": _processor_s() - busy,
        "extra_bytes": extra_bytes(before),
        "requests": sum(counts["requests"].values()),
        **{name: counts[name] for name in ("at_once", "connections", "busy", "slow")},
        "moved_bytes": max(counts["received"], counts["sent"]),
        "kinds": counts["kinds"],
        "data_requests": sum(counts["kinds"].get(kind, 0) for kind in ("put", "part", "get")),
    }


def _processor_s() -> float:
    """Return the processor time of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


if __name__ == "__main__":
    _child(Task(**json.loads(sys.argv[1])))
