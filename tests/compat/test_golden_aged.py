"""The golden store of aged versions, which every version of ckptstore must read as it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from goldenkit import copied, golden, sizes

import ckptstore
from ckptstore.catalog.policy import Policy

GOLDEN = golden("v1-aged")
FILES = {
    "commits/000000/000000000001.json": 1122,
    "commits/000000/000000000002.json": 1175,
    "commits/000000/000000000003.json": 1175,
    "commits/000000/000000000004.json": 1175,
    "commits/000000/000000000005.json": 1173,
    "commits/000000/000000000006.json": 1173,
    "commits/000000/000000000007.json": 673,
    "commits/000000/000000000008.json": 879,
    "commits/000000/000000000009.json": 1418,
    "commits/000000/000000000010.json": 880,
    "commits/000000/000000000011.json": 876,
    "commits/000000/000000000012.json": 428,
    "manifests/08/081642f35df09602ba9fa2e3c81d579b.manifest": 553,
    "manifests/31/3106f95611e997564c709e3d20d62c4b.manifest": 553,
    "manifests/5c/5c2284d3c4134eb3b9fc7dbc94f995a5.manifest": 553,
    "manifests/61/6113fc833af3e6465268be322427cda8.manifest": 532,
    "manifests/79/79e7513b2c3578d54fdfd36cb2f0f927.manifest": 553,
    "manifests/93/93e9952af33cfb4fdf532566ee958cf7.manifest": 553,
    "manifests/b5/b5a14de02e10621f7223a7d4e9276854.manifest": 553,
    "manifests/d5/d50ed83dae0e62b6ac614dfacf943da4.manifest": 721,
    "manifests/dc/dcb6f872ef59b182ca7d3afbd9d90f0f.manifest": 721,
    "manifests/eb/eb06dc82609c8464c59f89293ae36820.manifest": 524,
    "manifests/f7/f7704f23f79d9a0a937e19880eaec0de.manifest": 444,
    "packs/0f/0fe02db6f02e95478b4e6fe220ff029e.pack": 25918,
    "packs/1e/1e1fc90a24e3389450135a0b0afba439.pack": 16306,
    "packs/41/415dac06266e9852cb82919d9991ca2e.pack": 6270,
    "packs/50/502272929d91b679d492eb2737520c58.pack": 22406,
    "packs/66/66ac4ff9f4ba8b3a7ac471720d53eef8.pack": 15938,
    "packs/70/701ba8eec066af150822af5b78b01c72.pack": 17489,
    "packs/82/82d8a015a58c82be1fe176c3192773d8.pack": 5415,
    "packs/91/91b3ad579734a7c04a09a254e28aaf8f.pack": 22766,
    "packs/96/96bd4cbce91b63b2442c2d45b6d0f687.pack": 2595,
    "packs/9a/9ab439e140f7d995714ec7f080416127.pack": 8622,
    "packs/f6/f63678fa7ac03f3f806754efa9f5a233.pack": 6457,
    "snapshots/000000000008.snap": 1260,
    "snapshots/000000000012.snap": 1434,
    "store.json": 360,
}
LEVELS = {
    0: "record",
    1: "weights-int8",
    2: "weights-int8",
    3: "weights-bf16",
    4: "weights",
    5: "full",
}
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


def test_every_file_of_the_golden_store_is_there() -> None:
    """A missing, added or changed fixture is a failure: it must be read as it was written."""
    assert sizes(GOLDEN) == FILES


@pytest.mark.parametrize("snapshots", [True, False])
def test_levels_weights_and_policy_come_back(snapshots: bool, tmp_path: Path) -> None:
    """From the snapshot as from the log alone: every level, every value, the bounds."""
    place = GOLDEN
    if not snapshots:
        place = copied(GOLDEN, tmp_path / "log-only", without=("*.snap",))
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
