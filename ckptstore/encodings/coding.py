"""Between the elements of a tensor and those that are stored: every lossy form, both ways.

Casts convert each element (:mod:`ckptstore.encodings.casts`). Scaled elements are
``book[code] * scale``, one multiplication in float32, and then a cast to their dtype. A scale that
is written is 0 or at least ``2**-100``, so that no product is denormal, and no setting of a
processor for such numbers changes a bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ckptstore.encodings import casts, codebooks
from ckptstore.encodings.casts import FLOATS, Rounding, from_float32, recast, to_float32, to_float64
from ckptstore.encodings.codebooks import BOOKS
from ckptstore.encodings.encoding import CASTS, Encoding
from ckptstore.format.tables import CODES

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
        return
    if recipe_kind != SCALED or code not in BOOKS or scales is None or block < 1:
        raise ValueError(f"a recipe of kind {recipe_kind!r} with code {code!r} is unknown")
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


_E4M3FN_MAX: Final = 464.0
"""What is larger would not be rounded to 448, the largest value, if there were a next one."""
_SCALE_MAX: Final = float(np.finfo(np.float32).max)
"""Scales are float32."""


class Coded(NamedTuple):
    """Some elements, encoded."""

    codes: npt.NDArray[Any]
    """One for each, unsigned."""
    scales: npt.NDArray[np.float32] | None
    """One for each block; None for a cast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The bits that an encoding means for a tensor: those of a recipe.

    Two forms that are equal make equal codes of equal elements.
    """

    kind: str
    """``cast`` or ``scaled``."""
    code: str
    """scaled: a key of :data:`~ckptstore.encodings.codebooks.BOOKS`."""
    block: int
    """scaled: elements per scale; cast: 0."""
    dtype: str
    """Of the codes: torch's name."""

    @classmethod
    def of(cls, encoding: Encoding, *, signed: bool) -> Form:
        """Return the form of an encoding, not ``lossless``.

        Parameters
        ----------
        signed
            The tensor has negative elements.
        """
        target = CASTS.get(encoding.name)
        if target is not None:
            return cls(kind=CAST, code="", block=0, dtype=target)
        dynamic = codebooks.DYNAMIC_SIGNED if signed else codebooks.DYNAMIC_UNSIGNED
        code = codebooks.LINEAR if encoding.name == "int8" else dynamic
        return cls(kind=SCALED, code=code, block=encoding.block or 0, dtype=CODES[code])

    @property
    def item_bytes(self) -> int:
        """Bytes of one code."""
        return FLOATS[self.dtype] if self.kind == CAST else 1

    @property
    def step(self) -> int:
        """Elements to encode at once: whole blocks."""
        return max(self.block, _STEP // self.block * self.block) if self.block else _STEP

    def problem(self, seen: ValueRange) -> str:
        """Return why it cannot hold a tensor with such elements; empty if it may."""
        if self.kind == SCALED and not seen.finite:
            return "it holds NaN or an infinity"
        largest = {SCALED: _SCALE_MAX, "float8_e4m3fn": _E4M3FN_MAX}
        name = SCALED if self.kind == SCALED else self.dtype
        if max(-seen.low, seen.high) > largest.get(name, math.inf):
            return "an element is larger than the form can hold"
        return ""

    def encode(self, dtype: str, raw: npt.NDArray[Any], rounding: Rounding | None = None) -> Coded:
        """Encode some elements of a tensor.

        Parameters
        ----------
        dtype
            Of the tensor.
        raw
            Elements as unsigned integers; of a scaled form finite, and beginning with a block.
        rounding
            Rounds to bfloat16 faster than NumPy; None for NumPy.
        """
        if self.kind == CAST:
            return Coded(recast(dtype, self.dtype, raw, rounding), None)
        values = to_float32(dtype, raw)
        scales = codebooks.scales_of(values, self.block)
        return Coded(codebooks.codes_of(self.code, values, scales, self.block), scales)

    def scales(self, dtype: str, raw: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """Return the scales alone; of a scaled form."""
        return codebooks.scales_of(to_float32(dtype, raw), self.block)


_Values: TypeAlias = "npt.NDArray[Any]"

_DIGITS: Final = 6
"""Digits of a recorded error, rounded up: sums may differ in the last bits between machines."""

_SQUARES_MIN: Final = 2.0**-900
"""Of a sum below, the squares of errors that count may be denormal, or 0. No float32 gets there."""

_TINY: Final = 2.0**-100
"""Of differences below, those of denormal float32 count, which a processor may take for 0."""


@dataclass(slots=True)
class ValueRange:
    """Range of the elements of a tensor; grows with each :meth:`add`."""

    low: float = math.inf
    high: float = -math.inf
    finite: bool = True

    def add(self, dtype: str, raw: npt.NDArray[Any]) -> None:
        """Take some elements into account, given as unsigned integers."""
        if not len(raw):
            return
        values = raw.view(dtype) if dtype in ("float32", "float64") else to_float64(dtype, raw)
        low, high = float(values.min()), float(values.max())  # NaN if any is
        if math.isfinite(low) and math.isfinite(high):
            self.low, self.high = min(self.low, low), max(self.high, high)
        else:
            self.finite = False
            rest = values[np.isfinite(values)]
            self.low = min(self.low, float(rest.min(initial=math.inf)))
            self.high = max(self.high, float(rest.max(initial=-math.inf)))

    @property
    def negative(self) -> bool:
        """Whether an element is below 0."""
        return self.low < 0

    @property
    def positive(self) -> bool:
        """Whether an element is above 0."""
        return self.high > 0


@dataclass(slots=True)
class Difference:
    """Difference of a restored tensor to the given one, over finite elements; grows when fed."""

    largest: float = 0.0
    squares: float = 0.0
    given_squares: float = 0.0
    problem: str = ""
    """Why the form cannot hold the tensor, whatever the bounds."""

    def add(self, dtype: str, given: npt.NDArray[Any], restored: npt.NDArray[Any]) -> None:
        """Compare some elements; both as unsigned integers of one dtype."""
        if not len(given):
            return
        widened = to_float64 if dtype == "float64" else to_float32
        with np.errstate(all="ignore"):
            was, off, largest = self._off(widened(dtype, given), widened(dtype, restored))
            if largest < _TINY and dtype != "float64" and not np.array_equal(given, restored):
                was, off, largest = self._off(*(_exactly(dtype, raw) for raw in (given, restored)))
            self.largest = max(self.largest, largest)
            # Squares of float32 may be too small for it.
            self.squares += float(np.square(off, dtype=np.float64).sum())
            self.given_squares += float(np.square(was, dtype=np.float64).sum())

    def _off(self, was: _Values, now: _Values) -> tuple[_Values, _Values, float]:
        """Return what finite elements were, their differences, and the largest of these."""
        off = now - was
        largest = float(np.abs(off).max())  # NaN if any is
        if not math.isfinite(largest):
            was, off = self._finite(was, now)
            largest = float(np.abs(off).max(initial=0.0))
        return was, off, largest

    def _finite(self, was: _Values, now: _Values) -> tuple[_Values, _Values]:
        """Return the finite elements and their differences; the others must have stayed."""
        finite = np.isfinite(was)
        if not np.isfinite(now[finite]).all():
            self.problem = "an element is larger than the form can hold"
        same = (was == now) | (np.isnan(was) & np.isnan(now))
        if not same[~finite].all():
            self.problem = "an infinity cannot be held"
        kept = finite & np.isfinite(now)
        return was[kept], now[kept] - was[kept]

    @property
    def max_abs(self) -> float:
        """The largest difference, rounded up."""
        return _up(self.largest)

    @property
    def rel_l2(self) -> float:
        """The root of the sum of squares, over that of the squares of what was given.

        Infinite where they are too small for a square to tell.
        """
        if self.largest and self.given_squares < _SQUARES_MIN:
            return math.inf
        if not self.squares:
            return 0.0
        with np.errstate(all="ignore"):
            share = np.float64(self.squares) / np.float64(self.given_squares)
        return _up(math.sqrt(share)) if share < math.inf else math.inf


def _exactly(dtype: str, raw: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return elements of up to 32 bits as float64, whatever becomes of denormals here."""
    wide = from_float32("float64", to_float32(dtype, raw))
    found: npt.NDArray[np.float64] = wide.view(np.float64)
    return found


def _up(value: float) -> float:
    """Return a number of few digits that is not below `value`."""
    if not 0 < value < math.inf:
        return value
    short = float(f"{value:.{_DIGITS - 1}e}")
    if short >= value:
        return short
    unit = 10.0 ** (math.floor(math.log10(value)) - _DIGITS + 1)
    return float(f"{value + unit:.{_DIGITS - 1}e}")
