"""The parts of saves in the background: memory, messages, the witness, events, and figures."""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

import ckptstore
from ckptstore.backends.memory import MemoryBackend
from ckptstore.catalog.log import Build, Log
from ckptstore.config import memory_bytes
from ckptstore.errors import LimitError, OperationCancelledError, TornStateError
from ckptstore.events import Events, SaveEvent
from ckptstore.hashing import xxh3_64
from ckptstore.maintenance.reports.prometheus_text import ProcessFigures, exposition
from ckptstore.model import Receipt
from ckptstore.saver.arena import Arena, ArenaPool, Digests, StagedTensor, sources_in
from ckptstore.saver.messages import Channel
from ckptstore.saver.save_job import CancellationToken
from ckptstore.saver.staging import Staging, lay_out
from ckptstore.tensors.flatten import flatten

MIB = 1 << 20


# --- memory -------------------------------------------------------------------------------------
@pytest.mark.parametrize("shared", [True, False])
def test_a_pool_never_holds_more_than_its_budget(shared: bool) -> None:
    """What is lent and what is idle count together; too large for ever is an error, else None."""
    pool = ArenaPool(10 * MIB, arenas_max=3, shared=shared)
    first = pool.lend(4 * MIB)
    second = pool.lend(5 * MIB + 1)
    assert first is not None
    assert second is not None
    assert len(first.view) >= 4 * MIB
    assert pool.size_bytes == 10 * MIB
    assert pool.lend(1) is None
    with pytest.raises(LimitError, match="more than the budget"):
        pool.lend(10 * MIB + 1)

    pool.give_back(first)
    assert pool.lend(3 * MIB) is first  # large enough, so it is used again
    pool.give_back(first)
    pool.give_back(second)
    whole = pool.lend(9 * MIB)  # the idle ones make room
    assert whole is not None
    assert sorted(pool.dropped()) == sorted([first.number, second.number])
    assert pool.dropped() == []
    assert pool.size_bytes == len(whole.view)
    pool.give_back(whole)
    pool.close()
    assert pool.size_bytes == 0


def test_a_pool_keeps_no_more_arenas_than_it_may() -> None:
    """An idle arena that is too small gives way to a larger one, whatever the budget allows."""
    pool = ArenaPool(100 * MIB, arenas_max=1, shared=False)
    small = pool.lend(MIB)
    assert small is not None
    pool.give_back(small)
    assert pool.lend(8 * MIB) is not None
    assert pool.size_bytes == 8 * MIB


def test_an_arena_is_no_copy_for_who_maps_it() -> None:
    """Bytes that are written through one mapping are seen through another."""
    arena = Arena(2 * MIB, shared=True)
    with mmap.mmap(arena.fd, arena.size_bytes) as other:
        arena.view[12345] = 7
        assert other[12345] == 7
    arena.drop()
    arena.drop()


@pytest.mark.parametrize("shared", [False, True])
def test_a_kernel_without_huge_pages_has_arenas(
    monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    """It refuses the advice, and the memory is as good."""
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 9999)
    arena = Arena(1 << 21, shared=shared)
    arena.view[:3] = b"abc"
    assert bytes(arena.view[:3]) == b"abc"
    arena.drop()


