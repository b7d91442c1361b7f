"""Chunks of a pack that one request fetches together."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar

from ckptstore.backends.base import Capabilities
from ckptstore.format.pack import CHUNK_HEADER_BYTES


class Stored(Protocol):
    """A chunk in a pack: where, and its lengths in bytes."""

    @property
    def offset(self) -> int:
        """Of the header, in the pack."""

    @property
    def stored_bytes(self) -> int:
        """Without the header."""

    @property
    def raw_bytes(self) -> int:
        """Decoded."""


C = TypeVar("C", bound=Stored)


def join_chunks(chunks: Iterable[C], capabilities: Capabilities) -> Iterator[list[C]]:
    """Cut chunks of one pack, in the order of their offsets, into what one request fetches each.

    Chunks closer than ``read_gap_bytes`` are joined, since a request costs more than the gap;
    a request ends at ``read_bytes_max``, if it has more than one chunk.
    """
    part: list[C] = []
    end = 0
    for chunk in chunks:
        after = chunk.offset + CHUNK_HEADER_BYTES + chunk.stored_bytes
        if part and not (
            0 <= chunk.offset - end <= capabilities.read_gap_bytes
            and after - part[0].offset <= capabilities.read_bytes_max
        ):
            yield part
            part = []
        part.append(chunk)
        end = after
    if part:
        yield part


class Growing:
    """Memory of one thread, used again from call to call; grows to what it had to hold.

    Mapped, not allocated: allocators keep such memory, in pieces, when it is used no more.
    """

    def __init__(self) -> None:
        self._memory: bytearray | mmap.mmap = bytearray()

    def __call__(self, size: int) -> memoryview:
        """Return so many bytes of it; the same as at the last call."""
        if len(self._memory) < size:
            self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return memoryview(self._memory)[:size]
