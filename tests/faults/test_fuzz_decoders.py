"""Every decoder against arbitrary and mutated bytes whose digests are right."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
import torch
import zstandard
from faultkit.forge import frame
from faultkit.lies import STATE_LIES
from faultkit.states import state_of
from faultkit.stores import contents, create, memory_with
from hypothesis import HealthCheck, given, settings
from peaks import memory_below
from shortening import examples

from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.commits import decode_commit
from ckptstore.checkpoint.content import read_content
from ckptstore.codecs import codec_table
from ckptstore.codecs.codec import CodecError
from ckptstore.codecs.plane_layout import Layout
from ckptstore.encodings.coding import decode_elements
from ckptstore.errors import CkptStoreError
from ckptstore.format import manifest, pack, skeleton
from ckptstore.format.framing import encode_envelope
from ckptstore.format.manifest import TensorRecord
from ckptstore.format.skeleton_check import validate
from ckptstore.format.snapshot import (
    decode_details,
    decode_manifest_key,
    decode_metrics,
    decode_snapshot,
)
from ckptstore.format.superblock import decode_superblock
from ckptstore.format.tables import NO_BASE
from ckptstore.hashing import xxh3_64
from ckptstore.tensors.restore import Restorer

PEAK_BYTES = 48 << 20
"""What decoding a few kB may take at its peak: some hundred times what is decoded."""
FUZZ = settings(
    max_examples=examples(150),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=True,
)


def healthy() -> dict[str, bytes]:
    """Return the objects of a store with two versions and a snapshot."""
    backend = memory_with({})
    with create(backend) as store:
        for seed in (1, 2):
            store.run("gpt", metrics={"loss": "min"}).save(
                state_of(seed), step=seed, metrics={"loss": 1 / seed}, metadata={"a": [1, "b"]}
            )
        snapshot = store.repo.catalog.to_snapshot()
    objects = contents(backend)
    objects["snapshots/000000000002.snap"] = frame_of(b"CKPTSNAP", msgspec.msgpack.encode(snapshot))
    return objects


def frame_of(magic: bytes, raw: bytes, *, flags: int = 0) -> bytes:
    """Return a frame with right digest and lengths around a payload."""
    return frame(magic, zstandard.ZstdCompressor().compress(raw), len(raw), flags=flags)


def with_recipes() -> bytes:
    """Return the payload of a manifest with tensors of every kind of recipe."""
    body: dict[str, Any] = msgspec.msgpack.decode(MANIFEST)
    raw = [90, 45, 45, 12]
    columns = {"raw": "<u4", "pack": "<u4", "offset": "<u8", "stored": "<u4", "inner": "<u4"}
    sizes = {"raw": raw, "stored": raw, "offset": [32] * 4}
    for name, dtype in {**columns, "slab": "<u4"}.items():
        body[name] = np.array(sizes.get(name, raw if name == "slab" else [0] * 4), dtype).tobytes()
    body["ids"] = bytes(range(128))
    body["dtypes"] = ["float32", "bfloat16", "int8", "uint8"]
    body["roles"] = ["weights"]
    shape = [5, 9]
    body["tensors"] = [
        [0, 0, shape, None, 180, 0], [0, 0, shape, [1, 0], 180, 0], [1, 0, shape, None, 90, 0],
        [1, 0, shape, None, 90, 1], [2, 0, shape, None, 45, 1], [3, 0, shape, [1, 0], 45, 1],
        [0, 0, [3], None, 12, 1],
    ]  # fmt: skip
    body["recipes"] = [
        [0, 0, [3], 0, 0, bytes(64), [0.5, 0.25, None, 1.0]],
        [1, 1, [5, 6], 2, 16, bytes(64), [0.5, 0.25, None, None]],
        [2, 1, [4, 6], 0, 16, bytes(32), []],
    ]
    body["skeleton"] = skeleton.encode(["l", ["T", 0], ["T", 1], ["T", 2]])
    return msgspec.msgpack.encode(body)


def with_bases() -> bytes:
    """Return the payload of a manifest of which two pieces are deltas, one twice."""
    body: dict[str, Any] = msgspec.msgpack.decode(MANIFEST)
    columns = {"raw": [64, 32, 64, 32], "slab": [64, 32, 64, 40], "stored": [60, 30, 64, 40]}
    columns |= {"offset": [32, 500, 32, 200], "pack": [0] * 4, "inner": [0, 0, 0, 8]}
    for name, values in columns.items():
        body[name] = np.array(values, "<u8" if name == "offset" else "<u4").tobytes()
    body["ids"] = bytes(range(128))
    body["dtypes"], body["roles"] = ["float32", "uint8"], ["weights", "base"]
    body["tensors"] = [[0, 0, [24], None, 96, 2], [1, 1, [96], None, 96, 2]]
    body["base"] = np.array([2, 3, NO_BASE, NO_BASE], "<u4").tobytes()
    body["skeleton"] = skeleton.encode(["l", ["T", 0]])
    return msgspec.msgpack.encode(body)


def payload(objects: dict[str, bytes], kind: str) -> bytes:
    """Return what is inside the last object of a kind: a body, or a decompressed payload."""
    data = objects[max(key for key in objects if key.startswith(kind))]
    if data.startswith(b"{"):
        return data[len(b'{"body":') : -len(b',"blake3":""}\n') - 64]
    return zstandard.ZstdDecompressor().decompress(data[64:])


OBJECTS = healthy()
SUPERBLOCK, COMMIT = payload(OBJECTS, "store.json"), payload(OBJECTS, "commits")
MANIFEST, SNAPSHOT = payload(OBJECTS, "manifests"), payload(OBJECTS, "snapshots")
SKELETON: bytes = msgspec.msgpack.decode(MANIFEST)["skeleton"]
VERSION: str = msgspec.msgpack.decode(MANIFEST)["version"]
PACK = OBJECTS[max(key for key in OBJECTS if key.startswith("packs"))]


def open_superblock(body: bytes) -> None:
    """Decode a superblock of this body."""
    decode_superblock(encode_envelope(body), where="store.json")


def open_commit(body: bytes) -> None:
    """Decode a commit of this body."""
    decode_commit(encode_envelope(body), where="a commit")


def open_snapshot(raw: bytes) -> None:
    """Decode a snapshot of this payload, all its rows, and make a catalog of it."""
    body = decode_snapshot(frame_of(b"CKPTSNAP", raw), where="a snapshot")
    catalog = Catalog.from_snapshot(body, where="a snapshot")
    list(catalog.versions())
    catalog.runs()


def open_rows(raw: bytes) -> None:
    """Decode what is opaque in a snapshot's row."""
    rows = decode_snapshot(frame_of(b"CKPTSNAP", SNAPSHOT), where="s").versions
    row = msgspec.structs.replace(rows[0], details=raw, metrics=raw)
    for decode in (decode_details, decode_manifest_key, decode_metrics):
        try:
            decode(row)
        except CkptStoreError:
            continue


