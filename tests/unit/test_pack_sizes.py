"""Sizes of packs where a pack waits in memory to be sent: the first small, few of a small write."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import ckptstore
from ckptstore import limits
from ckptstore.backends.base import Capabilities
from ckptstore.backends.memory import CAPABILITIES, MemoryBackend
from ckptstore.codecs.codec_table import encode
from ckptstore.codecs.plane_layout import Layout
from ckptstore.config import SYSTEM
from ckptstore.format.keys import pack_key
from ckptstore.limits import GIB, MIB
from ckptstore.objects import packs
from ckptstore.objects.packs import plan_packs


@given(
    total=st.integers(0, 1 << 50),
    whole=st.integers(1, 4 * GIB),
    threads=st.integers(1, 64),
    memory=st.integers(0, 8 * GIB),
    beside=st.integers(0, 64 * MIB),
)
def test_packs_in_memory_stay_between_their_bounds(
    *, total: int, whole: int, threads: int, memory: int, beside: int
) -> None:
    """Never above the backend's size or the memory, never tiny, sizes grow; one is always begun."""
    plan = plan_packs(
        total,
        _capabilities(pack_bytes=whole, part_bytes=whole),
        threads=threads,
        memory_bytes=memory,
        beside_bytes=beside,
    )
    sizes = [plan.closed_at(turn) for turn in range(70)]
    assert sizes == sorted(sizes)
    assert sizes[-1] == plan.most_bytes <= whole
    assert sizes[0] >= min(whole, limits.PACK_BYTES_FIRST)
    assert plan.most_bytes >= min(whole, limits.PACK_BYTES_MIN)
    assert 1 <= plan.streams <= min(plan.at_once, threads)
    assert plan.at_once <= limits.PACKS_AT_ONCE
    held = max(plan.most_bytes + limits.CHUNK_BYTES_DEFAULT, beside)
    assert plan.at_once == 1 or plan.at_once * held <= memory
    enough = max(max(whole, limits.PACK_BYTES_MIN) + limits.CHUNK_BYTES_DEFAULT, beside)
    if memory >= limits.PACKS_AT_ONCE * enough:
        assert plan.at_once == limits.PACKS_AT_ONCE
        if total >= whole * limits.PACKS_OF_A_WRITE:
            assert plan.most_bytes == whole


@given(total=st.integers(0, 1 << 50), whole=st.integers(2, 4 * GIB), memory=st.integers(0, GIB))
def test_packs_that_leave_as_they_are_written_have_one_size(
    total: int, whole: int, memory: int
) -> None:
    """The backend's own, from the first on: nothing waits for a pack to be full."""
    plan = plan_packs(
        total, _capabilities(pack_bytes=whole, part_bytes=0), threads=2, memory_bytes=memory
    )
    assert plan.closed_at(0) == plan.closed_at(9) == whole


@given(total=st.integers(0, 1 << 50), memory=st.integers(0, GIB), threads=st.integers(1, 16))
def test_packs_in_parts_stay_within_the_memory(total: int, memory: int, threads: int) -> None:
    """The parts that are held at most fit into it, or all packs do; one is always begun."""
    plan = plan_packs(
        total,
        _capabilities(pack_bytes=64 * MIB, part_bytes=limits.PART_BYTES),
        threads=threads,
        memory_bytes=memory,
    )
    whole = plan.most_bytes + limits.CHUNK_BYTES_DEFAULT
    held = min(limits.PARTS_HELD_MAX * limits.PART_BYTES, plan.at_once * whole)
    assert held <= memory or plan.at_once == 1
    assert limits.PACK_BYTES_MIN <= plan.most_bytes <= 64 * MIB
    assert plan.closed_at(0) == plan.closed_at(9) == plan.most_bytes
    if memory >= limits.PARTS_HELD_MAX * limits.PART_BYTES:
        assert plan.at_once * 64 * MIB > held, "the packs do not reach all connections"


