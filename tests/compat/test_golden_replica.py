"""The golden store with versions of another store, which must be read as it is for ever."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from goldenkit import copied, golden, sizes

import ckptstore

GOLDEN = golden("v1-replica")
FILES = {
    "commits/000000/000000000001.json": 3221,
    "commits/000000/000000000002.json": 1263,
    "commits/000000/000000000003.json": 1205,
    "commits/000000/000000000004.json": 1276,
    "commits/000000/000000000005.json": 525,
    "commits/000000/000000000006.json": 1084,
    "commits/000000/000000000007.json": 530,
    "commits/000000/000000000008.json": 1300,
    "commits/000000/000000000009.json": 673,
    "manifests/75/75fe83055248ab1e4ba1f1f19fc28893.manifest": 427,
    "manifests/83/831d4743e50b80ab9b055e4fe79289b0.manifest": 351,
    "manifests/93/9327e2c4c64d07445c3690c834ab9e2d.manifest": 427,
    "manifests/97/9785e699ca00541d0d27e7786c7d9184.manifest": 447,
    "manifests/b2/b2683344eee0dc29b639b0d9f5fc3040.manifest": 427,
    "packs/19/19a2d6a371201061ab05f79fe56e05dd.pack": 1661,
    "packs/8a/8a5e6ac5b8eb0329b144a66f98f53ba6.pack": 3252,
    "packs/b2/b2a881f9ad28af9b42f7df2b5969d4fc.pack": 1655,
    "snapshots/000000000004.snap": 1191,
    "snapshots/000000000008.snap": 1390,
    "store.json": 360,
}
FIRST = "70dfa4e25a304be52508a60a71016361"
"""Id of the store that the versions came from."""
# Run, step: id, parent's step, level, abandoned, whether it was first saved here.
VERSIONS = {
    ("gpt", 0): ("7d21364db6e4ab2e9fa29137a2d470b8", None, "weights", False, False),
    ("gpt", 1): ("1f93274c2e1e6058c41b0308f9454e61", 0, "record", False, False),
    ("gpt", 2): ("bd15c5a907eeed345db28c19bf12d813", 1, "full", False, False),
    ("gpt", 3): ("fcd927e27c399306dc5ebb975434cdaa", 2, "record", True, False),
    ("ft", 2): ("6aeb49566678fc072e018f34b805664b", 2, "record", False, False),
    ("ft", 9): ("dae16f7bd36dcd4dfde8ec0e7ef4c7f9", 2, "full", False, False),
    ("ft", 10): ("75fe83055248ab1e4ba1f1f19fc28893", 9, "full", False, True),
}


def test_every_file_of_the_golden_store_is_there() -> None:
    """A missing, added or changed fixture is a failure: it must be read as it was written."""
    assert sizes(GOLDEN) == FILES


@pytest.mark.parametrize("snapshots", [True, False])
def test_what_came_from_another_store(snapshots: bool, tmp_path: Path) -> None:
    """From the snapshot as from the log alone: lineage, levels, metrics, tags, where it is too."""
    place = GOLDEN
    if not snapshots:
        place = copied(GOLDEN, tmp_path / "log-only", without=("*.snap",))
    with ckptstore.open(place, read_only=True) as store:
        versions = {(v.run, v.step): v for v in store.versions()}
        steps = {v.id: v.step for v in versions.values()}
        found = {
            key: (v.id, steps.get(v.parent), v.level, v.abandoned, not v.origin)
            for key, v in versions.items()
        }
        runs = {info.name: info for info in store.runs()}
        loaded = {key: store.load(f"#{v.id}") for key, v in versions.items() if v.level != "record"}
        sound = store.verify().ok

    assert found == VERSIONS
    assert {v.origin for v in versions.values()} == {FIRST, ""}
    noted = {key for key, v in versions.items() if v.replicas == (FIRST,)}
    assert noted == {("gpt", 0), ("gpt", 3), ("ft", 9), ("ft", 10)}
    losses = {step: repr(versions["gpt", step].metrics["loss"]) for step in range(4)}
    assert losses == {0: "1.0", 1: "nan", 2: repr(1 / 3), 3: "0.25"}
    assert versions["gpt", 2].tags == ("good",)
    assert versions["gpt", 2].metadata == {"note": "größer"}
    assert (runs["gpt"].head, runs["ft"].head) == (VERSIONS["gpt", 2][0], VERSIONS["ft", 10][0])
    assert runs["ft"].origin == VERSIONS["gpt", 2][0]
    changed = {("gpt", 0): 1, ("gpt", 2): 3, ("ft", 9): 4, ("ft", 10): 4}
    for key, count in changed.items():
        assert loaded[key]["model"]["w"][: count + 1].tolist() == [-1.5] * count + [count]
        assert loaded[key]["model"]["w"].sum().item() == pytest.approx(
            12_497_500 - 2 * count, abs=9
        )
        assert ("optimizer" in loaded[key]) == (key != ("gpt", 0))
    assert torch.equal(loaded["ft", 9]["optimizer"]["m"], torch.ones(300))
    assert sound


def test_the_single_file_reads_it_too(reader: ModuleType) -> None:
    """The reader of docs/reference knows versions that came from another store."""
    for name, count in (("gpt", 3), ("ft", 4), (VERSIONS["ft", 9][0], 4)):
        found = reader.restore(GOLDEN, name)["model.w"]
        assert found[: count + 1].tolist() == [-1.5] * count + [count]
