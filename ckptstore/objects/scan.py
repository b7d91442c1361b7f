"""Forward scan of a pack: every intact chunk, wherever damage left it.

Each chunk stands behind a header with a magic and a check sum of its own, so a pack gives up its
chunks without index, header or manifest. After damage the next chunk is found by its magic, at
any offset: bytes may also have been lost or inserted. What is found is only believed if the
stored bytes match their check sum; whoever uses a chunk checks its content besides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ckptstore import limits
from ckptstore.errors import CorruptObjectError
from ckptstore.format.pack import (
    CHUNK_HEADER_BYTES,
    CHUNK_MAGIC,
    HEADER_BYTES,
    ChunkHeader,
    parse_chunk_header,
)
from ckptstore.hashing import xxh3_64

__all__ = ["FoundChunk", "ReadRange", "scan_chunks"]

ReadRange = Callable[[int, int], bytes]
"""Returns so many bytes of the pack from an offset on, both within its size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundChunk:
    """An intact chunk."""

    offset: int
    """Of its header, in bytes; not always where the index says."""
    header: ChunkHeader
    stored: bytes
    """Its stored bytes, which match their check sum."""


def scan_chunks(read: ReadRange, size: int, *, start: int = HEADER_BYTES) -> Iterator[FoundChunk]:
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
    at, budget = start, limits.SCAN_REREADS_MAX * size
    while at + CHUNK_HEADER_BYTES <= size:
        header = _header_at(read(at, CHUNK_HEADER_BYTES), at)
        body = at + CHUNK_HEADER_BYTES
        if header is not None and body + header.stored_bytes <= size:
            stored = read(body, header.stored_bytes)
            if xxh3_64(stored) == header.checksum:
                yield FoundChunk(offset=at, header=header, stored=stored)
                at = body + header.stored_bytes
                continue
            budget -= header.stored_bytes
            if budget < 0:
                return
        found = _next_header(read, at + 1, size)
        if found is None:
            return
        at = found


def _header_at(data: bytes, at: int) -> ChunkHeader | None:
    try:
        return parse_chunk_header(data, where=f"at {at}")
    except CorruptObjectError:
        return None


def _next_header(read: ReadRange, start: int, size: int) -> int | None:
    """Return where the next sound chunk header begins, from `start` on."""
    at = start
    while at + CHUNK_HEADER_BYTES <= size:
        window = read(at, min(limits.SCAN_WINDOW_BYTES, size - at))
        place = window.find(CHUNK_MAGIC)
        while place >= 0:
            header = window[place : place + CHUNK_HEADER_BYTES]
            if len(header) < CHUNK_HEADER_BYTES:
                break  # the header goes on in the next window, or the pack ends in it
            if _header_at(header, at + place) is not None:
                return at + place
            place = window.find(CHUNK_MAGIC, place + 1)
        if at + len(window) >= size:
            return None
        at += len(window) - CHUNK_HEADER_BYTES + 1
    return None
