"""Finds the file system that a path lies on, from the mount table of this process."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

_TABLE = Path("/proc/self/mountinfo")
_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """One line of the mount table."""

    point: str
    """Mount point, an absolute path."""
    fs_type: str
    """As the kernel names it: ``ext4``, ``nfs4``, ``lustre``, ``fuse.glusterfs`` ..."""
    source: str
    """Mounted source: a device, ``server:/export``, ``mfs#host:9421`` ..."""


UNKNOWN = Mount(point="/", fs_type="unknown", source="")


def parse_mounts(text: str) -> list[Mount]:
    """Return the mounts of a ``/proc/self/mountinfo`` text, in its order.

    The format is in proc_pid_mountinfo(5): point in field 5, and after a lone ``-`` type and
    source. Lines that do not follow it are skipped.
    """
    mounts = []
    for line in text.splitlines():
        left, dash, right = line.partition(" - ")
        fields, tail = left.split(" "), right.split(" ")
        if dash and len(fields) > 4 and len(tail) > 1:
            mounts.append(Mount(point=_decode(fields[4]), fs_type=tail[0], source=_decode(tail[1])))
    return mounts


def _decode(field: str) -> str:
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), field)


def find_mount(path: str, *, table: Path = _TABLE) -> Mount:
    """Return the mount that `path` lies on, or will lie on once it is created.

    Without a readable mount table (not Linux) the type is ``unknown``.
    """
    try:
        text = table.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return UNKNOWN
    real = os.path.realpath(path)
    found = UNKNOWN
    for mount in parse_mounts(text):
        inside = real == mount.point or real.startswith(mount.point.rstrip("/") + "/")
        # If two mounts share one point, the later line is the upper mount, hence >=.
        if inside and len(mount.point) >= len(found.point):
            found = mount
    return found
