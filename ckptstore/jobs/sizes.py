"""Numbers of bytes as job files write them."""

from __future__ import annotations

import re
from typing import Final

from ckptstore.errors import InvalidInputError

__all__ = ["rate_of"]

_SIZE: Final = re.compile(r"(\d{1,15})\s*([KMGT]?)(?:i?B)?\Z")
_FACTORS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def rate_of(value: str | int) -> float:
    """Return the bytes that ``50MiB``, ``50M`` or a number stand for.

    Raises
    ------
    InvalidInputError
        It is no such text.
    """
    match = _SIZE.match(str(value).strip())
    if match is None:
        msg = f"{value!r} is not a number of bytes"
        raise InvalidInputError(msg, hint="write 50MiB, 512KiB or a plain number")
    return float(int(match[1]) * _FACTORS[match[2]])
