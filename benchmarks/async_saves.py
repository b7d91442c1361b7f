"""Costs of a save in the background: the stall of the training, and its slow-down.

Three measurements: the stall of the call, against a copy of the same bytes and DCP's
``async_save``; the steps a second of a training on one thread while a save is written behind it;
and a table of what goes wrong (:mod:`benchmarks.async_failures`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save

from benchmarks import peers
from benchmarks.async_failures import failures_of_async_saves
from benchmarks.disk import Workspace
from benchmarks.host import header
from benchmarks.measure import Case, Measured, Result, run_cases, say
from benchmarks.peers import empty_like
from benchmarks.states import State, StateName, StateSpec, flat_tensors, make_state, state_bytes
from benchmarks.training import stepper
from ckptstore.backends.registry import open_backend
from ckptstore.backends.throttled import ThrottledBackend
from ckptstore.config import Options
from ckptstore.errors import OperationCancelledError
from ckptstore.repo import create_on
from ckptstore.saver.pending import PendingSave
from ckptstore.store import Store

__all__ = ["run"]

_RUN = "bench"
_ENGINES: Final = ("process", "thread")
_SLOW_BYTES_S: Final = 20e6
# One element in this many is changed before a save, so that every piece of 4 MiB changes.
_TOUCH_ELEMENTS: Final = 1 << 19


def run(
    space: Workspace,
    *,
    bytes_min: int,
    rounds: int,
    training_steps: int = 120,
    state_name: StateName = "follows",
    window_s: float = 5.0,
    saves: int = 2,
    tries: int = 10,
) -> Result:
    """Run everything; return the tables ``stall`` and ``training``, and the failures as facts.

    Parameters
    ----------
    bytes_min
        The state has at least this many bytes of tensors.
    rounds
        Counted rounds of each case.
    state_name
        Of the state; results of another one than ``follows`` get a file of their own.
    window_s
        Seconds that the training runs undisturbed, before and after, in each round.
    saves
        Number of saves of each way in a round of the training.
    tries
        Saves for each row of failures.
    """
    peers.quiet()
    spec = StateSpec(bytes_min=bytes_min, training_steps=training_steps, name=state_name)
    head = header(space.root)
    say(f"async: making a state of {bytes_min / 1e9:.2f} GB")
    state = make_state(spec)
    result = Result(
        benchmark="async" if state_name == "follows" else f"async-{state_name}",
        header=head,
        parameters={
            "state_bytes": state_bytes(state),
            "tensors": len(list(flat_tensors(state))),
            "seed": spec.seed,
            "rounds": rounds,
            "window_s": window_s,
            "saves": saves,
            "torch_threads": torch.get_num_threads(),
        },
    )
    result.tables["stall"] = _stalls(state, space, rounds)
    with _one_thread():
        result.tables["training"] = _training(state, space, rounds, window_s, saves)
    result.facts["rows"] = [asdict(row) for row in failures_of_async_saves(space, tries=tries)]
    return result


def _touch(state: State, turn: int) -> None:
    """Change every piece of the state a little, so that nothing is shared with the save before."""
    for _, tensor in flat_tensors(state):
        flat = tensor.reshape(-1)
        if flat.numel() > 1:
            flat.view(torch.uint8)[turn::_TOUCH_ELEMENTS] ^= 1


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# --- the stall ----------------------------------------------------------------------------------


class _Kept:
    """A store that stays open over all rounds, as in a training loop."""

    def __init__(self, folder: Path, engine: str, *, slow: bool = False) -> None:
        backend = open_backend(folder)
        if slow:
            backend = ThrottledBackend(backend, bytes_per_s=_SLOW_BYTES_S)
        self.store = Store(create_on(backend, options=Options(engine=engine)))
        self.run = self.store.run(_RUN)
        self._slow = slow
        self._began = 0.0

    def save(self, state: State, stage: Any = "now") -> PendingSave:  # noqa: ANN401 - a literal
        """Begin a save."""
        self._began = time.perf_counter()
        return self.run.save_async(state, step=1, stage=stage)

    def end(self, pending: object) -> Mapping[str, float]:
        """Wait until a save is durable; on slow storage, until it is staged."""
        assert isinstance(pending, PendingSave)  # noqa: S101 - what save returned
        pending.wait_staged()
        numbers = {"staged_s": time.perf_counter() - self._began}
        if self._slow:
            pending.cancel()
            with suppress(OperationCancelledError):
                pending.result()
            return numbers
        version = pending.result()
        return {**numbers, "durable_s": time.perf_counter() - self._began, **version.receipt}


def _stalls(state: State, space: Workspace, rounds: int) -> list[Measured]:
    size = state_bytes(state)
    kept: list[_Kept] = []
    turn = [0]

    def touch(_: Path) -> None:
        turn[0] += 1
        _touch(state, turn[0])

    def keep(engine: str, *, slow: bool = False) -> _Kept:
        kept.append(_Kept(space.fresh(), engine, slow=slow))
        return kept[-1]

    def case(name: str, one: _Kept, stage: str = "now", note: str = "") -> Case:
        return Case(
            name=name,
            prepare=touch,
            run=lambda _: one.save(state, stage),
            after=lambda _, pending: one.end(pending),
            logical_bytes=size,
            note=note,
        )

    target = [(tensor, empty_like(tensor)) for _, tensor in flat_tensors(state)]
    cases = [
        Case(name="copy, two threads", run=lambda _: _copy(target), logical_bytes=size),
        Case(name="copy, one thread", run=lambda _: _copy_alone(target), logical_bytes=size),
        _dcp_case(state, size, touch),
    ]
    cases += [case(f"ckptstore, {engine}", keep(engine)) for engine in _ENGINES]
    slow = [
        case(f"ckptstore, {engine}, storage of 20 MB/s", keep(engine, slow=True))
        for engine in _ENGINES
    ]
    background = case(
        "ckptstore, process, stage=background", kept[0], "background", "the call alone"
    )
    cases += [*slow, background, _first_case(state, size, touch)]
    try:
        return run_cases("stall", cases, space, rounds=rounds)
    finally:
        for one in kept:
            one.store.close()


def _copy(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for source, target in pairs:
        target.copy_(source)


def _copy_alone(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    with _one_thread():
        _copy(pairs)


def _dcp_case(state: State, size: int, touch: Callable[[Path], None]) -> Case:
    """Return the case of DCP's call with its defaults; the wait for its end is not timed."""

    def end(_: Path, future: object) -> Mapping[str, float]:
        assert isinstance(future, Future)  # noqa: S101 - the default stager's answer
        future.result()
        return {}

    return Case(
        name="DCP async_save",
        prepare=touch,
        run=lambda folder: dcp_async_save(state, storage_writer=_dcp(folder), no_dist=True),
        after=end,
        logical_bytes=size,
    )


