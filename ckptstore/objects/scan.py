"""Forward scan of a pack: every intact chunk, wherever damage left it.

Each chunk stands behind a header with a magic and a check sum of its own, so a pack gives up its
chunks without index, header or manifest. After damage the next chunk is found by its magic, at
any offset: bytes may also have been lost or inserted. What is found is only believed if the
stored bytes match their check sum; the caller checks the content of a chunk besides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ckptstore import limits
from ckptstore.errors import CorruptObjectError
from ckptstore.format import pack
from ckptstore.hashing import xxh3_64

ReadRange = Callable[[int, int], bytes]
"""Returns so many bytes of the pack from an offset on, both within its size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundChunk:
    """An intact chunk."""

    offset: int
    """Of its header, in bytes; not always where the index says."""
    header: pack.ChunkHeader
    stored: bytes
    """Its stored bytes, which match their check sum."""


def scan_chunks(
    read: ReadRange, size: int, *, start: int = pack.HEADER_BYTES
) -> Iterator[FoundChunk]:
    """Yield the intact chunks of a pack in the order of their offsets.

    Holds one chunk and one window in memory. What is read again for headers whose bytes do not
    match is bounded by ``SCAN_REREADS_MAX`` times the pack: a pack made to be slow ends the scan
    early, and an honest one never comes near.

    Parameters
    ----------
    size
        Of the pack, in bytes.
    start
        Where to begin; damage may also have moved the first chunk, so 0 is allowed.

    Raises
    ------
    CkptStoreError
        What `read` raises.
    """
    window = _Window(read, size)
    at, budget = start, limits.SCAN_REREADS_MAX * size
    while at + pack.CHUNK_HEADER_BYTES <= size:
        header = _header_at(window.bytes_at(at, pack.CHUNK_HEADER_BYTES), at)
        body = at + pack.CHUNK_HEADER_BYTES
        if header is not None and body + header.stored_bytes <= size:
            stored = window.bytes_at(body, header.stored_bytes)
            if xxh3_64(stored) == header.checksum:
                yield FoundChunk(offset=at, header=header, stored=stored)
                at = body + header.stored_bytes
                continue
            budget -= header.stored_bytes
            if budget < 0:
                return
        found = _next_header(window, at + 1)
        if found is None:
            return
        at = found


class _Window:
    """Reads a pack through a part of it that is held: small steps cost no request each."""

    def __init__(self, read: ReadRange, size: int) -> None:
        self._read = read
        self._start = 0
        self._held = b""
        self.size = size

    def bytes_at(self, offset: int, count: int) -> bytes:
        """Return `count` bytes from `offset` on, both within the pack."""
        if count > limits.SCAN_WINDOW_BYTES:
            return self._read(offset, count)
        self._hold(offset, count)
        at = offset - self._start
        return self._held[at : at + count]

    def find_magic(self, offset: int) -> int:
        """Return where the next magic begins, from `offset` on; -1 if there is none."""
        while offset + len(pack.CHUNK_MAGIC) <= self.size:
            self._hold(offset, len(pack.CHUNK_MAGIC))
            place = self._held.find(pack.CHUNK_MAGIC, offset - self._start)
            if place >= 0:
                return self._start + place
            offset = self._start + len(self._held) - len(pack.CHUNK_MAGIC) + 1
        return -1

    def _hold(self, offset: int, count: int) -> None:
        if not self._start <= offset <= offset + count <= self._start + len(self._held):
            self._held = self._read(offset, min(limits.SCAN_WINDOW_BYTES, self.size - offset))
            self._start = offset


def _header_at(data: bytes, at: int) -> pack.ChunkHeader | None:
    try:
        return pack.parse_chunk_header(data, where=f"at {at}")
    except CorruptObjectError:
        return None


def _next_header(window: _Window, start: int) -> int | None:
    """Return where the next sound chunk header begins, from `start` on."""
    at = window.find_magic(start)
    while 0 <= at <= window.size - pack.CHUNK_HEADER_BYTES:
        if _header_at(window.bytes_at(at, pack.CHUNK_HEADER_BYTES), at) is not None:
            return at
        at = window.find_magic(at + 1)
    return None
