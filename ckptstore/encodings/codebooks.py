"""The values that an 8-bit code of a block stands for, as shares of the block's scale.

``linear``: k / 127 for k from -127 to 127; codes are ``int8``.

``dynamic-signed`` and ``dynamic-unsigned``: the dynamic tree of Dettmers 2016, "8-bit
approximations for parallelism in deep learning", arXiv:1511.04561, section 2.3, as Dettmers et al.
2022, "8-bit optimizers via block-wise quantization", arXiv:2110.02861, section 2.2, use it for the
states of optimizers: seven decades below 1, each cut evenly, the top one finest. Decade ``e`` of 0
to 6 reaches from ``10**(e - 7)`` to ``10**(e - 6)`` and has ``2**e`` equal parts a sign (twice as
many where there is no sign), each of which stands for its middle; with 0 and 1 these are 256
values. Codes are ``uint8``, the places of the values in ascending order.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Final

import numpy as np
import numpy.typing as npt

LINEAR: Final = "linear"
DYNAMIC_SIGNED: Final = "dynamic-signed"
DYNAMIC_UNSIGNED: Final = "dynamic-unsigned"
LINEAR_TOP: Final = 127
"""The code of the scale itself."""
_DECADES: Final = 7

CODE_DTYPES: Final[Mapping[str, str]] = {
    LINEAR: "int8",
    DYNAMIC_SIGNED: "uint8",
    DYNAMIC_UNSIGNED: "uint8",
}
"""dtype of the record that holds the codes, by code."""


def _rounded(values: list[Fraction]) -> npt.NDArray[np.float32]:
    """Return float32 values; a Fraction becomes the nearest float64 on any machine."""
    table = np.array([float(value) for value in values], np.float32)
    table.setflags(write=False)
    return table


def _linear() -> npt.NDArray[np.float32]:
    """Return values by code, read as ``uint8``; -128 is never written."""
    codes = [code - 256 if code > LINEAR_TOP else code for code in range(256)]
    return _rounded([Fraction(code, LINEAR_TOP) for code in codes])


def _dynamic(*, signed: bool) -> npt.NDArray[np.float32]:
    values = [Fraction(0), Fraction(1)]
    for decade in range(_DECADES):
        parts = 2**decade if signed else 2 ** (decade + 1)
        top = Fraction(10) ** (decade - _DECADES + 1)
        middles = [
            top * (Fraction(1, 10) + Fraction(9, 10) * Fraction(2 * part + 1, 2 * parts))
            for part in range(parts)
        ]
        values += middles
        values += [-middle for middle in middles] if signed else []
    return _rounded(sorted(values))


BOOKS: Final[Mapping[str, npt.NDArray[np.float32]]] = {
    LINEAR: _linear(),
    DYNAMIC_SIGNED: _dynamic(signed=True),
    DYNAMIC_UNSIGNED: _dynamic(signed=False),
}
"""``float32[256]`` by code: the value of each code as a share of the scale."""
