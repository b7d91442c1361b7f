"""Reading a tensor that is to be stored in fewer bytes: what it is, and what comes back of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ckptstore.checkpoint.encoded_sources import Elements, parts_of, torn
from ckptstore.encodings.casts import raw_dtype
from ckptstore.encodings.coding import Coded, Form
from ckptstore.encodings.decoding import decode_elements
from ckptstore.encodings.measuring import Difference, ValueRange
from ckptstore.hashing import Hasher, PieceChecksums, xxh3_64
from ckptstore.objects.sources import Source

# Elements that are looked at together. Source: as the step of the encodings, in cache.
_STEP: Final = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFacts:
    """What a tensor is."""

    given: bytes
    """BLAKE3-256 of its bytes."""
    seen: ValueRange
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


def look(source: Source, step: int) -> TensorFacts:
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
    seen = ValueRange()
    steps = PieceChecksums(step * source.itemsize)
    kind = raw_dtype(source.dtype)
    for part in parts_of(source, _STEP * source.itemsize, copy=True):
        hasher.update(part)
        steps.update(part)
        raw = np.frombuffer(part, kind)
        for at in range(0, len(raw), _STEP):
            seen.add(source.dtype, raw[at : at + _STEP])
    return TensorFacts(given=hasher.digest(), seen=seen, steps=steps.checksums())


def measure(
    elements: Elements, form: Form, looked: TensorFacts, grids: tuple[int, int], name: str
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
        coded = form.encode(elements.dtype, raw, elements.rounding)
        restored = np.empty_like(raw)
        _restore(form, elements, coded, restored.data.cast("B"))
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


def _restore(form: Form, elements: Elements, coded: Coded, out: memoryview) -> None:
    scales = None if coded.scales is None else coded.scales.data.cast("B")
    codes = np.ascontiguousarray(coded.codes).data.cast("B")
    decode_elements(
        form.kind,
        form.code,
        form.block,
        elements.dtype,
        form.dtype,
        0,
        codes,
        scales,
        out,
        elements.rounding,
    )
