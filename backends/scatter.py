"""Fills several buffers from one stream of bytes."""

from __future__ import annotations

from collections.abc import Sequence


def wanted_bytes(buffers: Sequence[memoryview]) -> int:
    """Return the number of bytes that `buffers` hold."""
    return sum(buffer.nbytes for buffer in buffers)


class Scatter:
    """Fills `buffers` one after another with the bytes fed to it; drops bytes beyond their end."""

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._buffers = [buffer for buffer in buffers if buffer.nbytes]
        self._index = 0
        self._at = 0
        self.left = wanted_bytes(buffers)
        """Bytes still missing."""

    def take(self, count: int) -> memoryview | None:
        """Return the place of the next `count` bytes, for the caller to fill, if it is one buffer.

        None if they span more than one buffer, or exceed the bytes that are missing.
        """
        if not 0 < count <= self.left:
            return None
        buffer = self._buffers[self._index]
        if count > buffer.nbytes - self._at:
            return None
        place = buffer[self._at : self._at + count]
        self.left -= count
        self._at += count
        if self._at == buffer.nbytes:
            self._index += 1
            self._at = 0
        return place

    def feed(self, data: bytes | memoryview) -> None:
        """Copy the next bytes of the stream into the buffers."""
        rest = memoryview(data)[: self.left]
        self.left -= len(rest)
        while rest:
            buffer = self._buffers[self._index]
            count = min(len(rest), buffer.nbytes - self._at)
            buffer[self._at : self._at + count] = rest[:count]
            rest = rest[count:]
            self._at += count
            if self._at == buffer.nbytes:
                self._index += 1
                self._at = 0