def open_manifest(raw: bytes) -> None:
    """Decode a manifest of this payload, and its skeleton."""
    found = manifest.decode(frame_of(manifest.MAGIC, raw), where="m", version=VERSION)
    read_content(found).tensors()


def open_bases(raw: bytes) -> None:
    """Decode a manifest of this payload that says that it has bases; follow each once."""
    found = manifest.decode(frame_of(manifest.MAGIC, raw, flags=4), where="m", version=VERSION)
    read_content(found).tensors()
    table, own = found.pieces, found.first[-1]
    for row in range(own):
        base = table.base_of(row)
        if base is not None:
            assert own <= base < len(table)
            assert table.base_of(base) is None
            assert table.raw[base] == table.raw[row]
    assert len(table.take(range(own))) == len(table)


def open_recipes(raw: bytes) -> None:
    """Decode a manifest of this payload that says that it has recipes, and make the tensors."""
    found = manifest.decode(frame_of(manifest.MAGIC, raw, flags=2), where="m", version=VERSION)
    content = read_content(found)
    for index, record in enumerate(found.tensors):
        if record.recipe is not None and record.nbytes < 1 << 20:
            content.rows(index)
            sources = [found.tensors[place] for place in record.recipe.sources]
            stored = [memoryview(bytes(source.nbytes)) for source in sources]
            decode_elements(
                record.recipe.kind,
                record.recipe.code,
                record.recipe.block,
                record.dtype,
                sources[0].dtype,
                0,
                stored[0],
                stored[1] if len(stored) > 1 else None,
                memoryview(bytearray(record.nbytes)),
            )


