"""Saves in the background of a process that forks: what its child may do, and what it keeps."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from faultkit.forking import in_a_fork
from programs import run_program

import ckptstore
from ckptstore.errors import CkptStoreError
from ckptstore.saver.arena import Arena

ENGINES = ("thread", "process")
_PATIENCE_S = 120.0


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
        pending = store.run("gpt").save_async(_state(), step=1)
        pending.result(_PATIENCE_S)
        store._saver._unheard.append((pending._save, CkptStoreError("of the parent")))
        assert in_a_fork(store.close) == 0
        with pytest.raises(CkptStoreError, match="of the parent"):
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
