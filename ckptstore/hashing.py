"""The two digests of the format.

BLAKE3-256 names content and guards records; XXH3-64 is the fast checksum of stored bytes, which
detects damage but not malice. All functions are pure, release the GIL on large inputs, and may be
called from any thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import xxhash
from blake3 import blake3

Buffer = bytes | bytearray | memoryview

Hasher = blake3
"""BLAKE3-256 of a stream of bytes: ``update`` appends, ``digest`` is that of all bytes so far."""

DIGEST_BYTES: Final = 32
"""Length of a BLAKE3-256 digest, in bytes (source: the BLAKE3 specification, section 2)."""
DIGEST_HEX_CHARS: Final = 2 * DIGEST_BYTES


def blake3_digest(data: Buffer) -> bytes:
    """Return the BLAKE3-256 digest of `data`, 32 bytes."""
    return blake3(data).digest()


def blake3_hex(data: Buffer) -> str:
    """Return the BLAKE3-256 digest of `data` as 64 lower-case hex digits."""
    return blake3(data).hexdigest()


def blake3_of(parts: Iterable[Buffer]) -> bytes:
    """Return the BLAKE3-256 digest of the concatenation of `parts`, 32 bytes."""
    hasher = blake3()
    for part in parts:
        hasher.update(part)
    return hasher.digest()


class PieceChecksums:
    """XXH3-64 of each piece of a stream of bytes. One thread at a time.

    Parameters
    ----------
    piece_bytes
        Length of every piece but the last.
    """

    __slots__ = ("_done", "_filled", "_piece_bytes", "_state")

    def __init__(self, piece_bytes: int) -> None:
        self._piece_bytes = piece_bytes
        self._state = xxhash.xxh3_64()
        self._filled = 0
        self._done: list[int] = []

    def update(self, data: Buffer) -> None:
        """Append the next bytes, pieces or parts of them."""
        view = memoryview(data)
        while len(view):
            part = view[: self._piece_bytes - self._filled]
            self._state.update(part)
            self._filled += len(part)
            view = view[len(part) :]
            if self._filled == self._piece_bytes:
                self._end()

    def checksums(self) -> list[int]:
        """Return the checksums of all pieces; the last may be shorter. Call it once."""
        if self._filled:
            self._end()
        return self._done

    def _end(self) -> None:
        self._done.append(self._state.intdigest())
        self._state.reset()
        self._filled = 0


def xxh3_64(data: Buffer) -> int:
    """Return the XXH3-64 checksum of `data` (seed 0) as an unsigned integer."""
    checksum: int = xxhash.xxh3_64_intdigest(data)
    return checksum


def xxh3_64_of(parts: Iterable[Buffer]) -> int:
    """Return the xxh3-64 checksum of several buffers as if they were one."""
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return int(state.intdigest())
