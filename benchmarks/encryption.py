"""Cost of encryption: saves and loads of one state, with a key and without.

On the local disk, and in memory (``/dev/shm``), where only the processor counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

import ckptstore
from benchmarks.disk import Workspace, warm, workspace
from benchmarks.host import header
from benchmarks.measure import Case, Result, run_cases, say
from benchmarks.peers import empty_like
from benchmarks.states import State, StateSpec, make_state, same, state_bytes

__all__ = ["run"]

_RUN = "bench"
_KEY = bytes(range(32))
_CODECS = ("raw", "planes")
_MEMORY = Path("/dev/shm")  # noqa: S108 - the file system that is measured


def run(space: Workspace, *, bytes_min: int, rounds: int, training_steps: int = 120) -> Result:
    """Run everything; return tables of saves and of loads for each place.

    Parameters
    ----------
    bytes_min
        The state has at least this many bytes of tensors.
    rounds
        Counted rounds of each case.
    """
    spec = StateSpec(bytes_min=bytes_min, training_steps=training_steps)
    head = header(space.root)
    say(f"encryption: making a state of {bytes_min / 1e9:.2f} GB")
    state = make_state(spec)
    result = Result(
        benchmark="encryption",
        header=head,
        parameters={
            "state_bytes": state_bytes(state),
            "seed": spec.seed,
            "rounds": rounds,
            "torch_threads": torch.get_num_threads(),
        },
    )
    _measure(result, "local disk", state, space, rounds)
    if _MEMORY.is_dir():
        with workspace(_MEMORY) as memory:
            _measure(result, "memory", state, memory, rounds)
    return result


def _measure(result: Result, place: str, state: State, space: Workspace, rounds: int) -> None:
    saves = [_save(state, codec, key) for codec in _CODECS for key in (None, _KEY)]
    result.tables[f"save, {place}"] = run_cases(f"save, {place}", saves, space, rounds=rounds)
    folder = space.fresh()
    into = empty_like(state)
    loads = [_load(state, into, folder, codec, key) for codec in _CODECS for key in (None, _KEY)]
    result.tables[f"load, {place}"] = run_cases(f"load, {place}", loads, space, rounds=rounds)
    space.discard(folder)


def _name(codec: str, key: bytes | None) -> str:
    return codec if key is None else f"{codec}, encrypted"


class _Busy:
    """The processor time of all threads, from one call of ``begin`` on."""

    began = 0.0

    def begin(self) -> None:
        self.began = time.process_time()

    def seconds(self) -> float:
        return time.process_time() - self.began


def _timed(busy: _Busy, work: Callable[[], object]) -> float:
    busy.begin()
    work()
    return busy.seconds()


def _save(state: State, codec: str, key: bytes | None) -> Case:
    stores: list[ckptstore.Store] = []
    busy = _Busy()

    def prepare(folder: Path) -> None:
        store = ckptstore.open(folder / "store", create=True, codec=codec, encryption_key=key)
        stores.append(store)

    def after(_: Path, spent: object) -> Mapping[str, float]:
        stores.pop().close()
        return {"processor_s": float(spent)}  # type: ignore[arg-type]

    return Case(
        name=_name(codec, key),
        prepare=prepare,
        run=lambda _: _timed(busy, lambda: stores[-1].run(_RUN).save(state, step=1)),
        after=after,
        logical_bytes=state_bytes(state),
    )


def _load(state: State, into: State, folder: Path, codec: str, key: bytes | None) -> Case:
    place = folder / _name(codec, key)
    with ckptstore.open(place, create=True, codec=codec, encryption_key=key) as store:
        store.run(_RUN).save(state, step=1)
    busy = _Busy()

    def load() -> None:
        with ckptstore.open(place, encryption_key=key) as store:
            store.load(f"{_RUN}@1", into=into)

    def after(_: Path, spent: object) -> Mapping[str, float]:
        if not same(state, into):
            msg = f"{place} gives something else back"
            raise ValueError(msg)
        return {"processor_s": float(spent)}  # type: ignore[arg-type]

    return Case(
        name=_name(codec, key),
        prepare=lambda _: warm(place),
        run=lambda _: _timed(busy, load),
        after=after,
        folder=folder,
        writes=False,
        logical_bytes=state_bytes(state),
    )
