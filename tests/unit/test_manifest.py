"""Manifests: what is written comes back; what does not fit is refused, when written and read."""

from __future__ import annotations

import os
import tracemalloc
from typing import Any

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import given

from ckptstore import limits
from ckptstore.errors import CorruptObjectError, LimitError, UnsupportedFeatureError
from ckptstore.format import framing, manifest
from ckptstore.format.manifest import Manifest, PieceTable, TensorRecord

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
        version=ID,
        chunk_bytes=limits.CHUNK_BYTES_MIN,
        skeleton=b"\x91\xa1d",
        tensors=tuple(records),
        first=tuple(first),
        pieces=table_of([length for lengths in pieces for length in lengths]),
    )


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
    ("name", "value"),
    [
        ("pack", 1),
        ("slab", limits.CHUNK_RAW_BYTES_MAX + 1),
        ("stored", limits.CHUNK_STORED_BYTES_MAX + 1),
        ("offset", limits.PACK_BYTES_MAX + 1),
        ("inner", 1),
        ("raw", 0),
        ("raw", 11),
    ],
)
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
    tracemalloc.start()
    try:
        with pytest.raises(CorruptObjectError, match="length"):
            manifest.decode(data, where="m", version=ID)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert len(data) < 200_000
    assert peak < 1.2 * size


def test_a_manifest_over_the_limit_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state with more pieces than a reader takes is refused when it is saved."""
    monkeypatch.setattr(limits, "MANIFEST_RAW_BYTES_MAX", 100)
    with pytest.raises(LimitError, match="chunk size"):
        manifest.encode(manifest_of([[10]]))
