"""Fills several buffers from one stream of bytes."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from ckptstore.byte_copies import copy_bytes


def wanted_bytes(buffers: Sequence[memoryview]) -> int:
    """Return the number of bytes that `buffers` hold."""
    return sum(buffer.nbytes for buffer in buffers)


def skip_bytes(buffers: list[memoryview], count: int) -> None:
    """Remove the first `count` bytes of `buffers`, in place: those that are done."""
    done = 0
    while done < len(buffers) and count >= buffers[done].nbytes:
        count -= buffers[done].nbytes
        done += 1
    del buffers[:done]
    if count:
        buffers[0] = buffers[0][count:]


class Scatter:
    """Fills `buffers` one after another with the bytes fed to it; drops bytes beyond their end."""

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._rest = [buffer for buffer in buffers if buffer.nbytes]
        self._lock = threading.Lock()
        self.left = wanted_bytes(buffers)
        """Bytes still missing."""

    def take(self, count: int) -> memoryview | None:
        """Return the place of the next `count` bytes, for the caller to fill, if it is one buffer.

        None if they span more than one buffer, or exceed the bytes that are missing.
        """
        if not 0 < count <= self.left or count > self._rest[0].nbytes:
            return None
        place = self._rest[0][:count]
        self._advance(count)
        return place

    def feed(self, data: bytes | memoryview) -> None:
        """Copy the next bytes of the stream into the buffers."""
        with self._lock:
            rest = memoryview(data)[: self.left]
            while rest:
                count = min(len(rest), self._rest[0].nbytes)
                copy_bytes(self._rest[0][:count], rest[:count])
                rest = rest[count:]
                self._advance(count)

    def close(self) -> None:
        """Let no byte of another thread come into the buffers any more."""
        with self._lock:
            self.left = 0
            self._rest.clear()

    def _advance(self, count: int) -> None:
        self.left -= count
        skip_bytes(self._rest, count)
