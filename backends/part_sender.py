"""Threads that send parts of objects, and the memory of these parts, shared by all writers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from ckptstore import limits
from ckptstore.backends.buffers import BufferPool
from ckptstore.backends.transfers import Threads

PARTS_KEPT: Final = 16
"""Parts whose memory an open store keeps. Source: a fourth of ``HOST_BYTES_DEFAULT``."""
SMALL_PART_BYTES: Final = 6 * limits.MIB
SMALL_PARTS_MAX: Final = 400
"""Parts of a write that are smaller, and how many: connections are all at work sooner, and end
together, which matters for the first 2 GB. Source: S3 takes 5 MiB and more in a part that is not
the last, and memory comes in huge pages of 2 MiB; docs/design/0025-width.md."""


class PartSender:
    """Threads that send parts, and the memory of all parts of a backend. Safe from any thread.

    Parameters
    ----------
    most
        Most parts that are sent at once.
    memory_bytes
        Of all parts at once.
    """

    def __init__(self, most: int, memory_bytes: int) -> None:
        self._most_bytes = min(memory_bytes, most * limits.PART_BYTES)
        threads = min(most, max(1, memory_bytes // SMALL_PART_BYTES))
        self._threads = Threads(threads, thread_name_prefix="ckptstore-part")
        each = limits.PART_BYTES
        self.pool = BufferPool(buffer_bytes=each, kept_max=2 * most, kept_bytes=self._most_bytes)
        self._changed = threading.Condition()
        self._held_bytes = 0
        self._sending = 0
        self._since_idle = 0
        """Parts that were begun since none was in memory."""

    def part_bytes(self) -> int:
        """Return the size of the parts of an object that is begun now."""
        return SMALL_PART_BYTES if self._since_idle < SMALL_PARTS_MAX else limits.PART_BYTES

    def take(self, size: int) -> None:
        """Count the bytes of a part; waits while there are too many and parts are on their way.

        When none is on its way, nobody would give memory back: every writer holds a part that is
        not full, or one that is sent again at its commit. Then there is one more.
        """
        with self._changed:
            while self._held_bytes + size > self._most_bytes and self._sending:
                self._changed.wait()
            self._since_idle = self._since_idle + 1 if self._held_bytes else 1
            self._held_bytes += size

    def give(self, size: int) -> None:
        """Count the bytes of a part as free again."""
        with self._changed:
            self._held_bytes -= size
            idle = not self._held_bytes
            self._changed.notify_all()
        if idle:
            self.pool.trim(PARTS_KEPT * limits.PART_BYTES)

    def start(self, send: Callable[[], None]) -> None:
        """Call `send` in a thread."""
        with self._changed:
            self._sending += 1
        self._threads.submit(self._run, send)

    def _run(self, send: Callable[[], None]) -> None:
        try:
            send()
        finally:
            with self._changed:
                self._sending -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """Wait for the threads, and release the memory."""
        self._threads.shutdown()
        self.pool.clear()
