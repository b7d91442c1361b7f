"""Memory that is used again for one part of an upload after another.

The first write to new memory costs several times the copy into it (docs/design/0026-cores.md).
"""

from __future__ import annotations

import mmap
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from functools import partial


@dataclass(slots=True)
class Memory:
    """Memory of one part; owned by the writer that took it from the pool."""

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
        self.buffer_bytes = buffer_bytes
        self._kept_max = kept_max
        self._kept_bytes = kept_bytes
        self._free: deque[Memory] = deque(maxlen=kept_max)

    def take(self) -> Memory:
        """Return a buffer for the caller alone, with arbitrary contents: the one used last."""
        try:
            return self._free.pop()
        except IndexError:
            size = max(self.buffer_bytes, 1)
            return Memory(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))

    def give(self, buffer: Memory) -> None:
        """Take a buffer back."""
        if len(buffer.memory) > 2 * self.buffer_bytes:
            return
        if buffer.touched + sum(kept.touched for kept in self._free.copy()) <= self._kept_bytes:
            self._free.append(buffer)

    def trim(self, kept_bytes: int) -> None:
        """Release the buffers beyond so many bytes, those first that were not used for longest."""
        with suppress(IndexError):  # another thread took the last
            while sum(kept.touched for kept in self._free.copy()) > kept_bytes:
                self._free.popleft()

    def clear(self) -> None:
        """Release the memory."""
        self._free.clear()

    def __reduce__(self) -> tuple[object, ...]:
        kept = {"kept_max": self._kept_max, "kept_bytes": self._kept_bytes}
        return partial(BufferPool, buffer_bytes=self.buffer_bytes, **kept), ()
