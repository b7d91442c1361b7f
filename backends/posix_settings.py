"""Differences between the kinds of mounted file system, as data, so that they share one code."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from ckptstore.backends.base import Capabilities, PutIfAbsent
from ckptstore.backends.mounts import Mount
from ckptstore.limits import KIB, MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class PosixSettings:
    """Settings of the POSIX backend for one kind of file system."""

    name: str
    """The backend's name, as in probe findings: ``local``, ``nfs`` or ``parallel``."""
    capabilities: Capabilities
    relist: bool
    """Before believing that a name is absent, read its folder: lookups may be cached."""
    stripe_count: int = 0
    """Lustre objects to stripe a pack over; 0 leaves the folder as it is."""


_LOCAL = Capabilities(
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
    # An NVMe disk, or a virtual one on top of some: 2 GB/s measured (docs/benchmarks.md).
    write_bytes_per_s=2e9,
)

SETTINGS: Final[dict[str, PosixSettings]] = {
    "local": PosixSettings(name="local", capabilities=_LOCAL, relist=False),
    "nfs": PosixSettings(
        name="nfs",
        capabilities=replace(
            _LOCAL,
            read_gap_bytes=256 * KIB,  # a round trip of 0.5 ms at 500 MB/s
            read_bytes_max=16 * MIB,
            concurrency=8,
            write_bytes_per_s=5e8,
            # A failed lookup is cached for acdirmin (30 s) up to acdirmax (60 s): nfs(5);
            # 30 s measured between two clients.
            lookup_lag_s=60.0,
        ),
        relist=True,
    ),
    "parallel": PosixSettings(
        name="parallel",
        capabilities=replace(
            _LOCAL,
            read_gap_bytes=256 * KIB,
            read_bytes_max=16 * MIB,
            concurrency=8,
            write_bytes_per_s=5e8,
            # GlusterFS serves stale entries for 1 s, CephFS for up to 5 s (measured).
            lookup_lag_s=10.0,
        ),
        relist=True,
        stripe_count=4,  # Lustre: a pack of 256 MiB over four servers
    ),
}

# File system types by the kernel's names. Any other is a disk or memory of this machine.
_NFS = frozenset({"nfs", "nfs4", "fuse.nfs"})
_PARALLEL = frozenset(
    {
        "acfs",
        "afs",
        "beegfs",
        "beegfs_nodev",
        "ceph",
        "cifs",
        "gfs2",
        "glusterfs",
        "gpfs",
        "lustre",
        "ocfs2",
        "orangefs",
        "panfs",
        "pvfs2",
        "smb3",
        "virtiofs",
        "wekafs",
        "9p",
    }
)


def settings_for(mount: Mount) -> PosixSettings:
    """Return the settings for a mount; every FUSE file system counts as a remote one."""
    if mount.fs_type in _NFS:
        return SETTINGS["nfs"]
    fuse = mount.fs_type == "fuse" or mount.fs_type.startswith("fuse.")
    if fuse or mount.fs_type in _PARALLEL:
        return SETTINGS["parallel"]
    return SETTINGS["local"]
