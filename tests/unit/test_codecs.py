"""Codecs: exact for every bit pattern; the choice of auto; damage is survived."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st

import ckptstore
from ckptstore import limits
from ckptstore.backends.memory import MemoryBackend
from ckptstore.backends.posix_settings import SETTINGS
from ckptstore.codecs import zstd
from ckptstore.codecs.codec import Codec, CodecError
from ckptstore.codecs.codec_table import CODECS, decode, encode
from ckptstore.codecs.plane_layout import Layout, join, layout_of, plane_bytes, split
from ckptstore.config import CODEC_CHOICES, SYSTEM, Options, check_choice
from ckptstore.errors import InvalidInputError
from ckptstore.objects.auto_codec import auto_codec
from ckptstore.repo import create_on
from ckptstore.store.store import Store

ITEM_BYTES = {
    Layout.BYTES: 1, Layout.FLOAT32: 4, Layout.FLOAT16: 2, Layout.FLOAT64: 8, Layout.BYTES2: 2,
    Layout.BYTES4: 4, Layout.BYTES8: 8,
}  # fmt: skip


def _stored(raw: bytes, layout: Layout, choice: str = "auto") -> tuple[int, int, bytes]:
    encoded = encode(memoryview(raw), layout, check_choice(choice))
    stored = b"".join(encoded.parts)
    assert len(stored) == encoded.stored_bytes
    return encoded.codec, encoded.layout, stored


def _decoded(codec: int, layout: int, stored: bytes, length: int) -> bytes:
    out = bytearray(length)
    decode(codec, layout, memoryview(stored), memoryview(out))
    return bytes(out)


@pytest.mark.parametrize("layout", Layout)
@given(data=st.data())
@pytest.mark.short(sample=3)
def test_split_and_join_are_inverses(layout: Layout, data: st.DataObject) -> None:
    """Any bytes, NaN payloads and denormals included, come back bit for bit."""
    count = data.draw(st.integers(0, 40))
    size = count * ITEM_BYTES[layout]
    raw = data.draw(st.binary(min_size=size, max_size=size))
    planes = split(layout, memoryview(raw))

    assert plane_bytes(layout, len(raw)) == tuple(plane.nbytes for plane in planes)
    out = bytearray(len(raw))
    join(layout, [plane.data for plane in planes], memoryview(out))
    assert raw == bytes(out)


@pytest.mark.parametrize("choice", CODEC_CHOICES)
@pytest.mark.parametrize("layout", Layout)
def test_every_codec_round_trips_every_layout(layout: Layout, choice: str) -> None:
    """Whatever a codec picks for noise, zeros, weights and single elements decodes to the same."""
    rng = np.random.default_rng(7)
    weights = rng.standard_normal(4096).astype(np.float32).tobytes()
    for raw in (weights, bytes(8192), rng.bytes(8192), rng.bytes(8)):
        codec, used, stored = _stored(raw, layout, choice)

        assert raw == _decoded(codec, used, stored, len(raw))


@pytest.mark.parametrize("codec", CODECS.values(), ids=lambda codec: str(codec.name))
def test_every_codec_can_be_chosen_by_its_name(codec: Codec) -> None:
    """The name of a codec is a choice, and that choice encodes with it."""
    found = encode(memoryview(bytes(8192)), Layout.FLOAT32, check_choice(codec.name))

    assert found.codec == codec.code


@pytest.mark.parametrize("layout", [Layout.FLOAT32, Layout.FLOAT16, Layout.FLOAT64])
@pytest.mark.parametrize("elements", [(1 << 17) - 1, 1 << 17, (1 << 18) + 3])
def test_large_chunks_round_trip_block_by_block(layout: Layout, elements: int) -> None:
    """Chunks of more than one block of elements, whole or not, come back bit for bit."""
    raw = np.random.default_rng(elements).bytes(elements * ITEM_BYTES[layout])
    planes = split(layout, memoryview(raw))
    out = bytearray(len(raw))
    join(layout, [plane.data for plane in planes], memoryview(out))

    assert raw == bytes(out)
    codec, used, stored = _stored(raw, layout)
    assert raw == _decoded(codec, used, stored, len(raw))


def test_samples_find_planes_that_compress_in_part() -> None:
    """A large chunk of noise, an eighth of whose rows are zero, is stored without most of these."""
    values = np.random.default_rng(3).integers(0, 1 << 32, 1 << 20, np.uint32)
    values.reshape(16, -1)[::8] = 0
    codec, used, stored = _stored(values.tobytes(), Layout.FLOAT32)

    assert len(stored) < 0.9 * values.nbytes
    assert values.tobytes() == _decoded(codec, used, stored, values.nbytes)


def test_planes_shrink_trained_floats() -> None:
    """float32 weights take at most 0.84, bfloat16 at most 0.68 of their bytes; noise stays raw."""
    rng = np.random.default_rng(3)
    weights = (rng.standard_normal(1 << 18) * 0.02).astype(np.float32)
    half = (weights.view(np.uint32) >> 16).astype(np.uint16)
    _, _, stored32 = _stored(weights.tobytes(), layout_of("float32"))
    _, _, stored16 = _stored(half.tobytes(), layout_of("bfloat16"))
    codec, _, _ = _stored(rng.bytes(1 << 16), layout_of("uint8"))

    assert len(stored32) < 0.84 * weights.nbytes
    assert len(stored16) < 0.68 * half.nbytes
    assert codec == 0


@pytest.mark.parametrize("code", sorted(CODECS))
@given(stored=st.binary(max_size=200), length=st.integers(0, 64), layout=st.sampled_from(Layout))
def test_decoders_survive_anything(code: int, stored: bytes, length: int, layout: Layout) -> None:
    """Arbitrary stored bytes decode to exactly the length that is due, or raise CodecError."""
    out = bytearray(length)
    try:
        decode(code, layout, memoryview(stored), memoryview(out))
    except CodecError:
        return

    assert length == len(out)


@given(flip=st.integers(0, 8 * 600 - 1))
def test_decoders_survive_damage(flip: int) -> None:
    """A flipped bit in a compressed chunk gives CodecError or other bytes, never anything else."""
    raw = (np.arange(4096, dtype=np.float32) / 7).tobytes()
    codec, layout, stored = _stored(raw, Layout.FLOAT32)
    damaged = bytearray(stored)
    at = flip // 8 % len(damaged)
    damaged[at] ^= 1 << flip % 8
    try:
        out = _decoded(codec, layout, bytes(damaged), len(raw))
    except CodecError:
        return

    assert len(raw) == len(out)


def test_a_zstd_bomb_is_refused_before_it_is_opened() -> None:
    """A frame that states or holds more than is due raises without allocating what it states."""
    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(1 << 26))
    unstated = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1 << 20))
    lying = bytearray(zstandard.ZstdCompressor().compress(bytes(64)))
    for frame in (bomb, unstated, bytes(lying) + b"x"):
        with pytest.raises(CodecError):
            _decoded(1, 0, frame, 64)
    table = struct.pack("<3I", len(bomb) | 1 << 31, 16, 32)
    with pytest.raises(CodecError):
        _decoded(2, Layout.FLOAT32, table + bomb + bytes(48), 64)


@pytest.mark.parametrize("cut", [0, 5])
@pytest.mark.parametrize("log", [20, 27, 31, 40])
def test_the_window_of_a_zstd_frame_costs_no_memory(log: int, cut: int) -> None:
    """A frame of 64 bytes, whole or cut, may ask for up to 1 TiB of window: it gets none."""
    stated = struct.pack("<BBI", 0x80, (log - 10) << 3, 64)  # a length of 4 bytes; the window
    block = (64 << 3 | 1).to_bytes(3, "little") + bytes(range(64))  # the last one, stored raw
    frame = b"\x28\xb5\x2f\xfd" + stated + block
    if cut or log > 31:
        with pytest.raises(CodecError, match="not a zstd frame"):
            _decoded(1, 0, frame[: len(frame) - cut], 64)
    else:
        assert _decoded(1, 0, frame, 64) == bytes(range(64))
    assert zstd._contexts.decompressor.memory_size() < 1 << 20


def test_unknown_codes_are_refused() -> None:
    """A codec or layout of a later version is an error, not a guess."""
    for codec, layout in ((99, 0), (0, 99)):
        with pytest.raises(CodecError, match="unknown"):
            _decoded(codec, layout, b"abcd", 4)
    with pytest.raises(InvalidInputError, match="codec is one of"):
        check_choice("gzip")


LOCAL = SETTINGS["local"].capabilities.write_bytes_per_s
NFS = SETTINGS["nfs"].capabilities.write_bytes_per_s
OBJECTS = limits.WRITE_BYTES_PER_S_DEFAULT


@pytest.mark.parametrize(
    ("speed", "workers", "codec"),
    [
        (LOCAL, 1, "raw"), (LOCAL, 2, "raw"), (LOCAL, 8, "planes"), (NFS, 1, "planes"),
        (NFS, 2, "planes"), (OBJECTS, 1, "planes"), (10 * LOCAL, 8, "raw"),
    ],
)  # fmt: skip
def test_threads_that_outrun_the_storage_compress(speed: float, workers: int, codec: str) -> None:
    """Few threads are too slow for a disk and not for S3 or NFS; many outrun a disk too."""
    assert auto_codec(speed, workers=workers) == codec


def test_ties_take_fewer_bytes() -> None:
    """Raw saves that are faster only by as much as they are larger are not worth their room."""
    encoding = limits.AUTO_ENCODE_BYTES_PER_S
    assert auto_codec(encoding, workers=1) == "planes"
    assert auto_codec(1.1 * encoding, workers=1) == "planes"
    assert auto_codec(1.3 * encoding, workers=1) == "raw"


@pytest.mark.parametrize("codec", ["raw", "planes"])
def test_saves_follow_the_declared_speed(codec: str) -> None:
    """Saves of one store have one codec, which the receipt names; a codec of the user counts."""
    memory = MemoryBackend(SYSTEM.random_hex(8))

    class Declared(MemoryBackend):
        @property
        def capabilities(self) -> object:  # type: ignore[override]
            speed = 5e9 if codec == "raw" else 1e8
            return replace(memory.capabilities, write_bytes_per_s=speed)

    backend = Declared(SYSTEM.random_hex(8))
    options = Options(workers=1, engine="thread")
    with Store(create_on(backend, options=options)) as store:
        for step in range(3):
            state = {"w": torch.randn(1 << 20)}
            version = store.run("a").save(state, step=step)
            assert version.receipt["auto_planes"] == (codec == "planes")
            assert (version.receipt["stored_bytes"] < 0.95 * (4 << 20)) == (codec == "planes")
            assert torch.equal(store.load("a@latest")["w"], state["w"])
        chosen = store.run("a").save({"w": torch.randn(1 << 20)}, step=3, codec="zstd")
        assert "auto_planes" not in chosen.receipt


def test_the_codec_does_not_decide_what_is_shared(tmp_path: Path) -> None:
    """Pieces are named before the codec: an unchanged state costs nothing."""
    state = {"w": torch.randn(1 << 20)}
    with ckptstore.open(tmp_path / "store", create=True, engine="thread") as store:
        store.run("a").save(state, step=0, codec="planes")
        assert store.run("a").save(state, step=1, codec="raw").receipt["new_bytes"] == 0
        assert store.run("a").save(state, step=2).receipt["new_bytes"] == 0


def test_the_receipt_says_what_was_chosen(tmp_path: Path) -> None:
    """``Receipt.auto`` of a pending save; empty where the user chose."""
    with ckptstore.open(tmp_path / "store", create=True, engine="thread") as store:
        state = {"w": torch.randn(1000)}
        pending = store.run("a").save_async(state, step=0)
        pending.result()
        assert pending.receipt.auto in {"raw", "planes"}
        chosen = store.run("a").save_async(state, step=1, codec="raw")
        chosen.result()
        assert chosen.receipt.auto == ""
