"""Streams a large object into a temporary file, keeping the disk busy from the first megabytes on.

By default the kernel collects written bytes in memory and writes them out at the final fsync,
while the caller waits. So the writer starts write-back of each window when it is complete, waits
for the window ``WRITEBACK_LAG_BYTES`` back, and frees its pages: the kernel then reuses the same
few megabytes, and other programs keep their cache. Figures:
docs/design/0004-posix-durable-writes.md.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from functools import cache
from typing import Final

from ckptstore import limits
from ckptstore.backends.base import Buffer, ObjectWriter, parts_of
from ckptstore.backends.oserrors import translate
from ckptstore.backends.posix_publish import Linkless, TempFile, drop_cache, publish
from ckptstore.backends.scatter import skip_bytes
from ckptstore.errors import StorageError, TransientStorageError

IOV_MAX: Final = os.sysconf("SC_IOV_MAX")
"""Most buffers of one system call."""
# Flags of sync_file_range(2), from linux/fs.h.
_WAIT_BEFORE: Final = 1
_START: Final = 2
_WAIT_AFTER: Final = 4
# The file system does not support the call; then the final fsync does all the work.
_NOT_THERE: Final = frozenset({errno.ENOSYS, errno.EINVAL, errno.ESPIPE, errno.EOPNOTSUPP})

SyncRange = Callable[[int, int, int, int], int]
"""``(descriptor, offset, bytes, flags) -> errno``, 0 for success."""


@cache
def sync_range() -> SyncRange | None:
    """Return Linux's sync_file_range, or None where the C library has none.

    The call only starts the work of the final fsync earlier, which still follows and decides; but
    a write error that it reports is reported only once, so the caller must not drop it.
    """
    import ctypes

    try:
        function = ctypes.CDLL(None, use_errno=True).sync_file_range
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    function.restype = ctypes.c_int

    def call(descriptor: int, offset: int, count: int, flags: int) -> int:
        """Call it until no signal interrupts; return the error number."""
        while function(descriptor, offset, count, flags):
            number = ctypes.get_errno()
            if number != errno.EINTR:
                return number
        return 0

    return call


class PosixWriter(ObjectWriter):
    """Writes bytes to a temporary file as they come; holds none of them itself."""

    def __init__(self, key: str, temp: TempFile, path: str, *, no_links: frozenset[int]) -> None:
        self._key = key
        self._no_links = no_links
        self._path = path
        self._size = 0
        self._started = 0
        self._waited = 0
        self._sync = sync_range()
        self._temp = temp

    def write(self, data: Buffer | Sequence[Buffer]) -> None:
        """Append by as few system calls as possible."""
        left = [view.cast("B") for part in parts_of(data) if (view := memoryview(part)).nbytes]
        try:
            while left:
                count = os.writev(self._temp.descriptor, left[:IOV_MAX])
                self._size += count
                skip_bytes(left, count)
                self._write_back()
        except OSError as error:
            raise translate(error, f"write {self._key}", writing=True) from error

    def commit(self) -> None:
        """Make the object durable, then visible; a failed commit cannot be repeated."""
        try:
            self._temp.finish(self._size, drop=self._waited > 0)
            what = f"create {self._key}"
            publish(self._temp.path, self._path, what, Linkless.ALONE, self._no_links)
        except OSError as error:
            self._temp.discard()
            found = translate(error, f"write {self._key}", writing=True)
            if isinstance(found, TransientStorageError):
                # The file is gone, and after a failed fsync its content would be unreliable.
                raise StorageError(found.message, hint="the save has to be repeated") from error
            if isinstance(error, StorageError):
                raise
            raise found from error

    def abort(self) -> None:
        """Remove the temporary file."""
        self._temp.discard()

    def _write_back(self) -> None:
        """Start write-back of complete windows, and wait for those far enough back."""
        window = limits.WRITEBACK_WINDOW_BYTES
        whole = self._size // window * window
        if whole > self._started:
            self._call_sync(self._started, whole - self._started, _START)
            self._started = whole
        behind = whole - limits.WRITEBACK_LAG_BYTES
        if behind > self._waited:
            flags = _WAIT_BEFORE | _START | _WAIT_AFTER
            self._call_sync(self._waited, behind - self._waited, flags)
            drop_cache(self._temp.descriptor, self._waited, behind - self._waited)
            self._waited = behind

    def _call_sync(self, offset: int, count: int, flags: int) -> None:
        if self._sync is None:
            return
        number = self._sync(self._temp.descriptor, offset, count, flags)
        if number in _NOT_THERE:
            self._sync = None
        elif number:
            raise OSError(number, os.strerror(number))
