"""Framing and manifests: what is written comes back, every bit and every cut is noticed."""

from __future__ import annotations

import math
import os
import re
import struct
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from peaks import memory_below

from ckptstore import limits
from ckptstore.chunking import cut, piece_bytes
from ckptstore.errors import CkptStoreError, CorruptObjectError, LimitError, UnsupportedFeatureError
from ckptstore.format import framing, manifest
from ckptstore.format.framing import (
    FRAME_HEADER_BYTES,
    decode_envelope,
    decode_frame,
    encode_envelope,
    encode_frame,
)
from ckptstore.format.manifest import Manifest, PieceTable, TensorRecord
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


@given(st.binary(max_size=5000))
def test_frame_returns_payload(payload: bytes) -> None:
    """Any payload comes back."""
    assert unframe(encode_frame(MAGIC, payload)) == payload


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
    with memory_below(100_000), pytest.raises(CorruptObjectError, match="refused"):
        unframe(bomb, raw_bytes_max=limits.GIB)


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


def test_flags_that_the_caller_knows_pass() -> None:
    """A later reader accepts flags that this one refuses."""
    data = frame_of(ZSTD(b"x"), 1, flags=1)
    assert decode_frame(MAGIC, data, where="k", raw_bytes_max=10, flags_known=1) == b"x"


ID = "ab" * 16
PACK = "cd" * 16


def table_of(raws: list[int], *, packs: list[str] | None = None) -> PieceTable:
    """Return pieces of these lengths, stored raw one after another."""
    count = len(raws)
    raw = np.array(raws, np.uint32)
    ends = np.cumsum(raw.astype(np.uint64) + 64)
    return PieceTable(
        ids=np.arange(32 * count, dtype=np.uint64).astype(np.uint8).reshape(count, 32),
        raw=raw,
        pack=np.zeros(count, np.uint32),
        offset=32 + np.concatenate(([0], ends[:-1])).astype(np.uint64) if count else ends,
        stored=raw.copy(),
        inner=np.zeros(count, np.uint32),
        slab=raw.copy(),
        packs=[PACK] if packs is None else packs,
    )


def manifest_of(pieces: list[list[int]]) -> Manifest:
    """Return a manifest of tensors that are cut into pieces of these lengths."""
    first = [0]
    records = []
    for lengths in pieces:
        first.append(first[-1] + len(lengths))
        nbytes = sum(lengths)
        records.append(
            TensorRecord(dtype="uint8", shape=(nbytes,), order=None, role="weights", nbytes=nbytes)
        )
    return Manifest(
        version=ID, chunk_bytes=limits.CHUNK_BYTES_MIN, skeleton=b"\x91\xa1d",
        tensors=tuple(records), first=tuple(first),
        pieces=table_of([length for lengths in pieces for length in lengths]),
    )  # fmt: skip


def encoded(body: dict[str, Any]) -> bytes:
    """Return the object of a manifest's body."""
    return framing.encode_frame(manifest.MAGIC, msgspec.msgpack.encode(body))


def body_of(made: Manifest) -> dict[str, Any]:
    """Return the map inside of a manifest's object."""
    raw = zstandard.ZstdDecompressor().decompress(manifest.encode(made)[64:])
    body: dict[str, Any] = msgspec.msgpack.decode(raw)
    return body


@given(st.lists(st.lists(st.integers(1, 1 << 20), max_size=5), max_size=8))
def test_manifests_come_back(pieces: list[list[int]]) -> None:
    """Tensors and every column of the piece table are read as they were written."""
    made = manifest_of(pieces)
    found = manifest.decode(manifest.encode(made), where="m", version=ID)

    assert (found.version, found.chunk_bytes, found.skeleton) == (ID, 65536, made.skeleton)
    assert found.tensors == made.tensors
    assert found.first == made.first
    for name in ("ids", "raw", "pack", "offset", "stored", "inner", "slab"):
        assert np.array_equal(getattr(found.pieces, name), getattr(made.pieces, name))
    assert found.pieces.packs == (PACK,)


