"""Ends of background saves: what is told, in which order, and forks beside them."""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from faultkit.forking import in_a_fork
from heldback import KilledBackend
from programs import run_program

import ckptstore
from ckptstore import errors
from ckptstore.backends.memory import MemoryBackend
from ckptstore.backends.registry import open_backend
from ckptstore.config import Options
from ckptstore.format.keys import commit_key
from ckptstore.repo import create_on
from ckptstore.saver import save_job
from ckptstore.saver.arena import Arena
from ckptstore.saver.save_job import write_job
from ckptstore.store import Store

_NAMES = itertools.count()


def _state(step: int = 0) -> dict[str, Any]:
    return {"w": torch.full((1000,), float(step))}


def _store(engine: str = "thread", **options: Any) -> Store:  # noqa: ANN401
    backend = MemoryBackend(f"ends/{next(_NAMES)}")
    return Store(create_on(backend, options=Options(engine=engine, **options)))


@pytest.mark.parametrize("stages", list(itertools.product(("now", "background"), repeat=3)))
def test_saves_are_handed_over_in_the_order_of_the_calls(stages: tuple[Any, ...]) -> None:
    """Whichever of them are ready first, or at once: versions have the order of the calls."""
    with _store(in_flight=3) as store:
        run, go = store.run("r"), threading.Event()
        store._session.saver._stager.submit(go.wait)
        saves = [run.save_async(_state(n), step=n, stage=how) for n, how in enumerate(stages)]
        go.set()
        assert [save.result().step for save in saves] == [0, 1, 2]
        assert [version.step for version in run.versions()] == [0, 1, 2]
        assert all(torch.equal(run.load(n)["w"], _state(n)["w"]) for n in range(3))


@pytest.mark.parametrize("ahead", [True, False])
def test_a_save_whose_retention_fails_is_durable(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ahead: bool
) -> None:
    """The failure is a warning: the version is there, and the next one too."""

    def failing(*_: object, **__: object) -> None:
        raise errors.StorageError("the disk is away")

    monkeypatch.setattr("ckptstore.saver.save_job.retain", failing)
    monkeypatch.setattr(ckptstore.Run, "retain", failing)
    with _store() as store:
        run = store.run("r")
        run.set_policy({"full": "last 1"})
        with caplog.at_level(logging.WARNING, "ckptstore"):
            for step in (1, 2):
                if ahead:
                    run.save_async(_state(), step=step, retain=True).result()
                else:
                    run.save(_state(), step=step, retain=True)
        assert [version.step for version in run.versions()] == [1, 2]
        assert caplog.text.count("the disk is away") == 2


_ENDS: dict[str, type[BaseException] | None] = {
    "durable": None,
    "full": errors.StorageFullError,
    "broken": ZeroDivisionError,
    "cancelled": errors.OperationCancelledError,
}


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("hears", ["result", "next save", "next in front", "close"])
@pytest.mark.parametrize("end", _ENDS)
def test_each_end_is_told_once(
    monkeypatch: pytest.MonkeyPatch, end: str, hears: str, asked: bool
) -> None:
    """A failure is raised to the first who asks, and to no one after; a cancellation to no other.

    The memory comes back, and the next save is durable, whatever the end.
    """
    error, known = _ENDS[end], threading.Event()

    def ending(*args: Any, **words: Any) -> Any:  # noqa: ANN401
        known.wait()
        if error is None or end == "cancelled":
            return write_job(*args, **words)
        raise error("no")

    monkeypatch.setattr(save_job, "write_job", ending)
    store, events = _store(), list[str]()
    store.observe(lambda event: events.append(event.kind))
    run = store.run("r")
    pending = run.save_async(_state(), step=1)
    assert end != "cancelled" or pending.cancel()
    known.set()
    pending._save.wait()
    monkeypatch.setattr(save_job, "write_job", write_job)
    if asked and error:
        with pytest.raises(error):
            pending.result()
    ways: dict[str, Callable[[], object]] = {
        "result": pending.result,
        "next save": lambda: run.save_async(_state(), step=2),
        "next in front": lambda: run.save(_state(), step=2),
        "close": store.close,
    }
    due = error if hears == "result" or (end != "cancelled" and not asked) else None
    with pytest.raises(due) if due else nullcontext():
        ways[hears]()
    if hears != "close":
        assert run.save_async(_state(), step=9).result().step == 9
        store.close()
    kinds = {"durable": "durable", "cancelled": "cancelled"}
    assert events[:2] == ["staged", kinds.get(end, "failed")]
    assert pending.state == events[1]
    with Store(
        create_on(MemoryBackend(store.url.removeprefix("memory://")), exist_ok=True)
    ) as again:
        steps = [version.step for version in again.versions()]
    assert (1 in steps) == (end == "durable")


