"""Which tensors of a state are another one of it, rounded: they need no bytes of their own.

Mixed-precision training keeps weights twice: in bfloat16 or float16 to compute with, and as masters
in float32 to update. The low ones are the masters, rounded to nearest even (Micikevicius et al.,
"Mixed Precision Training", ICLR 2018, section 3.1), and a state that holds both can store the
masters only. Here such pairs are found: by a few sampled elements at first, which is next to free,
and then by all of them, which is the proof. Copies that are equal byte for byte (tied tensors, an
average that has not moved yet) are not looked for: equal pieces are stored once anyway.

What counts is what a load would give: the same code that restores a tensor rounds the other one
here, and every bit must agree. Where another framework rounded otherwise, or a NaN carries another
payload, the tensor is stored as any other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

import numpy as np

from ckptstore import limits
from ckptstore.encodings.decoding import decode_elements
from ckptstore.format.dtypes import ITEM_BYTES

_WIDER: Final[Mapping[str, tuple[str, ...]]] = {
    "bfloat16": ("float32", "float64"),
    "float16": ("float32", "float64"),
    "float32": ("float64",),
}
"""What a tensor of a dtype may be the rounding of, what is looked at first being first."""

# Elements that two tensors are compared by at first: runs of neighbours, evenly over the tensor.
# Source: of two tensors that training has touched, 64 elements rounded to 8 bits of mantissa agree
# by chance less often than bits flip; runs, since a tensor on a device is read one run at a time.
_RUNS: Final = 8
_RUN_ELEMENTS: Final = 8
# Elements that are compared at once. Source: 4 bytes each stay in a second-level cache.
_STRIDE: Final = 1 << 18
# Tensors with equal samples that one is compared with in full. Source: the first is the right one
# but where all samples are zero, and then two tensors of zeros differ elsewhere: one more try.
_TRIES: Final = 2


class CandidateBytes(Protocol):
    """The bytes of one tensor, dense, in stored order."""

    def view(self) -> memoryview | None:
        """Return the bytes in place, or None where they are not in host memory as stored."""

    def copy_into(self, start: int, out: memoryview) -> None:
        """Fill `out` with the bytes from `start` on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One tensor that is to be stored, and what may become of it."""

    dtype: str
    """torch's name without ``torch.``"""
    shape: tuple[int, ...]
    order: tuple[int, ...] | None
    payload: CandidateBytes
    may_give: bool = True
    """It is stored with bytes of its own, so that others can be derived from it."""
    may_derive: bool = True
    """It may be stored as a recipe."""


_Form: TypeAlias = tuple[tuple[int, ...], tuple[int, ...] | None]


def derived_pairs(
    candidates: Sequence[Candidate], same: Callable[[int, int], bool] | None = None
) -> dict[int, int]:
    """Return which tensors are exactly another one rounded: place to place of the other.

    No source is derived itself. Where nothing has two precisions of one shape, only shapes are
    compared; where something has, 64 elements of each such tensor are read; all are read only of
    tensors that agree in these. Tensors below ``DERIVED_BYTES_MIN`` bytes are left alone.

    Reads what it compares in the calling thread, in strides of a megabyte, and keeps none of it.

    Parameters
    ----------
    same
        Says of two places whether the first is the second one rounded, in every bit; by default
        :func:`is_cast_of`. One that always agrees gives the pairs that are likely, from the 64
        elements alone.
    """
    if same is None:
        same = lambda low, high: is_cast_of(candidates[low], candidates[high])  # noqa: E731
    groups: dict[_Form, dict[str, list[int]]] = {}
    for place, one in enumerate(candidates):
        if one.dtype in _WIDER or one.dtype == "float64":
            group = groups.setdefault((one.shape, one.order), {})
            group.setdefault(one.dtype, []).append(place)
    found: dict[int, int] = {}
    for group in groups.values():
        if len(group) > 1:
            _search(candidates, group, found, same)
    return found


