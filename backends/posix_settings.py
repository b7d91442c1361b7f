"""Differences between the kinds of mounted file system, as data, so that they share one code.

The type of a file system comes from the mount table of this process.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from ckptstore.backends.base import Capabilities, PutIfAbsent
from ckptstore.backends.posix_publish import NO_LINKS
from ckptstore.limits import KIB, MIB

_TABLE: Final = Path("/proc/self/mountinfo")
_OCTAL: Final = re.compile(r"\\([0-7]{3})")
_STRIPING_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PosixSettings:
    """Settings of the POSIX backend for one kind of file system."""

    name: str
    """The backend's name, as in probe findings: ``local``, ``nfs`` or ``parallel``."""
    capabilities: Capabilities
    relist: bool = True
    """Before believing that a name is absent, read its folder: lookups may be cached."""
    stripe_count: int = 0
    """Lustre objects to stripe a pack over; 0 leaves the folder as it is."""


_LOCAL: Final = Capabilities(
    put_if_absent=PutIfAbsent.ATOMIC,
    # 256 MiB: the fsyncs of a pack and its folder (a few ms each) vanish beside a tenth of a
    # second of writing.
    pack_bytes=256 * MIB,
    part_bytes=0,  # the kernel holds the bytes, at most WRITEBACK_LAG_BYTES of them
    # A disk of 2 GB/s reads 64 KiB in the 30 us that another system call and seek cost.
    read_gap_bytes=64 * KIB,
    # One raw chunk, or two compressed ones: the bytes read are hashed and decoded from the
    # processor's cache. A load is 1.13 times as fast as with 16 MiB (measured: docs/design/0015).
    read_bytes_max=8 * MIB,
    concurrency=4,
    scatter_read=True,
    lookup_lag_s=0.0,
    # An NVMe disk, or a virtual one on top of some: 2 GB/s measured (benchmarks/RESULTS.md).
    write_bytes_per_s=2e9,
)
_NFS: Final = replace(
    _LOCAL,
    read_gap_bytes=256 * KIB,  # a round trip of 0.5 ms at 500 MB/s
    read_bytes_max=16 * MIB,
    concurrency=8,
    write_bytes_per_s=5e8,
    # A failed lookup is cached for acdirmin (30 s) up to acdirmax (60 s): nfs(5);
    # 30 s measured between two clients.
    lookup_lag_s=60.0,
)
# GlusterFS serves stale entries for 1 s, CephFS for up to 5 s (measured).
_PARALLEL: Final = replace(_NFS, lookup_lag_s=10.0)

SETTINGS: Final[dict[str, PosixSettings]] = {
    "local": PosixSettings(name="local", capabilities=_LOCAL, relist=False),
    "nfs": PosixSettings(name="nfs", capabilities=_NFS),
    # Lustre: a pack of 256 MiB over four servers.
    "parallel": PosixSettings(name="parallel", capabilities=_PARALLEL, stripe_count=4),
}

LINKLESS_DISKS: Final = frozenset({"exfat", "msdos", "ntfs3", "vfat"})
"""Types without hard links that only one machine at a time mounts: its kernel sees every rename."""


def no_links_of(fs_type: str) -> frozenset[int]:
    """Return the answers to link() that say that a file system has no hard links.

    Of most EIO is a failure; rclone's mount knows no other answer (seen with Debian's 1.60.1).
    """
    return NO_LINKS | {errno.EIO} if fs_type == "fuse.rclone" else NO_LINKS


# Mounts of buckets that the kernel shows as "fuse", with only a source (as their users report).
_FUSE_SOURCES: Final = frozenset({"blobfuse2", "mountpoint-s3"})
# File system types by the kernel's names. Any other is a disk or memory of this machine.
_NFS_TYPES: Final = frozenset({"nfs", "nfs4", "fuse.nfs"})
_PARALLEL_TYPES: Final = {
    *("beegfs", "beegfs_nodev", "ceph", "glusterfs", "gpfs", "lustre", "orangefs", "panfs"),
    *("pvfs2", "wekafs"),
    *("acfs", "gfs2", "ocfs2"),  # several machines share one disk
    *("afs", "cifs", "smb3"),  # a server that is neither
    *("virtiofs", "9p"),  # the host of a virtual machine
}


def settings_for(fs_type: str) -> PosixSettings:
    """Return the settings for a type; every FUSE file system counts as a remote one."""
    if fs_type in _NFS_TYPES:
        return SETTINGS["nfs"]
    if fs_type == "fuse" or fs_type.startswith("fuse.") or fs_type in _PARALLEL_TYPES:
        return SETTINGS["parallel"]
    return SETTINGS["local"]


def find_fs_type(path: str, *, table: Path = _TABLE) -> str:
    """Return the type of the file system that `path` lies on, or will lie on once it is created.

    As the kernel names it: ``ext4``, ``nfs4``, ``lustre``, ``fuse.glusterfs`` ...; FUSE programs
    that have only a source by that: ``fuse.mountpoint-s3``. It is ``unknown`` without a readable
    mount table (not Linux). The table's format is in proc_pid_mountinfo(5):
    mount point in field 5, the type after a lone ``-``. Lines that do not follow it are skipped.
    """
    longest, found = 0, "unknown"
    try:
        text = table.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return found
    real = os.path.realpath(path)
    for line in text.splitlines():
        left, dash, right = line.partition(" - ")
        fields, tail = left.split(" "), right.split(" ")
        if not dash or len(fields) < 5 or len(tail) < 2:
            continue
        point = _OCTAL.sub(lambda match: chr(int(match[1], 8)), fields[4])
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        # If two mounts share one point, the later line is the upper mount, hence >=.
        if inside and len(point) >= longest:
            by_source = tail[0] == "fuse" and tail[1] in _FUSE_SOURCES
            longest, found = len(point), f"fuse.{tail[1]}" if by_source else tail[0]
    return found


def stripe_folder(folder: str, count: int) -> None:
    """Request that files below the new `folder` lie on one server up to 4 MiB, on `count` beyond.

    A hint to Lustre, for a progressive layout (``lfs-setstripe(1)``, Lustre 2.10): commits and
    manifests then cost one object each, packs get the bandwidth of several servers. Never raises:
    where the tool is missing, too old, or too slow, the folder keeps its parent's layout.
    """
    tool = shutil.which("lfs")
    if tool is None or count < 2:
        return
    command = [tool, "setstripe", "-E", "4M", "-c", "1", "-E", "-1", "-c", str(count), folder]
    with suppress(OSError, subprocess.SubprocessError):
        subprocess.run(  # noqa: S603 - no shell, and no word that begins with a dash from outside
            command,
            timeout=_STRIPING_S,
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
