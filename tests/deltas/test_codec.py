"""The delta codecs are exact for every bit pattern, and survive anything that is fed to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.codecs.codec import CodecError
from ckptstore.codecs.codec_table import BaseData, decode, encode_delta
from ckptstore.codecs.delta import BASE_ID_BYTES, sampled
from ckptstore.codecs.differences import FLOATS as ORDERED
from ckptstore.codecs.differences import PLAIN, RUN, TURN_MAX, DeltaForm
from ckptstore.codecs.plane_layout import ITEM_BYTES, Layout, layout_of
from ckptstore.hashing import blake3_digest

FLOATS: dict[Layout, Any] = {
    Layout.FLOAT16: np.float16,
    Layout.FLOAT32: np.float32,
    Layout.FLOAT64: np.float64,
}
FORMS = [
    PLAIN, DeltaForm(turn=3), DeltaForm(grouped=True), DeltaForm(grouped=True, turn=TURN_MAX),
    DeltaForm(halves=True), DeltaForm(grouped=True, turn=1, halves=True),
]  # fmt: skip


def fits(form: DeltaForm, layout: Layout) -> bool:
    """Tell whether a layout has a form."""
    return layout in ORDERED or not form.grouped


PAIRS = [(form, layout) for form in FORMS for layout in Layout if fits(form, layout)]


def code_of(form: DeltaForm) -> int:
    """Return the codec that stores a form."""
    return 3 if form == PLAIN else 4


def stored(raw: bytes, base: bytes, layout: Layout, form: DeltaForm = PLAIN) -> bytes:
    """Return a piece as a delta."""
    found = BaseData(piece_id=blake3_digest(base), data=memoryview(base))
    encoded = encode_delta(memoryview(raw), found, layout, form)
    data = b"".join(encoded.parts)
    assert (encoded.codec, encoded.stored_bytes) == (code_of(form), len(data))
    return data


def decoded(
    data: bytes, base: bytes, layout: int, form: DeltaForm = PLAIN, *, base_id: bytes | None = None
) -> bytes:
    """Return what a delta stands for."""
    out = bytearray(len(base))
    found = BaseData(piece_id=base_id or blake3_digest(base), data=memoryview(base))
    decode(code_of(form), layout, memoryview(data), memoryview(out), base=found)
    return bytes(out)


@pytest.mark.parametrize(("form", "layout"), PAIRS)
@given(data=st.data())
@pytest.mark.short(sample=10)
def test_any_bytes_come_back_on_any_base(
    form: DeltaForm, layout: Layout, data: st.DataObject
) -> None:
    """NaN payloads, negative zeros, infinities and denormals included, whatever the base is."""
    size = data.draw(st.integers(0, 40)) * ITEM_BYTES[layout]
    raw, base = (data.draw(st.binary(min_size=size, max_size=size)) for _ in range(2))

    assert decoded(stored(raw, base, layout, form), base, layout, form) == raw


@pytest.mark.parametrize(("form", "layout"), PAIRS)
def test_every_pair_of_odd_patterns_comes_back(form: DeltaForm, layout: Layout) -> None:
    """Zeros of both signs, denormals, the largest numbers, infinities, NaNs: each on each."""
    item = ITEM_BYTES[layout]
    bits = 8 * item
    edges = {0, 1, 2, *(1 << n for n in range(bits)), *((1 << n) - 1 for n in range(1, bits + 1))}
    edges |= {(1 << bits) - 1 - edge for edge in edges}
    words = np.array(sorted(edges), f"<u{item}")
    one, two = (
        part.tobytes() for part in (np.repeat(words, len(words)), np.tile(words, len(words)))
    )

    assert decoded(stored(one, two, layout, form), two, layout, form) == one


@pytest.mark.parametrize(("form", "layout"), PAIRS)
@pytest.mark.parametrize("elements", [RUN - 1, RUN, 2 * RUN + 3])
@pytest.mark.short(sample=20)
def test_runs_of_elements_join_without_a_seam(
    form: DeltaForm, layout: Layout, elements: int
) -> None:
    """Pieces of more than one run, whole or not, come back bit for bit."""
    rng = np.random.default_rng(elements)
    raw, base = (rng.bytes(elements * ITEM_BYTES[layout]) for _ in range(2))

    assert decoded(stored(raw, base, layout, form), base, layout, form) == raw


@pytest.mark.parametrize("form", FORMS)
def test_it_is_applied_where_the_base_lies(form: DeltaForm) -> None:
    """The memory of the base may be that of the result: nothing is read after it was written."""
    rng = np.random.default_rng(1)
    base = rng.standard_normal(100_000).astype(np.float32)
    raw = base + np.float32(1e-6)
    data = stored(raw.tobytes(), base.tobytes(), Layout.FLOAT32, form)
    memory = bytearray(base.tobytes())
    found = BaseData(piece_id=blake3_digest(bytes(memory)), data=memoryview(memory))

    decode(code_of(form), Layout.FLOAT32, memoryview(data), memoryview(memory), base=found)

    assert bytes(memory) == raw.tobytes()


# --- another implementation, element by element, after docs/reference/format-v1.md ----------------
def slowly(data: bytes, base: bytes, layout: Layout) -> bytes:
    """Return what an arranged delta stands for."""
    item = ITEM_BYTES[layout]
    bits, mask, count = 8 * item, (1 << 8 * item) - 1, len(base) // item
    flags, turn = data[32], data[33]
    if not flags & 2:
        planes = planes_after(data[34:], item, count)
    else:
        halves = planes_after(data[34:], 2 * item, (count + 1) // 2)
        nibbles = [[byte >> shift & 15 for byte in half for shift in (0, 4)] for half in halves]
        planes = [
            bytes(high << 4 | low for high, low in zip(*pair, strict=True))
            for pair in zip(nibbles[::2], nibbles[1::2], strict=True)
        ]
    old = [int.from_bytes(base[item * k : item * k + item], "little") for k in range(count)]
    order = list(range(count))
    if flags & 1:
        first = {Layout.FLOAT32: 23, Layout.FLOAT16: 7, Layout.FLOAT64: 55}[layout]
        order.sort(key=lambda k: (k >> 16, old[k] >> first & 0xFF))
    new = [0] * count
    for rank, k in enumerate(order):
        word = int.from_bytes(bytes(plane[rank] for plane in planes), "big")
        word = (word >> turn | word << bits - turn) & mask
        step = -(word + 1 >> 1) if word & 1 else word >> 1
        if layout in ORDERED:
            new[k] = ordered(ordered(old[k], bits) + step & mask, bits)
        else:
            new[k] = old[k] + step & mask
    return b"".join(word.to_bytes(item, "little") for word in new)


def ordered(word: int, bits: int) -> int:
    """Return the bits of a float as an integer in the order of floats, or the other way round."""
    top = 1 << bits - 1
    return word ^ top - 1 if word & top else word


def planes_after(data: bytes, count: int, size: int) -> Sequence[bytes]:
    """Return the planes behind a table of lengths."""
    at, planes = 4 * count, []
    for place in range(count):
        length = int.from_bytes(data[4 * place : 4 * place + 4], "little")
        part = data[at : at + (length & (1 << 31) - 1)]
        at += len(part)
        planes.append(zstandard.decompress(part, size) if length >> 31 and size else part)
    assert at == len(data)
    return planes


@pytest.mark.parametrize(
    ("form", "layout"), [(form, layout) for form, layout in PAIRS if form != PLAIN]
)
@pytest.mark.short(sample=4)
def test_a_slow_decoder_after_the_page_agrees(form: DeltaForm, layout: Layout) -> None:
    """What is stored is what the format's page says: runs of 65536, ties as they lie, turns."""
    item = ITEM_BYTES[layout]
    count = (1 << 16) + 501
    rng = np.random.default_rng(item)
    base = rng.integers(0, 1 << 8 * item - 1, count, np.uint64, endpoint=True).astype(f"<u{item}")
    raw = base + rng.integers(0, 200, count).astype(base.dtype)
    raw[::50] ^= base.dtype.type(1 << 8 * item - 1)

    assert slowly(stored(raw.tobytes(), base.tobytes(), layout, form), base.tobytes(), layout) == (
        raw.tobytes()
    )


