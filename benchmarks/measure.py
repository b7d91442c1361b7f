"""Timing of all cases: interleaved rounds, a warm-up, medians with minimum and maximum.

A round runs each case once, in its own fresh folder, and the next round begins with another case;
so a drift during the benchmark (the disk, other processes) affects all cases alike, and none
always follows the same one. Ratios are taken within each round, and their median is shown. A case
that takes longer than 20 s is measured once, with a note.
"""

from __future__ import annotations

import ctypes
import gc
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from torch.distributed.checkpoint.api import CheckpointException

from benchmarks.disk import Workspace

__all__ = ["FAILURES", "Case", "Measured", "Result", "run_cases", "run_rounds", "say", "trim"]

# A case that takes longer than this is measured once, in the round that shows it: such a long case
# is not decided by a warm-up or by noise, and the other cases have to be done today.
_LONG_S: Final = 20.0
FAILURES: Final = (Exception, CheckpointException)
"""Exceptions of peers. DCP's is no Exception: ``except Exception`` misses it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One case to time."""

    name: str
    run: Callable[[Path], object]
    """Timed; gets the folder; its result is passed to `after`."""
    prepare: Callable[[Path], None] | None = None
    """Runs before the clock starts."""
    after: Callable[[Path, object], Mapping[str, float]] | None = None
    """Runs after the clock stopped; returns further numbers (``stored_bytes`` ...). It raises if
    the result is not right."""
    folder: Path | None = None
    """A folder that all rounds share, for cases that read or that add to existing files."""
    writes: bool = True
    """True if pending writes of earlier cases must be on the disk before the clock starts."""
    logical_bytes: int = 0
    note: str = ""


@dataclass(slots=True, kw_only=True)
class Measured:
    """Results of the rounds of one case."""

    name: str
    logical_bytes: int = 0
    seconds: list[float] = field(default_factory=list)
    """By round, the warm-up left out."""
    numbers: dict[str, float] = field(default_factory=dict)
    """Of the last round."""
    note: str = ""
    error: str = ""
    """Reason for missing numbers; empty if there are some."""

    @property
    def median(self) -> float:
        """Median of the seconds."""
        return statistics.median(self.seconds)


@dataclass(slots=True, kw_only=True)
class Result:
    """Content of a benchmark's JSON file: a header, and tables of measured cases."""

    benchmark: str
    header: dict[str, Any]
    parameters: dict[str, Any]
    tables: dict[str, list[Measured]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    """Figures that are no timings."""


def run_cases(
    table: str, cases: Sequence[Case], space: Workspace, *, rounds: int
) -> list[Measured]:
    """Time all cases, interleaved; a case that raises is reported with its error and left out.

    Parameters
    ----------
    table
        Printed with the progress.
    rounds
        Counted rounds, after one that is not; with a single round there is no warm-up.
    """
    warmups = 1 if rounds > 1 else 0
    measured = {case.name: _new(case) for case in cases}
    left_out: set[str] = set()
    gc.collect()
    gc.freeze()  # imported objects are not searched again before each measurement
    for number in range(-warmups, rounds):
        shift = number % len(cases)
        for case in [*cases[shift:], *cases[:shift]]:
            one = measured[case.name]
            if one.error or case.name in left_out:
                continue
            seconds = _once(case, one, space)
            if seconds is None:
                continue
            if seconds > _LONG_S:
                left_out.add(case.name)
                one.note = f"{one.note}; measured once".removeprefix("; ")
            if number >= 0 or seconds > _LONG_S:
                one.seconds.append(seconds)
        say(f"{table}: round {number + 1} of {rounds}")
    gc.unfreeze()
    return list(measured.values())


def run_rounds(
    name: str, work: Callable[[], object], *, rounds: int, logical_bytes: int = 0, note: str = ""
) -> Measured:
    """Time one case alone: a warm-up, then `rounds` calls."""
    one = Measured(name=name, logical_bytes=logical_bytes, note=note)
    work()
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        one.seconds.append(time.perf_counter() - began)
    return one


def say(text: str) -> None:
    """Print a line of progress."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def _new(case: Case) -> Measured:
    return Measured(name=case.name, logical_bytes=case.logical_bytes, note=case.note)


def trim() -> None:
    """Return the memory that the C library keeps for reuse to the kernel.

    Otherwise a case after one that freed much would get its memory without page faults,
    unlike a process that resumes a training.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def settle(*, writes: bool = True) -> None:
    """Remove the effects of one case on the next: garbage, kept memory and unwritten files."""
    gc.collect()
    trim()
    if writes:
        os.sync()


def _once(case: Case, one: Measured, space: Workspace) -> float | None:
    """Run a case once; record its numbers and return the seconds, or record its error."""
    folder = case.folder or space.fresh()
    try:
        if case.prepare is not None:
            case.prepare(folder)
        settle(writes=case.writes)
        began = time.perf_counter()
        result = case.run(folder)
        seconds = time.perf_counter() - began
        if case.after is not None:
            one.numbers.update(case.after(folder, result))
    except FAILURES as error:  # a peer that fails is a result of the benchmark
        traceback.print_exc()
        one.error = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return None
    finally:
        if case.folder is None:
            space.discard(folder)
    return seconds
