"""Differences to a base: the piece at the same place of an older version.

Two codecs store the same differences (:mod:`ckptstore.codecs.differences`): `DELTA` as they are,
`ARRANGED` in a form that a sample of the piece chooses. Stored form: the 32-byte id of the base
piece; of `ARRANGED` a byte of flags (1: in runs by exponent, 2: planes of four bits) and one of
the bits by which words are turned; then the planes, the highest first, as
:mod:`ckptstore.codecs.planes` stores them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ckptstore.codecs import differences
from ckptstore.codecs import plane_layout as layouts
from ckptstore.codecs.codec import CodecError, Part
from ckptstore.codecs.differences import FLOATS, PLAIN, TURN_MAX, DeltaForm
from ckptstore.codecs.plane_layout import ITEM_BYTES, Layout
from ckptstore.codecs.planes import read_planes, stored_planes

BASE_ID_BYTES: Final = 32
"""What stands before the planes: the id of the base."""
_GROUPED: Final = 1
_HALVES: Final = 2
_FORM_BYTES: Final = 2

# Parts of a chunk, and their length, from which its size is estimated. Source: 64 KiB of 4 MiB are
# within 3.1% of the whole on weights and moments of a GPT (measured: docs/design/0012-deltas.md).
_SAMPLES: Final = 16
_SAMPLE_BYTES: Final = 4096
# The same for an order of elements: zstd has to find some blocks of each exponent, as it will in
# the whole. Source: on 64 KiB of float32 half of the gain could not be seen.
_GROUPED_SAMPLE_BYTES: Final = 16384
# The forms that are tried. Source: without an order 0 and 2 suit weights, 4 second moments; in the
# order of exponents 0 and 4; none of the other turns gained 0.3% on the best of these. Planes of
# four bits gain where most of two-byte elements have not moved (measured, ibid.).
_TURNS: Final = (PLAIN, DeltaForm(turn=2), DeltaForm(turn=4))
_AS_THEY_LIE: Final = {Layout.FLOAT32: _TURNS, Layout.FLOAT64: _TURNS}
_GROUPED_TURNS: Final = (DeltaForm(grouped=True), DeltaForm(grouped=True, turn=4))
_GROUPED_FORMS: Final = {
    Layout.FLOAT32: _GROUPED_TURNS,
    Layout.FLOAT64: _GROUPED_TURNS,
    Layout.FLOAT16: (DeltaForm(grouped=True), DeltaForm(grouped=True, halves=True)),
}
# The share of the bytes of plain differences that another form has to come down to: a turn costs
# little time, and has to gain more than the error of the estimate; the others make decoding two to
# three times as slow, 6 to 10 ms for 4 MiB of float32 (measured, ibid.), so that what gains less
# than this is left as it is. Where it is chosen, weights gain 3% and more.
_TURN_GAIN: Final = 0.995
_SLOW_GAIN: Final = 0.98


@dataclass(frozen=True, slots=True)
class Delta:
    """Codec that stores a piece as its difference to another one of the same length."""

    code: int
    name: str
    arranged: bool
    """Whether differences are in a form that suits them, which is stored before them."""

    def encode(
        self, raw: memoryview, base: memoryview, base_id: bytes, layout: Layout, form: DeltaForm
    ) -> Sequence[Part]:
        """Return the id, the form if it is stored, the table of lengths and the planes.

        Parameters
        ----------
        raw, base
            C-contiguous, of one length, a whole number of elements; only read.
        base_id
            BLAKE3-256 of `base`.
        """
        planes = stored_planes(differences.split(layout, raw, base, form), local=form.grouped)
        if not self.arranged:
            return (base_id, *planes)
        described = bytes((_GROUPED * form.grouped | _HALVES * form.halves, form.turn))
        return (base_id, described, *planes)

    def decode(
        self, chunk: memoryview, layout: Layout, out: memoryview, base: memoryview, base_id: bytes
    ) -> None:
        """Fill `out` with the piece; see :class:`ckptstore.codecs.codec.Codec`.

        Parameters
        ----------
        chunk
            Untrusted.
        base, base_id
            The piece that the manifest says the chunk refers to, checked, and its id.

        Raises
        ------
        CodecError
            If `chunk` refers to another piece, or is not what ``encode`` returns.
        """
        if len(base) != len(out):
            raise CodecError(f"a base of {len(base)} bytes for a delta of {len(out)}")
        if bytes(chunk[:BASE_ID_BYTES]) != base_id:
            raise CodecError("a delta that refers to another base")
        body, form = chunk[BASE_ID_BYTES:], PLAIN
        if self.arranged:
            form = _read_form(bytes(body[:_FORM_BYTES]), layout)
            body = body[_FORM_BYTES:]
        count, rest = divmod(len(out), ITEM_BYTES[layout])
        if rest:
            msg = f"{len(out)} bytes are not a whole number of {ITEM_BYTES[layout]}-byte elements"
            raise CodecError(msg)
        stored = read_planes(body, differences.plane_bytes(layout, count, form))
        planes = [np.frombuffer(plane, np.uint8) for plane in stored]
        differences.join(layout, planes, base, out, form)


def _read_form(described: bytes, layout: Layout) -> DeltaForm:
    known = _GROUPED | _HALVES
    if len(described) < _FORM_BYTES or described[0] > known or described[1] > TURN_MAX:
        raise CodecError(f"an unknown form of a delta: {described.hex() or 'none'}")
    flags, turn = described
    form = DeltaForm(grouped=bool(flags & _GROUPED), turn=turn, halves=bool(flags & _HALVES))
    if form.grouped and layout not in FLOATS:
        raise CodecError(f"elements of layout {layout.name} have no exponents")
    return form


DELTA: Final = Delta(3, "delta", arranged=False)
ARRANGED: Final = Delta(4, "arranged delta", arranged=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """Bytes that a chunk is expected to take."""

    full_bytes: int
    """By itself."""
    delta_bytes: int
    """As a delta."""
    form: DeltaForm
    """In this form."""


def sampled(raw: memoryview, base: memoryview, layout: Layout) -> Sampled:
    """Estimate from a part of a chunk what it takes, and choose the form of the delta.

    Takes some 15% of the time of encoding it where a delta is smaller than the chunk by itself, and
    5% elsewhere. Chunks that are not much larger than the sample are looked at whole.
    """
    one, two = (_sample(data, layout, _SAMPLE_BYTES) for data in (raw, base))
    full = sum(map(len, stored_planes(layouts.split(layout, one))))
    delta, form = _best(one, two, layout, _AS_THEY_LIE.get(layout, (PLAIN,)))
    if delta < full and layout in _GROUPED_FORMS:
        wide, wide_base = (_sample(data, layout, _GROUPED_SAMPLE_BYTES) for data in (raw, base))
        delta, form = _grouped(wide, wide_base, layout, delta, form)
    return Sampled(
        full_bytes=full * len(raw) // len(one),
        delta_bytes=BASE_ID_BYTES + delta * len(raw) // len(one),
        form=form,
    )


def _best(
    raw: memoryview, base: memoryview, layout: Layout, forms: Sequence[DeltaForm]
) -> tuple[int, DeltaForm]:
    """Return the bytes of the planes, and the form among some of one order that pays best."""
    planes = {form: differences.split(layout, raw, base, form) for form in forms}
    sizes = {form: sum(map(len, stored_planes(planes[form], local=form.grouped))) for form in forms}
    best = min(forms, key=lambda form: sizes[form] / _gain(form))
    return sizes[best], best


def _grouped(
    raw: memoryview, base: memoryview, layout: Layout, bytes_found: int, found: DeltaForm
) -> tuple[int, DeltaForm]:
    """Return `bytes_found` and `found`, or what becomes of them in the order of exponents."""
    lying, _ = _best(raw, base, layout, (found,))
    size, form = _best(raw, base, layout, _GROUPED_FORMS[layout])
    if size / _gain(form) < lying / _gain(found):
        return bytes_found * size // max(1, lying), form
    return bytes_found, found


def _gain(form: DeltaForm) -> float:
    """Return what a form has to come down to, for each byte of the differences as they are."""
    slow = _SLOW_GAIN ** (form.grouped + form.halves)
    return slow * _TURN_GAIN if form.turn else slow


def _sample(data: memoryview, layout: Layout, part_bytes: int) -> memoryview:
    """Return spread parts of a chunk, whole elements each."""
    step = len(data) // _SAMPLES // ITEM_BYTES[layout] * ITEM_BYTES[layout]
    if step <= 4 * part_bytes:
        return data
    octets = np.frombuffer(data, np.uint8)[: step * _SAMPLES].reshape(_SAMPLES, step)
    return memoryview(np.ascontiguousarray(octets[:, :part_bytes]).reshape(-1))  # type: ignore[arg-type]
