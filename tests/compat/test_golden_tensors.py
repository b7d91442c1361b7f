"""Golden stores of deltas, aged and derived tensors, and tensors in blocks, read for ever."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from goldenkit import DIGESTS, chunks_of, copied, golden

import ckptstore
from ckptstore.catalog.policy import Policy
from ckptstore.encodings.casts import FLOATS, raw_dtype, recast
from ckptstore.encodings.codebooks import BOOKS
from ckptstore.hashing import blake3_hex

AGED, BLOCKS, RECIPES = golden("v1-aged"), golden("v1-blocks"), golden("v1-recipes")
LEVELS = {
    0: "record", 1: "weights-int8", 2: "weights-int8", 3: "weights-bf16", 4: "weights", 5: "full",
}  # fmt: skip
# The first three elements, and the sum of all, of bfloat16 weights and of float32 ones.
LOW = {
    1: ([-2.34375, 4.03125, 3.71875], 5007.595458984375),
    2: ([-1.3515625, 5.03125, 4.75], 10006.7646484375),
    3: ([-0.3359375, 6.03125, 5.71875], 15005.891510009766),
    4: ([0.6640625, 7.03125, 6.71875], 20005.91796875),
    5: ([1.6640625, 8.0, 7.71875], 25005.609375),
}
OWN = {
    1: ([-0.7818036079406738, 1.3433809280395508, 1.2442790269851685], 1668.7101984228939),
    2: ([-0.4501049816608429, 1.677664041519165, 1.5685476064682007], 3335.2574949003756),
    3: ([-0.1123046875, 2.015625, 1.90625], 5001.958511352539),
    4: ([0.22111113369464874, 2.3433332443237305, 2.240000009536743], 6668.654444023967),
    5: ([0.5544444918632507, 2.676666498184204, 2.573333501815796], 8335.321111381054),
}
TILES = [[9 * row + column for column in range(9)] for row in range(7)]
DEEP = [[[(15 * a + 5 * b + c) % 13 for c in range(5)] for b in range(3)] for a in range(4)]
BLOCKS_ID = "2b075ff5a57a271ce0d62c54fc783b72"
DELTA_IDS = {
    ("v1-delta", 1): "8dfd199bf11ce143e329b7f75e780b96",
    ("v1-delta", 2): "22e580d19470f63d496a31de6920a031",
    ("v1-delta", 3): "700da15c1c8ed39b2e82a5c5408ff7a6",
    ("v1-arranged", 0): "7fbeeb379905d89d545c3bb4f8a42376",
    ("v1-arranged", 1): "35ee575030efdab59be409148b8b7236",
}
FIRST, SECOND = "ee0616d645f8a718d470b3a4b59182b9", "4f852edf3c43948caa6c2057319bbabf"
FOLLOW = {
    "model.weight": ("cast", "", 0, True), "model.half": ("cast", "", 0, True), "master": None,
    "bf16": ("cast", "", 0, False), "fp16": ("cast", "", 0, False),
    "fp8_e4m3fn": ("cast", "", 0, False), "fp8_e5m2": ("cast", "", 0, False),
    "int8": ("scaled", "linear", 64, False), "int8_bf16": ("scaled", "linear", 64, False),
    "dynamic_signed": ("scaled", "dynamic-signed", 256, False),
    "dynamic_unsigned": ("scaled", "dynamic-unsigned", 256, False),
    "turned": ("scaled", "linear", 16, False), "scalar": None,
}  # fmt: skip


def digest_of(values: np.ndarray[Any, Any]) -> str:
    """Return 32 digits of the digest of an array, row by row."""
    return blake3_hex(np.ascontiguousarray(values).tobytes())[:32]


def bits_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return the bytes of a tensor, row by row."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


@pytest.mark.parametrize(
    ("name", "version", "flags"),
    [
        ("v1-blocks", BLOCKS_ID, 1),
        ("v1-recipes", FIRST, 2),
        *((store, version, 4) for (store, _), version in DELTA_IDS.items() if store == "v1-delta"),
    ],
)
def test_the_manifest_has_the_flag(name: str, version: str, flags: int) -> None:
    """A reader that does not know blocks, recipes or deltas refuses the record.

    It would mix up elements, return nothing, or lose the bases of deltas.
    """
    data = (golden(name) / f"manifests/{version[:2]}/{version}.manifest").read_bytes()

    assert struct.unpack_from("<8sHH", data) == (b"CKPTMANI", 1, flags)


@pytest.mark.parametrize("snapshots", [True, False])
def test_levels_weights_and_policy_come_back(snapshots: bool, tmp_path: Path) -> None:
    """From the snapshot as from the log alone: every level, every value, the bounds."""
    place = AGED
    if not snapshots:
        place = copied(AGED, tmp_path / "log-only", without=("*.snap",))
    with ckptstore.open(place, read_only=True) as store:
        versions = {version.step: version for version in store.versions("old")}
        loaded = {step: store.load(f"#{v.id}") for step, v in versions.items() if step}
        policy = Policy.from_json(store.runs()[0].policy or {})
        sound = store.verify().ok

    assert {step: version.level for step, version in versions.items()} == LEVELS
    for step, state in loaded.items():
        assert set(state) == {"model", "epoch"} | ({"optimizer"} if step == 5 else set())
        for name, dtype, wanted in (("low", torch.bfloat16, LOW), ("own", torch.float32, OWN)):
            tensor = state["model"][name]
            assert (tensor.dtype, tensor.shape) == (dtype, (100, 50))
            assert (tensor[0, :3].tolist(), tensor.double().sum().item()) == wanted[step]
    assert str(policy) == "full: last 1; weights-int8: all; lossy: int8:rel_l2=0.02"
    assert sound


@pytest.mark.parametrize(("name", "step"), DELTA_IDS)
def test_deltas_come_back(name: str, step: int) -> None:
    """Every tensor of every version, though the version of the keyframes was deleted."""
    with ckptstore.open(golden(name), read_only=True) as store:
        state = store.load(f"moving@{step}")
        assert store.version(f"moving@{step}").id == DELTA_IDS[name, step]

    found = {path: digest_of(bits_of(tensor)) for path, tensor in state.items()}
    assert found == DIGESTS[name][str(step)]


@pytest.mark.parametrize(("name", "step"), DELTA_IDS)
def test_the_single_file_reader_reads_deltas(reader: ModuleType, name: str, step: int) -> None:
    """Without ckptstore, from the format page alone."""
    found = reader.restore(golden(name), DELTA_IDS[name, step])

    digests = {path: digest_of(array) for path, array in found.items()}
    assert digests == DIGESTS[name][str(step)]


def test_deltas_are_sound_and_have_all_forms() -> None:
    """Verify reads every piece; every layout is there, and orders, turns, planes of half bytes."""
    layouts = {header.layout for header, _ in chunks_of(golden("v1-delta")) if header.codec == 3}
    forms = {
        (header.layout, body[32], body[33])
        for header, body in chunks_of(golden("v1-arranged"))
        if header.codec == 4
    }
    for name in ("v1-delta", "v1-arranged"):
        with ckptstore.open(golden(name), read_only=True) as store:
            assert store.verify().ok

    assert layouts == {0, 1, 2, 3, 4, 5, 6}
    assert forms == {(1, 1, 0), (1, 0, 4), (2, 3, 0), (3, 0, 4)}


def test_whole_tensors_come_back() -> None:
    """Tensors that two ranks wrote, by rows, by columns and in tiles; and plain values."""
    with ckptstore.open(BLOCKS, read_only=True) as store:
        state = store.load("ranks@3")
        lazy = store.version(f"#{BLOCKS_ID}")
        kinds = {
            leaf.path[-1]: lazy._content.manifest.tensors[leaf.index]
            for leaf in lazy._content.leaves
        }
        part = lazy["model.tiles"][2:6, 3:7]
        version = store.resolve("ranks")
        sound = store.verify().ok

    model = state["model"]
    numbers = torch.arange(20_000, dtype=torch.float32).reshape(100, 200) / 8
    assert torch.equal(model["rows"], numbers)
    assert torch.equal(model["columns"], numbers)
    assert model["tiles"].tolist() == TILES
    assert model["deep"].dtype == torch.bfloat16
    assert model["deep"].tolist() == DEEP
    assert (state["step"], state["pair"][0]) == (3, 1)
    assert state["pair"][1].tolist() == [1.5, -2.0]
    assert part.tolist() == [row[3:7] for row in TILES[2:6]]
    assert [len(kinds[name].blocks or ()) for name in ("rows", "columns", "tiles", "deep")] == [
        0, 2, 4, 2,
    ]  # fmt: skip
    assert (version.metrics, version.content[:8], sound) == ({"loss": 0.25}, "7fd99b8f", True)


def test_boxes_that_leave_a_hole_are_refused_without_ckptstore(
    reader: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The single-file reader returns no memory that it did not fill."""
    read = reader.read_manifest

    def bent(*arguments: Any) -> dict[str, Any]:  # noqa: ANN401
        body: dict[str, Any] = read(*arguments)
        place, boxes = body["blocks"][0]
        dims = len(body["tensors"][place][2])
        table = np.frombuffer(boxes, "<u8").reshape(-1, 2, dims).copy()
        table[:, 0] = table[0, 0]  # all of them where the first is
        body["blocks"] = [[place, table.tobytes()]]
        return body

    monkeypatch.setattr(reader, "read_manifest", bent)
    with pytest.raises(ValueError, match=r"tile|broadcast"):
        reader.restore(BLOCKS, "ranks")


