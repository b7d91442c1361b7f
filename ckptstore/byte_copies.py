"""Copies of bytes while which other threads run: a slice of a memoryview keeps the interpreter."""

from __future__ import annotations

from ckptstore.hashing import Buffer


def copy_bytes(out: Buffer, data: Buffer) -> None:
    """Fill `out`, which is writable, with as many bytes."""
    import numpy as np  # only what copies loads it

    np.copyto(np.frombuffer(out, np.uint8), np.frombuffer(data, np.uint8))
