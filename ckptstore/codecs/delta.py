"""Differences to a base: the piece at the same place of an older version.

Floats are compared as *ordered integers*: their bits, so mapped that neighbouring floats are
neighbouring integers, whatever their signs and exponents. One step of an optimizer moves a weight
by few of them. The difference, modulo the width of the element, is folded so that small negative
numbers are small too (zigzag), and split into byte planes, of which the upper ones are almost all
zeros. Integers are compared as they are. Exact for every bit pattern: every step is a bijection.

Stored form: the 32-byte id of the base piece, then the planes, highest byte first, as
:mod:`ckptstore.codecs.planes` stores them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ckptstore.codecs import layout as layouts
from ckptstore.codecs.base import CodecError, Part
from ckptstore.codecs.layout import ITEM_BYTES, Layout
from ckptstore.codecs.planes import read_planes, stored_planes

__all__ = ["BASE_ID_BYTES", "Delta", "sampled_bytes"]

BASE_ID_BYTES: Final = 32
"""What stands before the planes: the id of the base."""
_FLOATS: Final = frozenset({Layout.FLOAT32, Layout.FLOAT16, Layout.FLOAT64})
# Elements that are taken through all steps at once. Source: three blocks of 8-byte elements stay
# within 768 KiB, a core's share of cache on the machine measured; larger gain nothing.
_BLOCK: Final = 1 << 15

# Parts of a chunk, and their length, from which its size is estimated. Source: 64 KiB of 4 MiB are
# within 1.5% of the whole on weights and moments of a GPT (measured: docs/design/0012-deltas.md).
_SAMPLES: Final = 16
_SAMPLE_BYTES: Final = 4096

Words = npt.NDArray[Any]
U8 = npt.NDArray[np.uint8]


class Delta:
    """Stores a piece as its difference to another one of the same length."""

    code = 3
    name = "delta"

    def encode(
        self, raw: memoryview, base: memoryview, base_id: bytes, layout: Layout
    ) -> Sequence[Part]:
        """Return the id, the table of lengths and the planes.

        Parameters
        ----------
        raw, base
            C-contiguous, of one length, a whole number of elements; only read.
        base_id
            BLAKE3-256 of `base`.
        """
        return (base_id, *stored_planes(_planes(layout, raw, base)))

    def decode(
        self,
        stored: memoryview,
        layout: Layout,
        out: memoryview,
        *,
        base_id: bytes,
        base: memoryview,
    ) -> None:
        """Fill `out` with the piece; see :class:`ckptstore.codecs.base.Codec`.

        Parameters
        ----------
        stored
            Untrusted.
        base_id
            What the manifest says that the piece refers to.
        base
            The piece of this id, checked.

        Raises
        ------
        CodecError
            If `stored` refers to another piece, or is not what ``encode`` returns.
        """
        if len(base) != len(out):
            msg = f"a base of {len(base)} bytes for a delta of {len(out)}"
            raise CodecError(msg)
        if bytes(stored[:BASE_ID_BYTES]) != base_id:
            msg = "a delta that refers to another base"
            raise CodecError(msg)
        item = ITEM_BYTES[layout]
        count, rest = divmod(len(out), item)
        if rest:
            msg = f"{len(out)} bytes are not a whole number of {item}-byte elements"
            raise CodecError(msg)
        planes = read_planes(stored[BASE_ID_BYTES:], (count,) * item)
        _join(layout, [np.frombuffer(plane, np.uint8) for plane in planes], base, out)


def sampled_bytes(raw: memoryview, base: memoryview, layout: Layout) -> tuple[int, int]:
    """Return what a chunk takes by itself and as a delta, estimated from a part of it; in bytes.

    Takes some 5% of the time of either. Chunks that are not much larger are looked at whole.
    """
    one, two = _sample(raw, layout), _sample(base, layout)
    planes = layouts.split(layout, one)
    full = sum(map(len, stored_planes(planes)))
    delta = sum(map(len, stored_planes(_planes(layout, one, two))))
    return full * len(raw) // len(one), BASE_ID_BYTES + delta * len(raw) // len(one)


def _sample(data: memoryview, layout: Layout) -> memoryview:
    """Return spread parts of a chunk, whole elements each."""
    step = len(data) // _SAMPLES // ITEM_BYTES[layout] * ITEM_BYTES[layout]
    if step <= 4 * _SAMPLE_BYTES:
        return data
    octets = np.frombuffer(data, np.uint8)[: step * _SAMPLES].reshape(_SAMPLES, step)
    return memoryview(np.ascontiguousarray(octets[:, :_SAMPLE_BYTES]).reshape(-1))  # type: ignore[arg-type]


class _Scratch(threading.local):
    """Memory of one thread for two blocks of elements, so that no step allocates any."""

    def __init__(self) -> None:
        self._first = np.empty(8 * _BLOCK, np.uint8)
        self._second = np.empty(8 * _BLOCK, np.uint8)

    def words(self, item: int, size: int) -> tuple[Words, Words]:
        first, second = (m[: item * size].view(f"<u{item}") for m in (self._first, self._second))
        return first, second


_scratch = _Scratch()


def _blocks(count: int) -> Iterator[slice]:
    for start in range(0, count, _BLOCK):
        yield slice(start, min(start + _BLOCK, count))


def _planes(layout: Layout, raw: memoryview, base: memoryview) -> list[U8]:
    """Return the byte planes of the folded differences, the highest first."""
    item = ITEM_BYTES[layout]
    new, old = np.frombuffer(raw, f"<u{item}"), np.frombuffer(base, f"<u{item}")
    planes = [np.empty(new.size, np.uint8) for _ in range(item)]
    for part in _blocks(new.size):
        word, work = _scratch.words(item, part.stop - part.start)
        if layout in _FLOATS:
            _order(old[part], work, out=word)
            _order(new[part], work, out=work)
            np.subtract(work, word, out=word)
        else:
            np.subtract(new[part], old[part], out=word)
        _sign(word, out=work)
        np.left_shift(word, 1, out=word)
        np.bitwise_xor(word, work, out=word)
        for place, plane in enumerate(planes):
            shift = 8 * (item - 1 - place)
            source = np.right_shift(word, shift, out=work) if shift else word
            np.copyto(plane[part], source, casting="unsafe")
    return planes


def _join(layout: Layout, planes: list[U8], base: memoryview, out: memoryview) -> None:
    """Write the elements whose differences to `base` are given; the inverse of :func:`_planes`."""
    item = ITEM_BYTES[layout]
    old, new = np.frombuffer(base, f"<u{item}"), np.frombuffer(out, f"<u{item}")
    for part in _blocks(new.size):
        word, work = _scratch.words(item, part.stop - part.start)
        np.copyto(word, planes[0][part])
        for plane in planes[1:]:
            np.left_shift(word, 8, out=word)
            np.bitwise_or(word, plane[part], out=word)
        np.bitwise_and(word, 1, out=work)
        np.negative(work, out=work)
        np.right_shift(word, 1, out=word)
        np.bitwise_xor(word, work, out=word)
        if layout in _FLOATS:
            _order(old[part], work, out=work)
            np.add(word, work, out=word)
            _order(word, work, out=new[part])
        else:
            np.add(word, old[part], out=new[part])


def _order(bits: Words, work: Words, *, out: Words) -> None:
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
