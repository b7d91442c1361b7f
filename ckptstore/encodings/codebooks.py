"""Books of the values of 8-bit codes, as shares of a block's scale, and the coding by them.

``linear``: k / 127 for k from -127 to 127; codes are ``int8``.

``dynamic-signed`` and ``dynamic-unsigned``: the dynamic tree of Dettmers 2016, "8-bit
approximations for parallelism in deep learning", arXiv:1511.04561, section 2.3, as Dettmers et al.
2022, "8-bit optimizers via block-wise quantization", arXiv:2110.02861, section 2.2, use it for the
states of optimizers: seven decades below 1, each cut evenly, the top one finest. Decade ``e`` of 0
to 6 reaches from ``10**(e - 7)`` to ``10**(e - 6)`` and has ``2**e`` equal parts a sign (twice as
many where there is no sign), and each part stands for its middle; with 0 and 1 these are 256
values. Codes are ``uint8``, the places of the values in ascending order.

Block-wise quantization is as in Dettmers et al. 2022, section 2.1: blocks of elements as codes of
8 bits and one scale each, the largest magnitude of the block. Two things are added to the paper. A
positive element of a tensor without negative ones never gets the code of 0: an optimizer divides by
its root. And a block with no magnitude of ``2**-100`` has scale 0, so that nothing depends on how a
processor treats denormal numbers.
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


# --- blocks of elements as codes, and back --------------------------------------------------------

Values = npt.NDArray[np.float32]

_SCALE_MIN: Final = np.float32(2.0**-100)
"""The smallest value of any book times this is normal: 3.25e-7 * 2**-100 is above 2**-126."""
_CELL_BITS: Final = 16
"""Floats are looked up by these first bits of theirs: no two borders of a book are in one cell."""


def scales_of(values: Values, block: int) -> Values:
    """Return the scale of each block; the last block may be shorter.

    Parameters
    ----------
    values
        ``float32[n]``, finite.
    """
    whole = len(values) // block * block
    scales = np.empty(-(-len(values) // block), np.float32)
    if whole:
        blocks = values[:whole].reshape(-1, block)
        np.maximum(blocks.max(axis=1), -blocks.min(axis=1), out=scales[: whole // block])
    if whole < len(values):
        scales[-1] = np.abs(values[whole:]).max()
    scales[~(scales >= _SCALE_MIN)] = 0
    return scales


def codes_of(code: str, values: Values, scales: Values, block: int) -> npt.NDArray[np.uint8]:
    """Return the code of each element: that of the nearest value of its block.

    Parameters
    ----------
    code
        A key of :data:`BOOKS`.
    values
        ``float32[n]``, finite; begins with a block.
    scales
        What :func:`scales_of` returns for them.

    Returns
    -------
    numpy.ndarray
        ``uint8[n]``; of ``linear``, the bits of ``int8``.
    """
    divisors = np.where(scales > 0, scales, np.float32(1))
    shares = np.empty(len(values), np.float32)
    whole = len(values) // block * block
    with np.errstate(under="ignore"):
        np.divide(
            values[:whole].reshape(-1, block),
            divisors[: whole // block, None],
            out=shares[:whole].reshape(-1, block),
        )
        if whole < len(values):
            np.divide(values[whole:], divisors[-1], out=shares[whole:])
    if code == LINEAR:
        shares *= np.float32(LINEAR_TOP)
        np.rint(shares, out=shares)
        return shares.astype(np.int8).view(np.uint8)
    cells = shares.view(np.uint32) >> np.uint32(32 - _CELL_BITS)
    places: npt.NDArray[np.uint8] = _CELLS[code][cells]
    places += shares > _BORDERS[code][places]
    if code == DYNAMIC_UNSIGNED:
        # By its bits: a processor that takes denormal numbers for zero must come to the same.
        lost = (places == 0) & (values.view(np.uint32) << np.uint32(1) != 0)
        if lost.any():
            scaled = np.repeat(scales > 0, block)[: len(values)]
            places[lost & scaled] = 1
    return places


def _borders(book: Values) -> Values:
    """Return, by code, the share above which the next code is nearer; none for the last."""
    wide = book.astype(np.float64)
    return np.append(((wide[1:] + wide[:-1]) / 2).astype(np.float32), np.float32(np.inf))


def _cells(borders: Values) -> npt.NDArray[np.uint8]:
    """Return, by the first bits of a share, the code of the least share that has them."""
    count = 1 << _CELL_BITS
    first = np.arange(count, dtype=np.uint32) << np.uint32(32 - _CELL_BITS)
    first[count // 2 :] |= np.uint32((1 << (32 - _CELL_BITS)) - 1)  # negative: least is largest
    least = first.view(np.float32)
    codes = np.searchsorted(borders[:-1], least, side="left").astype(np.uint8)
    codes[~np.isfinite(least)] = 0  # no share is
    return codes


_BORDERS: Final[Mapping[str, Values]] = {
    code: _borders(BOOKS[code]) for code in (DYNAMIC_SIGNED, DYNAMIC_UNSIGNED)
}
_CELLS: Final[Mapping[str, npt.NDArray[np.uint8]]] = {
    code: _cells(borders) for code, borders in _BORDERS.items()
}
