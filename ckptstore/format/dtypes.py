"""Names and sizes of the element types that a record may have, without torch.

A dtype's text is torch's own name without ``torch.``. Quantized types are absent on purpose: a
quantized tensor is stored as the integers below it, and the skeleton says how to read them.
Source of the list: every ``torch.dtype`` of torch 2.13;
``tests/unit/state/test_fidelity_states.py`` holds both equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from ckptstore.errors import CorruptObjectError

_NAMES_BY_BYTES: Final[Mapping[int, str]] = {
    1: "bool uint8 int8 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu "
    "float4_e2m1fn_x2 bits8 bits1x8 bits2x4 bits4x2 "
    "uint1 uint2 uint3 uint4 uint5 uint6 uint7 int1 int2 int3 int4 int5 int6 int7",
    2: "float16 bfloat16 int16 uint16 bits16",
    4: "float32 int32 uint32 complex32",
    8: "float64 int64 uint64 complex64",
    16: "complex128",
}

ITEM_BYTES: Final[Mapping[str, int]] = MappingProxyType(
    {name: size for size, names in _NAMES_BY_BYTES.items() for name in names.split()}
)
"""Bytes of one element, by dtype text. Packed types count one element a byte, as torch does."""

QUANTIZED_PER_BYTE: Final[Mapping[str, int]] = MappingProxyType(
    {"quint8": 1, "qint8": 1, "qint32": 1, "quint4x2": 2, "quint2x4": 4}
)
"""Elements of a quantized type in one stored item; 2 and 4 are packed along the last dim."""


def bytes_of(dtype: str, shape: Sequence[int]) -> int:
    """Return how many bytes a dense tensor takes.

    Raises
    ------
    CorruptObjectError
        The dtype is unknown or a dimension is negative.
    """
    total = ITEM_BYTES.get(dtype, -1)
    if total < 0:
        raise CorruptObjectError(f"unknown dtype {dtype!r} in a record")
    for size in shape:
        if size < 0:
            raise CorruptObjectError(f"negative dimension in the shape {tuple(shape)!r}")
        total *= size
    return total


def strides_of(shape: Sequence[int], order: Sequence[int] | None) -> tuple[int, ...]:
    """Return the strides, in elements, of a dense tensor whose dims lie in memory in `order`.

    Parameters
    ----------
    shape
        Sizes by dimension.
    order
        Dimensions from the outermost in memory to the innermost; None is 0, 1, 2, ...
    """
    strides, step = [0] * len(shape), 1
    for dim in reversed(range(len(shape)) if order is None else order):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)
