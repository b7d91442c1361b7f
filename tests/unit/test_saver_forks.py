"""Saves in the background of a process that forks: what its child may do, and what it keeps."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import ckptstore
from ckptstore.errors import CkptStoreError
from ckptstore.saver.arena import Arena

ENGINES = ("thread", "process")
_PATIENCE_S = 120.0


def _in_a_fork(work: Callable[[], None]) -> int | None:
    """Do something in a forked child; return its exit status, None if it never came to an end.

    One that hangs prints where. (A timer of faulthandler would hang in a fork, too.)
    """

    def watched() -> None:
        faulthandler.register(signal.SIGUSR1, file=2)
        work()

    child = multiprocessing.get_context("fork").Process(target=watched)
    child.start()
    child.join(_PATIENCE_S)
    status = child.exitcode
    if status is None and child.pid is not None:
        os.kill(child.pid, signal.SIGUSR1)
        child.join(5)
    child.kill()
    child.join()
    return status


def _state(seed: int = 0, elements: int = 1_000_000) -> dict[str, torch.Tensor]:
    return {"w": torch.full((elements,), float(seed))}


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_waits_for_no_lock_of_its_parent(tmp_path: Path) -> None:
    """It may look at the figures, wait and close while the parent holds its locks at the fork."""
    with ckptstore.open(tmp_path / "s", create=True, engine="thread") as store:
        store.run("gpt").save_async(_state(), step=1).result(_PATIENCE_S)
        saver = store._saver
        held, go = threading.Event(), threading.Event()

        def hold() -> None:
            with saver._changed, saver.dispatcher._pool._lock:
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
            status = _in_a_fork(work)
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
        pending = store.run("gpt").save_async(_state(), step=1)
        pending.result(_PATIENCE_S)
        store._saver._unheard.append((pending._save, CkptStoreError("of the parent")))
        assert _in_a_fork(store.close) == 0
        with pytest.raises(CkptStoreError, match="of the parent"):
            store.close()


@pytest.mark.short("True-process")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("close", [False, True])
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_keeps_its_own_memory(tmp_path: Path, engine: str, close: bool) -> None:
    """What it allocates outlives the parent's saver in it, whose mappings end with a save."""
    elements = 4_000_000
    gc.collect()  # garbage of other tests, whose libraries may not be finalised in a fork
    with ckptstore.open(tmp_path / "s", create=True, engine=engine) as store:
        run = store.run("gpt")
        run.save_async(_state(elements=elements), step=1).result(_PATIENCE_S)

        def work() -> None:
            own = [np.ones(elements) for _ in range(4)]  # torch's threads do not live on in a fork
            if close:
                store.close()
            else:
                run.save_async({"w": np.ones(10)}, step=2).result(_PATIENCE_S)
            gc.collect()  # the parent's saver is garbage here
            others = [np.full(elements - 1000 * step, 7.0) for step in range(4)]
            assert all(bool((one == 1).all()) for one in own)
            assert all(bool((one == 7).all()) for one in others)
            store.close()

        assert _in_a_fork(work) == 0
        run.save_async(_state(3), step=3).result(_PATIENCE_S)
        assert run.versions()[-1].step == 3


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

    assert _in_a_fork(work) == 0
    assert bytes(arena.view[:4]) == b"mine"
    arena.drop()
    assert unpinned == [1]
