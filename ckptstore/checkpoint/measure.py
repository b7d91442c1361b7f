"""Reading a tensor that is to be stored in fewer bytes: what it is, and what comes back of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ckptstore.checkpoint.coded import Elements, Guarded, torn
from ckptstore.chunking import cut
from ckptstore.encodings.casts import Raw, raw_dtype
from ckptstore.encodings.coding import Coded, Form
from ckptstore.encodings.decoding import decode_elements
from ckptstore.encodings.measuring import Difference, Range
from ckptstore.hashing import Hasher, PieceChecksums, xxh3_64
from ckptstore.objects.writer import Payload, Source

__all__ = ["Looked", "Measured", "Proved", "look", "measure", "prove"]

# Elements that are looked at together. Source: as the step of the encodings, in cache.
_STEP: Final = 1 << 16
# The same where two tensors are compared. Source: with smaller steps two threads hold each other up
# more than they help (docs/design/0015-pipeline.md).
_PROOF_STEP: Final = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """What a tensor is."""

    given: bytes
    """BLAKE3-256 of its bytes."""
    seen: Range
    steps: Sequence[int]
    """XXH3-64 of each step: what :func:`measure` must find again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What comes back of a tensor in a form, and what is stored of it."""

    digest: bytes
    """BLAKE3-256 of what comes back."""
    difference: Difference
    codes: Sequence[int]
    """XXH3-64 of each piece of the codes."""
    scales: Sequence[int]
    """The same of the scales; empty for a cast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proved:
    """That one tensor is another one, converted."""

    digest: bytes
    """BLAKE3-256 of it."""
    source: Sequence[int]
    """XXH3-64 of each piece of the other."""


def look(source: Source, step: int) -> Looked:
    """Read a float tensor once, and say what it is.

    Parameters
    ----------
    step
        Elements per checksum.

    Raises
    ------
    TornStateError
        It is not what was staged.
    """
    hasher = Hasher()
    seen = Range()
    steps = PieceChecksums(step * source.itemsize)
    kind = raw_dtype(source.dtype)
    for part in _parts(source):
        hasher.update(part)
        steps.update(part)
        raw = np.frombuffer(part, kind)
        for at in range(0, len(raw), _STEP):
            seen.add(source.dtype, raw[at : at + _STEP])
    return Looked(given=hasher.digest(), seen=seen, steps=steps.checksums())


def measure(
    elements: Elements, form: Form, looked: Looked, grids: tuple[int, int], name: str
) -> Measured:
    """Encode a tensor and restore it, keeping nothing of either.

    Parameters
    ----------
    grids
        Bytes of a piece of the codes, and of the scales.
    name
        Of the tensor, for errors.

    Raises
    ------
    TornStateError
        The tensor is not what was looked at.
    """
    difference = Difference()
    hasher = Hasher()
    codes, scales = PieceChecksums(grids[0]), PieceChecksums(grids[1])
    for number, at in enumerate(range(0, elements.count, form.step)):
        raw = elements.read(at, min(at + form.step, elements.count), copy=True)
        if xxh3_64(raw.data.cast("B")) != looked.steps[number]:
            raise torn(name)
        coded = form.encode(elements.dtype, raw)
        restored = np.empty_like(raw)
        _restore(form, elements.dtype, coded, restored.data.cast("B"))
        hasher.update(restored.data.cast("B"))
        codes.update(np.ascontiguousarray(coded.codes).data.cast("B"))
        if coded.scales is not None:
            scales.update(coded.scales.data.cast("B"))
        difference.add(elements.dtype, raw, restored)
    return Measured(
        digest=hasher.digest(),
        difference=difference,
        codes=codes.checksums(),
        scales=scales.checksums(),
    )


def prove(low: Source, high: Source, grid: int) -> Proved | None:
    """Read a tensor and the one that it may be made of; return None if it is not, in every bit.

    Parameters
    ----------
    grid
        Bytes of a piece of `high`.

    Raises
    ------
    TornStateError
        `low` is not what was staged.
    """
    hasher = Hasher()
    pieces = PieceChecksums(grid)
    elements = Elements(high)
    rounding = _Rounding(low.dtype, high.dtype)
    start = 0
    for part in _parts(low, _PROOF_STEP):
        hasher.update(part)
        wanted = np.frombuffer(part, raw_dtype(low.dtype))
        for at in range(0, len(wanted), _PROOF_STEP):
            want = wanted[at : at + _PROOF_STEP]
            given = rounding.take(elements, start + at, start + at + len(want))
            pieces.update(given.data.cast("B"))
            if not rounding.gives(given, want):
                return None
        start += len(wanted)
    return Proved(digest=hasher.digest(), source=pieces.checksums())


class _Rounding:
    """Compares elements with those that they should become, in memory of its own. One thread's."""

    def __init__(self, dtype: str, source_dtype: str) -> None:
        self._dtype = dtype
        self._source_dtype = source_dtype
        self._given = np.empty(_PROOF_STEP, raw_dtype(source_dtype))
        self._made = np.empty(_PROOF_STEP, raw_dtype(dtype))

    def take(self, elements: Elements, start: int, stop: int) -> Raw:
        """Return elements that no one else changes, until the next call."""
        given = self._given[: stop - start]
        np.copyto(given, elements.read(start, stop, copy=False))
        return given

    def gives(self, given: Raw, want: Raw) -> bool:
        """Say whether `given`, converted, is `want`, in every bit."""
        made = self._made[: len(want)]
        out, codes = made.data.cast("B"), given.data.cast("B")
        decode_elements("cast", "", 0, self._dtype, self._source_dtype, 0, codes, None, out)
        return np.array_equal(made, want)


def _restore(form: Form, dtype: str, coded: Coded, out: memoryview) -> None:
    scales = None if coded.scales is None else coded.scales.data.cast("B")
    codes = np.ascontiguousarray(coded.codes).data.cast("B")
    decode_elements(form.kind, form.code, form.block, dtype, form.dtype, 0, codes, scales, out)


def _parts(source: Source, step: int = _STEP) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in order, each part a copy that is valid until the next."""
    payload: Payload = source.payload
    length, view = step * source.itemsize, None
    if isinstance(payload, Guarded):
        length = payload.piece_bytes
    else:
        view = payload.view()
    buffer = memoryview(bytearray(min(length, source.nbytes)))
    for start, size in cut(source.nbytes, length):
        part = buffer[:size]
        if view is None:
            payload.copy_into(start, part)
        else:
            part[:] = view[start : start + size]
        yield part
