"""Float formats as bits, and casts between them that are the same on any machine.

Rounding is to nearest, ties to even; infinities and the sign of zero are kept. Where a NaN has to
be made it is the quiet one of its sign, since processors differ in what else they keep of it.
``float64`` becomes a narrower type by way of ``float32``, as in torch. What is too large becomes
infinite, and in ``float8_e4m3fn``, which has no infinity, its largest value. All of it is as in
torch 2.13, bit for bit, NaN apart (older ones make NaN of what is too large for
``float8_e4m3fn``).

Sources: the layouts of float16, float32 and float64 are IEEE 754-2008; bfloat16 is the upper half
of a float32; the two of 8 bits are of Micikevicius et al. 2022, "FP8 formats for deep learning",
arXiv:2209.05433, table 1.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from ckptstore.format.dtypes import ITEM_BYTES
from ckptstore.format.tables import CASTS

F32 = npt.NDArray[np.float32]
U16 = npt.NDArray[np.uint16]
Raw = npt.NDArray[Any]
"""Elements as unsigned integers of their width."""

FLOATS: Final[Mapping[str, int]] = {name: ITEM_BYTES[name] for name in sorted(CASTS)}
"""Bytes of an element of each format that there are casts for, by torch's name."""

_QUIET: Final = {
    "bfloat16": np.uint16(0x7FC0),
    "float16": np.uint16(0x7E00),
    "float64": np.uint64(0x7FF8 << 48),
}
"""The quiet NaN without a sign."""
_ABS32: Final = np.uint32(0x7FFF_FFFF)
_INF32: Final = np.uint32(0x7F80_0000)
_ABS64: Final = np.uint64((1 << 63) - 1)
_DENORMALS32: Final = np.uint32((1 << 23) - 1)
"""How many denormals float32 has of each sign."""
_BELOW64: Final = np.uint64((0x3810 << 48) - 1)
"""How many float64 are between 0 and the least normal float32, 2**-126."""
_UNIT32: Final = 2.0**-149
"""The least float32 above 0."""


def raw_dtype(dtype: str) -> np.dtype[Any]:
    """Return the unsigned integer that holds an element of a format; little-endian."""
    return np.dtype(f"<u{FLOATS[dtype]}")


class ByteTable:
    """Table of 256 values of float32, one for each byte. Any thread may use it.

    NumPy turns indices into machine words and checks each. Here codes are taken two at a time from
    a table of all pairs, and nothing is checked that cannot be wrong: 15 times as fast as plain
    indexing (measured, 64 Ki codes at a time).

    Parameters
    ----------
    values
        ``float32[256]``.
    """

    def __init__(self, values: F32) -> None:
        self._values = values

    def __call__(self, codes: npt.NDArray[Any]) -> F32:
        """Return the values of codes: integers of 8 bits, C-contiguous, of any shape."""
        flat = codes.reshape(-1).view(np.uint8)
        even = len(flat) // 2 * 2
        found = np.empty(len(flat), np.float32)
        np.take(self._pairs, flat[:even].view("<u2"), out=found[:even].view(np.uint64), mode="clip")
        found[even:] = self._values[flat[even:]]
        return found.reshape(codes.shape)

    @cached_property
    def _pairs(self) -> npt.NDArray[np.uint64]:
        """The pairs, made when they are needed first: half a MiB."""
        pairs = np.empty((256, 256, 2), np.float32)
        pairs[..., 0] = self._values  # the first code is the lower byte
        pairs[..., 1] = self._values[:, None]
        return pairs.reshape(-1).view(np.uint64)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mini:
    """A format of 8 bits."""

    mantissa_bits: int
    bias: int
    """Of the exponent."""
    top: int
    """The code of the largest finite value, without its sign."""
    over: int
    """What becomes of what is larger, and of an infinity."""
    infinity: int | None
    """The code of an infinity."""


_MINIS: Final[Mapping[str, _Mini]] = {
    "float8_e4m3fn": _Mini(mantissa_bits=3, bias=7, top=0x7E, over=0x7E, infinity=None),
    "float8_e5m2": _Mini(mantissa_bits=2, bias=15, top=0x7B, over=0x7C, infinity=0x7C),
}
_NAN8: Final = 0x7F


def _widened(mini: _Mini) -> F32:
    """Return the value of each of the 256 codes."""
    values = []
    for code in range(256):
        size = code & 0x7F
        exponent, mantissa = divmod(size, 1 << mini.mantissa_bits)
        fraction = mantissa / (1 << mini.mantissa_bits)
        if size <= mini.top:
            first = 1.0 if exponent else 0.0
            value = (first + fraction) * 2.0 ** (max(exponent, 1) - mini.bias)
        else:
            value = np.inf if size == mini.infinity else np.nan
        values.append(-value if code & 0x80 else value)
    return np.array(values, np.float32)


