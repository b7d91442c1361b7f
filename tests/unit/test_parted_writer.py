"""Objects in parts: right bytes, bounded memory, no part lost, nothing left after an abort."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from ckptstore import limits
from ckptstore.backends import part_sender
from ckptstore.backends.buffers import BufferPool
from ckptstore.backends.part_sender import PartSender
from ckptstore.backends.parted_writer import PartedWriter
from ckptstore.errors import StorageError, StoragePermissionError, TransientStorageError

PART = 100
MOST = 4


class Storage:
    """Takes objects whole or in parts; fails as often as it is told to."""

    def __init__(self, failures: Sequence[Exception] = ()) -> None:
        self.objects: list[bytes] = []
        self.calls: list[str] = []
        self.abandoned = 0
        self.gate: threading.Event | None = None
        """Parts wait for it."""
        self.at_once = self.most_at_once = 0
        self._failures = list(failures)
        self._parts: dict[int, bytes] = {}
        self._lock = threading.Lock()

    def _call(self, name: str) -> None:
        with self._lock:
            self.calls.append(name)
            if self._failures:
                raise self._failures.pop(0)

    def whole(self, body: memoryview) -> None:
        """Take an object."""
        self._call("whole")
        self.objects.append(bytes(body))

    def begin(self) -> None:
        """Begin."""
        self._call("begin")

    def part(self, number: int, body: memoryview) -> int:
        """Take a part."""
        with self._lock:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            if self.gate is not None:
                assert self.gate.wait(120)
            self._call(f"part {number}")
            self._parts[number] = bytes(body)
        finally:
            with self._lock:
                self.at_once -= 1
        return number

    def complete(self, receipts: Sequence[Any], size_bytes: int) -> None:
        """Show the object."""
        self._call("complete")
        data = b"".join(self._parts[number] for number in receipts)
        assert len(data) == size_bytes
        self.objects.append(data)

    def abandon(self) -> None:
        """Drop the parts."""
        assert not self.at_once
        self.abandoned += 1
        raise StorageError("it fails, too")


@pytest.fixture
def sender(monkeypatch: pytest.MonkeyPatch) -> Iterator[PartSender]:
    """Return threads and memory for a few tiny parts."""
    monkeypatch.setattr(limits, "PART_BYTES", PART)
    monkeypatch.setattr(part_sender, "SMALL_PART_BYTES", PART)
    sender = PartSender(MOST, MOST * PART)
    yield sender
    sender.close()
    assert sender._held_bytes == 0, "memory was not given back, or twice"


def test_an_object_is_what_was_written(sender: PartSender) -> None:
    """Whatever the pieces are; one that fits into a part takes one request."""
    for sizes in ([], [0], [1], [100], [60, 60], [1000], [7] * 100, [30, 500, 1], [100, 100]):
        storage = Storage()
        parts = [os.urandom(size) for size in sizes]
        with PartedWriter(storage, sender) as writer:
            for part in parts[:2]:
                writer.write(part)
            writer.write([bytearray(part) for part in parts[2:]])
            assert not storage.objects
            writer.commit()
            writer.commit()
        assert storage.objects == [b"".join(parts)]
        count = -(-sum(sizes) // PART)
        assert len(storage.calls) == (1 if count < 2 else count + 2)
        assert not storage.abandoned
    with pytest.raises(ValueError, match="finished"):
        writer.write(b"x")


def test_two_objects_never_share_memory(sender: PartSender) -> None:
    """Also when many threads write at once; never more parts on their way than allowed."""
    most = []

    def write(number: int) -> bool:
        storage = Storage()
        data = bytes([number % 251]) * (number % 1500)
        with PartedWriter(storage, sender) as writer:
            for at in range(0, len(data), 70):
                writer.write(data[at : at + 70])
            writer.commit()
        most.append(storage.most_at_once)
        return storage.objects == [data]

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(write, range(400)))
    assert max(most) <= MOST


@given(failures=st.lists(st.booleans(), max_size=12))
def test_a_part_that_failed_for_a_while_is_sent_again(failures: list[bool]) -> None:
    """Each call of commit tries what failed before; the object is whole, whichever calls failed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "PART_BYTES", PART)
        patch.setattr(part_sender, "SMALL_PART_BYTES", PART)
        sender = PartSender(MOST, MOST * PART)
        storage = Storage([TransientStorageError("busy") for fails in failures if fails])
        data = os.urandom(6 * PART + 1)
        with PartedWriter(storage, sender) as writer:
            for at in range(0, len(data), 130):
                writer.write(data[at : at + 130])
            for _ in range(20):
                try:
                    writer.commit()
                except TransientStorageError:
                    assert not storage.objects
                    continue
                break
        assert storage.objects == [data]
        assert not storage.abandoned
        sender.close()
        assert sender._held_bytes == 0


def test_a_lasting_failure_is_raised_and_the_parts_are_dropped(sender: PartSender) -> None:
    """By a later write or the commit; the error is that of the part, not that of dropping it."""
    storage = Storage([StoragePermissionError("no"), StoragePermissionError("no")])
    with PartedWriter(storage, sender) as writer:
        with pytest.raises(StoragePermissionError):  # noqa: PT012 - by one of them
            for _ in range(100):
                writer.write(bytes(PART))
            writer.commit()
        with pytest.raises(StoragePermissionError):
            writer.commit()
    assert not storage.objects


def test_an_abort_drops_the_parts_once_none_is_on_its_way(sender: PartSender) -> None:
    """It waits for no request itself, and no object appears."""
    storage = Storage()
    storage.gate = threading.Event()
    with PartedWriter(storage, sender) as writer:
        writer.write(bytes(3 * PART))
        writer.abort()
        writer.abort()
        before = storage.abandoned
    storage.gate.set()
    sender.close()
    assert (before, storage.abandoned) == (0, 1)
    assert not storage.objects
    assert sender._held_bytes == 0


def test_writers_that_fill_the_memory_do_not_wait_for_each_other(sender: PartSender) -> None:
    """More unfinished parts than there is memory for: with none on its way, there is one more."""
    writers = [PartedWriter(Storage(), sender) for _ in range(3 * MOST)]
    for writer in writers:
        writer.write(bytes(PART))
    for writer in writers:
        writer.write(bytes(PART // 2))
    for writer in writers:
        writer.commit()
        assert writer._upload.objects == [bytes(PART + PART // 2)]  # type: ignore[attr-defined]


def test_the_memory_kept_is_bounded() -> None:
    """Buffers are used again; closing lets go of all; a pickle carries none."""
    pool = BufferPool(buffer_bytes=1000, kept_max=8, kept_bytes=2500)
    one = pool.take()
    pool.give(one)
    assert pool.take() is one

    def give(count: int, touched: int) -> int:
        taken = [pool.take() for _ in range(count)]
        for memory in taken:
            memory.touched = touched
            pool.give(memory)
        return len(pool._free)

    assert give(6, 100) == 6
    assert give(10, 100) == 8
    assert not pickle.loads(pickle.dumps(pool))._free  # noqa: S301
    pool.clear()
    assert give(4, 1000) == 2
    assert sum(buffer.touched for buffer in pool._free) == 2000
