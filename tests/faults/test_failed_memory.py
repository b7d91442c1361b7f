"""Memory of calls that fail: it goes with their error, without the garbage collector."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TypeVar

import pytest
import torch
from faultkit.stores import memory_with

from ckptstore.backends.transfers import Threads
from ckptstore.backends.wrapper import WrapperBackend
from ckptstore.config import Options
from ckptstore.errors import CkptStoreError, StorageError
from ckptstore.objects.joining import Growing
from ckptstore.repo import create_on
from ckptstore.store import Store

T = TypeVar("T")


class _Away(WrapperBackend):
    """Fails calls of one kind, from a moment on."""

    failing = ""

    def around(self, call: str, key: str, action: Callable[[], T], size_bytes: int = 0) -> T:
        """Fail, or pass on."""
        if call == self.failing and key.startswith("packs/"):
            raise StorageError("away")
        return super().around(call, key, action, size_bytes)


@pytest.fixture
def _no_collector() -> Iterator[None]:
    """Free what nothing refers to, and no cycles."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def _flip(data: bytes) -> bytes:
    changed = bytearray(data)
    changed[len(changed) // 2] ^= 1
    return bytes(changed)


def _kept() -> int:
    """Return how many tensors and buffers of threads there are."""
    return sum(type(one) in (Growing, torch.Tensor) for one in gc.get_objects())


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("codec", ["raw", "planes"])
@pytest.mark.parametrize("failure", ["damage", "gone", "read_into", "open_writer"])
@pytest.mark.usefixtures("_no_collector")
def test_a_call_that_fails_keeps_no_memory(failure: str, codec: str, workers: int) -> None:
    """Nothing of a failed load or save stays once its error is dropped, whichever thread failed."""
    storage = memory_with({})
    backend = _Away(storage)
    options = Options(workers=workers, codec=codec)
    state = {name: torch.randn(200_000) for name in "abc"}
    with Store(create_on(backend, chunk_bytes=1 << 18, options=options)) as store:
        run = store.run("r")
        run.save(state, step=1)
        for key in [one.key for one in storage.list("packs/")]:
            if failure == "damage":
                storage.put(key, _flip(storage.get(key, bytes_max=1 << 30)))
            elif failure == "gone":
                storage.delete(key)
        backend.failing = failure
        another = {name: one + 1 for name, one in state.items()}

        def call() -> str:
            try:
                run.save(another, step=2) if failure == "open_writer" else run.load(1)
            except CkptStoreError as error:
                return error.kind
            return ""

        call()  # loads modules
        before = _kept()
        assert call() == ("storage" if "_" in failure else "corrupt_tensor")
        assert _kept() == before


@pytest.mark.usefixtures("_no_collector")
def test_an_error_of_a_thread_keeps_nothing() -> None:
    """What the frames of a call held is free once the error that it raised is dropped."""

    class Held:
        """Something that can be seen to be freed."""

    seen: list[weakref.ref[Held]] = []

    def fail() -> None:
        held = Held()
        seen.append(weakref.ref(held))
        raise StorageError("away")

    with Threads(1) as pool, suppress(StorageError):
        pool.submit(fail).result()
    assert [one() for one in seen] == [None]


def test_a_call_that_was_cancelled_is_not_made() -> None:
    """A call that is cancelled before a thread takes it is never made; others are."""
    made: list[int] = []
    go = threading.Event()
    with Threads(1) as pool:
        first = pool.submit(go.wait, 60)
        second, third = pool.submit(made.append, 2), pool.submit(made.append, 3)
        assert second.cancel()
        go.set()
        assert first.result(60)
        assert third.result(60) is None
    assert made == [3]
    assert second.cancelled()