def test_blocks_are_read_without_ckptstore(reader: ModuleType) -> None:
    """The single-file reader puts the boxes together."""
    found = reader.restore(BLOCKS, "ranks")

    numbers = np.arange(20_000, dtype=np.float32).reshape(100, 200) / 8
    assert np.array_equal(found["model.rows"], numbers)
    assert np.array_equal(found["model.columns"], numbers)
    assert found["model.tiles"].tolist() == TILES
    bits = torch.tensor(DEEP).to(torch.bfloat16).view(torch.uint16)
    assert found["model.deep"].tolist() == bits.tolist()
    assert found["step"] == 3


def flat(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of a loaded state by their paths."""
    model = {f"model.{name}": tensor for name, tensor in state["model"].items()}
    return {**model, **{name: value for name, value in state.items() if name != "model"}}


def test_what_was_stored_in_fewer_bits_comes_back_as_it_did() -> None:
    """Every tensor of both versions has the bits that it had when it was saved."""
    with ckptstore.open(RECIPES, read_only=True) as store:
        first, second = (flat(store.load(f"coded@{step}")) for step in (1, 2))
        sound = store.verify().ok

    assert {name: digest_of(bits_of(tensor)) for name, tensor in second.items()} == DIGESTS[
        "v1-recipes"
    ]["2"]
    assert {name: digest_of(bits_of(tensor)) for name, tensor in first.items()} == DIGESTS[
        "v1-recipes"
    ]["1"]
    assert second["int8"][5:9].tolist() == [0.0, 0.0, 100.0, 0.0]
    assert second["dynamic_signed"][:2].tolist() == [-0.5546661019325256, 0.25616762042045593]
    assert second["fp8_e5m2"][-2:].tolist() == [-math.inf, -0.0]
    assert second["turned"].stride() == (2400, 1, 300, 30)
    assert sound


def test_slices_are_those_of_the_whole() -> None:
    """A slice of each form is read as the whole is."""
    with ckptstore.open(RECIPES, read_only=True) as store:
        whole, lazy = flat(store.load("coded")), store.version("coded")
        for name, tensor in whole.items():
            if tensor.dim():
                assert torch.equal(lazy[name][1:2], tensor[1:2]), name


def test_the_recipes_are_what_they_were() -> None:
    """The first manifest says which tensors follow from which, and how exactly."""
    with ckptstore.open(RECIPES, read_only=True) as store:
        content = store.version("coded@1")._content
    found = {}
    for leaf in content.leaves:
        recipe = content.manifest.tensors[leaf.index].recipe
        found[".".join(map(str, leaf.path))] = recipe and (
            recipe.kind, recipe.code, recipe.block, recipe.exact,
        )  # fmt: skip

    assert found == FOLLOW
    assert content.hidden == frozenset(range(13, 27))
    int8 = content.manifest.tensors[7].recipe
    assert int8 is not None
    assert (round(int8.max_abs, 7), round(int8.rel_l2, 8)) == (0.0030358, 0.00672781)


@pytest.mark.parametrize(("name", "step"), [("coded", "2"), (FIRST, "1")])
def test_recipes_are_read_without_ckptstore(reader: ModuleType, name: str, step: str) -> None:
    """The single-file reader makes the same bits, and checks them against the recipes' digests."""
    found = reader.restore(RECIPES, name)

    digests = {path: digest_of(array) for path, array in found.items()}
    assert digests == DIGESTS["v1-recipes"][step]


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
