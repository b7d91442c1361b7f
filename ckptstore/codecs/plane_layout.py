"""Layouts: splits the bytes of elements into planes, so that alike bytes stand together.

Only the exponents of trained floats compress (the mantissas are noise); a plane that holds them
alone shrinks to about a third, while byte-wise compression of whole floats gains almost nothing.
The sign goes with the mantissa, since it is noise too. Both were measured:
docs/design/0006-planes-and-zstd.md.

A `Layout` is one byte in the chunk header. Splitting and joining are exact inverses for every bit
pattern: NaN payloads, negative zeros and denormals included.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from enum import IntEnum
from typing import Any, Final

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]


class Layout(IntEnum):
    """Codes of the chunk header; append-only."""

    BYTES = 0
    """No planes."""
    FLOAT32 = 1
    """exponent (8 bits) | sign and upper 7 bits of the mantissa | lower 16 bits."""
    FLOAT16 = 2
    """bits 14..7 | sign and bits 6..0: exponent of bfloat16, exponent and 3 bits of float16."""
    FLOAT64 = 3
    """bits 62..55 | then the other 56 bits as 7 byte planes, highest first, the sign lowest."""
    BYTES2 = 4
    """2-byte elements as byte planes, lowest first."""
    BYTES4 = 5
    """4-byte elements as byte planes, lowest first."""
    BYTES8 = 6
    """8-byte elements as byte planes, lowest first."""


ITEM_BYTES = {
    Layout.BYTES: 1,
    Layout.FLOAT32: 4,
    Layout.FLOAT16: 2,
    Layout.FLOAT64: 8,
    Layout.BYTES2: 2,
    Layout.BYTES4: 4,
    Layout.BYTES8: 8,
}
"""Bytes of one element, by layout."""

# By torch's name of the dtype; what is not here has no planes (one byte, or no better choice).
_DTYPES = {
    Layout.FLOAT32: ("float32", "complex64"),
    Layout.FLOAT16: ("bfloat16", "float16", "complex32"),
    Layout.FLOAT64: ("float64", "complex128"),
    Layout.BYTES2: ("int16", "uint16"),
    Layout.BYTES4: ("int32", "uint32"),
    Layout.BYTES8: ("int64", "uint64"),
}
_BY_DTYPE = {dtype: layout for layout, dtypes in _DTYPES.items() for dtype in dtypes}


def layout_of(dtype: str) -> Layout:
    """Return the layout for a dtype by its torch name, without the ``torch.``."""
    return _BY_DTYPE.get(dtype, Layout.BYTES)


def plane_bytes(layout: Layout, raw_bytes: int) -> tuple[int, ...]:
    """Return the length of each plane of a chunk, in bytes.

    Raises
    ------
    ValueError
        If `raw_bytes` is not a whole number of elements.
    """
    item = ITEM_BYTES[layout]
    count, rest = divmod(raw_bytes, item)
    if rest:
        raise ValueError(f"{raw_bytes} bytes are not a whole number of {item}-byte elements")
    if layout is Layout.FLOAT32:
        return (count, count, 2 * count)
    return (count,) * item


def split(layout: Layout, raw: memoryview) -> list[U8]:
    """Return the planes of a chunk as new arrays.

    Parameters
    ----------
    raw
        C-contiguous bytes, a whole number of elements; only read.
    """
    if layout is Layout.FLOAT32:
        return _split_float32(np.frombuffer(raw, np.dtype("<u4")))
    if layout is Layout.FLOAT16:
        return _split_float16(np.frombuffer(raw, np.dtype("<u2")))
    octets = np.frombuffer(raw, np.uint8)
    if layout is Layout.FLOAT64:
        bits = octets.view(np.dtype("<u8"))
        octets = ((bits << np.uint64(1)) | (bits >> np.uint64(63))).view(np.uint8)
    return [np.ascontiguousarray(octets[k :: ITEM_BYTES[layout]]) for k in _places(layout)]


def _places(layout: Layout) -> range:
    """Return where in an element the byte of each plane lies."""
    places = range(ITEM_BYTES[layout])
    return places[::-1] if layout is Layout.FLOAT64 else places


def join(layout: Layout, planes: list[Any], out: memoryview) -> None:
    """Write the elements whose planes are given; the inverse of :func:`split`.

    Parameters
    ----------
    planes
        Buffers of the lengths that :func:`plane_bytes` names.
    out
        Writable, C-contiguous, exactly the chunk's raw length.
    """
    arrays = [np.frombuffer(plane, np.uint8) for plane in planes]
    if layout is Layout.FLOAT32:
        _join_float32(arrays, np.frombuffer(out, np.dtype("<u4")))
    elif layout is Layout.FLOAT16:
        _join_float16(arrays, np.frombuffer(out, np.dtype("<u2")))
    else:
        octets = np.frombuffer(out, np.uint8)
        for place, plane in zip(_places(layout), arrays, strict=True):
            octets[place :: len(arrays)] = plane
        if layout is Layout.FLOAT64:
            bits = octets.view(np.dtype("<u8"))
            bits[:] = (bits >> np.uint64(1)) | (bits << np.uint64(63))


# The float paths are shifts and casts, which NumPy runs with vector instructions: 1.0 ms to split
# 4 MiB of float32 and 0.6 to join them, against 1.1 ms for a transposed byte copy. Blocks of this
# many elements stay in a processor's cache from step to step; smaller ones pay for the calls, each
# of which takes the interpreter's lock. Source: measured, docs/design/0026-cores.md.
_BLOCK = 1 << 18
# A lower byte widened with its sign, and masked by this, has its top bit at the top and the other
# seven at the bottom.
_LOWER: Final = np.int16(-0x8000 | 0x7F)


class _PlaneBuffers(threading.local):
    """Memory of one thread for a block of elements, so that steps in between allocate nothing."""

    def __init__(self) -> None:
        self.first = np.empty(_BLOCK, np.dtype("<u2"))
        self.second = np.empty(_BLOCK, np.dtype("<u2"))
        self.wide = np.empty(_BLOCK, np.dtype("<u4"))
        self.octets = np.empty(_BLOCK, np.uint8)


_scratch = _PlaneBuffers()


def blocks_of(size: int, block: int = _BLOCK) -> Iterator[slice]:
    """Yield the parts of `size` elements that are worked on one after another."""
    for start in range(0, size, block):
        yield slice(start, min(start + block, size))


def _split_float32(bits: npt.NDArray[np.uint32]) -> list[U8]:
    upper, lower = np.empty(bits.size, np.uint8), np.empty(bits.size, np.uint8)
    last = np.empty(bits.size, np.dtype("<u2"))
    for part in blocks_of(bits.size):
        block = bits[part]
        np.copyto(last[part], block, casting="unsafe")
        wide = np.right_shift(block, 16, out=_scratch.wide[: block.size])
        half = _scratch.second[: block.size]  # sign, exponent, 7 bits: laid out as a bfloat16
        np.copyto(half, wide, casting="unsafe")
        _split_halves(half, upper[part], lower[part])
    return [upper, lower, last.view(np.uint8)]


def _split_float16(bits: npt.NDArray[np.uint16]) -> list[U8]:
    upper, lower = np.empty(bits.size, np.uint8), np.empty(bits.size, np.uint8)
    for part in blocks_of(bits.size):
        _split_halves(bits[part], upper[part], lower[part])
    return [upper, lower]


def _split_halves(bits: npt.NDArray[np.uint16], upper: U8, lower: U8) -> None:
    """Split a block of 16-bit elements into bits 14..7, and the sign with bits 6..0."""
    work, sign = _scratch.first[: bits.size], _scratch.octets[: bits.size]
    np.copyto(upper, np.right_shift(bits, 7, out=work), casting="unsafe")
    np.copyto(sign, np.right_shift(bits, 8, out=work), casting="unsafe")
    np.copyto(lower, bits, casting="unsafe")
    np.bitwise_and(lower, 0x7F, out=lower)
    np.bitwise_and(sign, 0x80, out=sign)
    np.bitwise_or(lower, sign, out=lower)


def _join_float32(planes: list[U8], out: npt.NDArray[np.uint32]) -> None:
    last = planes[2].view(np.dtype("<u2"))
    for part in blocks_of(out.size):
        target = out[part]
        upper, wide = _scratch.first[: target.size], _scratch.wide[: target.size]
        _join_halves(planes[0][part], planes[1][part], upper)
        np.copyto(wide, upper)
        np.left_shift(wide, 16, out=wide)
        np.copyto(target, last[part])
        np.bitwise_or(target, wide, out=target)


def _join_float16(planes: list[U8], out: npt.NDArray[np.uint16]) -> None:
    for part in blocks_of(out.size):
        _join_halves(planes[0][part], planes[1][part], out[part])


def _join_halves(upper: U8, lower: U8, out: npt.NDArray[np.uint16]) -> None:
    """Join bits 14..7, and the sign with bits 6..0, to a block of 16-bit elements."""
    bits, work = out.view(np.dtype("<i2")), _scratch.second[: out.size].view(np.dtype("<i2"))
    np.copyto(work, lower.view(np.int8))
    np.bitwise_and(work, _LOWER, out=work)
    np.copyto(bits, upper)
    np.multiply(bits, 128, out=bits)  # a shift of 16-bit elements takes twice as long
    np.bitwise_or(bits, work, out=bits)