def open_skeleton(raw: bytes) -> None:
    """Decode and validate a skeleton, and build the state over a few records."""
    build(skeleton.decode(raw))


def open_pack(data: bytes) -> None:
    """Parse the parts of a pack, each from where it should be."""
    for parse in (
        lambda: pack.parse_header(data[:32], pack_id="ab" * 16),
        lambda: pack.parse_chunk_header(data[32:96], where="p"),
        lambda: pack.parse_trailer(data[-32:], pack_bytes=len(data), where="p"),
        lambda: pack.parse_index(data, checksum=xxh3_64(data), offset=len(data), where="p"),
    ):
        try:
            parse()
        except CkptStoreError:
            continue


def build(node: skeleton.Node) -> None:
    """Validate a node over three records and build the state."""
    validate(node, [record.nbytes for record in RECORDS])
    restorer = Restorer(skeleton.prune(node, lambda _path: True), RECORDS)
    for index in restorer.needed:
        restorer.destination(index).view[:] = bytes(RECORDS[index].nbytes)
    restorer.build()


RECORDS = [
    TensorRecord(dtype="float32", shape=(4, 2), order=None, role="weights", nbytes=32),
    TensorRecord(dtype="uint8", shape=(8,), order=None, role="rng", nbytes=8),
    TensorRecord(dtype="int32", shape=(), order=None, role="extra", nbytes=4),
]
DECODERS: dict[str, tuple[Callable[[bytes], None], bytes]] = {
    "superblock": (open_superblock, SUPERBLOCK), "commit": (open_commit, COMMIT),
    "snapshot": (open_snapshot, SNAPSHOT), "rows": (open_rows, SNAPSHOT),
    "manifest": (open_manifest, MANIFEST), "recipes": (open_recipes, with_recipes()),
    "bases": (open_bases, with_bases()), "skeleton": (open_skeleton, SKELETON),
    "pack": (open_pack, PACK),
}  # fmt: skip
each_decoder = pytest.mark.parametrize("name", sorted(DECODERS))
TOKENS = [
    *(bytes([b]) for b in (0x80, 0x81, 0x90, 0x91, 0xC0, 0xC1, 0xC3, 0xC7, 0xCB, 0xD7, 0xFF)),
    b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff",
    b"\xcf\xff\xff\xff\xff\xff\xff\xff\xff", b"\xcb\x7f\xf8\0\0\0\0\0\0", b"\xed\xa0\x80",
    *(b"null", b"[", b"{", b'"', b"\\ud800", b"1e999", b"-0", b"../", b"\0", b"9" * 30, b"true"),
]  # fmt: skip


def survives(decode: Callable[[bytes], None], data: bytes) -> None:
    """Hold that decoding returns or raises an error of the tree, in bounded memory."""
    with memory_below(PEAK_BYTES), suppress(CkptStoreError):  # refused, as it may be
        decode(data)


@each_decoder
@FUZZ
@given(data=st.binary(max_size=300))
def test_arbitrary_bytes(name: str, data: bytes) -> None:
    """No decoder raises anything foreign for any bytes."""
    survives(DECODERS[name][0], data)


