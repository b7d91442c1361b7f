"""The three models of the WEKA whitepaper on NeMo, by shape, saved every few seconds as there.

The paper saves on each better validation, 4 to 45 s apart, and reports latencies of operations;
here the whole is timed: each model's state saved and loaded by ckptstore and by peers, and the
optimizer's steps in a window in which it is saved every few seconds, against those of an
undisturbed one. A step is AdamW's arithmetic on all parameters: a training's work with this
memory, without its forward and backward pass, so that a save disturbs it more, not less.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

import torch

import ckptstore
from benchmarks import peers
from benchmarks.disk import Workspace
from benchmarks.host import header
from benchmarks.measure import Measured, Result, say
from benchmarks.peers import PEERS
from benchmarks.states import State, state_bytes
from benchmarks.workload_states import PAPER, Workload
from benchmarks.workloads import against_peers, describe, of_a_store

__all__ = ["run"]

_RUN = "bench"
_LARGE_BYTES = 2 << 30
"""A larger state is measured in one round, and against the peers that are named here."""
_LARGE_PEERS = ("torch.save", "safetensors", "DCP")


def run(
    space: Workspace,
    *,
    rounds: int,
    shrink: int = 1,
    training_steps: int = 120,
    saves: int = 3,
    every_s: float | None = None,
    only: Sequence[str] = (),
) -> Result:
    """Run everything; return the tables of :mod:`benchmarks.workloads`, and ``every: NAME``.

    Parameters
    ----------
    rounds
        Counted rounds of each case, after a warm-up; one without, for a model above 2 GiB.
    shrink
        Divisor of the models' widths; 1 for the published sizes.
    saves
        Saves in a window; fewer for a model above 2 GiB.
    every_s
        Seconds from a save to the next; by default each model's own.
    only
        Names of models; all by default.
    """
    peers.quiet()
    result = Result(
        benchmark="weka",
        header=header(space.root),
        parameters={
            "rounds": rounds,
            "shrink": shrink,
            "saves": saves,
            "torch_threads": torch.get_num_threads(),
        },
        facts={"workloads": {}, "every_s": {}},
    )
    for workload in PAPER:
        if only and workload.name not in only:
            continue
        state = workload.build(shrink=shrink, training_steps=training_steps)
        describe(result, workload, state)
        large = state_bytes(state) > _LARGE_BYTES
        turns = 1 if large else rounds
        chosen = _LARGE_PEERS if large else ()
        against_peers(result, workload, state, space, turns, only=chosen)
        of_a_store(result, workload, state, space, turns)
        pause = workload.every_s if every_s is None else every_s
        result.facts["every_s"][workload.name] = pause
        window = _Window(workload, state, pause, max(1, saves - 1) if large else saves)
        result.tables[f"every: {workload.name}"] = window.run(space)
    return result


class _Window:
    """Steps of a training, with saves at intervals."""

    def __init__(self, workload: Workload, state: State, every_s: float, saves: int) -> None:
        self._workload = workload
        self._state = state
        self._every_s = every_s
        self._saves = saves
        self._turn = 1_000

    def run(self, space: Workspace) -> list[Measured]:
        """Return a row for no saves, for saves in the background, and for torch.save."""
        rows = [self._steps("no save", None)]
        folder = space.fresh()
        with ckptstore.open(folder, create=True) as store:
            run = store.run(_RUN)
            run.save_async(self._state, step=0).result()  # allocates the staging memory once
            pending = []
            os.sync()
            rows.append(
                self._steps(
                    "ckptstore, save_async",
                    lambda: pending.append(run.save_async(self._state, step=self._turn)),
                )
            )
            began = time.perf_counter()
            versions = [one.result() for one in pending]
            rows[-1].numbers["behind_s"] = time.perf_counter() - began
            rows[-1].numbers["durable"] = len({one.id for one in versions})
        space.discard(folder)
        folder = space.fresh()
        peer = next(peer for peer in PEERS if peer.name == "torch.save")

        def save() -> None:
            place = folder / str(self._turn)
            place.mkdir()
            peer.save(self._state, place)

        rows.append(self._steps("torch.save", save))
        space.discard(folder)
        say(f"{self._workload.name}: saved every {self._every_s:g} s")
        return rows

    def _steps(self, name: str, save: Callable[[], object] | None) -> Measured:
        """Make steps until the window ends; `seconds` are those of a step, `stalls` in numbers."""
        row = Measured(name=name, logical_bytes=state_bytes(self._state))
        stalls: list[float] = []
        began = time.perf_counter()
        length = self._every_s * (self._saves if save is not None else 1)
        steps = 0
        while (now := time.perf_counter()) < began + length:
            if save is not None and now >= began + len(stalls) * self._every_s:
                save()
                stalls.append(time.perf_counter() - now)
                continue
            self._turn += 1
            self._workload.step(self._state, self._turn)
            steps += 1
        row.seconds.append((time.perf_counter() - began) / max(1, steps))
        row.numbers["steps"] = steps
        if stalls:
            row.numbers |= {"saves": len(stalls), "stall_s": sorted(stalls)[len(stalls) // 2]}
            row.numbers["stall_max_s"] = max(stalls)
        return row
