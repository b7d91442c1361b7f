"""NumPy arrays, scalars and dtypes as nodes of a skeleton, and back."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from ckptstore.errors import CorruptObjectError, StateError
from ckptstore.format.dtypes import strides_of
from ckptstore.format.skeleton import Node

_TWIN_NAMES: Final = (
    "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 float32 float64 complex64 "
    "complex128"
)
# On a big-endian machine only single bytes mean the same as in records, which are little-endian.
TWINS: Final[Mapping[np.dtype[Any], str]] = MappingProxyType(
    {
        np.dtype(name): name
        for name in _TWIN_NAMES.split()
        if sys.byteorder == "little" or np.dtype(name).itemsize == 1
    }
)
"""NumPy dtypes whose records carry the dtype of the same name."""

# Values of numpy.dtype.str for types without Python objects. Fullmatch, so that no other spelling
# (aliases, comma lists) ever reaches numpy.dtype().
_SIMPLE: Final = re.compile(r"[<>|][?biufcmMSUV][0-9]{1,10}(\[[0-9]{0,9}[A-Za-z]{1,8}\])?")


def describe_dtype(dtype: np.dtype[Any]) -> Node:
    """Return the node of a dtype.

    Raises
    ------
    StateError
        It holds Python objects, or its own description does not restore it.
    """
    node = _describe(dtype)
    try:
        same = not dtype.hasobject and build_dtype(node) == dtype
    except CorruptObjectError:
        same = False
    if not same:
        msg = f"the NumPy dtype {dtype!r} cannot be stored"
        raise StateError(msg, hint="use numbers, fixed-size strings or structures of these")
    return node


def _describe(dtype: np.dtype[Any]) -> Node:
    if dtype.fields is None or dtype.names is None:
        return dtype.str
    fields: list[Node] = []
    for name in dtype.names:
        entry = dtype.fields[name]
        inner, offset = entry[0], entry[1]
        title = entry[2] if len(entry) > 2 else None
        base, shape = inner.subdtype if inner.subdtype is not None else (inner, ())
        text = title if title is None or isinstance(title, str) else str(title)
        fields.append([name, text, _describe(base), offset, [*shape]])
    return ["f", dtype.itemsize, dtype.isalignedstruct, fields]


def build_dtype(node: Node) -> np.dtype[Any]:
    """Return the dtype of a node.

    Raises
    ------
    CorruptObjectError
        NumPy has no such dtype, or it would hold Python objects.
    """
    if isinstance(node, str):
        if not _SIMPLE.fullmatch(node):
            raise CorruptObjectError(f"{node[:60]!r} is not the name of a NumPy dtype")
        spec: Any = node
    elif isinstance(node, list) and isinstance(node[3], list):
        fields: list[Any] = node[3]
        spec = {
            "names": [field[0] for field in fields],
            "formats": [_format(field[2], field[4]) for field in fields],
            "offsets": [field[3] for field in fields],
            "itemsize": node[1],
        }
        if any(field[1] is not None for field in fields):
            spec["titles"] = [field[1] for field in fields]
        if node[2]:
            spec["aligned"] = True
    else:
        raise CorruptObjectError("a NumPy dtype is not valid")
    try:
        dtype: np.dtype[Any] = np.dtype(spec)
    except (TypeError, ValueError, OverflowError) as error:
        raise CorruptObjectError(f"a NumPy dtype is not valid: {error}") from error
    if dtype.hasobject:
        raise CorruptObjectError("a NumPy dtype holds Python objects")
    return dtype


def _format(node: Node, shape: Sequence[int]) -> object:
    base = build_dtype(node)
    return (base, tuple(shape)) if shape else base


def scalar_bytes(value: np.generic) -> bytes:
    """Return the bytes of a NumPy scalar."""
    return np.asarray(value).tobytes() if value.dtype.itemsize else b""


def build_scalar(dtype: np.dtype[Any], data: bytes) -> object:
    """Return the scalar of `dtype` with these bytes.

    Raises
    ------
    CorruptObjectError
        `data` has another length than the dtype.
    """
    if len(data) != dtype.itemsize:
        raise CorruptObjectError(f"a NumPy scalar of {dtype} has {len(data)} bytes")
    if not data:
        return np.zeros((), dtype)[()]
    if dtype.kind in "SU":  # of an array, NumPy drops NULs at the end
        wide = "utf-32-be" if dtype.str[0] == ">" else "utf-32-le"
        return np.bytes_(data) if dtype.kind == "S" else np.str_(data.decode(wide, "surrogatepass"))
    array: np.ndarray[Any, Any] = np.ndarray((), dtype, buffer=bytearray(data))
    return array[()]


def array_over(
    memory: memoryview, dtype: np.dtype[Any], shape: Sequence[int], order: Sequence[int] | None
) -> np.ndarray[Any, Any]:
    """Return a writable array over `memory`, with the dimensions in memory in `order`."""
    steps = strides_of(shape, order)
    strides = tuple(step * dtype.itemsize for step in steps)
    if not len(memory):
        return np.ndarray(tuple(shape), dtype, order="C" if order is None else "F")
    return np.ndarray(tuple(shape), dtype, buffer=memory, strides=strides)
