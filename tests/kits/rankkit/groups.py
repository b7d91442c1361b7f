"""Groups of ranks: processes that torch.distributed connects by gloo, on this machine.

They are forked from a process that has imported torch, so that eight of them start in a second.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Self

from cirules import slowness
from programs import forkserver

__all__ = ["Group", "Rank", "run_ranks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """The rank that runs a job, and its way to report."""

    rank: int
    world: int
    tell: Callable[[Any], None]
    """Send something to the test at once."""


Job = Callable[..., Any]


def _main(
    job: Job, rank: int, world: int, meeting: str, out: Connection, args: tuple[Any, ...]
) -> None:
    """Be one rank."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        dist.init_process_group(
            "gloo", init_method=meeting, rank=rank, world_size=world,
            timeout=dt.timedelta(seconds=120 * slowness()),
        )  # fmt: skip
        me = Rank(rank=rank, world=world, tell=lambda value: out.send(("told", value)))
        result = job(me, *args)
        dist.barrier()
        out.send(("done", result))
    except BaseException:  # noqa: BLE001 - the test decides
        out.send(("failed", traceback.format_exc()))
    sys.stdout.flush()
    os._exit(0)  # skip torch's clean-up


class Group:
    """Running ranks; owned by the test. Use it as a context manager: none outlives it."""

    def __init__(self, job: Job, world: int, *args: object) -> None:
        context = forkserver()
        self._folder = tempfile.TemporaryDirectory(prefix="ckptstore-ranks-")
        meeting = f"file://{self._folder.name}/meeting"
        self.world = world
        self.told: list[list[Any]] = [[] for _ in range(world)]
        """Reports of each rank so far."""
        self.ended: list[tuple[str, Any] | None] = [None] * world
        """End of each rank: ``done`` and its result, ``failed`` and why, or ``gone``."""
        self._processes = []
        self._pipes: list[Connection] = []
        for rank in range(world):
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_main, args=(job, rank, world, meeting, theirs, args))
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(mine)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in range(self.world):
            self.kill(rank)
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.join(120)
            pipe.close()
        self._folder.cleanup()

    def kill(self, rank: int) -> None:
        """End a rank with SIGKILL, unless it has ended."""
        pid = self._processes[rank].pid
        if pid is not None and self._processes[rank].is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def step(self, timeout_s: float) -> bool:
        """Receive reports of ranks, for at most `timeout_s`; return whether any came."""
        open_pipes = {p: n for n, p in enumerate(self._pipes) if self.ended[n] is None}
        ready = wait(list(open_pipes), timeout_s)
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = open_pipes[pipe]
            try:
                kind, value = pipe.recv()
            except (EOFError, OSError):
                self.ended[rank] = ("gone", None)
                continue
            if kind == "told":
                self.told[rank].append(value)
            else:
                self.ended[rank] = (kind, value)
        return bool(ready)

    def finish(self, timeout_s: float = 300) -> list[tuple[str, Any]]:
        """Wait until every rank has ended; return how each ended."""
        while None in self.ended:
            told = self.step(timeout_s * slowness())
            assert told, f"nothing heard for {timeout_s} s of a fast machine: {self.ended}"
        return [end for end in self.ended if end is not None]


def run_ranks(job: Job, world: int, *args: object, timeout_s: float = 300) -> list[Any]:
    """Return the results of ``job(rank, *args)`` on `world` ranks; none may fail."""
    with Group(job, world, *args) as group:
        ends = group.finish(timeout_s)
    failures = [
        f"rank {rank}: {value}" for rank, (kind, value) in enumerate(ends) if kind != "done"
    ]
    assert not failures, "\n".join(failures)
    return [value for _, value in ends]
