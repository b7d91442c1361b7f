"""A writer that collects an object in memory which is used again, then sends it.

The first write to new memory costs several times the copy into it (measured, docs/design/0014:
0.6 ms/MB against 0.1, in huge pages 0.3), and each pack would be written to new memory.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from ckptstore.backends.base import Buffer, ObjectWriter

__all__ = ["BufferPool", "PooledWriter"]


class BufferPool:
    """Buffers that are kept for the next object. Safe from any thread, across forks and pickles.

    Parameters
    ----------
    buffer_bytes
        Size of a new buffer; one that had to grow much beyond it is not kept.
    kept_max
        How many are kept.
    """

    def __init__(self, *, buffer_bytes: int, kept_max: int) -> None:
        self._buffer_bytes = buffer_bytes
        self._kept_max = kept_max
        self._free: deque[mmap.mmap] = deque(maxlen=kept_max)

    def take(self) -> mmap.mmap:
        """Return a buffer that nobody else has, with anything in it."""
        try:
            return self._free.pop()
        except IndexError:
            return _new_buffer(self._buffer_bytes)

    def give(self, buffer: mmap.mmap) -> None:
        """Take a buffer back."""
        if len(buffer) <= 2 * self._buffer_bytes:
            self._free.append(buffer)

    def clear(self) -> None:
        """Let go of the memory."""
        self._free.clear()

    def __reduce__(self) -> tuple[object, ...]:
        return _new_pool, (self._buffer_bytes, self._kept_max)


def _new_pool(buffer_bytes: int, kept_max: int) -> BufferPool:
    return BufferPool(buffer_bytes=buffer_bytes, kept_max=kept_max)


def _new_buffer(size: int) -> mmap.mmap:
    buffer = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            buffer.madvise(mmap.MADV_HUGEPAGE)
    return buffer


class PooledWriter(ObjectWriter):
    """Holds the whole object in a buffer of the pool and passes it to `send` on commit.

    A commit that raised ``TransientStorageError`` may be called again. `send` must be done with
    the memory when it returns or raises.
    """

    def __init__(self, send: Callable[[memoryview], None], pool: BufferPool) -> None:
        self._send = send
        self._pool = pool
        self._buffer: mmap.mmap | None = None
        self._size = 0
        self._finished = False

    def write(self, data: Buffer | Sequence[Buffer]) -> None:
        """Append to the memory."""
        if self._finished:
            msg = "this writer is finished"
            raise ValueError(msg)
        if self._buffer is None:
            self._buffer = self._pool.take()
        for part in (data,) if isinstance(data, bytes | bytearray | memoryview) else data:
            view = memoryview(part).cast("B")
            end = self._size + len(view)
            if end > len(self._buffer):
                self._grow(end)
            memoryview(self._buffer)[self._size : end] = view
            self._size = end

    def commit(self) -> None:
        """Send it, and give the memory back."""
        if self._finished:
            return
        with memoryview(self._buffer or b"") as whole, whole[: self._size] as body:
            self._send(body)
        self.abort()

    def abort(self) -> None:
        """Give the memory back."""
        buffer, self._buffer = self._buffer, None
        self._finished = True
        if buffer is not None:
            self._pool.give(buffer)

    def _grow(self, size: int) -> None:
        """Go on in a larger buffer; not in place, since an old error may still refer to it."""
        assert self._buffer is not None  # noqa: S101  # for the type checker
        larger = _new_buffer(max(size, len(self._buffer) * 5 // 4))
        memoryview(larger)[: self._size] = memoryview(self._buffer)[: self._size]
        self._buffer = larger
