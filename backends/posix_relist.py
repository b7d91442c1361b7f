"""Fresh lookups and listings where the client caches both (NFS).

Two caches were measured between Linux clients and a Linux server:

* A failed lookup is cached for 30 s and more, of files and of *folders*. Opening the folder
  above asks the server, which drops the cached entries below it if that folder has changed.
* A listing is cached until the folder's modification time changes. On NFS 3 that time has the
  resolution of a clock tick (4 to 10 ms): a listing between two changes within one tick hides the
  second, not for a while but until the next change (still hidden after 70 s). Dropping the cached
  pages of the folder helps; `posix_fadvise` does that.
"""

from __future__ import annotations

import os
from contextlib import suppress

from ckptstore.backends.oserrors import ABSENT

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def forget_listing(folder: str) -> None:
    """Make the next listing of `folder` come from the server; raises OSError if it is absent."""
    descriptor = os.open(folder, _FOLDER)
    try:
        with suppress(OSError, AttributeError):  # a file system or a platform that caches none
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def is_listed(path: str) -> bool:
    """Return whether a fresh listing of `path`'s folder contains its name.

    A folder that cannot be opened is looked up in the folder above, and so on upwards, which
    makes the client ask the server for it again.
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