@cache
def _halves() -> F32:
    """Return the value of each float16, made when they are needed first."""
    with np.errstate(all="ignore"):
        return _quiet(np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32))


_WIDENED: Final = {name: ByteTable(_widened(mini)) for name, mini in _MINIS.items()}


def to_float32(dtype: str, raw: Raw) -> F32:
    """Return elements of a format as float32; exact but for float64."""
    if dtype == "float32":
        return raw.view(np.float32)
    if dtype == "bfloat16":
        wide = raw.astype(np.uint32)
        wide <<= np.uint32(16)
        return wide.view(np.float32)
    if dtype in _MINIS:
        return _WIDENED[dtype](raw)
    if dtype == "float16":
        return np.take(_halves(), raw, mode="clip")
    with np.errstate(all="ignore"):  # what becomes of NaN, and of what is too large, is defined
        return _quiet(_narrowed(raw))


def to_float64(dtype: str, raw: Raw) -> npt.NDArray[np.float64]:
    """Return elements of a format as float64; exact."""
    if dtype == "float64":
        return raw.view(np.float64)
    with np.errstate(all="ignore"):
        return to_float32(dtype, raw).astype(np.float64)


def from_float32(dtype: str, values: F32, rounding: Rounding | None = None) -> Raw:
    """Return the elements of a format that are nearest to values."""
    if dtype == "float32":
        return values.view(np.uint32)
    with np.errstate(all="ignore"):
        if dtype in _MINIS:
            return _to_mini(_MINIS[dtype], values)
        if dtype == "bfloat16":
            found: Raw = np.empty(values.shape, np.uint16)
            to_bfloat16(values, found, rounding)
            return found
        if dtype == "float16":
            found = values.astype(np.float16).view(np.uint16)
        else:
            found = _widened64(values).view(np.uint64)
    missing = np.isnan(values)
    if missing.any():
        found[missing] = _signs(values[missing], 8 * FLOATS[dtype]) | _QUIET[dtype]
    return found


def recast(source: str, target: str, raw: Raw, rounding: Rounding | None = None) -> Raw:
    """Return elements of one format as elements of another."""
    return raw if source == target else from_float32(target, to_float32(source, raw), rounding)


def _narrowed(raw: Raw) -> F32:
    """Return float64 as float32. Denormals are made as integers: a processor may flush them."""
    found = raw.view(np.float64).astype(np.float32)
    size = raw & _ABS64
    small = size - np.uint64(1) < _BELOW64  # 0 wraps, and is not
    if small.any():
        units = np.rint(size[small].view(np.float64) * (1 / _UNIT32)).astype(np.uint32)
        found.view(np.uint32)[small] = units | _signs(found[small], 32)
    return found


def _widened64(values: F32) -> npt.NDArray[np.float64]:
    """Return float32 as float64; denormals by way of integers, as :func:`_narrowed`."""
    found = values.astype(np.float64)
    size = values.view(np.uint32) & _ABS32
    small = size - np.uint32(1) < _DENORMALS32
    if small.any():
        found[small] = np.copysign(size[small] * _UNIT32, values[small])
    return found


def _signs(values: F32, bits: int) -> Raw:
    """Return the sign of each value, where an element of so many bits has it."""
    signs: Raw = np.signbit(values).astype(f"<u{bits // 8}")
    signs <<= signs.dtype.type(bits - 1)
    return signs


def _quiet(values: F32) -> F32:
    """Make every NaN, in place, the quiet one of its sign."""
    missing = np.isnan(values)
    if missing.any():
        bits = values.view(np.uint32)
        bits[missing] = _signs(values[missing], 32) | np.uint32(0x7FC0_0000)
    return values


# Elements that are rounded to bfloat16 at once. Source: with what is made of them 0.8 MiB, which
# stays in the second-level cache (measured: docs/design/0015-pipeline.md).
_STEP: Final = 1 << 16
# Elements for which a faster rounding is worth its call. Source: 10 us of NumPy.
_MANY: Final = 1 << 13
_INF16: Final = 0x7F80
# Denormals that are looked at each time. Source: all upper halves of the positive ones; 10 us.
_FEW: Final = 5 << 7


Rounding: TypeAlias = Callable[[F32, U16], None]
"""Fills a writable array with values rounded to bfloat16; of a NaN it may make any.

Callers hand in one that is faster than NumPy; None in its place is NumPy. Each thread compares it
with the definition before it first uses it: all upper halves of a float32, with the lower ones
around a tie. So no processor, and no setting of one (denormals), changes what a cast gives.
"""


