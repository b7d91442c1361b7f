"""A disk that is filled to its last byte."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["fill"]


def fill(folder: Path) -> Path:
    """Write to files in `folder` until not one byte more fits; return the first."""
    filler = folder / "filler"
    for size in (1 << 20, 1 << 12):
        _append(filler, size)
    # What is left has room for files of one byte, each of which takes a block.
    for n in range(1000):
        if not _append(folder / f"filler-{n}", 1, once=True):
            break
    return filler


def _append(path: Path, size: int, *, once: bool = False) -> bool:
    """Append blocks of random bytes to a file; return False if nothing fits any more."""
    try:
        with path.open("ab", buffering=0) as file:
            while file.write(os.urandom(size)) == size:
                os.fsync(file.fileno())
                if once:
                    return True
    except OSError:
        return False
    return False
