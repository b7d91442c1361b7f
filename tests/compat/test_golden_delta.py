"""The golden store of deltas, which every version of ckptstore must read as it is."""

from __future__ import annotations

import struct
from types import ModuleType
from typing import Any

import pytest
from goldenkit import chunks_of, golden, sizes

import ckptstore
from ckptstore.hashing import blake3_hex

GOLDEN = golden("v1-delta")
IDS = {
    1: "8dfd199bf11ce143e329b7f75e780b96",
    2: "22e580d19470f63d496a31de6920a031",
    3: "700da15c1c8ed39b2e82a5c5408ff7a6",
}
FILES = {
    "commits/000000/000000000001.json": 1014,
    "commits/000000/000000000002.json": 1060,
    "commits/000000/000000000003.json": 1060,
    "commits/000000/000000000004.json": 1063,
    "commits/000000/000000000005.json": 390,
    "manifests/22/22e580d19470f63d496a31de6920a031.manifest": 1620,
    "manifests/70/700da15c1c8ed39b2e82a5c5408ff7a6.manifest": 1547,
    "manifests/8d/8dfd199bf11ce143e329b7f75e780b96.manifest": 1595,
    "manifests/95/957321c66793962030992d1f3650bbdd.manifest": 952,
    "packs/51/51bbe3af76c4ba783f45bf4aef75ff77.pack": 70288,
    "packs/a6/a6b175e73795f7ef9adac59eb1afc01b.pack": 36725,
    "packs/c3/c3c17135a450f80704bc816e360477d9.pack": 340647,
    "packs/cd/cd9309992f241ab059f6786b547a4011.pack": 36517,
    "snapshots/000000000004.snap": 941,
    "store.json": 360,
}
DIGESTS = {
    1: {
        "float32": "20781c30980399f1142e46d0c03faae9",
        "float16": "e92afc5c86c3852004d5b3972e9bc84c",
        "float64": "b0394b7d6f95d7a481d4e4f31dd7d282",
        "int16": "c4ea02b24cb1fb30598a5a415ec3015a",
        "int32": "a446b2991154d3d9ed2783eb1c97aa0d",
        "int64": "7b03c990b80e02423a894f2ebe5c9598",
        "uint8": "0649bc9b4b985f742cc6cabcd2afda03",
    },
    2: {
        "float32": "3d501ad02e15d515be207c64478c46d6",
        "float16": "ec3da91e86503a6924cfe19552761d00",
        "float64": "3b4d5b21e1d4b70e1c8022a1f6d18835",
        "int16": "cd958e18cf7accfd9f34a75636103c29",
        "int32": "befad303178db8d20d13aff46844411f",
        "int64": "1379c07dcecf0a6fff3e7e42657f453d",
        "uint8": "6945381d096763a91947cbb9f47421fe",
    },
}
DIGESTS[3] = {**DIGESTS[2], "int16": "73347dd9bddf96d19e872d29c5b9004b"}
"""Of the bytes of each tensor, by step: the first 16 bytes of BLAKE3-256."""


def test_every_file_of_the_golden_store_is_there() -> None:
    """A missing, added or changed fixture is a failure: it must be read as it was written."""
    assert sizes(GOLDEN) == FILES


@pytest.mark.parametrize("step", DIGESTS)
def test_what_was_saved_comes_back(step: int) -> None:
    """Every tensor of every version, though the version of the keyframes was deleted."""
    with ckptstore.open(GOLDEN, read_only=True) as store:
        state = store.load(f"moving@{step}")
        assert store.version(f"moving@{step}").id == IDS[step]

    found = {name: blake3_hex(tensor.numpy().tobytes())[:32] for name, tensor in state.items()}
    assert found == DIGESTS[step]


def test_the_store_is_sound_and_has_deltas() -> None:
    """Verify reads every piece; deltas of every layout are among them."""
    layouts = {header.layout for header, _ in chunks_of(GOLDEN) if header.codec == 3}
    with ckptstore.open(GOLDEN, read_only=True) as store:
        assert store.verify().ok

    assert layouts == {0, 1, 2, 3, 4, 5, 6}


@pytest.mark.parametrize("step", DIGESTS)
def test_manifests_have_the_flag(step: int) -> None:
    """A reader that does not know deltas refuses the record, instead of losing their bases."""
    path = next(GOLDEN.glob(f"manifests/*/{IDS[step]}.manifest"))

    assert struct.unpack_from("<8sHH", path.read_bytes()) == (b"CKPTMANI", 1, 4)


@pytest.mark.parametrize("step", DIGESTS)
def test_the_single_file_reader_reads_deltas(reader: ModuleType, step: int) -> None:
    """Without ckptstore, from the format page alone."""
    found: dict[str, Any] = reader.restore(GOLDEN, IDS[step])

    digests = {name: blake3_hex(array.tobytes())[:32] for name, array in found.items()}
    assert digests == DIGESTS[step]
