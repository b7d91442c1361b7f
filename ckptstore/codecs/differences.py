"""Differences of elements to those of a base, as byte planes, and back.

Floats are compared as *ordered integers*: their bits, so mapped that neighbouring floats are
neighbouring integers, whatever their signs and exponents. One step of an optimizer moves a weight
by few of them. The difference, modulo the width of the element, is folded so that small negative
numbers are small too (zigzag), and split into byte planes, and the upper ones are almost all
zeros. Integers are compared as they are. Exact for every bit pattern: every step is a bijection.

Three things may be done to the folded differences (`DeltaForm`). They may be turned left by some
bits, so that the border between noise and what compresses falls between two planes. They may be
split into planes of four bits, two elements a byte: zstd's codes have no less than one bit for a
byte, which is too much for an element that mostly has not moved. And those of each run of elements
may be put in the order of their base's exponents: a step of the same size is many units of a small
number and few of a large one, so that differences of one exponent are alike, and zstd, whose codes
are those of a few kilobytes, gets them together. The base tells the order, so nothing of it is
stored. Why, and what was measured: docs/design/0012-deltas.md.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ckptstore.codecs.plane_layout import ITEM_BYTES, U8, Layout, blocks_of

FLOATS: Final = frozenset({Layout.FLOAT32, Layout.FLOAT16, Layout.FLOAT64})
"""Layouts whose elements are compared as ordered integers, and have an exponent."""
RUN: Final = 1 << 16
"""Elements that are put in order together, and taken through all steps at once; of the format.
Source: runs of half the length took up to 3% more bytes, of twice the length 1% fewer, and a run
with its order stays within a core's share of cache."""
TURN_MAX: Final = 7
"""Bits by which differences are turned at most: by eight, each plane would be the next."""

# Where the 8 bits of a float begin by which runs are put in order: those of the layout's first
# plane, the exponent of float32 and bfloat16, and its upper part of float64.
_KEY_SHIFT: Final = {Layout.FLOAT32: 23, Layout.FLOAT16: 7, Layout.FLOAT64: 55}

Words = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaForm:
    """Transformation of folded differences before they are split."""

    grouped: bool = False
    """Whether each run is in the order of its base's exponents; of floats only."""
    turn: int = 0
    """Bits by which each is turned left."""
    halves: bool = False
    """Whether planes have four bits of each instead of eight."""


PLAIN: Final = DeltaForm()
"""Nothing."""


