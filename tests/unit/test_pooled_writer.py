"""Objects that are collected in memory which is used again: right bytes, bounded memory."""

from __future__ import annotations

import os
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest

from ckptstore.backends.pooled_writer import BufferPool, PooledWriter
from ckptstore.errors import TransientStorageError

KEPT_BYTES = 3000


class Sent:
    """Keeps a copy of what was sent; fails as often as it is told to."""

    def __init__(self, failures: int = 0) -> None:
        self.bodies: list[bytes] = []
        self._failures = failures
        self.held: list[memoryview] = []

    def __call__(self, body: memoryview) -> None:
        """Take an object."""
        self.held.append(body[:])  # as a traceback may
        if self._failures:
            self._failures -= 1
            raise TransientStorageError("busy")
        self.bodies.append(bytes(body))


def test_an_object_is_what_was_written() -> None:
    """Whatever the pieces are, and however far beyond a buffer they go."""
    pool = BufferPool(buffer_bytes=100, kept_max=2, kept_bytes=KEPT_BYTES)
    for sizes in ([], [0], [1], [100], [60, 60], [1000], [7] * 100, [30, 500, 1]):
        sent = Sent()
        parts = [os.urandom(size) for size in sizes]
        with PooledWriter(sent, pool) as writer:
            for part in parts[:2]:
                writer.write(part)
            writer.write([bytearray(part) for part in parts[2:]])
            writer.commit()
        assert sent.bodies == [b"".join(parts)]


def test_memory_is_used_again() -> None:
    """The next object goes into the buffer of the last, and what was longer does not show."""
    pool = BufferPool(buffer_bytes=100, kept_max=2, kept_bytes=KEPT_BYTES)
    buffers = []
    for size in (90, 10, 50):
        sent = Sent()
        with PooledWriter(sent, pool) as writer:
            writer.write(bytes([size]) * size)
            buffers.append(id(writer._buffer))
            writer.commit()
        assert sent.bodies == [bytes([size]) * size]
    assert len(set(buffers)) == 1


def test_two_objects_never_share_memory() -> None:
    """Also when many threads write at once."""
    pool = BufferPool(buffer_bytes=1000, kept_max=3, kept_bytes=KEPT_BYTES)

    def write(number: int) -> bool:
        sent = Sent()
        data = bytes([number % 251]) * (number % 1500)
        with PooledWriter(sent, pool) as writer:
            for at in range(0, len(data), 100):
                writer.write(data[at : at + 100])
            writer.commit()
        return sent.bodies == [data]

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(write, range(500)))
    assert len(pool._free) <= 3


def test_a_commit_can_be_tried_again() -> None:
    """After a passing failure nothing is lost; the memory goes back once, at the end."""
    pool = BufferPool(buffer_bytes=10, kept_max=2, kept_bytes=KEPT_BYTES)
    sent = Sent(failures=2)
    with PooledWriter(sent, pool) as writer:
        writer.write(b"abc")
        for _ in range(2):
            with pytest.raises(TransientStorageError):
                writer.commit()
            assert not pool._free
        writer.commit()
        writer.commit()
    assert sent.bodies == [b"abc"]
    assert len(pool._free) == 1
    with pytest.raises(ValueError, match="finished"):
        writer.write(b"x")


def test_a_buffer_that_an_error_refers_to_can_grow() -> None:
    """A failed request's traceback holds on to the memory; the next object is not hit by it."""
    pool = BufferPool(buffer_bytes=10, kept_max=2, kept_bytes=KEPT_BYTES)
    failing = Sent(failures=1)
    with PooledWriter(failing, pool) as writer:
        writer.write(b"x" * 10)
        with pytest.raises(TransientStorageError):
            writer.commit()
    sent = Sent()
    with PooledWriter(sent, pool) as writer:
        writer.write(b"y" * 30)
        writer.commit()
    assert sent.bodies == [b"y" * 30]


def test_the_memory_kept_is_bounded() -> None:
    """Buffers that grew much are dropped, and closing lets go of all; a pickle carries none."""
    pool = BufferPool(buffer_bytes=10, kept_max=2, kept_bytes=KEPT_BYTES)
    with PooledWriter(Sent(), pool) as writer:
        writer.write(b"x" * 100)
        writer.commit()
    assert not pool._free
    pool.give(pool.take())
    assert pool._free
    assert not pickle.loads(pickle.dumps(pool))._free  # noqa: S301
    pool.clear()
    assert not pool._free


def test_buffers_are_kept_by_what_they_take() -> None:
    """Of large buffers of which little was written many are kept, of full ones few."""
    pool = BufferPool(buffer_bytes=1000, kept_max=8, kept_bytes=2500)

    def write_at_once(count: int, size: int) -> int:
        writers = [PooledWriter(Sent(), pool) for _ in range(count)]
        for writer in writers:
            writer.write(b"x" * size)
        for writer in writers:
            writer.commit()
        return len(pool._free)

    assert write_at_once(6, 100) == 6
    assert write_at_once(10, 100) == 8
    pool.clear()
    assert write_at_once(4, 1000) == 2
    assert sum(buffer.touched for buffer in pool._free) == 2000
