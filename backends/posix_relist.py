"""Whether a name is there, where the client remembers what it saw a moment ago (NFS).

Two kinds of memory were measured between Linux clients and a Linux server:

* A failed lookup is remembered for 30 s and more, of files and of *folders*. Opening the folder
  above asks the server, and what was remembered below it is forgotten if that folder has changed.
* A listing is remembered until the folder's modification time changes. On NFS 3 that is a clock
  of ticks: of two changes within one tick (4 to 10 ms) a listing between them hides the second,
  not for a while but until the next change (still hidden after 70 s). Dropping the cached pages of
  the folder is what helps, and `posix_fadvise` does that.
"""

from __future__ import annotations

import os
from contextlib import suppress

from ckptstore.backends.oserrors import ABSENT

__all__ = ["forget_listing", "is_listed"]

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def forget_listing(folder: str) -> None:
    """Make the next listing of `folder` come from the server; raises OSError if it is not there."""
    descriptor = os.open(folder, _FOLDER)
    try:
        with suppress(OSError, AttributeError):  # a file system or a system that caches none
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def is_listed(path: str) -> bool:
    """Say whether the folder of `path` lists its name, by a fresh listing.

    A folder that cannot be opened is looked for in the folder above, and so on upwards, which is
    what makes the client ask for it again.
    """
    folder, name = os.path.split(path)
    if not name:
        return True
    try:
        return name in _names(folder)
    except OSError as error:
        if error.errno not in ABSENT or not is_listed(folder):
            return False
    try:
        return name in _names(folder)
    except OSError:
        return False


def _names(folder: str) -> list[str]:
    forget_listing(folder)
    return os.listdir(folder)  # noqa: PTH208 - plain strings on the hot path