@each_decoder
@FUZZ
@given(data=st.data())
@pytest.mark.short(sample=5)
def test_valid_records_with_other_bytes_in_them(name: str, data: st.DataObject) -> None:
    """A record that was valid, with parts replaced, cut out, doubled or put in, breaks nothing."""
    decode, whole = DECODERS[name]
    changed = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(changed)))
        end = min(len(changed), start + data.draw(st.integers(0, 12)))
        piece = data.draw(st.one_of(st.binary(max_size=12), st.sampled_from(TOKENS)))
        changed[start:end] = piece
    survives(decode, bytes(changed))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)


@pytest.mark.parametrize("name", ["superblock", "commit"])
@FUZZ
@given(data=st.data())
def test_fields_of_json_records_of_any_type(name: str, data: st.DataObject) -> None:
    """Any field of a superblock or commit, at any depth, may hold anything."""
    decode, whole = DECODERS[name]
    body = json.loads(whole)
    place: Any = body
    while True:
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else [0]))
        if isinstance(place[key], dict | list) and place[key] and data.draw(st.booleans()):
            place = place[key]
            continue
        place[key] = data.draw(json_values)
        break
    survives(decode, json.dumps(body).encode("utf-8", "surrogatepass"))


TAGS = [*skeleton.MAPS, *skeleton.SEQUENCES, *skeleton.LEAF_KINDS]
TAGS += ["s", "fs", "c", "i", "u", "ba", "r", "sl", "p", "da", "dm", "td", "dt", "dv", "sz"]
TAGS += ["nd", "ns", "x", "m", "Q", "G"]
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-3, 40)
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=6)
    | st.binary(max_size=8)
    | st.sampled_from(
        ["float32", "int32", "qint8", "tensor", "channel", "cpu", "|O", "<f4", "path"]
    )
)
nodes: st.SearchStrategy[Any] = st.recursive(
    scalars | st.sampled_from([["T", 0], ["T", 1], ["T", 2], *STATE_LIES.values()]),
    lambda inner: (
        st.builds(
            lambda tag, fields: [tag, *fields], st.sampled_from(TAGS), st.lists(inner, max_size=6)
        )
        | st.lists(st.integers(0, 9), max_size=3)
    ),
    max_leaves=20,
)


@pytest.mark.filterwarnings("ignore::UserWarning")
@settings(FUZZ, max_examples=examples(1500))
@given(node=nodes)
def test_skeletons_of_known_tags_and_any_fields(node: Any) -> None:  # noqa: ANN401
    """What validation lets through can be built, or raises an error of the tree."""
    torch.set_num_threads(1)
    with suppress(CkptStoreError):
        build(skeleton.decode(msgspec.msgpack.encode(node)))


@FUZZ
@given(
    codec=st.integers(0, 3),
    layout=st.sampled_from([*Layout, 9]),
    raw_bytes=st.sampled_from([0, 1, 7, 8, 64, 4096]),
    stored=st.binary(max_size=200),
    keep=st.booleans(),
)
def test_codecs_fill_or_refuse(
    codec: int, layout: int, raw_bytes: int, stored: bytes, *, keep: bool
) -> None:
    """A codec raises CodecError or fills its output, for any stored bytes and any length."""
    if keep and layout in [*Layout] and codec in codec_table.CODECS and raw_bytes % 8 == 0:
        source = memoryview(bytes(range(256)) * 16)[:raw_bytes]
        whole = b"".join(codec_table.CODECS[codec].encode(source, Layout(layout)))
        stored = whole[: len(stored)] + stored[:4] + whole[len(stored) + 4 :]
    base = None
    if codec in codec_table.DELTAS and keep:
        base = codec_table.BaseData(piece_id=stored[:32], data=memoryview(bytes(raw_bytes)))
    out = memoryview(bytearray(raw_bytes))
    with suppress(CodecError):
        codec_table.decode(codec, layout, memoryview(stored), out, base=base)
