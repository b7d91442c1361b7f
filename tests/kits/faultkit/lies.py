"""Hostile stores: each function makes one false statement in a forge; digests stay right."""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Callable
from typing import Any

import msgspec
import zstandard

from ckptstore import limits
from ckptstore.format.framing import encode_envelope
from faultkit.forge import Forge, frame

__all__ = ["LIES", "MARKER", "STATE_LIES"]

MARKER = "ckptstore-was-tricked"
Lie = Callable[[Forge], dict[str, bytes]]
MIB = limits.MIB


class Trap:
    """A pickle that leaves a file behind when it is loaded."""

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        """Return the call that loading would make."""
        return os.system, (f"touch {MARKER}",)


PICKLE = pickle.dumps(Trap())
NOISE = os.urandom(100 * limits.KIB)
"""Does not compress: with it, a record of 200 MB is within the ratio that is accepted."""


def field(name: str, value: Any) -> Lie:  # noqa: ANN401
    """Return the lie that gives a field of the manifest another value."""

    def lie(forge: Forge) -> dict[str, bytes]:
        forge.manifest[name] = value(forge) if callable(value) else value
        return forge.finish()

    return lie


def first_tensor(place: int, value: Any) -> Lie:  # noqa: ANN401
    """Return the lie that gives a field of the first tensor another value."""

    def lie(forge: Forge) -> dict[str, bytes]:
        forge.manifest["tensors"][0][place] = value
        return forge.finish()

    return lie


def first_piece(name: str, value: int) -> Lie:
    """Return the lie that gives the first piece another number in a column."""

    def lie(forge: Forge) -> dict[str, bytes]:
        forge.put_column(name, [value, *forge.column(name)[1:]])
        return forge.finish()

    return lie


def skeleton(node: Any) -> Lie:  # noqa: ANN401
    """Return the lie that replaces the skeleton."""

    def lie(forge: Forge) -> dict[str, bytes]:
        forge.put_skeleton(node)
        return forge.finish()

    return lie


def raw_skeleton(data: Callable[[], bytes]) -> Lie:
    """Return the lie that replaces the skeleton by these bytes."""

    def lie(forge: Forge) -> dict[str, bytes]:
        forge.manifest["skeleton"] = data()
        forge.manifest["noise"] = NOISE
        return forge.finish()

    return lie


def last_commit(change: Callable[[dict[str, Any]], object]) -> Lie:
    """Return the lie that changes the last commit's body in place."""

    def lie(forge: Forge) -> dict[str, bytes]:
        change(forge.commits[-1])
        return forge.chained()

    return lie


def last_body(change: Callable[[bytes], bytes]) -> Lie:
    """Return the lie that replaces the last commit's body by other bytes."""

    def lie(forge: Forge) -> dict[str, bytes]:
        objects = forge.chained()
        last = max(key for key in objects if key.startswith("commits/"))
        body = objects[last][len(b'{"body":') : -len(b',"blake3":""}\n') - 64]
        return forge.chained([change(body)])

    return lie


def superblock(change: Callable[[dict[str, Any]], object]) -> Lie:
    """Return the lie that changes the superblock."""

    def lie(forge: Forge) -> dict[str, bytes]:
        body = json.loads(forge.objects["store.json"])["body"]
        change(body)
        forge.objects["store.json"] = encode_envelope(json.dumps(body).encode())
        return forge.objects

    return lie


def manifest_object(data: Callable[[], bytes]) -> Lie:
    """Return the lie that replaces the manifest's object by other bytes."""

    def lie(forge: Forge) -> dict[str, bytes]:
        forge.put_object(forge.manifest_key, data())
        return forge.chained()

    return lie


def raw_manifest(data: Callable[[Forge], bytes]) -> Lie:
    """Return the lie that replaces the manifest's payload by other bytes, properly framed."""

    def lie(forge: Forge) -> dict[str, bytes]:
        forge.put_manifest(data(forge))
        return forge.chained()

    return lie


def chunk(stored: Callable[[], bytes], codec: int, layout: int, raw_bytes: int) -> Lie:
    """Return the lie that the first piece's chunk holds other bytes."""

    def lie(forge: Forge) -> dict[str, bytes]:
        forge.put_chunk(stored(), codec=codec, layout=layout, raw_bytes=raw_bytes)
        return forge.finish()

    return lie


