"""The delta codec is exact for every bit pattern, and survives anything that is fed to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.codecs.base import CodecError
from ckptstore.codecs.delta import BASE_ID_BYTES, sampled_bytes
from ckptstore.codecs.layout import ITEM_BYTES, Layout, layout_of
from ckptstore.codecs.registry import DELTA, Base, decode
from ckptstore.hashing import blake3_digest

FLOATS: dict[Layout, Any] = {
    Layout.FLOAT16: np.float16,
    Layout.FLOAT32: np.float32,
    Layout.FLOAT64: np.float64,
}


def stored(raw: bytes, base: bytes, layout: Layout) -> bytes:
    """Return a piece as a delta."""
    parts = DELTA.encode(memoryview(raw), memoryview(base), blake3_digest(base), layout)
    return b"".join(parts)


def decoded(data: bytes, base: bytes, layout: int, *, base_id: bytes | None = None) -> bytes:
    """Return what a delta stands for."""
    out = bytearray(len(base))
    found = Base(piece_id=base_id or blake3_digest(base), data=memoryview(base))
    decode(DELTA.code, layout, memoryview(data), memoryview(out), base=found)
    return bytes(out)


@pytest.mark.parametrize("layout", Layout)
@given(data=st.data())
def test_any_bytes_come_back_on_any_base(layout: Layout, data: st.DataObject) -> None:
    """NaN payloads, negative zeros, infinities and denormals included, whatever the base is."""
    size = data.draw(st.integers(0, 40)) * ITEM_BYTES[layout]
    raw, base = (data.draw(st.binary(min_size=size, max_size=size)) for _ in range(2))

    assert decoded(stored(raw, base, layout), base, layout) == raw


@pytest.mark.parametrize("layout", Layout)
def test_every_pair_of_odd_patterns_comes_back(layout: Layout) -> None:
    """Zeros of both signs, denormals, the largest numbers, infinities, NaNs: each on each."""
    item = ITEM_BYTES[layout]
    bits = 8 * item
    edges = {0, 1, 2, *(1 << n for n in range(bits)), *((1 << n) - 1 for n in range(1, bits + 1))}
    edges |= {(1 << bits) - 1 - edge for edge in edges}
    words = np.array(sorted(edges), f"<u{item}")
    one, two = (
        part.tobytes() for part in (np.repeat(words, len(words)), np.tile(words, len(words)))
    )

    assert decoded(stored(one, two, layout), two, layout) == one


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("elements", [(1 << 15) - 1, 1 << 15, (1 << 16) + 3])
def test_blocks_of_elements_join_without_a_seam(layout: Layout, elements: int) -> None:
    """Pieces of more than one block, whole or not, come back bit for bit."""
    rng = np.random.default_rng(elements)
    raw, base = (rng.bytes(elements * ITEM_BYTES[layout]) for _ in range(2))

    assert decoded(stored(raw, base, layout), base, layout) == raw


def test_it_is_applied_where_the_base_lies() -> None:
    """The memory of the base may be that of the result: nothing is read after it was written."""
    rng = np.random.default_rng(1)
    base = rng.standard_normal(100_000).astype(np.float32)
    raw = base + np.float32(1e-6)
    data = stored(raw.tobytes(), base.tobytes(), Layout.FLOAT32)
    memory = bytearray(base.tobytes())
    found = Base(piece_id=blake3_digest(bytes(memory)), data=memoryview(memory))

    decode(DELTA.code, Layout.FLOAT32, memoryview(data), memoryview(memory), base=found)

    assert bytes(memory) == raw.tobytes()


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


def test_small_steps_take_little() -> None:
    """Weights that moved by a millionth take less than half of what they take by themselves."""
    rng = np.random.default_rng(3)
    old = (rng.standard_normal(1 << 18) * 0.02).astype(np.float32)
    new = old + (rng.standard_normal(1 << 18) * 1e-7).astype(np.float32)
    layout = layout_of("float32")
    full, delta = sampled_bytes(memoryview(new.tobytes()), memoryview(old.tobytes()), layout)
    size = len(stored(new.tobytes(), old.tobytes(), layout))

    assert delta < full / 2
    assert size == pytest.approx(delta, rel=0.03)


@given(data=st.binary(max_size=200), length=st.integers(0, 64), layout=st.sampled_from(Layout))
def test_decoding_survives_anything(data: bytes, length: int, layout: Layout) -> None:
    """Arbitrary stored bytes decode to exactly the length that is due, or raise CodecError."""
    base = bytes(length)
    for body in (data, blake3_digest(base) + data):
        try:
            found = decoded(body, base, layout)
        except CodecError:
            continue
        assert len(found) == length


@given(flip=st.integers(0, 8 * 600 - 1))
def test_decoding_survives_damage(flip: int) -> None:
    """A flipped bit gives CodecError or other bytes; in the id of the base always the error."""
    base = (np.arange(4096, dtype=np.float32) / 7).tobytes()
    raw = (np.arange(4096, dtype=np.float32) / 7.001).tobytes()
    damaged = bytearray(stored(raw, base, Layout.FLOAT32))
    at = flip // 8 % len(damaged)
    damaged[at] ^= 1 << flip % 8
    try:
        found = decoded(bytes(damaged), base, Layout.FLOAT32)
    except CodecError:
        return

    assert at >= BASE_ID_BYTES
    assert len(found) == len(raw)


def test_what_does_not_belong_together_is_refused() -> None:
    """Another base, one of another length, none at all, or one where none is due."""
    rng = np.random.default_rng(4)
    base, raw = rng.bytes(4096), rng.bytes(4096)
    data = stored(raw, base, Layout.FLOAT32)
    out = memoryview(bytearray(4096))
    for wrong in (
        Base(piece_id=blake3_digest(raw), data=memoryview(base)),
        Base(piece_id=blake3_digest(base), data=memoryview(base[:-4])),
        None,
    ):
        with pytest.raises(CodecError, match="base"):
            decode(DELTA.code, Layout.FLOAT32, memoryview(data), out, base=wrong)
    found = Base(piece_id=blake3_digest(base), data=memoryview(base))
    with pytest.raises(CodecError, match="no delta"):
        decode(0, 0, memoryview(raw), out, base=found)
    with pytest.raises(CodecError, match="whole number"):
        decoded(data, base[:-1], Layout.FLOAT32, base_id=blake3_digest(base))
    with pytest.raises(CodecError, match="unknown"):
        decode(DELTA.code, 99, memoryview(data), out, base=found)
