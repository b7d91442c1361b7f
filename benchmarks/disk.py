"""Files for benchmarks: fresh folders, fsynced trees, cold and warm page caches."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = [
    "Workspace",
    "chill",
    "disk_reads",
    "fsync_file",
    "fsync_folder",
    "fsync_tree",
    "tree_bytes",
    "warm",
    "workspace",
]

_BLOCK = 1 << 20


class Workspace:
    """A folder of one benchmark, on the file system under test; hands out fresh folders."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._numbers = itertools.count(1)

    def fresh(self) -> Path:
        """Return a new empty folder."""
        folder = self.root / f"{next(self._numbers):04d}"
        folder.mkdir()
        return folder

    def discard(self, folder: Path) -> None:
        """Remove a folder."""
        shutil.rmtree(folder)


@contextmanager
def workspace(parent: Path | None) -> Iterator[Workspace]:
    """Yield a workspace below `parent` (by default the system's folder for temporary files)."""
    root = Path(tempfile.mkdtemp(prefix="ckptstore-bench-", dir=parent))
    try:
        yield Workspace(root)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def fsync_file(path: Path) -> None:
    """Make a file's contents durable."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def fsync_folder(path: Path) -> None:
    """Make a folder's entries durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(path: Path) -> None:
    """Make every file and folder below a folder durable, itself and its own entry included."""
    for name, _, files in os.walk(path):
        for file in files:
            fsync_file(Path(name, file))
        fsync_folder(Path(name))
    fsync_folder(path.parent)


def tree_bytes(path: Path) -> int:
    """Return the bytes of all files below a folder (their lengths; no file has holes here)."""
    return sum(
        Path(name, file).stat().st_size for name, _, files in os.walk(path) for file in files
    )


def chill(path: Path) -> None:
    """Drop the files of a folder from the page cache; other programs keep theirs."""
    for name, _, files in os.walk(path):
        for file in files:
            with Path(name, file).open("rb") as opened:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def warm(path: Path) -> None:
    """Read the files of a folder once, so that they are in the page cache."""
    block = bytearray(_BLOCK)
    for name, _, files in os.walk(path):
        for file in files:
            with Path(name, file).open("rb", buffering=0) as opened:
                while opened.readinto(block):
                    pass


def disk_reads() -> int:
    """Return the bytes that this process has caused to be read from disks so far."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    return 0
