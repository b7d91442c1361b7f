"""Reads a log of dm-log-writes, and rebuilds the disk as it was after any number of writes.

The format is the kernel's: Documentation/admin-guide/device-mapper/log-writes.rst.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

__all__ = ["Entry", "apply", "read_log"]

MAGIC = 0x6A736677736872
SECTOR_BYTES = 512  # the log's unit, for any device
DISCARD = 4
MARK = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One recorded request."""

    sector: int
    """First sector on the disk, in units of 512 bytes."""
    size_bytes: int
    """Bytes written; of a discard, bytes that become zeros."""
    data_at: int
    """Offset of its data in the log, in bytes; 0 for a discard."""
    mark: str
    """Text that the workload put into the log here; empty for a write."""


def read_log(path: Path) -> list[Entry]:
    """Return all entries in the order in which the requests were completed.

    Raises
    ------
    ValueError
        It is not such a log.
    """
    with path.open("rb") as log:
        magic, _version, count, sector_bytes = struct.unpack("<QQQI", log.read(28))
        if magic != MAGIC:
            msg = f"{path} is not a dm-log-writes log"
            raise ValueError(msg)
        return list(_entries(log, count, sector_bytes))


def _entries(log: BinaryIO, count: int, sector_bytes: int) -> Iterator[Entry]:
    at = sector_bytes
    for _ in range(count):
        log.seek(at)
        sector, sectors, flags, text_bytes = struct.unpack("<QQQQ", log.read(32))
        at += sector_bytes
        if flags & MARK:
            text = log.read(text_bytes).rstrip(b"\0").decode()
            yield Entry(sector=0, size_bytes=0, data_at=0, mark=text)
            continue
        size_bytes = sectors * SECTOR_BYTES
        discard = bool(flags & DISCARD)
        yield Entry(sector=sector, size_bytes=size_bytes, data_at=0 if discard else at, mark="")
        at += 0 if discard else size_bytes


def apply(entry: Entry, log: BinaryIO, disk: BinaryIO) -> None:
    """Apply the recorded request to `disk`."""
    if not entry.size_bytes:
        return
    disk.seek(entry.sector * SECTOR_BYTES)
    if entry.data_at:
        log.seek(entry.data_at)
        disk.write(log.read(entry.size_bytes))
    else:
        disk.write(bytes(entry.size_bytes))
