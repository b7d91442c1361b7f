"""From the elements of a tensor to those that are stored: the forward way of every lossy form."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ckptstore.encodings import codebooks
from ckptstore.encodings.casts import FLOATS, Rounding, recast, to_float32
from ckptstore.encodings.decoding import CAST, SCALED
from ckptstore.encodings.encoding import CASTS, Encoding
from ckptstore.encodings.measuring import ValueRange
from ckptstore.format.tables import CODES

_STEP: Final = 1 << 16
"""Elements that are converted at once. Source: as in ``decoding``."""
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