def plane_bytes(layout: Layout, count: int, form: DeltaForm) -> tuple[int, ...]:
    """Return the length of each plane of so many elements."""
    item = ITEM_BYTES[layout]
    return (-(-count // 2),) * (2 * item) if form.halves else (count,) * item


class _DifferenceBuffers(threading.local):
    """Memory of one thread for some runs of elements, so that no step allocates any."""

    def __init__(self) -> None:
        self._octets = [np.empty(8 * RUN, np.uint8) for _ in range(3)]
        self._keys = np.empty(RUN, np.uint8)

    def words(self, item: int, size: int) -> tuple[Words, Words, Words]:
        first, second, third = (m[: item * size].view(f"<u{item}") for m in self._octets)
        return first, second, third

    def keys(self, size: int) -> U8:
        return self._keys[:size]


_scratch = _DifferenceBuffers()


def split(layout: Layout, raw: memoryview, base: memoryview, form: DeltaForm = PLAIN) -> list[U8]:
    """Return the planes of the differences of `raw` to `base`, the highest first."""
    count = len(raw) // ITEM_BYTES[layout]
    planes = [np.empty(size, np.uint8) for size in plane_bytes(layout, count, form)]
    for part, words in _folded(layout, raw, base, grouped=form.grouped):
        _turn(words, form.turn)
        _split(words, planes, part.start, form)
    return planes


def join(
    layout: Layout, planes: Sequence[U8], base: memoryview, out: memoryview, form: DeltaForm = PLAIN
) -> None:
    """Write the elements whose differences to `base` are given; the inverse of :func:`split`.

    Parameters
    ----------
    planes
        Of the lengths that :func:`plane_bytes` names.
    out
        As long as `base`, whose memory it may be.
    """
    item = ITEM_BYTES[layout]
    old, new = np.frombuffer(base, f"<u{item}"), np.frombuffer(out, f"<u{item}")
    for part in blocks_of(new.size, RUN):
        words, work, other = _scratch.words(item, part.stop - part.start)
        _unsplit(planes, words, part.start, form)
        _turn(words, 8 * item - form.turn if form.turn else 0)
        np.bitwise_and(words, 1, out=work)
        np.negative(work, out=work)
        np.right_shift(words, 1, out=words)
        np.bitwise_xor(words, work, out=words)
        if form.grouped:
            other[_order_of(layout, old[part])] = words
            words = other
        if layout in FLOATS:
            _ordered(old[part], work, out=work)
            np.add(words, work, out=words)
            _ordered(words, work, out=new[part])
        else:
            np.add(words, old[part], out=new[part])


def _folded(
    layout: Layout, raw: memoryview, base: memoryview, *, grouped: bool
) -> Iterator[tuple[slice, Words]]:
    """Yield the folded differences run by run; they are valid until the next."""
    item = ITEM_BYTES[layout]
    new, old = np.frombuffer(raw, f"<u{item}"), np.frombuffer(base, f"<u{item}")
    for part in blocks_of(new.size, RUN):
        words, work, other = _scratch.words(item, part.stop - part.start)
        if layout in FLOATS:
            _ordered(old[part], work, out=words)
            _ordered(new[part], work, out=work)
            np.subtract(work, words, out=words)
        else:
            np.subtract(new[part], old[part], out=words)
        _sign(words, out=work)
        np.left_shift(words, 1, out=words)
        np.bitwise_xor(words, work, out=words)
        if grouped:
            order = _order_of(layout, old[part])
            words = np.take(words, order, out=other, mode="clip")  # "raise" would copy `out`
        yield part, words


def _split(words: Words, planes: Sequence[U8], start: int, form: DeltaForm) -> None:
    """Put the bytes of some words, or the halves of these, where they belong in their planes."""
    item, size = words.dtype.itemsize, words.size
    octets = words.view(np.uint8)
    if not form.halves:
        for place, plane in enumerate(reversed(planes)):
            plane[start : start + size] = octets[place::item]
        return
    part = slice(start // 2, start // 2 + -(-size // 2))  # a run begins at an even place
    for place in range(item):
        first, second = octets[place :: 2 * item], octets[place + item :: 2 * item]
        low, high = (plane[part] for plane in (planes[-1 - 2 * place], planes[-2 - 2 * place]))
        np.bitwise_and(first, 15, out=low)
        np.right_shift(first, 4, out=high)
        low[: second.size] |= second << 4
        high[: second.size] |= second & 0xF0


def _unsplit(planes: Sequence[U8], words: Words, start: int, form: DeltaForm) -> None:
    """Put some words together again; the inverse of :func:`_split`."""
    item, size = words.dtype.itemsize, words.size
    octets = words.view(np.uint8)
    if not form.halves:
        for place, plane in enumerate(reversed(planes)):
            octets[place::item] = plane[start : start + size]
        return
    part = slice(start // 2, start // 2 + -(-size // 2))
    for place in range(item):
        first, second = octets[place :: 2 * item], octets[place + item :: 2 * item]
        low, high = (plane[part] for plane in (planes[-1 - 2 * place], planes[-2 - 2 * place]))
        np.bitwise_or(low & 15, high << 4, out=first)
        np.bitwise_or(low[: second.size] >> 4, high[: second.size] & 0xF0, out=second)


def _order_of(layout: Layout, old: Words) -> npt.NDArray[np.intp]:
    """Return the places of a run's elements in the order of their exponents; ties as they lie."""
    keys = _scratch.keys(old.size)
    np.copyto(keys, old >> _KEY_SHIFT[layout], casting="unsafe")
    return np.argsort(keys, kind="stable")


def _turn(words: Words, bits: int) -> None:
    """Turn words left by some bits, in place."""
    if bits:
        right = words >> (8 * words.dtype.itemsize - bits)
        np.left_shift(words, bits, out=words)
        np.bitwise_or(words, right, out=words)


def _ordered(bits: Words, work: Words, *, out: Words) -> None:
    """Map the bits of floats to integers in the same order, two's complement; its own inverse.

    All bits but the sign are turned over where the sign is set. `out` may be `bits` or `work`.
    """
    _sign(bits, out=work)
    np.right_shift(work, 1, out=work)
    np.bitwise_xor(bits, work, out=out)


def _sign(words: Words, *, out: Words) -> None:
    """Write all ones where the highest bit is set, zeros elsewhere."""
    item = words.dtype.itemsize
    signed = f"<i{item}"
    np.right_shift(words.view(signed), 8 * item - 1, out=out.view(signed))
