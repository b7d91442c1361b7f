"""The interface of codecs: chunk bytes to fewer bytes and back, always lossless.

A codec never sees a chunk id: the id is the digest of the bytes *before* the codec, so codecs
change without losing sharing. Instances hold no state between calls; every method may be called
from any thread at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ckptstore.codecs.plane_layout import Layout

Part = bytes | bytearray | memoryview
"""One piece of an encoded chunk, of format ``B``; the pieces are written one after another."""


class CodecError(ValueError):
    """Stored bytes that no encoder wrote; callers turn it into an error that names the object."""


class Codec(Protocol):
    """One way to store a chunk."""

    code: int
    """One byte in the chunk header; append-only, see ``registry``."""
    name: str

    def encode(self, raw: memoryview, layout: Layout) -> Sequence[Part]:
        """Return the stored bytes of a chunk, in pieces.

        Parameters
        ----------
        raw
            C-contiguous bytes, a whole number of the layout's elements; only read. The result
            may refer to it.
        """

    def decode(self, stored: memoryview, layout: Layout, out: memoryview) -> None:
        """Fill `out` with the chunk.

        Parameters
        ----------
        stored
            Untrusted: anything may be in it.
        out
            Writable, C-contiguous, of the raw length that the chunk header states.

        Raises
        ------
        CodecError
            If `stored` is not what ``encode`` returns for a chunk of this length. No more memory
            than a small multiple of `out` is ever used.
        """