@pytest.mark.parametrize(("when", "hears"), [("before", "close"), ("after", "result")])
def test_the_log_tells_what_became_of_a_killed_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str, hears: str
) -> None:
    """Killed between commit and answer the save is durable, its name synced; else it failed."""
    synced: list[str] = []
    monkeypatch.setattr(KilledBackend, "make_durable", lambda _, keys: synced.extend(keys))
    backend = KilledBackend(open_backend(tmp_path / "s"), os.getpid(), when)
    store = Store(create_on(backend, options=Options(engine="process")))
    pending = store.run("r").save_async(_state(3), step=3)
    ask = pending.result if hears == "result" else store.close
    if when == "before":
        with pytest.raises(errors.SaverDiedError, match="SIGKILL"):
            ask()
    else:
        ask()
        assert pending.result().step == 3
        assert pending.receipt.state == "durable"
        assert synced == [commit_key(pending.result().commit)]
    store.close()
    with ckptstore.open(tmp_path / "s") as again:
        assert [version.step for version in again.versions()] == ([3] if when == "after" else [])


ENGINES = ("thread", "process")
_PATIENCE_S = 120.0


def _forks_state(seed: int = 0, elements: int = 1_000_000) -> dict[str, torch.Tensor]:
    return {"w": torch.full((elements,), float(seed))}


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_waits_for_no_lock_of_its_parent(tmp_path: Path) -> None:
    """It may look at the figures, wait and close while the parent holds its locks at the fork."""
    with ckptstore.open(tmp_path / "s", create=True, engine="thread") as store:
        store.run("gpt").save_async(_forks_state(), step=1).result(_PATIENCE_S)
        saver = store._session.saver
        held, go = threading.Event(), threading.Event()

        def hold() -> None:
            with saver._changed, saver.dispatcher.pool._lock:
                held.set()
                go.wait()

        def work() -> None:
            assert "ckptstore" in store.prometheus()
            store.wait()
            store.close()

        holder = threading.Thread(target=hold)
        holder.start()
        held.wait()
        try:
            status = in_a_fork(work)
        finally:
            go.set()
            holder.join()
    assert status == 0


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_does_not_hear_of_an_error_of_its_parent(tmp_path: Path) -> None:
    """The error is raised in the process whose save failed, and in that one alone."""
    store = ckptstore.open(tmp_path / "s", create=True, engine="thread")
    with store:
        pending = store.run("gpt").save_async(_forks_state(), step=1)
        pending.result(_PATIENCE_S)
        store._session.saver._unheard.append(
            (pending._save, errors.CkptStoreError("of the parent"))
        )
        assert in_a_fork(store.close) == 0
        with pytest.raises(errors.CkptStoreError, match="of the parent"):
            store.close()


@pytest.mark.short("True-process")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("close", [False, True])
def test_a_forked_child_keeps_its_own_memory(tmp_path: Path, engine: str, close: bool) -> None:
    """What it allocates outlives the parent's saver in it, whose mappings end with a save.

    In a program of its own: a fork here would finalise what other tests have left, and fail by it.
    """
    run_program("faultkit.forking", tmp_path / "s", engine, *["close"] * close)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_an_arena_is_given_up_in_a_forked_child(shared: bool) -> None:
    """The parent's bytes stay as they are, and its pinning is not ended by somebody else."""
    arena = Arena(1 << 21, shared=shared)
    arena.view[:4] = b"mine"
    unpinned: list[int] = []
    arena.unpin = lambda: unpinned.append(1)

    def work() -> None:
        arena.drop()
        assert not unpinned

    assert in_a_fork(work) == 0
    assert bytes(arena.view[:4]) == b"mine"
    arena.drop()
    assert unpinned == [1]