def bomb(size: int) -> bytes:
    """Return a zstd frame of `size` zeros."""
    return zstandard.ZstdCompressor().compress(bytes(size))


def undeclared_bomb(size: int) -> bytes:
    """Return a zstd frame of `size` zeros that does not state its size."""
    return zstandard.ZstdCompressor(write_content_size=False).compress(bytes(size))


def declaring(size: int) -> bytes:
    """Return a short zstd frame that states a false size."""
    return struct.pack("<IBQ", 0xFD2FB528, 0xE0, size) + b"\x01\0\0"


def planes(*lengths: int, body: bytes = b"") -> bytes:
    """Return a table of planes followed by `body`."""
    return struct.pack(f"<{len(lengths)}I", *lengths) + body


def changed_op(**words: Any) -> Lie:  # noqa: ANN401
    """Return the lie that gives fields of the last save other values."""

    def lie(forge: Forge) -> dict[str, bytes]:
        forge.save.update(words)
        return forge.chained()

    return lie


def pointer(**words: Any) -> Lie:  # noqa: ANN401
    """Return the lie that points the last save to another manifest."""

    def lie(forge: Forge) -> dict[str, bytes]:
        forge.save["manifest"].update(words)
        return forge.chained()

    return lie


def twice(forge: Forge) -> dict[str, bytes]:
    """Save the same version twice."""
    forge.commits[-1]["ops"].append(dict(forge.save))
    return forge.chained()


def swapped(forge: Forge) -> dict[str, bytes]:
    """Swap the last two commits."""
    first, second = sorted(key for key in forge.objects if key.startswith("commits/"))[-2:]
    objects = forge.objects
    objects[first], objects[second] = objects[second], objects[first]
    return objects


def other_objects_piece(forge: Forge) -> dict[str, bytes]:
    """Place the second piece where the first lies: the content differs."""
    for name in ("pack", "offset", "stored", "inner", "slab"):
        values = forge.column(name)
        forge.put_column(name, [values[0], values[0], *values[2:]])
    return forge.finish()


def overlapping(forge: Forge) -> dict[str, bytes]:
    """Let the second piece's chunk begin inside of the first's."""
    offsets = forge.column("offset")
    forge.put_column("offset", [offsets[0], offsets[0] + 16, *offsets[2:]])
    return forge.finish()


def many_tensors(forge: Forge) -> bytes:
    """Return a manifest of eleven million tensors, in 77 MB that compress a thousandfold."""
    count = limits.TENSORS_MAX + 1_000_000
    raw = msgspec.msgpack.encode({**forge.manifest, "tensors": None, "noise": NOISE})
    row = msgspec.msgpack.encode([0, 0, [], None, 0, 0])
    listed = b"\xdd" + count.to_bytes(4, "big") + row * count
    return raw.replace(b"\xa7tensors\xc0", b"\xa7tensors" + listed)


def many_names(name: str) -> Callable[[Forge], bytes]:
    """Return a manifest whose list of names has thirty million entries."""

    def make(forge: Forge) -> bytes:
        count = 20_000_000
        raw = msgspec.msgpack.encode({**forge.manifest, name: None, "noise": NOISE})
        word = msgspec.msgpack.encode(name)
        return raw.replace(
            word + b"\xc0", word + b"\xdd" + count.to_bytes(4, "big") + b"\xa1a" * count
        )

    return make


def many_packs(forge: Forge) -> dict[str, bytes]:
    """Name five million packs."""
    forge.manifest["packs"] = bytes(16 * (limits.PACKS_MAX + 1_000_000))
    forge.manifest["noise"] = NOISE
    return forge.finish()


def header_only(length_byte: bytes) -> Callable[[Forge], bytes]:
    """Return a manifest that ends after the header of a huge container."""
    return lambda _forge: b"\x81\xa7tensors" + length_byte + b"\xff\xff\xff\xff"