@given(total=st.integers(0, 1 << 40), beyond=st.integers(1, 1 << 50), memory=st.integers(0, GIB))
def test_a_part_of_a_write_has_the_packs_of_the_whole(total: int, beyond: int, memory: int) -> None:
    """As large as those of the whole write, the first one too: others are on their way already."""
    size = CAPABILITIES.pack_bytes
    capabilities = _capabilities(pack_bytes=size, part_bytes=size)
    whole = total + beyond
    part = plan_packs(
        total, capabilities, threads=2, memory_bytes=memory, in_memory=3, whole_bytes=whole
    )
    alone = plan_packs(whole, capabilities, threads=2, memory_bytes=memory, in_memory=3)
    assert part.closed_at(0) == part.closed_at(9) == alone.most_bytes
    assert part.at_once == alone.at_once <= limits.PACKS_AT_ONCE


def test_a_little_is_one_pack() -> None:
    """A write of a few megabytes takes one request, as many of them are made."""
    backend = MemoryBackend("little")
    state = {f"w{i}": torch.randn(MIB) for i in range(3)}  # 12 MiB
    with ckptstore.open("memory://little", create=True, codec="raw") as store:
        store.run("r").save(state, step=1)
    assert len(list(backend.list("packs/"))) == 1


def test_a_save_sends_its_first_pack_before_the_last_is_filled() -> None:
    """A state that would fill one pack and a half goes in several; all of it comes back."""
    backend = MemoryBackend("sizes")  # sees what the store puts there
    state = {f"w{i}": torch.randn(2 * MIB) for i in range(12)}  # 96 MiB
    with ckptstore.open("memory://sizes", create=True, codec="raw") as store:
        store.run("r").save(state, step=1)
        sizes = [info.size_bytes for info in backend.list("packs/")]
        assert len(sizes) >= 6
        spare = 2 * limits.CHUNK_BYTES_DEFAULT
        assert max(sizes) < limits.PACK_BYTES_MIN + spare
        assert sum(size < limits.PACK_BYTES_FIRST + spare for size in sizes) >= 2
        loaded = store.load("r@1")
    assert all(torch.equal(loaded[name], state[name]) for name in state)


def _capabilities(*, pack_bytes: int, part_bytes: int) -> Capabilities:
    return replace(CAPABILITIES, pack_bytes=pack_bytes, part_bytes=part_bytes)


class _Late(Future[None]):
    """A result that comes when somebody waits for it."""

    def __init__(self, call: Callable[[], None]) -> None:
        super().__init__()
        self._call = call

    def result(self, timeout: float | None = None) -> None:
        """Do the work, once."""
        if not self.done():
            self._call()
            self.set_result(None)
        return super().result(timeout)


class _Finishers:
    """Threads that come to their work as late as anybody lets them."""

    def __init__(self, *_: object, **__: object) -> None:
        self._given: list[_Late] = []

    def submit(self, call: Callable[..., None], *arguments: object) -> _Late:
        """Take work."""
        self._given.append(_Late(partial(call, *arguments)))
        return self._given[-1]

    def shutdown(self, wait: bool = True) -> None:
        """Let it be done, if it is waited for."""
        for one in self._given if wait else ():
            one.result()


def test_a_write_returns_once_its_packs_are_durable(monkeypatch: pytest.MonkeyPatch) -> None:
    """However late the threads are that make packs durable: a commit may name them afterwards."""
    monkeypatch.setattr(packs, "Threads", _Finishers)
    backend = MemoryBackend("pack-sizes/late")
    sink = packs.PackSink(backend, SYSTEM, plan_packs(1, CAPABILITIES, threads=1, memory_bytes=GIB))
    chunk = encode(memoryview(b"x"), Layout.BYTES, "raw")
    placed = sink.append(0, chunk, bytes(32), 1)
    assert not backend.objects
    sink.finish()
    assert pack_key(placed.pack) in backend.objects