def test_a_piece_costs_little() -> None:
    """A piece takes at most 60 bytes in a manifest, 32 of which are its id."""
    count = 10_000
    made = manifest_of([[65536] * count])
    made.pieces.ids[:] = np.random.default_rng(0).integers(0, 256, (count, 32))
    made.pieces.stored[:] = np.random.default_rng(1).integers(50_000, 65_536, count)

    assert len(manifest.encode(made)) < 60 * count


def test_unknown_fields_are_ignored() -> None:
    """A later version may add fields that a reader of this one need not know."""
    body = {**body_of(manifest_of([[10]])), "later": {"a": [1, 2]}}

    assert manifest.decode(encoded(body), where="m", version=ID).first == (0, 1)


def test_a_manifest_that_would_not_load_is_never_written() -> None:
    """Pieces that do not add up to their tensor are noticed before the manifest is stored."""
    made = manifest_of([[10, 10]])
    made.pieces.raw[1] = 9
    made.pieces.slab[1] = 9
    with pytest.raises(LimitError, match="do not add up"):
        manifest.encode(made)


@pytest.mark.parametrize("name", ["raw", "pack", "offset", "stored", "inner", "slab", "ids"])
def test_a_column_of_another_length_is_refused(name: str) -> None:
    """Every column has a row per piece."""
    body = body_of(manifest_of([[10], [20]]))
    for changed in (body[name][:-1], body[name] + body[name], b""):
        with pytest.raises(CorruptObjectError, match="of version m"):
            manifest.decode(encoded({**body, name: changed}), where="of version m", version=ID)


@pytest.mark.parametrize(
    ("dtype", "shape", "fits"),
    [
        ("uint8", [10], True), ("int16", [5], True), ("later9", [7], True),
        ("uint8", [5], False), ("uint8", [1 << 40], False), ("float32", [10], False),
        ("uint8", [0], False), ("uint8", [1 << 62, 1 << 62, 0], False),
    ],
)  # fmt: skip
def test_a_shape_that_does_not_give_the_bytes_is_refused(
    dtype: str, shape: list[int], fits: bool
) -> None:
    """By every reader, verify too; of a dtype that is not known here nothing is said."""
    made = manifest_of([[10] if math.prod(shape) else []])
    body = body_of(made)
    body["dtypes"] = [dtype]
    body["tensors"] = [[0, 0, shape, *body["tensors"][0][3:]]]
    if fits:
        found = manifest.decode(encoded(body), where="m", version=ID)
        assert found.tensors[0].shape == tuple(shape)
        return
    if shape == [0]:
        body["tensors"][0][4] = 10
    with pytest.raises(CorruptObjectError, match="tensor 0 is out of bounds"):
        manifest.decode(encoded(body), where="m", version=ID)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("pack", 1), ("slab", limits.CHUNK_RAW_BYTES_MAX + 1),
        ("stored", limits.CHUNK_STORED_BYTES_MAX + 1), ("offset", limits.PACK_BYTES_MAX + 1),
        ("inner", 1), ("raw", 0), ("raw", 11),
    ],
)  # fmt: skip
def test_a_piece_outside_of_its_chunk_or_pack_is_refused(name: str, value: int) -> None:
    """No row can point a reader outside of what may be there."""
    body = body_of(manifest_of([[10]]))
    width = 8 if name == "offset" else 4
    body[name] = value.to_bytes(width, "little")
    with pytest.raises(CorruptObjectError, match=r"points outside|do not add up"):
        manifest.decode(encoded(body), where="m", version=ID)


def test_a_piece_that_ends_inside_of_an_element_is_refused() -> None:
    """Pieces hold whole elements, so that whoever reads by elements need not ask."""
    body = body_of(manifest_of([[5, 7]]))
    for dtype, right in (("uint8", True), ("float32", False)):
        body["dtypes"] = [dtype]
        body["tensors"][0][2] = [12 if right else 3]
        if right:
            assert len(manifest.decode(encoded(body), where="m", version=ID).pieces) == 2
        else:
            with pytest.raises(CorruptObjectError, match="ends inside of an element"):
                manifest.decode(encoded(body), where="m", version=ID)


def test_another_versions_manifest_is_refused() -> None:
    """A manifest under the wrong name is noticed."""
    data = manifest.encode(manifest_of([[10]]))
    with pytest.raises(CorruptObjectError, match="it describes version"):
        manifest.decode(data, where="m", version="00" * 16)