LIES: dict[str, Lie] = {
    # --- manifest: numbers that do not fit --------------------------------------------------
    "manifest-bytes-of-a-tensor": first_tensor(4, 4),
    "manifest-bytes-negative": first_tensor(4, -1),
    "manifest-bytes-huge": first_tensor(4, 2**62),
    "manifest-pieces-too-many": first_tensor(5, 10**9),
    "manifest-pieces-negative": first_tensor(5, -1),
    "manifest-dtype-index": first_tensor(0, 99),
    "manifest-dtype-negative": first_tensor(0, -1),
    "manifest-role-index": first_tensor(1, 7),
    "manifest-shape-huge": first_tensor(2, [2**62]),
    "manifest-shape-product-overflows": first_tensor(2, [2**40, 2**40]),
    "manifest-shape-negative": first_tensor(2, [-5]),
    "manifest-shape-beyond-64-bits": first_tensor(2, [2**63]),
    "manifest-shape-of-65-dims": first_tensor(2, [1] * 65),
    "manifest-shape-empty-but-huge": first_tensor(2, [0, 2**62, 2**62]),
    "manifest-order-no-permutation": first_tensor(3, [0, 0]),
    "manifest-order-too-long": first_tensor(3, list(range(50))),
    "manifest-dtype-unknown": field("dtypes", lambda f: ["o" * 20 for _ in f.manifest["dtypes"]]),
    "manifest-dtype-object": field("dtypes", lambda f: ["object" for _ in f.manifest["dtypes"]]),
    "manifest-dtype-other-size": field(
        "dtypes", lambda f: ["float64" if d == "float32" else d for d in f.manifest["dtypes"]]
    ),
    "manifest-role-with-slash": field("roles", lambda f: ["../x" for _ in f.manifest["roles"]]),
    "manifest-chunk-size-0": field("chunk_bytes", 0),
    "manifest-of-another-version": field("version", "ab" * 16),
    "manifest-version-path": field("version", "../../../../etc/passwd"),
    "manifest-ids-cut": field("ids", lambda f: f.manifest["ids"][:-1]),
    "manifest-ids-one-fewer": field("ids", lambda f: f.manifest["ids"][:-32]),
    "manifest-column-short": field("stored", lambda f: f.manifest["stored"][:-4]),
    "manifest-column-is-text": field("stored", "text"),
    "manifest-packs-cut": field("packs", lambda f: f.manifest["packs"][:-1]),
    "manifest-no-packs": field("packs", b""),
    "manifest-field-missing": raw_manifest(
        lambda f: msgspec.msgpack.encode({k: v for k, v in f.manifest.items() if k != "inner"})
    ),
    "manifest-field-null": field("tensors", None),
    "manifest-many-tensors": raw_manifest(many_tensors),
    "manifest-many-dtypes": raw_manifest(many_names("dtypes")),
    "manifest-many-roles": raw_manifest(many_names("roles")),
    "manifest-many-packs": many_packs,
    "manifest-array-of-4-billion": raw_manifest(header_only(b"\xdd")),
    "manifest-map-of-4-billion": raw_manifest(header_only(b"\xdf")),
    "manifest-bytes-of-4-gigabytes": raw_manifest(header_only(b"\xc6")),
    "manifest-not-utf8": raw_manifest(
        lambda f: msgspec.msgpack.encode(f.manifest).replace(b"weights", b"wei\xffhts")
    ),
    "manifest-nested": raw_manifest(lambda _f: b"\x81\xa7tensors" + b"\x91" * 10**6),
    "manifest-is-a-pickle": raw_manifest(lambda _f: PICKLE),
    "manifest-empty": raw_manifest(lambda _f: b""),
    "manifest-trailing-bytes": raw_manifest(lambda f: msgspec.msgpack.encode(f.manifest) + b"x"),
    "manifest-timestamp": field("version", msgspec.msgpack.Ext(-1, b"\xff" * 8)),
    # --- manifest: the frame ----------------------------------------------------------------
    "frame-bomb": manifest_object(lambda: frame(b"CKPTMANI", bomb(400 * MIB), 400 * MIB)),
    "frame-bomb-that-says-little": manifest_object(
        lambda: frame(b"CKPTMANI", bomb(128 * MIB), 100)
    ),
    "frame-declares-an-exabyte": manifest_object(
        lambda: frame(b"CKPTMANI", declaring(2**60), 2**60)
    ),
    "frame-declares-more-than-it-says": manifest_object(
        lambda: frame(b"CKPTMANI", declaring(2**60), 100)
    ),
    "frame-undeclared-bomb": manifest_object(
        lambda: frame(b"CKPTMANI", undeclared_bomb(128 * MIB), 1000)
    ),
    "frame-no-zstd": manifest_object(lambda: frame(b"CKPTMANI", b"no zstd", 7)),
    "frame-other-kind": manifest_object(lambda: frame(b"CKPTSNAP", bomb(10), 10)),
    "frame-is-a-pickle": manifest_object(lambda: PICKLE),
    "frame-empty": manifest_object(lambda: b""),
    "frame-format-9": manifest_object(lambda: frame(b"CKPTMANI", bomb(9), 9, version=9)),
    "frame-flags": manifest_object(lambda: frame(b"CKPTMANI", bomb(9), 9, flags=1)),
    # --- manifest: places -------------------------------------------------------------------
    "piece-past-the-pack": first_piece("offset", 2**31),
    "piece-past-any-pack": first_piece("offset", 2**63),
    "piece-offset-off-by-one": first_piece("offset", 33),
    "piece-at-0": first_piece("offset", 0),
    "piece-stored-huge": first_piece("stored", 2**32 - 1),
    "piece-stored-64-mib": first_piece("stored", 64 * MIB),
    "piece-stored-0": first_piece("stored", 0),
    "piece-slab-huge": first_piece("slab", 2**32 - 1),
    "piece-slab-64-mib": first_piece("slab", 64 * MIB),
    "piece-slab-0": first_piece("slab", 0),
    "piece-inner-huge": first_piece("inner", 2**32 - 1),
    "piece-raw-huge": first_piece("raw", 2**32 - 1),
    "piece-raw-0": first_piece("raw", 0),
    "piece-pack-out-of-range": first_piece("pack", 2**32 - 1),
    "piece-in-a-pack-that-is-not-there": field("packs", lambda f: b"\x77" * 16 * len(f.packs)),
    "piece-of-another-content": other_objects_piece,
    "pieces-overlap": overlapping,
    # --- chunks -----------------------------------------------------------------------------
    "chunk-bomb": chunk(lambda: bomb(256 * MIB), 1, 0, 65536),
    "chunk-bomb-of-the-largest-size": chunk(lambda: bomb(64 * MIB), 1, 0, 64 * MIB),
    "chunk-raw-larger-than-any": chunk(lambda: bomb(65 * MIB), 1, 0, 65 * MIB),
    "chunk-undeclared-bomb": chunk(lambda: undeclared_bomb(128 * MIB), 1, 0, 65536),
    "chunk-declares-an-exabyte": chunk(lambda: declaring(2**60), 1, 0, 65536),
    "chunk-codec-unknown": chunk(lambda: b"x" * 100, 200, 0, 65536),
    "chunk-layout-unknown": chunk(lambda: b"x" * 100, 2, 200, 65536),
    "chunk-raw-of-another-length": chunk(lambda: b"x" * 100, 0, 0, 65536),
    "chunk-zeros": chunk(lambda: bytes(65536), 0, 0, 65536),
    "chunk-planes-odd": chunk(lambda: planes(0, 0, 0), 2, 1, 65535),
    "chunk-planes-huge": chunk(lambda: planes(2**31 - 1, 2**31 - 1, 1), 2, 1, 65536),
    "chunk-planes-bomb": chunk(
        lambda: planes(
            len(b := bomb(128 * MIB)) | 1 << 31, len(b) | 1 << 31, len(b) | 1 << 31, body=b * 3
        ),
        2,
        1,
        65536,
    ),
    "chunk-planes-no-table": chunk(lambda: b"\0\0", 2, 1, 65536),
    "chunk-planes-empty": chunk(lambda: planes(0, 0, 0), 2, 1, 65536),
    "chunk-is-a-pickle": chunk(lambda: PICKLE, 0, 0, len(PICKLE)),
    # --- commits ----------------------------------------------------------------------------
    "commit-unknown-op": last_commit(lambda b: b["ops"].append({"op": "erase", "run": "gpt"})),
    "commit-op-without-name": last_commit(lambda b: b["ops"].append({"run": "gpt"})),
    "commit-op-is-a-list": last_commit(lambda b: b["ops"].append(["save"])),
    "commit-format-2": last_commit(lambda b: b.update(format=2)),
    "commit-format-0": last_commit(lambda b: b.update(format=0)),
    "commit-magic": last_commit(lambda b: b.update(magic="other")),
    "commit-number": last_commit(lambda b: b.update(number=77)),
    "commit-number-0": last_commit(lambda b: b.update(number=0)),
    "commit-time": last_commit(lambda b: b.update(at_ms=2**62)),
    "commit-ops-empty": last_commit(lambda b: b.update(ops=[])),
    "commit-ops-many": last_commit(lambda b: b.update(ops=b["ops"] * 2000)),
    "commit-write-id": last_commit(lambda b: b.update(write_id="../" * 10)),
    "commit-not-json": last_body(lambda _b: b"{]"),
    "commit-not-utf8": last_body(lambda b: b.replace(b'"by":"', b'"by":"\xff\xfe')),
    "commit-nested": last_body(lambda _b: b"[" * 10**6),
    "commit-nested-metadata": last_body(
        lambda b: b.replace(b'"metadata":{}', b'"metadata":' + b'{"a":' * 5000 + b"1" + b"}" * 5000)
    ),
    "commit-infinite-metric": last_body(lambda b: b.replace(b'"loss":0.5', b'"loss":1e999')),
    "commit-metric-nan-literal": last_body(lambda b: b.replace(b'"loss":0.5', b'"loss":NaN')),
    "commit-is-a-pickle": last_body(lambda _b: PICKLE),
    "commit-too-large": last_body(lambda b: b + b" " * 5 * MIB),
    "commit-swapped": swapped,
    "save-twice": twice,
    "save-key-with-dots": pointer(key="manifests/../../../etc/passwd"),
    "save-key-absolute": pointer(key="/etc/passwd"),
    "save-key-of-a-commit": pointer(key="commits/000000/000000000001.json"),
    "save-key-of-another-folder": pointer(key="manifests/00/" + "ab" * 16 + ".manifest"),
    "save-key-with-nul": pointer(key="manifests/ab/" + "ab" * 16 + ".manifest\0"),
    "save-key-of-nothing": pointer(key="manifests/ab/" + "ab" * 16 + ".manifest"),
    "save-bytes-huge": pointer(bytes=2**62),
    "save-bytes-negative": pointer(bytes=-1),
    "save-digest": pointer(blake3="0" * 64),
    "save-version-path": changed_op(version="../../etc/passwd"),
    "save-run-dots": changed_op(run="../../etc"),
    "save-run-unknown": changed_op(run="nobody"),
    "save-run-escapes": changed_op(run="\x1b[2J"),
    "save-step-negative": changed_op(step=-1),
    "save-step-huge": changed_op(step=2**80),
    "save-parent-unknown": changed_op(parent="12" * 16),
    "save-content": changed_op(content="xyz"),
    "save-tag-reserved": changed_op(tags=["latest"]),
    "save-tags-many": changed_op(tags=[f"t{n}" for n in range(5000)]),
    "save-metrics-many": changed_op(metrics={f"m{n}": 1.0 for n in range(5000)}),
    "save-metadata-is-a-list": changed_op(metadata=[1]),
    "save-receipt": changed_op(receipt={"x": "y"}),
    # --- superblock -------------------------------------------------------------------------
    "store-format-2": superblock(lambda b: b.update(format=2)),
    "store-feature": superblock(lambda b: b.update(features=["time-travel"])),
    "store-features-many": superblock(lambda b: b.update(features=["a"] * 1000)),
    "store-chunk-size": superblock(lambda b: b.update(chunk_bytes=2**60)),
    "store-chunk-size-0": superblock(lambda b: b.update(chunk_bytes=0)),
    "store-magic": superblock(lambda b: b.update(magic="zip")),
    "store-id": superblock(lambda b: b.update(store_id="..")),
    # --- skeleton ---------------------------------------------------------------------------
    "skeleton-is-a-pickle": raw_skeleton(lambda: PICKLE),
    "skeleton-empty": raw_skeleton(lambda: b""),
    "skeleton-array-of-4-billion": raw_skeleton(lambda: b"\xdd\xff\xff\xff\xff"),
    "skeleton-nested-a-million": raw_skeleton(lambda: b"\x92\xa1l" * 10**6 + b"\xc0"),
    "skeleton-nested-100": raw_skeleton(lambda: b"\x92\xa1l" * 100 + b"\xc0"),
    "skeleton-many-containers": raw_skeleton(
        lambda: b"\xdd" + (21 * 10**6).to_bytes(4, "big") + b"\x90" * 21 * 10**6
    ),
    "skeleton-over-the-limit": raw_skeleton(
        lambda: b"\xc6" + (257 * MIB).to_bytes(4, "big") + bytes(257 * MIB)
    ),
    "skeleton-map": skeleton({"a": 1}),
    "skeleton-timestamp": skeleton(msgspec.msgpack.Ext(-1, b"\0" * 4)),
    "skeleton-ext": skeleton(["d", "a", msgspec.msgpack.Ext(5, PICKLE)]),
    "skeleton-not-utf8": raw_skeleton(lambda: b"\x93\xa1d\xa1a\xa2\xff\xfe"),
    "skeleton-tag-unknown": skeleton(["eval", "1"]),
    "skeleton-tag-is-a-number": skeleton([1, 2]),
    "skeleton-adapter": skeleton(["x", "os.system", ["l", f"touch {MARKER}"]]),
    "skeleton-key-without-value": skeleton(["d", "a"]),
    "skeleton-key-twice": skeleton(["d", "a", 1, "a", 2]),
    "skeleton-key-twice-in-disguise": skeleton(["d", 1, 1, True, 2]),
    "skeleton-key-nan": skeleton(["d", float("nan"), 1]),
    "skeleton-key-list": skeleton(["d", ["l"], 1]),
    "skeleton-key-nested": skeleton(["d", json.loads("[" + '"t",[' * 90 + '"t"' + "]" * 91), 1]),
    "skeleton-factory": skeleton(["dd", "exec"]),
    "skeleton-set-of-lists": skeleton(["s", ["l"]]),
    "skeleton-deque": skeleton(["q", 1, 2, 3]),
}

