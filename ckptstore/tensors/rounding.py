"""float32 to bfloat16 by torch: in one pass over memory, and with one release of the lock.

What it gives is compared with the definition before it is used; see
:func:`ckptstore.encodings.casts.offer_rounding`.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["to_bfloat16"]

# Elements that torch is given at once. Source: from 32,768 on (at::internal::GRAIN_SIZE) it calls
# threads of its own, which would take turns with ours on the same cores; a whole number of lines.
_BLOCK: Final = (1 << 15) - 64


def to_bfloat16(values: npt.NDArray[np.float32], out: npt.NDArray[np.uint16]) -> None:
    """Fill `out` with values rounded to bfloat16, a NaN with any NaN.

    Parameters
    ----------
    values
        Writable, since torch warns of memory that is not.
    """
    given = torch.split(torch.from_numpy(values), _BLOCK)
    made = torch.split(torch.from_numpy(out.view(np.int16)).view(torch.bfloat16), _BLOCK)
    together = getattr(torch, "_foreach_copy_", None)  # one call, where there is one for it
    if together is not None:
        together(made, given)
        return
    for target, source in zip(made, given, strict=True):
        target.copy_(source)
