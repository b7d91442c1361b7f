"""Processor time of saves and loads, and the share of it that only one thread can spend at a time.

Python runs one thread at a time; what is done with bytes (digests, copies, planes, zstd, reading
and writing) runs without its lock. So a piece takes a time under the lock that does not depend on
its size, and a time without it that does. Two states tell them apart: tensors of 4 MiB in a store
of pieces of 4 MiB, and as many of a sixteenth in a store of pieces of a sixteenth, in blocks of a
sixteenth where planes are joined. Both run the same steps the same number of times.

With ``o + b`` seconds for a piece of 4 MiB and ``o + b / 16`` for a small one, ``o`` is under the
lock, and more than ``(o + b) / o`` threads cannot work at once. Only processor time is measured, so
other work on the machine disturbs it little; the least of all rounds counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Final
from unittest.mock import patch

import torch

import ckptstore
from benchmarks.disk import Workspace
from benchmarks.host import header
from benchmarks.measure import Measured, Result, say, trim
from benchmarks.peers import empty_like
from benchmarks.states import State, state_bytes
from ckptstore import limits
from ckptstore.codecs import plane_layout

__all__ = ["run"]

_RUN: Final = "bench"
_SMALLER: Final = 16
_PIECE_BYTES: Final = limits.CHUNK_BYTES_DEFAULT


def run(space: Workspace, *, pieces: int = 64, rounds: int) -> Result:
    """Run everything; return a table for each type of elements.

    Parameters
    ----------
    pieces
        Tensors of each state, one piece each.
    rounds
        Counted rounds of each case.
    """
    result = Result(
        benchmark="cores",
        header=header(space.root),
        parameters={"pieces": pieces, "piece_bytes": _PIECE_BYTES, "rounds": rounds},
    )
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        result.tables[name] = _rows(dtype, pieces, space, rounds)
        say(f"cores: {name}")
    return result


def _rows(dtype: torch.dtype, pieces: int, space: Workspace, rounds: int) -> list[Measured]:
    """Measure all ways with large and small pieces, in turns."""
    large, small = (_state(dtype, pieces, _PIECE_BYTES // by) for by in (1, _SMALLER))
    with (
        _ways(large, space, _PIECE_BYTES) as whole,
        _ways(small, space, _PIECE_BYTES // _SMALLER) as parts,
    ):
        rows = {name: Measured(name=name, logical_bytes=state_bytes(large)) for name in whole}
        of_small: dict[str, list[float]] = {name: [] for name in parts}
        for number in range(-1, rounds):
            for name, row in rows.items():
                spent = _spent(whole[name])
                with patch.object(plane_layout, "_BLOCK", plane_layout._BLOCK // _SMALLER):
                    short = _spent(parts[name])
                if number >= 0:
                    row.seconds.append(spent)
                    of_small[name].append(short)
    for name, row in rows.items():
        spent, short = min(row.seconds), min(of_small[name])
        row.numbers["small_s"] = short
        row.numbers["locked_s"] = max(0.0, (_SMALLER * short - spent) / (_SMALLER - 1))
    return list(rows.values())


def _state(dtype: torch.dtype, pieces: int, nbytes: int) -> State:
    """Return tensors whose exponents compress as those of weights, and no two are alike."""
    made = torch.Generator().manual_seed(1)
    size = nbytes // dtype.itemsize
    return {
        f"layer.{place}": torch.randn(size // 256, 256, generator=made).to(dtype)
        for place in range(pieces)
    }


def _spent(prepare: Callable[[], Callable[[], object]]) -> float:
    work = prepare()
    trim()
    began = time.process_time()
    work()
    return time.process_time() - began


@contextmanager
def _ways(
    state: State, space: Workspace, chunk_bytes: int
) -> Iterator[Mapping[str, Callable[[], Callable[[], object]]]]:
    """Yield all saves and loads by name, with one worker; each call opens its store."""
    folders = {codec: space.fresh() for codec in ("raw", "planes")}
    target = empty_like(state)
    with ExitStack() as stores:

        def opened(codec: str) -> ckptstore.Store:
            return stores.enter_context(
                ckptstore.open(
                    space.fresh(), create=True, codec=codec, workers=1, chunk_bytes=chunk_bytes
                )
            )

        def save(codec: str) -> Callable[[], object]:
            return partial(opened(codec).run(_RUN).save, state, step=1)

        def load(codec: str, into: State | None = None) -> Callable[[], object]:
            store = ckptstore.open(folders[codec], read_only=True, workers=1)
            return partial(stores.enter_context(store).load, f"{_RUN}@0", into=into)

        for codec, folder in folders.items():
            with ckptstore.open(folder, create=True, codec=codec, chunk_bytes=chunk_bytes) as store:
                store.run(_RUN).save(state, step=0)
        kept = opened("auto").run(_RUN)
        kept.save(state, step=0)
        yield {
            "save raw": lambda: save("raw"),
            "save planes": lambda: save("planes"),
            "save, nothing changed": lambda: partial(kept.save, state, step=1),
            "load raw, new": lambda: load("raw"),
            "load raw, into": lambda: load("raw", target),
            "load planes, new": lambda: load("planes"),
            "load planes, into": lambda: load("planes", target),
        }
