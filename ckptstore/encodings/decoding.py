"""From stored elements to those that a load gives back; the reverse of every lossy form.

Casts convert each element (:mod:`ckptstore.encodings.casts`). Scaled elements are
``book[code] * scale``, one multiplication in float32, and then a cast to their dtype. A scale that
is written is 0 or at least ``2**-100``, so that no product is denormal, and no setting of a
processor for such numbers changes a bit.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ckptstore.encodings import casts
from ckptstore.encodings.codebooks import BOOKS

CAST: Final = "cast"
SCALED: Final = "scaled"
_BOOKS: Final = {code: casts.ByteTable(values) for code, values in BOOKS.items()}
# Elements that are converted at once. Source: with the temporaries of a cast 1.5 MiB, which stay
# in the second-level cache.
_STEP: Final = 1 << 16


def decode_elements(
    recipe_kind: str,
    code: str,
    block: int,
    dtype: str,
    source_dtype: str,
    start: int,
    codes: memoryview,
    scales: memoryview | None,
    out: memoryview,
    rounding: casts.Rounding | None = None,
) -> None:
    """Restore some elements of a tensor, in stored order. Any thread may call it.

    Parameters
    ----------
    recipe_kind
        ``cast`` or ``scaled``.
    code
        scaled: a key of :data:`~ckptstore.encodings.codebooks.BOOKS`; cast: ``""``.
    block
        scaled: elements per scale; cast: 0.
    dtype
        Of what comes back: a key of :data:`~ckptstore.encodings.casts.FLOATS`.
    source_dtype
        Of `codes`: of that kind too in a cast, ``int8`` or ``uint8`` if scaled.
    start
        Place of the first element in the tensor.
    codes
        The bytes of exactly the elements to restore, as they are in the first source.
    scales
        scaled: the bytes of the float32 scales from that of element `start` on; cast: None.
    out
        Writable bytes; as many elements of `dtype` as `codes` has of its own.
    rounding
        Rounds to bfloat16 faster than NumPy; None for NumPy.

    Raises
    ------
    ValueError
        The lengths, or the names, do not fit. A manifest that was decoded holds none such.
    """
    if dtype not in casts.FLOATS:
        raise ValueError(f"no form restores {dtype}")
    if recipe_kind == CAST and source_dtype in casts.FLOATS:
        cast_elements(source_dtype, dtype, codes, out, rounding)
    elif recipe_kind == SCALED and code in BOOKS and scales is not None and block >= 1:
        _rescale(code, block, dtype, start, codes, scales, out, rounding)
    else:
        raise ValueError(f"a recipe of kind {recipe_kind!r} with code {code!r} is unknown")


def cast_elements(
    source_dtype: str,
    dtype: str,
    codes: memoryview,
    out: memoryview,
    rounding: casts.Rounding | None = None,
) -> None:
    """Convert each element, as :func:`decode_elements` does by a cast."""
    source = np.frombuffer(codes, casts.raw_dtype(source_dtype))
    target = np.frombuffer(out, casts.raw_dtype(dtype))
    if len(source) != len(target):
        raise ValueError(f"{len(source)} elements for {len(target)}")
    if (source_dtype, dtype) == ("float32", "bfloat16"):
        with np.errstate(all="ignore"):
            casts.to_bfloat16(source.view(np.float32), target, rounding)
        return
    for at in range(0, len(source), _STEP):
        part = source[at : at + _STEP]
        target[at : at + len(part)] = casts.recast(source_dtype, dtype, part, rounding)


def _rescale(
    code: str,
    block: int,
    dtype: str,
    start: int,
    codes: memoryview,
    scales: memoryview,
    out: memoryview,
    rounding: casts.Rounding | None,
) -> None:
    """Look each element up in the book of its code, and multiply it by the scale of its block."""
    target = np.frombuffer(out, casts.raw_dtype(dtype))
    places = np.frombuffer(codes, np.uint8)
    sizes = np.frombuffer(scales, np.dtype("<f4"))
    first = start // block
    blocks = -(-(start + len(places)) // block) - first if len(places) else 0
    if len(places) != len(target) or blocks > len(sizes):
        raise ValueError(f"{len(places)} codes and {len(sizes)} scales for {len(target)} elements")
    book = _BOOKS[code]
    for at in range(0, len(places), _STEP):
        step = places[at : at + _STEP]
        low, high = start + at, start + at + len(step)
        touched = np.arange(low // block, -(-high // block))
        counts = np.minimum((touched + 1) * block, high) - np.maximum(touched * block, low)
        values = book(step)
        with np.errstate(all="ignore"):  # a hostile scale may be anything
            values *= np.repeat(sizes[touched - first], counts)
        target[at : at + len(step)] = casts.from_float32(dtype, values, rounding)
