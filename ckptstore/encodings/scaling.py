"""Blocks of elements as codes of 8 bits and one scale each: the largest magnitude of the block.

Block-wise quantization as in Dettmers et al. 2022, "8-bit optimizers via block-wise quantization",
arXiv:2110.02861, section 2.1; the books of values are in :mod:`ckptstore.encodings.codebooks`. Two
things are added to the paper. A positive element of a tensor without negative ones never gets the
code of 0: an optimizer divides by its root. And a block with no magnitude of ``2**-100`` has scale
0, so that nothing depends on how a processor treats denormal numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from ckptstore.encodings.codebooks import (
    BOOKS,
    DYNAMIC_SIGNED,
    DYNAMIC_UNSIGNED,
    LINEAR,
    LINEAR_TOP,
)

Values = npt.NDArray[np.float32]

_SCALE_MIN: Final = np.float32(2.0**-100)
"""The smallest value of any book times this is normal: 3.25e-7 * 2**-100 is above 2**-126."""
_CELL_BITS: Final = 16
"""Floats are looked up by these first bits of theirs: no two borders of a book are in one cell."""


def scales_of(values: Values, block: int) -> Values:
    """Return the scale of each block, the last of which may be shorter.

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
        A key of :data:`~ckptstore.encodings.codebooks.BOOKS`.
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
    middles = ((wide[1:] + wide[:-1]) / 2).astype(np.float32)
    return np.append(middles, np.float32(np.inf))


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
