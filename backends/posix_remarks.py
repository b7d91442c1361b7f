"""Properties of a folder that ``ckptstore doctor`` tells: rights of a group, mounts of buckets."""

from __future__ import annotations

import grp
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from ckptstore.backends.posix_walk import WITH_TEMPS
from ckptstore.format.keys import STORE_KEY

BUCKET_MOUNTS: Final = frozenset(
    {
        *("fuse.blobfuse", "fuse.blobfuse2", "fuse.gcsfuse", "fuse.goofys"),
        *("fuse.mountpoint-s3", "fuse.rclone", "fuse.s3fs"),
    }
)
"""Types of mounts that show a bucket as a folder."""


def find_remarks(root: str, fs_type: str) -> list[str]:
    """Return remarks on the folder `root`, as sentences; none where nothing stands out.

    Parameters
    ----------
    fs_type
        As the mount table names it.
    """
    found = []
    if fs_type in BUCKET_MOUNTS:
        found.append(
            f"{fs_type} shows a bucket as a folder: open the bucket by its URL (s3://, gs://, "
            "az://) instead, which is faster and allows many writers"
        )
    with suppress(OSError):  # it is not there, or may not be looked at
        state = os.stat(root)  # noqa: PTH116
        if state.st_mode & stat.S_IWGRP:
            found += _of_group(root, state.st_mode, state.st_gid)
    return found


def _of_group(root: str, mode: int, group: int) -> list[str]:
    """Return remarks on a folder whose group may write: what members could not read or write."""
    found = []
    everyone = bool(mode & stat.S_IWOTH)
    if not mode & (stat.S_ISGID | stat.S_IWOTH):
        found.append(
            f"the group may write to {root}, but new folders get the group of the member who saves,"
            f" in which the others cannot save: chmod g+s {root}"
        )
    mask = _umask()
    if mask & stat.S_IRGRP:
        found.append(f"this umask ({mask:03o}) hides saved files from the group: umask 002")
    if other := _folder_where(root, lambda found: found.st_gid != group and not everyone):
        found.append(
            f"{other} is not of the group of {root}, whose members cannot save there: "
            f"chgrp -R {_group_name(group)} {root} && find {root} -type d -exec chmod g+s {{}} +"
        )
    with suppress(OSError):  # there is no store yet
        if not os.stat(f"{root}/{STORE_KEY}").st_mode & stat.S_IRGRP:  # noqa: PTH116
            found.append(
                f"the group cannot read {root}/{STORE_KEY}: loads and saves of other members fail: "
                f"chmod -R g+rX {root}"
            )
    if closed := _folder_where(root, lambda found: not found.st_mode & stat.S_IWGRP):
        found.append(
            f"the group may write to {root}, but not to {closed}: saves of other members "
            f"fail there: chmod -R g+rwX {root}"
        )
    return found or [f"the group may write to {root}: its folders and this umask suit that"]


def _umask() -> int:
    """Return this process's umask, 0 if unknown; ``umask()`` would change it for other threads."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    return 0


def _group_name(group: int) -> str:
    """Return the name of a group, or its number where it has no name on this machine."""
    with suppress(KeyError):
        return grp.getgrgid(group).gr_name
    return str(group)


def _folder_where(root: str, holds: Callable[[os.stat_result], bool]) -> str:
    """Return the first folder of a store of which something holds; two levels are seen."""
    for name in WITH_TEMPS:
        folder = f"{root}/{name}"
        with suppress(OSError), os.scandir(folder) as entries:
            below = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
            for path in (folder, *sorted(below)):
                if holds(os.stat(path)):  # noqa: PTH116
                    return path
    return ""
