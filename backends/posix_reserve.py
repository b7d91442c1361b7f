"""A file of random bytes in the root of a store: room for the commits that free a full disk.

Its name begins with a dot, so that listings leave it out. It needs no fsync: after a crash it may
be short or missing, and the next writer makes it up. Sizes measured: docs/design/0004.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Final

from ckptstore import limits
from ckptstore.backends.posix_publish import NEW_FILE
from ckptstore.config import Environment

NAME: Final = ".ckptstore-reserve"
# Not all file systems write a part of what does not fit as a whole. Source: a block of ext4.
_STEP_BYTES: Final = 4 * limits.KIB


def keep_reserve(root: str, environment: Environment, *, whole: bool) -> None:
    """Make up the reserve to its full size, unless `whole` to what fits; never raises.

    One that is too short is replaced, never appended to: others may have given its name to a file
    of somebody's, to have it changed, and not all file systems count the names of a file.
    """
    path, before = f"{root}/{NAME}", 0
    with suppress(OSError):  # no right to write here, or no room for a name: there is none then
        if os.path.lexists(path):
            before = os.lstat(path).st_size
            if before >= limits.RESERVE_BYTES:
                return
            os.unlink(path)  # noqa: PTH108 - plain strings, as in all of this backend
        descriptor = os.open(path, NEW_FILE, 0o666)
        try:
            _fill(descriptor, environment, keep_bytes=before if whole else limits.RESERVE_BYTES)
        finally:
            os.close(descriptor)


def _fill(descriptor: int, environment: Environment, *, keep_bytes: int) -> None:
    """Write the reserve; if it does not fit, keep at most `keep_bytes` of it."""
    try:
        for _ in range(0, limits.RESERVE_BYTES, _STEP_BYTES):
            # Random, so that a file system that compresses keeps it at its size.
            os.write(descriptor, bytes.fromhex(environment.random_hex(_STEP_BYTES)))
    except OSError:
        os.ftruncate(descriptor, min(keep_bytes, os.fstat(descriptor).st_size))


def drop_reserve(root: str) -> None:
    """Remove the reserve, if there is one; never raises."""
    with suppress(OSError):  # none, or no right to remove it
        os.unlink(f"{root}/{NAME}")  # noqa: PTH108
