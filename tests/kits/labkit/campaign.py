"""Length of the lab's campaigns: a few rounds by default, many with ``CKPTSTORE_LAB_LONG=1``.

A long one can be run in pieces: ``CKPTSTORE_SOAK_ROUNDS`` is the number of rounds of one, and
``CKPTSTORE_SOAK_SEED`` the turn at which its moments begin.
"""

from __future__ import annotations

import os

from soaking import soak_rounds, soak_seed

__all__ = ["moment", "rounds"]


def rounds(short: int, long: int) -> int:
    """Return `short`, or `long` if ``CKPTSTORE_LAB_LONG=1`` is set."""
    return soak_rounds(long) if os.environ.get("CKPTSTORE_LAB_LONG") == "1" else short


def moment(turn: int, first_s: float, last_s: float) -> float:
    """Return the moment of the fault in round `turn`, in seconds; evenly spread for any count.

    Multiples of the golden ratio, modulo 1, leave no large gap and repeat nothing.
    """
    return first_s + (last_s - first_s) * ((turn + soak_seed(0)) * 0.6180339887498949 % 1)