# --- what it takes --------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", FLOATS)
def test_neighbouring_floats_are_one_apart_whatever_their_signs(layout: Layout) -> None:
    """From -0 to +0, over powers of two, into infinity: all but the lowest plane is zeros."""
    kind = FLOATS[layout]
    values = np.array([0.0, -0.0, 1.0, -1.0, 2.0, 0.5, np.finfo(kind).max, -np.inf], kind)
    values = np.resize(values, 1 << 14)
    for target in (np.inf, -np.inf):
        with np.errstate(all="ignore"):
            moved = np.nextafter(values, kind(target))
        zeros = values == 0  # of which NumPy's neighbour lies beyond the other zero
        moved[zeros] = -values[zeros]
        size = len(stored(moved.tobytes(), values.tobytes(), layout))
        assert size < 0.02 * values.nbytes


def weights(count: int = 1 << 18) -> np.ndarray:
    """Return numbers as weights are."""
    return (np.random.default_rng(3).standard_normal(count) * 0.02).astype(np.float32)


def moved(old: np.ndarray, by: float) -> np.ndarray:
    """Return weights after some steps."""
    return old + (np.random.default_rng(4).standard_normal(old.size) * by).astype(np.float32)


@pytest.mark.parametrize("by", [1e-7, 1e-6, 1e-5, 1e-4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sample_tells_size_and_form(dtype: str, by: float) -> None:
    """The form that the sample chooses takes what it says, and not more than differences alone."""
    old = weights()
    new = moved(old, by)
    raw, base = (
        (part.view(np.uint32) >> 16).astype(np.uint16).tobytes()
        if dtype == "bfloat16"
        else part.tobytes()
        for part in (new, old)
    )
    layout = layout_of(dtype)
    found = sampled(memoryview(raw), memoryview(base), layout)
    size = len(stored(raw, base, layout, found.form))

    assert size == pytest.approx(found.delta_bytes, rel=0.06, abs=1024)
    assert size <= len(stored(raw, base, layout))


def test_small_steps_take_little() -> None:
    """Weights that moved by a millionth take less than half of what they take by themselves."""
    old = weights()
    raw, base = memoryview(moved(old, 1e-7).tobytes()), memoryview(old.tobytes())
    found = sampled(raw, base, Layout.FLOAT32)

    assert found.delta_bytes < found.full_bytes / 2


def test_steps_of_one_size_take_less_in_the_order_of_exponents() -> None:
    """Bf16 weights that all moved alike take at most nine tenths of what they take unordered."""
    old = weights()
    raw, base = (
        (part.view(np.uint32) >> 16).astype(np.uint16).tobytes() for part in (moved(old, 1e-4), old)
    )
    found = sampled(memoryview(raw), memoryview(base), Layout.FLOAT16)
    grouped = len(stored(raw, base, Layout.FLOAT16, DeltaForm(grouped=True)))

    assert found.form.grouped
    assert grouped < 0.9 * len(stored(raw, base, Layout.FLOAT16))


def test_a_turn_moves_the_border_between_planes() -> None:
    """Differences of 22 bits and a half take less where the border of noise is one of planes."""
    rng = np.random.default_rng(5)
    base = rng.integers(1 << 29, 1 << 30, 1 << 18, dtype=np.uint32)
    raw = (base + rng.laplace(0, 1 << 21, base.size).astype(np.int64)).astype(np.uint32)
    found = sampled(memoryview(raw.tobytes()), memoryview(base.tobytes()), Layout.FLOAT32)
    plain, turned = (
        len(stored(raw.tobytes(), base.tobytes(), Layout.FLOAT32, form))
        for form in (PLAIN, found.form)
    )

    assert found.form.turn in {2, 4}
    assert turned < 0.995 * plain


@pytest.mark.parametrize("layout", Layout)
def test_any_piece_has_a_form(layout: Layout) -> None:
    """Empty and short pieces, those of few values and of noise: the sample is of any of them."""
    item = ITEM_BYTES[layout]
    rng = np.random.default_rng(6)
    for count in (1, 2, 255, 70_000):
        raw, base = rng.bytes(item * count), bytes(item * count)
        for one, two in ((raw, base), (base, raw), (raw, raw)):
            found = sampled(memoryview(one), memoryview(two), layout)
            assert fits(found.form, layout)
            data = stored(one, two, layout, found.form)
            assert decoded(data, two, layout, found.form) == one


# --- what does not belong there -------------------------------------------------------------------
@given(
    data=st.binary(max_size=200),
    length=st.integers(0, 64),
    layout=st.sampled_from(Layout),
    form=st.sampled_from(FORMS),
)
def test_decoding_survives_anything(
    data: bytes, length: int, layout: Layout, form: DeltaForm
) -> None:
    """Arbitrary stored bytes decode to exactly the length that is due, or raise CodecError."""
    base = bytes(length)
    described = bytes((form.grouped + 2 * form.halves, form.turn))
    for body in (data, blake3_digest(base) + data, blake3_digest(base) + described + data):
        try:
            found = decoded(body, base, layout, form)
        except CodecError:
            continue
        assert len(found) == length


@pytest.mark.parametrize("form", FORMS)
@given(flip=st.integers(0, 8 * 600 - 1))
def test_decoding_survives_damage(form: DeltaForm, flip: int) -> None:
    """A flipped bit gives CodecError or other bytes; in the id of the base always the error."""
    base = (np.arange(4096, dtype=np.float32) / 7).tobytes()
    raw = (np.arange(4096, dtype=np.float32) / 7.001).tobytes()
    damaged = bytearray(stored(raw, base, Layout.FLOAT32, form))
    at = flip // 8 % len(damaged)
    damaged[at] ^= 1 << flip % 8
    try:
        found = decoded(bytes(damaged), base, Layout.FLOAT32, form)
    except CodecError:
        return

    assert at >= BASE_ID_BYTES
    assert len(found) == len(raw)


@pytest.mark.parametrize("form", FORMS)
def test_what_does_not_belong_together_is_refused(form: DeltaForm) -> None:
    """Another base, one of another length, none at all, or one where none is due."""
    rng = np.random.default_rng(4)
    base, raw = rng.bytes(4096), rng.bytes(4096)
    data = stored(raw, base, Layout.FLOAT32, form)
    out = memoryview(bytearray(4096))
    for wrong in (
        BaseData(piece_id=blake3_digest(raw), data=memoryview(base)),
        BaseData(piece_id=blake3_digest(base), data=memoryview(base[:-4])),
        None,
    ):
        with pytest.raises(CodecError, match="base"):
            decode(code_of(form), Layout.FLOAT32, memoryview(data), out, base=wrong)
    found = BaseData(piece_id=blake3_digest(base), data=memoryview(base))
    with pytest.raises(CodecError, match="no delta"):
        decode(0, 0, memoryview(raw), out, base=found)
    with pytest.raises(CodecError, match="whole number"):
        decoded(data, base[:-1], Layout.FLOAT32, form, base_id=blake3_digest(base))
    with pytest.raises(CodecError, match="unknown"):
        decode(code_of(form), 99, memoryview(data), out, base=found)


@pytest.mark.parametrize(
    ("described", "layout", "said"),
    [
        (b"", Layout.FLOAT32, "unknown form"),
        (b"\x01", Layout.FLOAT32, "unknown form"),
        (b"\x04\x00", Layout.FLOAT32, "unknown form"),
        (b"\x00\x08", Layout.FLOAT32, "unknown form"),
        (b"\xff\xff", Layout.FLOAT32, "unknown form"),
        (b"\x01\x00", Layout.BYTES4, "no exponents"),
    ],
)
def test_an_unknown_form_is_refused(described: bytes, layout: Layout, said: str) -> None:
    """Flags and turns that the page does not name, and an order of what has no exponents."""
    base = bytes(4096)
    whole = stored(base, base, layout, DeltaForm(turn=1))
    data = whole[:BASE_ID_BYTES] + described + (whole[34:] if len(described) == 2 else b"")
    with pytest.raises(CodecError, match=said):
        decoded(data, base, layout, DeltaForm(turn=1))