def _dcp(folder: Path) -> FileSystemWriter:
    return FileSystemWriter(folder, sync_files=True, thread_count=2)


def _first_case(state: State, size: int, touch: Callable[[Path], None]) -> Case:
    """Return the case of the first save of a store: its memory was never touched before."""
    opened: list[_Kept] = []

    def prepare(folder: Path) -> None:
        touch(folder)
        opened.append(_Kept(folder / "store", "process"))

    def end(_: Path, pending: object) -> Mapping[str, float]:
        one = opened.pop()
        numbers = one.end(pending)
        one.store.close()
        return numbers

    return Case(
        name="ckptstore, process, first save of a store",
        prepare=prepare,
        run=lambda _: opened[-1].save(state),
        after=end,
        logical_bytes=size,
        note="its memory is new",
    )


# --- the training -------------------------------------------------------------------------------


def _training(
    state: State, space: Workspace, rounds: int, window_s: float, saves: int
) -> list[Measured]:
    """Count the steps of a training beside saves, in rounds that begin and end undisturbed."""
    step = stepper(seed=7)
    kept = {f"ckptstore, {engine}": _Kept(space.fresh(), engine) for engine in _ENGINES}
    ways: dict[str, Callable[[], _Beside]] = {
        name: partial(_store_beside, one, state, step) for name, one in kept.items()
    }
    ways["DCP async_save"] = lambda: _dcp_beside(state, space, step)
    rows = {name: Measured(name=name, logical_bytes=state_bytes(state)) for name in ways}
    taken: dict[str, list[_Beside]] = {name: [] for name in ways}
    alone = Measured(name="no save")
    turn = 0
    try:
        _rate(step, window_s / 2)  # warm
        for number in range(rounds):
            before = _rate(step, window_s)
            names = list(ways)
            shift = number % len(names)
            found: dict[str, list[_Beside]] = {name: [] for name in names}
            for name in [*names[shift:], *names[:shift]]:
                for _ in range(saves):
                    turn += 1
                    _touch(state, turn)
                    found[name].append(ways[name]())
            undisturbed = (before + _rate(step, window_s)) / 2
            alone.seconds.append(1 / undisturbed)
            for name, parts in found.items():
                taken[name] += parts
                rate = sum(p.steps for p in parts) / sum(p.behind_s for p in parts)
                rows[name].seconds.append(1 / rate)
            say(f"training: round {number + 1} of {rounds}")
    finally:
        for one in kept.values():
            one.store.close()
    for name, parts in taken.items():
        rows[name].numbers = {
            "stall_s": sum(p.stall_s for p in parts) / len(parts),
            "behind_s": sum(p.behind_s for p in parts) / len(parts),
        }
    return [alone, *rows.values()]


class _Beside:
    """One save with the training beside it."""

    def __init__(self, stall_s: float, behind_s: float, steps: int) -> None:
        self.stall_s = stall_s
        self.behind_s = behind_s
        self.steps = steps


def _rate(step: Callable[[], None], seconds: float) -> float:
    """Return the steps a second of an undisturbed training."""
    began = time.perf_counter()
    steps = 0
    while (taken := time.perf_counter() - began) < seconds:
        step()
        steps += 1
    return steps / taken


def _beside(begin: Callable[[], Callable[[], bool]], step: Callable[[], None]) -> _Beside:
    """Begin a save, and train until it is over; at least one step."""
    began = time.perf_counter()
    over = begin()
    staged = time.perf_counter()
    steps = 0
    while not steps or not over():
        step()
        steps += 1
    return _Beside(staged - began, time.perf_counter() - staged, steps)


def _store_beside(one: _Kept, state: State, step: Callable[[], None]) -> _Beside:
    pending: list[PendingSave] = []

    def begin() -> Callable[[], bool]:
        pending.append(one.save(state))
        return lambda: pending[-1].done

    found = _beside(begin, step)
    pending[-1].result()
    return found


def _dcp_beside(state: State, space: Workspace, step: Callable[[], None]) -> _Beside:
    folder = space.fresh()
    futures: list[Future[Any]] = []

    def begin() -> Callable[[], bool]:
        future = dcp_async_save(state, storage_writer=_dcp(folder), no_dist=True)
        assert isinstance(future, Future)  # noqa: S101 - the default stager's answer
        futures.append(future)
        return future.done

    found = _beside(begin, step)
    futures[-1].result()
    space.discard(folder)
    return found
