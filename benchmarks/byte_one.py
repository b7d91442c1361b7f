"""One save or one load of a client, in a process of its own: seconds, processor time, memory.

The child does the same with a tiny state before, so that imports and pools are paid for, and tells
the server to begin its counts. A load is compared with what was saved. Processor time is that of
the process by getrusage, its ended children included, and that of the server by its own.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.lock_share import LockShare
from benchmarks.paced import Paced
from benchmarks.resident import extra_bytes, mark

__all__ = ["ACTIONS", "CRT", "Task", "do_task"]

CRT: Final = "bytes by boto3, CRT"
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
    command = [sys.executable, "-m", "benchmarks.byte_one", json.dumps(asdict(task))]
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
    if task.way != CRT:  # botocore signs all requests by it where it finds it
        sys.modules["awscrt"] = None  # type: ignore[assignment]  # as if it were not installed

    import torch

    from benchmarks.byte_ways import WAYS, state_as_bytes
    from benchmarks.peers import empty_like, quiet
    from benchmarks.states import same, state_bytes

    quiet()
    way = WAYS[task.way]

    def room(state: dict[str, Any]) -> Any:  # noqa: ANN401 - tensors, or memory
        return bytearray(b"\x01") * state_bytes(state) if way.plain else empty_like(state)

    tiny = {"model": {"w": torch.arange(1 << 16, dtype=torch.float32)}}
    warm = f"{task.place}-warm"
    way.begin(warm)
    way.save(state_as_bytes(tiny) if way.plain else tiny, warm, task.width)
    into = task.action == "load, into"
    load = way.load_into if into else way.load
    if task.action != "save":
        assert load is not None  # noqa: S101 - the suite asks for what the way has
        load(warm, task.width, *([room(tiny)] if into else []))

    state = torch.load(task.state_file, weights_only=True)
    total = state_bytes(state)
    if load is None or task.action == "save":
        data = state_as_bytes(state) if way.plain else state
        way.begin(task.place)
        numbers = _measured(lambda: way.save(data, task.place, task.width))
        print(json.dumps({**numbers, "state_bytes": total}))
        return
    target = [room(state)] if into else []
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
    watch = LockShare()
    server.begin()
    before, busy = mark(), _processor_s()
    with watch:
        began = time.perf_counter()
        work()
        seconds = time.perf_counter() - began
    counts = server.counts()
    known = {"server_s": counts.get("processor_s"), "locked": watch.share}
    return {
        "seconds": seconds,
        "processor_s": _processor_s() - busy,
        **{name: value for name, value in known.items() if value is not None},
        "extra_bytes": extra_bytes(before),
        "requests": sum(counts["requests"].values()),
        **{name: counts[name] for name in ("at_once", "connections", "busy", "slow")},
        "moved_bytes": max(counts["received"], counts["sent"]),
        "kinds": counts["kinds"],
        "data_requests": sum(counts["kinds"].get(kind, 0) for kind in ("put", "part", "get")),
    }


def _processor_s() -> float:
    """Return the processor time of this process and of its children that have ended."""
    usages = [resource.getrusage(of) for of in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


if __name__ == "__main__":
    _child(Task(**json.loads(sys.argv[1])))
