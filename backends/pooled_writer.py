"""A buffered writer that collects in reused memory.

The first write to new memory costs several times the
copy into it (measured, docs/design/0014: 0.6 ms/MB against 0.1, in huge pages 0.3), and each pack
would be written to new memory.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from ckptstore.backends.base import Buffer, ObjectWriter, parts_of


@dataclass(slots=True)
class Memory:
    """Memory of one object; owned by the writer that took it from the pool."""

    memory: mmap.mmap
    touched: int = 0
    """Bytes from its beginning that were ever written to: the rest takes no memory yet."""


class BufferPool:
    """Buffers kept for reuse. Safe from any thread, across forks and pickles.

    Parameters
    ----------
    buffer_bytes
        Size of a new buffer; one that had to grow much beyond it is not kept.
    kept_max
        Most buffers that are kept.
    kept_bytes
        Most bytes that the kept buffers take together.
    """

    def __init__(self, *, buffer_bytes: int, kept_max: int, kept_bytes: int) -> None:
        self._buffer_bytes = buffer_bytes
        self._kept_max = kept_max
        self._kept_bytes = kept_bytes
        self._free: deque[Memory] = deque(maxlen=kept_max)

    def take(self) -> Memory:
        """Return a buffer for the caller alone, with arbitrary contents: the one used last."""
        try:
            return self._free.pop()
        except IndexError:
            return Memory(_new_memory(self._buffer_bytes))

    def give(self, buffer: Memory) -> None:
        """Take a buffer back."""
        if len(buffer.memory) > 2 * self._buffer_bytes:
            return
        if buffer.touched + sum(kept.touched for kept in self._free.copy()) <= self._kept_bytes:
            self._free.append(buffer)

    def clear(self) -> None:
        """Release the memory."""
        self._free.clear()

    def __reduce__(self) -> tuple[object, ...]:
        kept = {"kept_max": self._kept_max, "kept_bytes": self._kept_bytes}
        return partial(BufferPool, buffer_bytes=self._buffer_bytes, **kept), ()


def _new_memory(size: int) -> mmap.mmap:
    buffer = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
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
        self._buffer: Memory | None = None
        self._size = 0
        self._finished = False

    def write(self, data: Buffer | Sequence[Buffer]) -> None:
        """Append to the memory."""
        if self._finished:
            msg = "this writer is finished"
            raise ValueError(msg)
        if self._buffer is None:
            self._buffer = self._pool.take()
        for part in parts_of(data):
            view = memoryview(part).cast("B")
            end = self._size + len(view)
            if end > len(self._buffer.memory):
                self._grow(end)
            memoryview(self._buffer.memory)[self._size : end] = view
            self._size = end
            self._buffer.touched = max(self._buffer.touched, end)

    def commit(self) -> None:
        """Send the object, and return the memory to the pool."""
        if self._finished:
            return
        memory = b"" if self._buffer is None else self._buffer.memory
        with memoryview(memory) as whole, whole[: self._size] as body:
            self._send(body)
        self.abort()

    def abort(self) -> None:
        """Return the memory to the pool."""
        buffer, self._buffer = self._buffer, None
        self._finished = True
        if buffer is not None:
            self._pool.give(buffer)

    def _grow(self, size: int) -> None:
        """Continue in a larger buffer; not in place, since an old error may still refer to it."""
        assert self._buffer is not None  # noqa: S101  # for the type checker
        memory = self._buffer.memory
        larger = _new_memory(max(size, len(memory) * 5 // 4))
        memoryview(larger)[: self._size] = memoryview(memory)[: self._size]
        self._buffer = Memory(larger, touched=self._size)
