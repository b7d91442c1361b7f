"""Pages of new memory, mapped by one call instead of a page fault each while it is filled.

Half of the processor time of a local load into new memory is page faults
(docs/design/0026-cores.md).
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from typing import Final

from ckptstore import limits

# Source: linux/mman.h (5.14); the module mmap has no name for it before Python 3.14.
_MADV_POPULATE_WRITE: Final = 23
# Smaller memory is filled as it is. Source: of 64 pages the calls take a tenth of the faults.
_BYTES_MIN: Final = 256 * limits.KIB
_PAGE: Final = mmap.PAGESIZE
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def prefault(*memories: memoryview) -> None:
    """Map the pages of memory that is about to be filled, if they are new; its bytes stay.

    Advice only: where the kernel cannot do it (before Linux 5.14, other systems, special mappings),
    each page is mapped when it is written first, as without the call. Memory that is in use already
    is recognised by its last page, and left alone.

    Parameters
    ----------
    memories
        Writable, C-contiguous; all of them will be written. Neighbours with no page between them
        are mapped by one call, as the small tensors of a state are.
    """
    if _libc is None:
        return
    begin = end = 0
    for start, size in sorted((_address(one), one.nbytes) for one in memories if one.nbytes):
        if start // _PAGE > (end - 1) // _PAGE + 1:  # pages between are somebody else's
            _map(begin, end)
            begin = start
        end = max(end, start + size)
    _map(begin, end)


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _map(begin: int, end: int) -> None:
    """Map the pages between two addresses; each of them will be written."""
    assert _libc is not None  # noqa: S101  # for the type checker: callers looked
    if end - begin < _BYTES_MIN:
        return
    first = -(-begin // _PAGE) * _PAGE
    last = end // _PAGE * _PAGE - _PAGE
    there = ctypes.c_ubyte()
    asked = _libc.mincore(ctypes.c_void_p(last), ctypes.c_size_t(_PAGE), ctypes.byref(there))
    if asked == 0 and not there.value & 1:
        size = ctypes.c_size_t(last + _PAGE - first)
        _libc.madvise(ctypes.c_void_p(first), size, _MADV_POPULATE_WRITE)