def test_the_memory_of_the_process_is_known() -> None:
    """What bounds the default budget is not more than the machine has."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 64 * MIB < memory_bytes() <= physical


# --- messages -----------------------------------------------------------------------------------
def test_messages_of_any_size_arrive_in_order_with_descriptors() -> None:
    """Small ones inline, large ones as memory, and a descriptor with the one it belongs to."""
    ours, theirs = socket.socketpair()
    sender, receiver = Channel(ours), Channel(theirs)
    large = os.urandom(3 * MIB)
    arena = Arena(2 * MIB, shared=True)
    arena.view[:3] = b"abc"

    sender.send({"a": 1})
    sender.send(large)  # does not wait for anybody to read
    sender.send("fd", arena.fd)
    sender.send(large[:100])

    assert receiver.receive() == ({"a": 1}, -1)
    assert receiver.receive() == (large, -1)
    message, fd = receiver.receive() or ("", -1)
    assert message == "fd"
    assert os.pread(fd, 3, 0) == b"abc"
    os.close(fd)
    assert receiver.receive() == (large[:100], -1)
    sender.close()
    assert receiver.receive() is None
    with pytest.raises(OSError):  # noqa: PT011 - any: the other end is gone
        receiver.send(large[:100])
    receiver.close()
    arena.drop()


def test_a_message_that_was_cut_short_is_none() -> None:
    """A sender that dies in the middle has sent nothing."""
    ours, theirs = socket.socketpair()
    receiver = Channel(theirs)
    ours.sendall(b"\x10\0\0\0\0\0\0\0\0half")
    ours.close()
    assert receiver.receive() is None
    receiver.close()


def test_the_end_of_a_process_is_the_end_of_the_stream() -> None:
    """A copy of the socket in a fork keeps the stream open; the descriptor of the process tells."""
    ours, theirs = socket.socketpair()
    read, write = os.pipe()
    receiver = Channel(theirs, peer=read)
    Channel(ours).send("last")
    os.close(write)  # readable from now on, as of a process that is gone
    assert receiver.receive() == ("last", -1)
    assert receiver.receive() is None
    receiver.close()
    ours.close()
    os.close(read)


def test_of_cancel_and_commit_one_wins() -> None:
    """Whoever comes first decides, once and for all."""
    cancelled = CancellationToken()
    assert cancelled.cancel()
    for call in (cancelled.check, cancelled.commit):
        with pytest.raises(OperationCancelledError):
            call()
    committed = CancellationToken()
    committed.commit()
    assert not committed.cancel()
    committed.check()
    committed.commit()


# --- staging ------------------------------------------------------------------------------------
def _staged(state: object) -> tuple[Arena, tuple[StagedTensor, ...], Digests, list[bytes]]:
    flat = flatten(state)
    layout = lay_out(flat.tensors, 1 << 16)
    arena = Arena(max(4096, layout.size_bytes), shared=False)
    staging = Staging(flat.tensors, layout, arena, later=True)
    staging.begin()
    staged = staging.tensors
    staging.copy()
    staging.settle()
    meant = []
    for source in flat.tensors:
        data = bytearray(source.nbytes)
        source.payload.copy_into(0, memoryview(data))
        meant.append(bytes(data))
    return arena, staged, staging.digests(), meant


def test_staged_bytes_are_the_bytes_of_the_state() -> None:
    """Dense, strided, conjugated, empty, tied and NumPy: each is in the arena as it is stored."""
    base = torch.randn(100, 70)
    state = {
        "dense": base, "tied": base, "part": torch.randn(50, 60)[::2, 5:],
        "channels": torch.randn(2, 3, 40, 50).contiguous(memory_format=torch.channels_last),
        "conj": torch.randn(30, dtype=torch.complex64).conj(), "empty": torch.empty(0, 4),
        "array": np.arange(40_000, dtype=np.int16)[::-1], "text": "x" * 10_000,
        "half": torch.randn(1_000_000).to(torch.bfloat16),
    }  # fmt: skip
    arena, staged, digests, meant = _staged(state)
    for tensor, taken, data in zip(staged, digests, meant, strict=True):
        assert bytes(arena.view[tensor.offset : tensor.offset + tensor.nbytes]) == data
        pieces = [
            xxh3_64(data[start : start + tensor.piece_bytes])
            for start in range(0, len(data), tensor.piece_bytes)
        ]
        assert list(taken) == pieces
    assert len({tensor.offset for tensor in staged if tensor.nbytes}) == len(staged) - 1


def test_every_bit_of_a_staged_tensor_is_watched() -> None:
    """A flip anywhere is found when the piece is read, by the name; other tensors are read."""
    values = torch.randn(100_000)
    state = {"a": values, "b": {"c": torch.randn(50)}}
    arena, staged, digests, _ = _staged(state)
    first, second = sources_in(arena.view, staged, digests, lambda: None)
    random = np.random.default_rng(1)
    for place in random.integers(0, first.nbytes, 50):
        arena.view[place] ^= 1 << int(random.integers(8))
        start = int(place) // staged[0].piece_bytes * staged[0].piece_bytes
        out = memoryview(bytearray(min(staged[0].piece_bytes, first.nbytes - start)))
        with pytest.raises(TornStateError, match="'a' was changed in memory"):
            first.payload.copy_into(start, out)
        second.payload.copy_into(0, memoryview(bytearray(second.nbytes)))
        state_bytes = values.numpy().view(np.uint8)
        arena.view[place] = int(state_bytes[place])


def test_copies_by_several_threads() -> None:
    """Helpers change nothing but the time; an error of one of them is raised."""
    flat = flatten({str(n): torch.randn(300_000) for n in range(20)})
    layout = lay_out(flat.tensors, 1 << 20)
    arena = Arena(layout.size_bytes, shared=True)
    with ThreadPoolExecutor(3) as helpers:
        staging = Staging(flat.tensors, layout, arena, later=False)
        staging.begin()
        staged = staging.tensors
        staging.copy(helpers, 3)
        staging.settle()
    for source, tensor in zip(flat.tensors, staged, strict=True):
        view = source.payload.view()
        assert view is not None
        assert bytes(view) == bytes(arena.view[tensor.offset : tensor.offset + tensor.nbytes])


# --- events and figures -------------------------------------------------------------------------
def _event(kind: str) -> SaveEvent:
    return SaveEvent(kind=kind, store="s", run="r", step=1, version="v", at_ms=5)  # type: ignore[arg-type]


@pytest.mark.parametrize("failure", [ZeroDivisionError, SystemExit])
def test_an_observer_that_fails_disturbs_nobody(
    caplog: pytest.LogCaptureFixture, failure: type[BaseException]
) -> None:
    """Others are called all the same; the failure is logged; ends are counted."""
    events = Events()
    heard: list[str] = []

    def broken(_: SaveEvent) -> None:
        raise failure

    events.observe(broken)
    end = events.observe(lambda event: heard.append(event.kind))
    events.emit(_event("staged"))
    events.emit(_event("durable"))
    end()
    end()
    events.emit(_event("failed"))

    assert heard == ["staged", "durable"]
    assert "an observer of saves failed" in caplog.text
    assert events.counts() == {"durable": 1, "failed": 1, "cancelled": 0, "skipped": 0}


def test_documents_of_events_are_plain() -> None:
    """An event can be written as JSON; an error is in it only where there is one."""
    assert _event("durable").document() == {
        "kind": "durable", "store": "s", "run": "r", "step": 1, "version": "v", "at_ms": 5,
        "receipt": {},
    }  # fmt: skip


def test_receipts_of_old_versions_are_receipts() -> None:
    """What an older version did not note is 0."""
    receipt = Receipt.of({"packs_s": 1.0, "blocked_s": 2.0}, "verified")
    assert (receipt.state, receipt.blocked_s, receipt.hashing_s) == ("verified", 2.0, 0.0)


def test_text_for_prometheus(memory: MemoryBackend, saving: Callable[..., Build]) -> None:
    """Each metric has its help and type, once; labels are escaped; values are numbers."""
    log = Log(memory)
    for step in (1, 2):
        log.append(saving("gpt", step))
    process = ProcessFigures(outcomes={"failed": 3}, in_flight=1, staging_bytes=5)
    text = exposition(log.refresh(), process)

    lines = text.splitlines()
    names = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(names) == len(set(names))
    assert 'ckptstore_versions{run="gpt",state="durable"} 2' in lines
    assert 'ckptstore_last_save_step{run="gpt"} 2' in lines
    assert 'ckptstore_saves_total{outcome="failed"} 3' in lines
    assert "ckptstore_saves_in_flight 1" in lines
    assert text.endswith("\n")
    for line in lines:
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            assert float(value) >= 0
            assert name.split("{")[0] in names
    assert "ckptstore_saves_total" not in exposition(log.refresh())


def test_the_store_tells_its_figures(tmp_path: Path) -> None:
    """Saves of this process are counted, also those in the foreground."""
    with ckptstore.open(tmp_path / "s", create=True) as store:
        run = store.run("gpt")
        run.save({"w": 1}, step=1)
        run.save_async({"w": 2}, step=2).result()
        lines = store.prometheus().splitlines()
    assert 'ckptstore_saves_total{outcome="durable"} 2' in lines
    assert 'ckptstore_versions{run="gpt",state="durable"} 2' in lines
