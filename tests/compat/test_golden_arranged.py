"""The golden store of arranged deltas, which every version of ckptstore must read as it is."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from goldenkit import chunks_of, golden, sizes

import ckptstore
from ckptstore.hashing import blake3_hex

GOLDEN = golden("v1-arranged")
IDS = {0: "7fbeeb379905d89d545c3bb4f8a42376", 1: "35ee575030efdab59be409148b8b7236"}
FILES = {
    "commits/000000/000000000001.json": 1018,
    "commits/000000/000000000002.json": 1063,
    "manifests/35/35ee575030efdab59be409148b8b7236.manifest": 1220,
    "manifests/7f/7fbeeb379905d89d545c3bb4f8a42376.manifest": 728,
    "packs/c0/c0a1eb608b1d10ea02a873077d21690b.pack": 187473,
    "packs/f9/f906afb2ba521523984608d728571e58.pack": 239989,
    "store.json": 360,
}
DIGESTS = {
    0: {
        "float32": "d485f57f49c3a34423c03c5de686646c",
        "float64": "13f6f4e8d14b8cc69d15c3dd8e70f34d",
        "few": "915793c6ee350edc7cb7a32c13ec308f",
        "many": "915793c6ee350edc7cb7a32c13ec308f",
        "squares": "ef0f25b6d659fac7a6ce648b1e6ef92c",
    },
    1: {
        "float32": "049b3a9e65c2870be6bdaba82f451f87",
        "float64": "04f7a080e10d56e44f525dc10b4b2329",
        "few": "684381c571eefaf4d9bb47092e983ce2",
        "many": "5465f910aec446bd7083ddb13b1f7847",
        "squares": "20e7841b5a86a455fe51cc65db36bad5",
    },
}
"""Of the bytes of each tensor, by step: the first 16 bytes of BLAKE3-256."""


def test_every_file_of_the_golden_store_is_there() -> None:
    """A missing, added or changed fixture is a failure: it must be read as it was written."""
    assert sizes(GOLDEN) == FILES


@pytest.mark.parametrize("step", DIGESTS)
def test_what_was_saved_comes_back(step: int) -> None:
    """Every tensor of both versions, bit for bit."""
    with ckptstore.open(GOLDEN, read_only=True) as store:
        state = store.load(f"moving@{step}")
        assert store.version(f"moving@{step}").id == IDS[step]

    found = {
        name: blake3_hex(tensor.view(torch.uint8).numpy().tobytes())[:32]
        for name, tensor in state.items()
    }
    assert found == DIGESTS[step]


def test_the_store_is_sound_and_has_all_forms() -> None:
    """Verify reads every piece; there are orders, turns, and planes of half bytes."""
    forms = {
        (header.layout, body[32], body[33])
        for header, body in chunks_of(GOLDEN)
        if header.codec == 4
    }
    with ckptstore.open(GOLDEN, read_only=True) as store:
        assert store.verify().ok

    assert forms == {(1, 1, 0), (1, 0, 4), (2, 3, 0), (3, 0, 4)}


@pytest.mark.parametrize("step", DIGESTS)
def test_the_single_file_reader_reads_them(reader: ModuleType, step: int) -> None:
    """Without ckptstore, from the format page alone."""
    found: dict[str, Any] = reader.restore(GOLDEN, IDS[step])

    digests = {name: blake3_hex(array.tobytes())[:32] for name, array in found.items()}
    assert digests == DIGESTS[step]
