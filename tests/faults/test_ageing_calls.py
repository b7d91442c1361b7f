"""Ageing that writes tensors: every call to the storage fails, and processes are killed at it."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from faultkit.stores import contents, create, memory_with, reopen
from shortening import places

from ckptstore.backends.base import Backend
from ckptstore.backends.memory import MemoryBackend
from ckptstore.errors import CkptStoreError, StorageError, TransientStorageError
from ckptstore.store import Store
from ckptstore.testing.faulty import Fault, FaultyBackend, When

pytestmark = pytest.mark.timeout(180)

POLICY = {"full": "last 1", "weights-bf16": "last 2", "weights-int8": "all", "weights": "tagged"}


def _state(step: int) -> dict[str, Any]:
    masters = torch.randn(80, 64, generator=torch.Generator().manual_seed(step))
    return {
        "model": {"low": masters.bfloat16(), "own": masters + 1},
        "optimizer": {"master": masters, "m": masters * 2},
    }


def _check(store: Store, *, done: bool | None) -> None:
    """Hold that each version is at the level that it had or has, and loads as that says."""
    levels = {version.step: version.level for version in store.versions("gpt")}
    wanted = {1: "weights-int8", 2: "weights", 3: "weights-bf16", 4: "full"}
    for step, level in levels.items():
        assert level in ("full", wanted[step])
        loaded, meant = store.load(f"gpt@{step}"), _state(step)
        if level == "full":
            assert torch.equal(loaded["optimizer"]["master"], meant["optimizer"]["master"])
        else:
            assert list(loaded) == ["model"]
        for name, tensor in meant["model"].items():
            found = loaded["model"][name]
            assert found.dtype == tensor.dtype
            near = {"weights-bf16": 0.01, "weights-int8": 0.05}.get(level, 0.0)
            assert torch.allclose(found.double(), tensor.double(), rtol=0, atol=3 * near)
    if done is not None:
        assert (levels == wanted) == done
    assert store.verify().ok


@pytest.fixture(scope="module")
def base() -> dict[str, bytes]:
    """Return the objects of a store of four versions, the second one tagged."""
    backend = memory_with({})
    with create(backend) as store:
        run = store.run("gpt")
        for step in (1, 2, 3, 4):
            run.save(_state(step), step=step, tags=["kept"] if step == 2 else [])
    return contents(backend)


WAYS = {
    "permanent": (When.BEFORE, StorageError, 1),
    "for-good": (When.BEFORE, TransientStorageError, 0),
    "lost-reply": (When.AFTER, StorageError, 1),
}


@pytest.mark.short("permanent")
@pytest.mark.parametrize("way", WAYS)
def test_a_failure_at_any_call_leaves_each_version_whole(base: dict[str, bytes], way: str) -> None:
    """Versions are as they were or as they are to be; once more, and all is as it is to be."""
    when, error, times = WAYS[way]
    count = Fault(at=0)
    with reopen(FaultyBackend(memory_with(base), count)) as store:
        store.retain(POLICY)
        _check(store, done=True)
    assert count.seen > 20
    for at in places(count.seen, way, every=9):
        inner: MemoryBackend = memory_with(base)
        fault = Fault(at=at, times=times, when=when, error=lambda: error("injected failure"))
        backend: Backend = FaultyBackend(inner, fault)
        try:
            with reopen(backend) as store:
                store.retain(POLICY)
        except CkptStoreError:
            pass
        with reopen(inner) as store:
            _check(store, done=None)
            store.gc(grace_s=0, orphan_age_s=0)
            store.retain(POLICY)
            _check(store, done=True)
            for _ in range(2):
                store.gc(grace_s=0, orphan_age_s=0, repack_below=0.99)
            _check(store, done=True)
            assert store.retain(POLICY).changes == ()


def _die(folder: str, at: int, *, after: bool) -> None:
    """Age in this process, and kill it at one of its calls on files."""
    seen = 0

    def wrapped(real: Any) -> Any:  # noqa: ANN401
        def call(*args: Any, **words: Any) -> Any:  # noqa: ANN401
            nonlocal seen
            seen += 1
            if seen == at and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = real(*args, **words)
            if seen == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    import ckptstore

    with ckptstore.open(folder) as store:
        for name in ("open", "write", "writev", "fsync", "link", "mkdir"):
            setattr(os, name, wrapped(getattr(os, name)))
        store.retain(POLICY)


@pytest.mark.slow
def test_a_kill_at_any_step_leaves_each_version_whole(tmp_path: Path) -> None:
    """SIGKILL before or after a call on files, over and over, until one goes through."""
    import ckptstore

    folder = str(tmp_path / "store")
    with ckptstore.open(folder, create=True) as store:
        run = store.run("gpt")
        for step in (1, 2, 3, 4):
            run.save(_state(step), step=step, tags=["kept"] if step == 2 else [])
    context = multiprocessing.get_context("fork")
    kills, at = 0, 1
    while True:
        process = context.Process(target=_die, args=(folder, at), kwargs={"after": at % 2 == 0})
        process.start()
        process.join()
        with ckptstore.open(folder) as store:
            _check(store, done=None if process.exitcode else True)
        if not process.exitcode:
            break
        assert process.exitcode == -signal.SIGKILL
        kills += 1
        at += 3
    assert kills >= 5
    with ckptstore.open(folder) as store:
        for _ in range(2):
            store.gc(grace_s=0, orphan_age_s=0, repack_below=0.99)
        _check(store, done=True)
