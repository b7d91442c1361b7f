"""The envelope and the frame: what was wrapped comes back, and nothing else is accepted."""

from __future__ import annotations

import struct
import tracemalloc

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from ckptstore import limits
from ckptstore.errors import CkptStoreError, CorruptObjectError, UnsupportedFeatureError
from ckptstore.format.framing import (
    FRAME_HEADER_BYTES,
    decode_envelope,
    decode_frame,
    encode_envelope,
    encode_frame,
)
from ckptstore.hashing import blake3_digest, blake3_hex

MAGIC = b"TESTTEST"


def unframe(data: bytes, raw_bytes_max: int = limits.MIB) -> bytes:
    """Decode a frame of the tests."""
    return decode_frame(MAGIC, data, where="some/key", raw_bytes_max=raw_bytes_max)


def frame_of(
    stored: bytes, raw_len: int, *, version: int = 1, flags: int = 0, zero: int = 0
) -> bytes:
    """Return a frame with a sound digest around any payload, as an attacker would."""
    digest = blake3_digest(stored)
    return (
        struct.pack("<8sHHIQQ32s", MAGIC, version, flags, zero, raw_len, len(stored), digest)
        + stored
    )


@given(st.binary(max_size=2000))
def test_envelope_returns_body_and_digest(body: bytes) -> None:
    """Any body comes back byte for byte, with the digest of exactly these bytes."""
    assert decode_envelope(encode_envelope(body), where="k") == (body, blake3_hex(body))


def test_envelope_is_json_of_the_documented_form() -> None:
    """The bytes are those that the format page promises."""
    data = encode_envelope(b'{"a":1}')
    assert data == b'{"body":{"a":1},"blake3":"' + blake3_hex(b'{"a":1}').encode() + b'"}\n'


def test_every_bit_of_an_envelope_counts() -> None:
    """Flipping any single bit is noticed, and the error names the key."""
    data = encode_envelope(b'{"number":1}')
    for bit in range(8 * len(data)):
        torn = bytearray(data)
        torn[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptObjectError, match="some/key"):
            decode_envelope(bytes(torn), where="some/key")


def test_every_cut_of_an_envelope_is_refused() -> None:
    """A record that ends early, or goes on, is not a record."""
    data = encode_envelope(b'{"number":1}')
    for torn in [data[:size] for size in range(len(data))] + [data + b"\n", b" " + data]:
        with pytest.raises(CorruptObjectError):
            decode_envelope(torn, where="k")


@given(st.binary(max_size=5000), st.integers(1, 5))
def test_frame_returns_payload(payload: bytes, level: int) -> None:
    """Any payload comes back, whatever the level."""
    assert unframe(encode_frame(MAGIC, payload, level=level)) == payload


def test_frame_header_is_of_the_documented_form() -> None:
    """The header has 64 bytes with lengths and digest where the format page says."""
    data = encode_frame(MAGIC, b"payload" * 100)
    assert FRAME_HEADER_BYTES == 64
    assert data[:16] == MAGIC + b"\x01\0\0\0\0\0\0\0"
    assert struct.unpack_from("<QQ", data, 16) == (700, len(data) - 64)
    assert data[32:64] == blake3_digest(data[64:])


def test_every_bit_of_a_frame_counts() -> None:
    """Flipping any single bit, of the header too, raises an error of our own."""
    data = encode_frame(MAGIC, bytes(range(64)))
    for bit in range(8 * len(data)):
        torn = bytearray(data)
        torn[bit // 8] ^= 1 << bit % 8
        with pytest.raises((CorruptObjectError, UnsupportedFeatureError), match="some/key"):
            unframe(bytes(torn))


def test_every_cut_of_a_frame_is_refused() -> None:
    """A frame that ends early, or goes on, is refused."""
    data = encode_frame(MAGIC, b"payload")
    for torn in [data[:size] for size in range(len(data))] + [data + b"\0"]:
        with pytest.raises(CorruptObjectError):
            unframe(torn)


ZSTD = zstandard.ZstdCompressor().compress
MEGABYTE = ZSTD(bytes(limits.MIB))


@pytest.mark.parametrize(
    ("data", "error"),
    [
        pytest.param(frame_of(MEGABYTE, 10), CorruptObjectError, id="declares-less-than-it-holds"),
        pytest.param(frame_of(ZSTD(b"a"), 1000), CorruptObjectError, id="declares-more"),
        pytest.param(frame_of(MEGABYTE, 2**60), CorruptObjectError, id="declares-an-exabyte"),
        pytest.param(
            frame_of(MEGABYTE + MEGABYTE, limits.MIB), CorruptObjectError, id="two-frames"
        ),
        pytest.param(frame_of(MEGABYTE[:-1], limits.MIB), CorruptObjectError, id="cut-zstd"),
        pytest.param(frame_of(b"no zstd at all", 14), CorruptObjectError, id="no-zstd"),
        pytest.param(
            frame_of(zstandard.ZstdCompressor(write_content_size=False).compress(b"a" * 9), 9),
            CorruptObjectError,
            id="no-content-size",
        ),
        pytest.param(frame_of(ZSTD(b""), 0, zero=1), CorruptObjectError, id="reserved-not-zero"),
        pytest.param(frame_of(ZSTD(b""), 0, version=0), UnsupportedFeatureError, id="format-0"),
        pytest.param(frame_of(ZSTD(b""), 0, version=2), UnsupportedFeatureError, id="format-2"),
        pytest.param(frame_of(ZSTD(b""), 0, flags=4), UnsupportedFeatureError, id="unknown-flag"),
    ],
)
def test_hostile_frames_are_refused(data: bytes, error: type[CkptStoreError]) -> None:
    """Frames whose digest is right but whose content lies raise the right error."""
    with pytest.raises(error, match="some/key"):
        unframe(data)


def test_a_bomb_is_refused_before_it_is_decompressed() -> None:
    """A small object that declares gigabytes costs no memory, even where the limit is high."""
    bomb = frame_of(ZSTD(bytes(200 * limits.MIB)), 200 * limits.MIB)
    assert len(bomb) < 10_000
    tracemalloc.start()
    try:
        with pytest.raises(CorruptObjectError, match="refused"):
            unframe(bomb, raw_bytes_max=limits.GIB)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 100_000


def test_the_limit_of_the_caller_holds() -> None:
    """A payload of exactly the limit passes, one byte more does not."""
    data = encode_frame(MAGIC, bytes(1000))
    assert unframe(data, raw_bytes_max=1000) == bytes(1000)
    with pytest.raises(CorruptObjectError):
        unframe(data, raw_bytes_max=999)


def test_what_compresses_like_a_bomb_can_still_be_written_and_read() -> None:
    """A record of equal bytes beyond the free size is stored so that its own reader takes it."""
    payload = bytes(limits.RECORD_RATIO_FREE_BYTES + 1)
    data = encode_frame(MAGIC, payload)
    assert unframe(data, raw_bytes_max=limits.GIB) == payload
    assert zstandard.ZstdDecompressor().decompress(data[64:]) == payload


def test_flags_and_formats_that_the_caller_knows_pass() -> None:
    """A later reader accepts what this one refuses."""
    data = frame_of(ZSTD(b"x"), 1, version=2, flags=1)
    payload = decode_frame(MAGIC, data, where="k", raw_bytes_max=10, format_max=2, flags_known=1)
    assert payload == b"x"
