"""The golden store of tensors that follow from others, which every version must read as it is."""

from __future__ import annotations

import math
import struct
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from goldenkit import golden, sizes

import ckptstore
from ckptstore.encodings.casts import FLOATS, raw_dtype, recast
from ckptstore.encodings.codebooks import BOOKS
from ckptstore.hashing import blake3_hex

GOLDEN = golden("v1-recipes")
FIRST, SECOND = "ee0616d645f8a718d470b3a4b59182b9", "4f852edf3c43948caa6c2057319bbabf"
FILES = {
    "store.json": 360,
    "commits/000000/000000000001.json": 1301,
    "commits/000000/000000000002.json": 1382,
    f"manifests/4f/{SECOND}.manifest": 2255,
    f"manifests/ee/{FIRST}.manifest": 2224,
    "packs/5d/5d644f1c2865ea435c5350e608e2133d.pack": 110628,
    "packs/c7/c7e049fb5b967dad0d2bdace3d263b50.pack": 137423,
}
DIGESTS = {
    "model.weight": "bf40b06dec64ccea01ded5a4d86751bd",
    "model.half": "740cbca4b33641340c4fb919559f3d44",
    "master": "45e1926802898756a79d8e9a6fd50dc8",
    "bf16": "5b3677d00e69c37a58c6f86de0c7c0c2",
    "fp16": "2dfbb7040d4492e09456a009d00fa682",
    "fp8_e4m3fn": "53491ca4c3e345459404fb127e745f85",
    "fp8_e5m2": "ef31df471fc2b2165aea637990ef1314",
    "int8": "38a7cd4e5a81158fb04a6eb633ccf704",
    "int8_bf16": "1c375a1b6d15c1b37295b549760051b0",
    "dynamic_signed": "001a296dd6db64b311c2d06c7f5f95ef",
    "dynamic_unsigned": "8add8b1db8d7514b083336a5146852ba",
    "turned": "db1010fdfc5c701e1ccc455737425fff",
    "scalar": "68b64841a69e013cefceb67bf5ba7aaf",
}
"""Of what the second version gives back, row by row: the first 16 bytes of BLAKE3-256."""
OF_THE_FIRST = {
    "model.weight": "832f3d67060cf687facd251380203357",
    "master": "c39b62db141026eabeac59c73c39b835",
    "int8": "a15d51e22fe90d978cef73a34d4747b7",
}
"""What the first version gives back that the second does not."""
RECIPES = {
    "model.weight": ("cast", "", 0, True),
    "model.half": ("cast", "", 0, True),
    "master": None,
    "bf16": ("cast", "", 0, False),
    "fp16": ("cast", "", 0, False),
    "fp8_e4m3fn": ("cast", "", 0, False),
    "fp8_e5m2": ("cast", "", 0, False),
    "int8": ("scaled", "linear", 64, False),
    "int8_bf16": ("scaled", "linear", 64, False),
    "dynamic_signed": ("scaled", "dynamic-signed", 256, False),
    "dynamic_unsigned": ("scaled", "dynamic-unsigned", 256, False),
    "turned": ("scaled", "linear", 16, False),
    "scalar": None,
}