def test_a_newer_format_is_told_apart_from_damage() -> None:
    """A frame of format 2 asks for a newer ckptstore."""
    data = bytearray(manifest.encode(manifest_of([[10]])))
    data[8] = 2
    with pytest.raises(UnsupportedFeatureError, match="format 2"):
        manifest.decode(bytes(data), where="m", version=ID)


def test_text_that_is_not_utf8_is_damage() -> None:
    """Invalid UTF-8 in a name is reported as damage of this object."""
    raw = msgspec.msgpack.encode(body_of(manifest_of([[10]]))).replace(b"weights", b"wei\xffhts")
    with pytest.raises(CorruptObjectError, match="not a manifest"):
        manifest.decode(framing.encode_frame(manifest.MAGIC, raw), where="m", version=ID)


@pytest.mark.parametrize("name", ["tensors", "dtypes", "roles"])
def test_the_length_of_a_list_is_checked_before_it_is_built(name: str) -> None:
    """Lists of millions, compressed to kilobytes, are refused at the cost of their bytes alone."""
    body = body_of(manifest_of([[10]]))
    row = msgspec.msgpack.encode([0, 0, [], None, 0, 0]) if name == "tensors" else b"\xa1a"
    count = limits.TENSORS_MAX + 1
    raw = msgspec.msgpack.encode({**body, name: None, "noise": os.urandom(60_000)})
    word = msgspec.msgpack.encode(name)
    long = word + b"\xdd" + count.to_bytes(4, "big") + row * count
    data = framing.encode_frame(manifest.MAGIC, raw.replace(word + b"\xc0", long))
    size = len(raw) + len(long)
    del raw, long
    with memory_below(1.2 * size), pytest.raises(CorruptObjectError, match="length"):
        manifest.decode(data, where="m", version=ID)
    assert len(data) < 200_000


def test_a_manifest_over_the_limit_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state with more pieces than a reader takes is refused when it is saved."""
    monkeypatch.setattr(limits, "MANIFEST_RAW_BYTES_MAX", 100)
    with pytest.raises(LimitError, match="chunk size"):
        manifest.encode(manifest_of([[10]]))


@given(
    row=st.integers(0, 10_000_000),
    item=st.sampled_from([1, 2, 4, 8, 16]),
    target=st.sampled_from([1 << 16, 1 << 20, 1 << 22]),
)
def test_pieces_hold_whole_rows_or_whole_elements(row: int, item: int, target: int) -> None:
    """A piece is at most the target, and a multiple of the row or, for huge rows, the element."""
    length = piece_bytes(row * item, item, target)

    assert 0 < length <= target
    assert length % item == 0
    if 0 < row * item <= target:
        assert length % (row * item) == 0
        assert length + row * item > target


@given(total=st.integers(0, 1 << 20), length=st.integers(1000, 1 << 18))
def test_cuts_cover_every_byte_once(total: int, length: int) -> None:
    """Pieces follow each other without gap or overlap and end where the tensor ends."""
    at = 0
    for start, size in cut(total, length):
        assert at == start
        assert 0 < size <= length
        at += size

    assert total == at


def test_appended_rows_leave_earlier_pieces_alone() -> None:
    """A table that grows by rows keeps its cuts: only the last piece and new ones differ."""
    length = piece_bytes(3000, 4, 1 << 16)
    before, after = list(cut(3000 * 100, length)), list(cut(3000 * 130, length))

    assert before[:-1] == after[: len(before) - 1]


ROOT = Path(__file__).resolve().parents[2]


def test_no_record_is_decoded_by_a_type_that_is_looked_up_each_time() -> None:
    """Several threads that decode the first record of a struct at once crash msgspec 0.22.

    What the format, catalog and objects decode may come from any thread: a ``Decoder`` made at
    module level has looked the type up before.
    """
    folders = ("format", "catalog", "objects", "checkpoint")
    found = [
        f"{path.name}: {line.strip()}"
        for folder in folders
        for path in sorted((ROOT / "ckptstore" / folder).glob("*.py"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.search(r"\bdecode\(.*\btype=_?[A-Z]", line)
    ]

    assert found == []