def is_cast_of(low: Candidate, high: Candidate) -> bool:
    """Say whether a tensor is another one rounded, in every bit.

    Both must have the same shape and order.
    """
    item, wide = ITEM_BYTES[low.dtype], ITEM_BYTES[high.dtype]
    rounded = memoryview(bytearray(_STRIDE * item))
    for start, count in _strides(math.prod(low.shape)):
        want = _read(low.payload, start * item, count * item)
        given = _read(high.payload, start * wide, count * wide)
        out = rounded[: count * item]
        decode_elements("cast", "", 0, low.dtype, high.dtype, start, given, None, out)
        if not np.array_equal(np.frombuffer(out, np.uint8), np.frombuffer(want, np.uint8)):
            return False
    return True


def _search(
    candidates: Sequence[Candidate],
    group: Mapping[str, Sequence[int]],
    found: dict[int, int],
    same: Callable[[int, int], bool],
) -> None:
    """Add the pairs among tensors of one shape and order."""
    for dtype, wider in _WIDER.items():
        giving = set(found.values())
        lows = [p for p in group.get(dtype, ()) if _derivable(candidates[p]) and p not in giving]
        for high_dtype in wider:
            highs = [
                place
                for place in group.get(high_dtype, ())
                if candidates[place].may_give and place not in found
            ]
            if highs and lows:
                found.update(_match(candidates, lows, highs, same))
                lows = [place for place in lows if place not in found]


def _derivable(one: Candidate) -> bool:
    size = math.prod(one.shape) * ITEM_BYTES[one.dtype]
    return one.may_derive and size >= limits.DERIVED_BYTES_MIN


def _match(
    candidates: Sequence[Candidate],
    lows: Sequence[int],
    highs: Sequence[int],
    same: Callable[[int, int], bool],
) -> Iterator[tuple[int, int]]:
    """Yield which of `lows`, all of one dtype, is which of `highs`, all of another."""
    dtype = candidates[lows[0]].dtype
    by_sample: dict[bytes, list[int]] = {}
    for place in lows:
        by_sample.setdefault(_sample(candidates[place]), []).append(place)
    tried: dict[int, int] = {}
    for high in highs:
        sample = _rounded(_sample(candidates[high]), dtype, candidates[high].dtype)
        left = by_sample.get(sample, [])
        for place in list(left):
            tried[place] = tried.get(place, 0) + 1
            found = same(place, high)
            if found:
                yield place, high
            if found or tried[place] == _TRIES:
                left.remove(place)


def _rounded(sample: bytes, dtype: str, source: str) -> bytes:
    out = bytearray(len(sample) // ITEM_BYTES[source] * ITEM_BYTES[dtype])
    given = memoryview(sample)
    decode_elements("cast", "", 0, dtype, source, 0, given, None, memoryview(out))
    return bytes(out)


def _sample(one: Candidate) -> bytes:
    """Return the bytes of some elements, the same for all tensors of one shape."""
    item = ITEM_BYTES[one.dtype]
    count = math.prod(one.shape)
    run = min(_RUN_ELEMENTS, count)
    starts: Iterable[int] = {(count - run) * turn // (_RUNS - 1) for turn in range(_RUNS)}
    view = one.payload.view()  # once: it takes as long as all of the rest
    if view is not None:
        return b"".join(view[at * item : (at + run) * item] for at in sorted(starts))
    return b"".join(_read(one.payload, at * item, run * item) for at in sorted(starts))


def _read(payload: CandidateBytes, start: int, length: int) -> memoryview:
    """Return bytes of a tensor: in place where they lie in memory, else a copy."""
    view = payload.view()
    if view is not None:
        return view[start : start + length]
    out = memoryview(bytearray(length))
    payload.copy_into(start, out)
    return out


def _strides(count: int) -> Iterator[tuple[int, int]]:
    for start in range(0, count, _STRIDE):
        yield start, min(_STRIDE, count - start)