def flat(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of a loaded state by their paths."""
    model = {f"model.{name}": tensor for name, tensor in state["model"].items()}
    return {**model, **{name: value for name, value in state.items() if name != "model"}}


def digest_of(tensor: torch.Tensor) -> str:
    """Return 32 digits of the digest of a tensor, row by row."""
    return blake3_hex(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())[:32]


def test_every_file_of_the_golden_store_is_there() -> None:
    """A missing, added or changed fixture is a failure: it must be read as it was written."""
    assert sizes(GOLDEN) == FILES


def test_what_was_stored_in_fewer_bits_comes_back_as_it_did() -> None:
    """Every tensor of both versions has the bits that it had when it was saved."""
    with ckptstore.open(GOLDEN, read_only=True) as store:
        first, second = (flat(store.load(f"coded@{step}")) for step in (1, 2))
        sound = store.verify().ok

    assert {name: digest_of(tensor) for name, tensor in second.items()} == DIGESTS
    assert {name: digest_of(tensor) for name, tensor in first.items()} == DIGESTS | OF_THE_FIRST
    assert second["int8"][5:9].tolist() == [0.0, 0.0, 100.0, 0.0]
    assert second["dynamic_signed"][:2].tolist() == [-0.5546661019325256, 0.25616762042045593]
    assert second["fp8_e5m2"][-2:].tolist() == [-math.inf, -0.0]
    assert second["turned"].stride() == (2400, 1, 300, 30)
    assert sound


def test_slices_are_those_of_the_whole() -> None:
    """A slice of each form is read as the whole is."""
    with ckptstore.open(GOLDEN, read_only=True) as store:
        whole, lazy = flat(store.load("coded")), store.version("coded")
        for name, tensor in whole.items():
            if tensor.dim():
                assert torch.equal(lazy[name][1:2], tensor[1:2]), name


def test_the_recipes_are_what_they_were() -> None:
    """The first manifest says which tensors follow from which, and how exactly."""
    with ckptstore.open(GOLDEN, read_only=True) as store:
        content = store.version("coded@1")._content
    found = {}
    for leaf in content.leaves:
        recipe = content.manifest.tensors[leaf.index].recipe
        found[".".join(map(str, leaf.path))] = recipe and (
            recipe.kind,
            recipe.code,
            recipe.block,
            recipe.exact,
        )

    assert found == RECIPES
    assert content.hidden == frozenset(range(13, 27))
    int8 = content.manifest.tensors[7].recipe
    assert int8 is not None
    assert (round(int8.max_abs, 7), round(int8.rel_l2, 8)) == (0.0030358, 0.00672781)


def test_the_manifest_has_the_flag() -> None:
    """A reader that does not know recipes refuses the record instead of returning nothing."""
    data = (GOLDEN / f"manifests/ee/{FIRST}.manifest").read_bytes()

    assert struct.unpack_from("<8sHH", data) == (b"CKPTMANI", 1, 2)


@pytest.mark.parametrize("name", ["coded", FIRST])
def test_read_without_ckptstore(reader: ModuleType, name: str) -> None:
    """The single-file reader makes the same bits, and checks them against the recipes' digests."""
    found = reader.restore(GOLDEN, name)
    meant = DIGESTS if name == "coded" else DIGESTS | OF_THE_FIRST

    assert {
        path: blake3_hex(np.ascontiguousarray(array).tobytes())[:32]
        for path, array in found.items()
    } == meant


@pytest.mark.parametrize("source", sorted(FLOATS))
@pytest.mark.parametrize("target", sorted(FLOATS))
def test_casts_without_ckptstore(reader: ModuleType, source: str, target: str) -> None:
    """The reader's casts, written apart, give the same bits for every pattern of up to 16 bits."""
    dtype = raw_dtype(source)
    random = np.random.default_rng(7)
    if FLOATS[source] <= 2:
        raw = np.arange(1 << 8 * FLOATS[source], dtype=dtype)
    else:
        scale = 10.0 ** random.integers(-10, 6, 20_000)
        usual = (random.standard_normal(20_000) * scale).astype(source).view(dtype)
        raw = np.concatenate([usual, random.integers(0, 1 << 63, 20_000, np.uint64).astype(dtype)])
    if source != target:
        made = reader.from_float32(target, reader.to_float32(source, raw.tobytes()))
        assert made == recast(source, target, raw).tobytes()


def test_codebooks_without_ckptstore(reader: ModuleType) -> None:
    """The reader's codes stand for the same values."""
    for place, book in enumerate(BOOKS.values()):
        assert reader.codebook(place).tobytes() == book.tobytes()
