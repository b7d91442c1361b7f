"""float32 to bfloat16 by torch: in one pass over memory, and with one release of the GIL.

A :data:`ckptstore.encodings.casts.Rounding`: what it gives is compared with the definition before
it is used.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

# Elements that torch gets at once where its own threads cannot be turned off.
# Source: it starts them from 32,768 on (at::internal::GRAIN_SIZE); a whole number of lines.
_BLOCK: Final = (1 << 15) - 64


def to_bfloat16(values: npt.NDArray[np.float32], out: npt.NDArray[np.uint16]) -> None:
    """Fill `out` with values rounded to bfloat16, a NaN with any NaN; in the calling thread alone.

    Threads started by torch would compete with ckptstore's for the same cores.

    Parameters
    ----------
    values
        Writable, since torch warns of read-only memory.
    """
    given = torch.from_numpy(values)
    made = torch.from_numpy(out.view(np.int16)).view(torch.bfloat16)
    if torch.get_num_threads() == 1 or len(values) <= _BLOCK:
        made.copy_(given)
    elif not _copied_alone(made, given):
        for target, source in zip(
            torch.split(made, _BLOCK), torch.split(given, _BLOCK), strict=True
        ):
            target.copy_(source)


def _copied_alone(made: torch.Tensor, given: torch.Tensor) -> bool:
    """Copy with one thread of torch's if OpenMP can be limited to it; return whether it could.

    The number of threads of OpenMP is set for the calling thread alone (OpenMP 5.2, 2.4:
    nthreads-var belongs to the data environment of a task), and set back here. A torch built with
    another threading library, or another copy of OpenMP, ignores it; so torch itself is asked.
    """
    openmp = _openmp()
    if openmp is None:
        return False
    read, write = openmp
    before = read()
    write(1)
    try:
        alone = torch.get_num_threads() == 1
        if alone:
            made.copy_(given)
    finally:
        write(before)
    return alone


@cache
def _openmp() -> tuple[Callable[[], int], Callable[[int], None]] | None:
    """Return OpenMP's functions that read and set its number of threads; None without OpenMP."""
    try:
        library = ctypes.PyDLL(None)  # of this process; the calls are short, so keep the GIL
        read, write = library.omp_get_max_threads, library.omp_set_num_threads
    except (AttributeError, OSError, TypeError):  # no OpenMP; or no such call (Windows)
        return None
    read.argtypes, read.restype = (), ctypes.c_int
    write.argtypes, write.restype = (ctypes.c_int,), None
    return read, write