@cache
def _borders() -> tuple[F32, U16]:
    """Return what a rounding is tried with, and what it has to make of it."""
    lows = np.array([0, 1, 0x7FFF, 0x8000, 0x8001], np.uint32)
    bits = (np.arange(1 << 16, dtype=np.uint32)[:, None] << np.uint32(16) | lows).reshape(-1)
    # The last are denormals, and an odd number of elements: some are rounded one by one.
    values = np.roll(bits, -len(lows) << 7)[:-1].view(np.float32)
    wanted = np.empty(len(values), np.uint16)
    with np.errstate(all="ignore"):
        _round(_CastScratch(), values, wanted)
    return values, wanted


class _CastScratch(threading.local):
    """Memory of one thread for the steps of a cast, so that it allocates nothing."""

    def __init__(self) -> None:
        self.wide = np.empty(_STEP, np.uint32)
        self._tried: dict[Rounding, bool] = {}

    def trusts(self, rounding: Rounding) -> bool:
        """Return whether a rounding gives the bits of the definition in this thread."""
        values, wanted = _borders()
        if rounding not in self._tried:
            self._tried[rounding] = _gives(rounding, values, wanted)
        # What has to do with denormals is a setting of the thread, which may be another now.
        return self._tried[rounding] and _gives(rounding, values[-_FEW:], wanted[-_FEW:])


_scratch = _CastScratch()


def to_bfloat16(values: F32, out: U16, rounding: Rounding | None) -> None:
    """Fill `out` with values rounded to bfloat16; the cast that nearly all derived tensors are."""
    many = len(values) >= _MANY and values.flags.writeable
    if rounding is not None and many and _scratch.trusts(rounding):
        _round_by(rounding, values, out)
    else:
        _round(_scratch, values, out)


def _gives(rounding: Rounding, values: F32, wanted: U16) -> bool:
    made = np.empty_like(wanted)
    _round_by(rounding, values, made)
    return np.array_equal(made, wanted)


def _round_by(rounding: Rounding, values: F32, out: U16) -> None:
    """Round, and make each NaN the one that it has to be."""
    rounding(values, out)
    # The codes of a NaN are the greatest without a sign, and with one: two passes, no memory.
    if np.maximum.reduce(out.view(np.int16)) > _INF16 or np.maximum.reduce(out) > _INF16 | 0x8000:
        found = np.isnan(values)
        out[found] = _signs(values[found], 16) | _QUIET["bfloat16"]


def _round(scratch: _CastScratch, values: F32, out: U16) -> None:
    """Round by NumPy alone: the definition."""
    for start in range(0, len(values), _STEP):
        part = values[start : start + _STEP]
        target = out[start : start + _STEP]
        bits, wide = part.view(np.uint32), scratch.wide[: len(part)]
        np.right_shift(bits, 16, out=wide)
        np.bitwise_and(wide, 1, out=wide)
        np.add(wide, bits, out=wide)
        np.add(wide, 0x7FFF, out=wide)  # half up, and half to even of a tie; wraps for a NaN only
        np.right_shift(wide, 16, out=wide)
        np.copyto(target, wide, casting="unsafe")
        if np.isnan(np.maximum.reduce(part)):  # one NaN is enough for that
            found = np.isnan(part)
            target[found] = _signs(part[found], 16) | _QUIET["bfloat16"]


def _to_mini(mini: _Mini, values: F32) -> Raw:
    """Round magnitudes as integers; those below the least normal one by an addition that aligns."""
    size = values.view(np.uint32) & _ABS32
    shift = 23 - mini.mantissa_bits
    even = (size >> np.uint32(shift)) & np.uint32(1)
    normal = (size + even + np.uint32((1 << (shift - 1)) - 1)) >> np.uint32(shift)
    normal -= np.uint32((127 - mini.bias) << mini.mantissa_bits)  # wraps for small ones: not used
    # The last bit of this number weighs as much as the least denormal: the sum is rounded to it.
    aligned = np.float32(2.0 ** (1 - mini.bias - mini.mantissa_bits + 23))
    small = (size.view(np.float32) + aligned).view(np.uint32) - aligned.view(np.uint32)
    is_small = size < np.uint32((128 - mini.bias) << 23)
    code = np.where(is_small, small, normal)
    code = np.where(~is_small & (code > np.uint32(mini.top)), np.uint32(mini.over), code)
    code = np.where(size > _INF32, np.uint32(_NAN8), code)
    found = code.astype(np.uint8)
    found |= _signs(values, 8)
    return found