# Each of these is a leaf that must be refused at any place.
STATE_LIES: dict[str, Any] = {
    "index-too-high": ["T", 10**6],
    "index-negative": ["T", -1],
    "index-bool": ["T", True],
    "index-64-bits": ["T", 2**63],
    "tensor-flags": ["T", 0, 255],
    "tensor-device-is-bytes": ["T", 0, 0, 0, b"cpu"],
    "view-of-nothing": ["V", 10**6, "float32", 0, [1], [1]],
    "view-past-the-end": ["V", 0, "float32", 0, [2**40], [1]],
    "view-offset": ["V", 0, "float32", 2**60, [1], [1]],
    "view-negative-strides": ["V", 0, "float32", 100, [2], [-1]],
    "view-huge-strides": ["V", 0, "float32", 0, [2, 2], [2**62, 2**62]],
    "view-too-many-elements": ["V", 0, "float32", 0, [2**40, 2**40], [0, 0]],
    "view-empty-huge": ["V", 0, "float32", 0, [0, 2**62, 2**62], [1, 1, 1]],
    "view-dtype": ["V", 0, "object", 0, [1], [1]],
    "view-misaligned": ["V", 0, "float32", 1, [1], [1]],
    "view-ragged": ["V", 0, "float32", 0, [1, 1], [1]],
    "numpy-object": ["N", 0, "|O"],
    "numpy-object-8": ["N", 0, "|O8"],
    "numpy-spec": ["N", 0, "i4,O"],
    "numpy-struct-of-objects": ["N", 0, ["f", 8, False, [["a", None, "|O", 0, []]]]],
    "numpy-struct-huge": ["N", 0, ["f", 2**62, False, [["a", None, "<i4", 0, [2**30, 2**30]]]]],
    "numpy-struct-outside": ["N", 0, ["f", 4, False, [["a", None, "<i4", 100, []]]]],
    "numpy-struct-nested": ["N", 0, ["f", 4, False, [["a", None, ["f"], 0, []]]]],
    "numpy-other-size": ["N", 0, "<c64"],
    "numpy-name": ["N", 0, "V9999999999"],
    "numpy-scalar-object": ["ns", "|O", b"\0" * 8],
    "numpy-scalar-size": ["ns", "<i4", b"\0" * 7],
    "numpy-scalar-huge": ["ns", "|V2000000000", b""],
    "numpy-dtype-object": ["nd", "|O"],
    "bytes-kind": ["B", 0, "pickle"],
    "bytes-index": ["B", 10**6, "bytes"],
    "generator-device": ["G", "cuda:9999", ["T", 0]],
    "generator-state": ["G", "cpu", ["T", 0]],
    "generator-view": ["G", "cpu", ["V", 0, "uint8", 0, [8], [1]]],
    "quantized-scheme": ["Q", ["T", 0], "qint8", None, "exec", None],
    "quantized-parameters": ["Q", ["T", 0], "qint32", None, "tensor", None],
    "quantized-scale": ["Q", ["T", 0], "qint32", None, "tensor", ["t", "x", "y"]],
    "quantized-axis": ["Q", ["T", 0], "qint32", None, "channel", ["t", ["T", 0], ["T", 0], 99]],
    "quantized-shape": ["Q", ["T", 0], "quint4x2", [2**60], "none", ["t"]],
    "quantized-dtype": ["Q", ["T", 0], "float32", None, "none", ["t"]],
    "quantized-inner": ["Q", ["d"], "qint8", None, "none", ["t"]],
    "quantized-expanded": [
        "Q", ["V", 0, "int32", 0, [2**40], [0]], "qint32", None, "channel",
        ["t", ["T", 0], ["T", 0], 0],
    ],
    "int-too-long": ["i", "9" * 5000],
    "int-not-digits": ["i", "0x10"],
    "int-empty": ["i", ""],
    "text-not-utf8": ["u", b"\xff\xff"],
    "range-step-0": ["r", 0, 10, 0],
    "range-of-text": ["r", "a", "b", "c"],
    "path-kind": ["p", "os", "/etc"],
    "path-nul": ["p", "path", 7],
    "date": ["da", "2024-13-45"],
    "datetime": ["dm", "not a time", 0],
    "datetime-fold": ["dm", "2024-01-01T00:00:00", 7],
    "timedelta": ["td", 10**12, 0, 0],
    "dtype": ["dt", "os"],
    "dtype-private": ["dt", "__builtins__"],
    "device": ["dv", "toaster:1"],
    "size-negative": ["sz", -1],
    "size-huge": ["sz", 2**63],
    "complex": ["c", "1", "2"],
    "bytearray": ["ba", "text"],
    "missing": ["m", 1],
    "counter-key": ["ct", ["l"], 1],
    "ordered-attributes": ["o", ["l"], "a", 1],
    "ordered-attribute-names": ["o", ["d", 1, 1], "a", 1],
    "adapter-of-a-class-that-is-not-listed": ["x", "subprocess.Popen", ["l", f"touch {MARKER}"]],
    "subclass-without-parts": [
        "x", "torch.testing._internal.two_tensor.TwoTensor",
        ["d", "dtype", ["dt", "float32"], "shape", ["sz", 4], "stride", ["t", 1], "flags", 0,
         "context", None, "tensors", ["d"]],
    ],
    "subclass-context": ["x", "torchao.optim.subclass_8bit.OptimState8bit", ["d", "context", 1]],
    "sparse-indices-out-of-range": [
        "x", "ckptstore.sparse",
        ["d", "dtype", ["dt", "float32"], "shape", ["sz", 4], "stride", None, "flags", 0,
         "context", ["t", "coo", False], "tensors",
         ["d", "indices", ["V", 0, "int64", 0, [1, 4], [1, 1]],
          "values", ["V", 0, "float32", 0, [4], [1]]]],
    ],
    "sparse-huge": [
        "x", "ckptstore.sparse",
        ["d", "dtype", ["dt", "float32"], "shape", ["sz", 2**62, 2**62], "stride", None,
         "flags", 0, "context", ["t", "csr", True], "tensors",
         ["d", "compressed", ["V", 0, "int64", 0, [1], [1]],
          "indices", ["V", 0, "int64", 0, [1], [1]], "values", ["V", 0, "float32", 0, [1], [1]]]],
    ],
    "stream-position": ["x", "ckptstore.BytesIO", ["t", b"abc", 2**62]],
}  # fmt: skip


def _in_state(node: Any) -> Lie:  # noqa: ANN401
    """Return the lie that the state holds `node` besides its first tensor."""
    return skeleton(["d", "good", ["T", 0], "bad", node])


LIES.update({f"leaf-{name}": _in_state(node) for name, node in STATE_LIES.items()})
