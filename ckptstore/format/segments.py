"""Layout of an encrypted object: a header, then sealed segments.

::

    offset          size                field
    0               8                   magic "CKPTENC1"
    8               32                  salt, random, of this object alone
    40              segment + 16        segment 0: ciphertext and tag
    ...                                 segments 1, 2, ... of the same size
    ...             1..segment + 16     the last one: at most as long; empty only in an empty object

The size of an object without encryption follows from its size with it, so that a listing tells it
without a look inside. Pure arithmetic; what seals segments is :mod:`ckptstore.backends.sealing`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ckptstore import limits
from ckptstore.errors import CorruptObjectError

MAGIC: Final = b"CKPTENC1"
SALT_BYTES: Final = 32
TAG_BYTES: Final = 16
HEADER_BYTES: Final = len(MAGIC) + SALT_BYTES
_NONCE_BYTES: Final = 12


def nonce(index: int, *, last: bool) -> bytes:
    """Return the nonce of a segment: its number, and whether it is the last, big-endian.

    The key is the object's own, so that no nonce is ever used twice with it.
    """
    return (index << 8 | last).to_bytes(_NONCE_BYTES, "big")


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentLayout:
    """Where segments of one size lie."""

    segment_bytes: int
    """Of a segment before encryption."""

    def segments(self, plain_bytes: int) -> int:
        """Return how many segments an object has; an empty one has one."""
        return max(1, -(-plain_bytes // self.segment_bytes))

    def sealed_bytes(self, plain_bytes: int) -> int:
        """Return the size of an object with encryption."""
        return HEADER_BYTES + plain_bytes + TAG_BYTES * self.segments(plain_bytes)

    def plain_bytes(self, sealed_bytes: int) -> int:
        """Return the size of an object without encryption.

        Of a size that no object has, what is left of it once its incomplete end is cut off: a
        listing goes on beside damage, which those who read find.
        """
        full, rest = divmod(max(0, sealed_bytes - HEADER_BYTES), self.segment_bytes + TAG_BYTES)
        return full * self.segment_bytes + max(0, rest - TAG_BYTES)

    def check(self, sealed_bytes: int, *, where: str) -> int:
        """Return the size without encryption of an object that has this size with it.

        Raises
        ------
        CorruptObjectError
            No object has this size: it was cut off, or something was appended.
        """
        plain = self.plain_bytes(sealed_bytes)
        if self.sealed_bytes(plain) != sealed_bytes:
            msg = f"{where} has {sealed_bytes} bytes, which no encrypted object has: it is cut off"
            raise CorruptObjectError(msg)
        if plain > limits.PACK_BYTES_MAX:
            msg = f"{where} has {sealed_bytes} bytes, more than any object of a store"
            raise CorruptObjectError(msg)
        return plain

    def start(self, index: int) -> int:
        """Return where segment `index` begins in the object with encryption."""
        return HEADER_BYTES + index * (self.segment_bytes + TAG_BYTES)
