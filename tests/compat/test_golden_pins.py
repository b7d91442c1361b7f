"""The golden store with pins for other stores, which must be read as it is for ever."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from goldenkit import copied, golden, sizes

import ckptstore
from ckptstore.errors import PolicyError

GOLDEN = golden("v1-pins")
FILES = {
    "commits/000000/000000000001.json": 987,
    "commits/000000/000000000002.json": 1038,
    "commits/000000/000000000003.json": 1038,
    "commits/000000/000000000004.json": 1038,
    "commits/000000/000000000005.json": 372,
    "commits/000000/000000000006.json": 516,
    "commits/000000/000000000007.json": 617,
    "commits/000000/000000000008.json": 372,
    "commits/000000/000000000009.json": 417,
    "commits/000000/000000000010.json": 373,
    "commits/000000/000000000011.json": 375,
    "commits/000000/000000000012.json": 519,
    "manifests/46/4683a3258a6d07e02b8d2e7d86658dc0.manifest": 349,
    "manifests/5a/5ad515ad8ee28f0ca9ec3a41ebbeb806.manifest": 349,
    "manifests/7b/7bf8d6a2422d214b1822941009c59309.manifest": 349,
    "manifests/f4/f43172841d7a27e4eb586d3c9955616c.manifest": 349,
    "packs/04/04122977e510635aa98215b1bafa87a0.pack": 334,
    "packs/4e/4e40b825e6720fe2809bd3e681846b0c.pack": 337,
    "packs/c2/c2e0e7b6a22244058338814f2a2d696d.pack": 335,
    "packs/ca/ca44f521e7ae70cc4b1e0df81058c769.pack": 336,
    "snapshots/000000000008.snap": 922,
    "snapshots/000000000012.snap": 910,
    "store.json": 360,
}
FIRST, SECOND = f"{1:032x}", f"{2:032x}"
PINS = [(True, ()), (True, (FIRST, SECOND)), (True, (SECOND,)), (False, ())]


def test_every_file_of_the_golden_store_is_there() -> None:
    """A missing, added or changed fixture is a failure: it must be read as it was written."""
    assert sizes(GOLDEN) == FILES


@pytest.mark.parametrize(
    "without", [(), ("*12.snap",), ("*8.snap", "*12.snap"), ("*.snap",)], ids=str
)
def test_pins(without: tuple[str, ...], tmp_path: Path) -> None:
    """From the newest snapshot, from older ones and the log after them, from the log alone."""
    place = copied(GOLDEN, tmp_path / "copy", without=without)
    with ckptstore.open(place) as store:
        assert [(one.pinned, one.pinned_for) for one in store.versions()] == PINS
        for step in range(3):
            with pytest.raises(PolicyError, match="is pinned"):
                store.remove([f"gpt@{step}"], force=True)
        # A person's pin is beside that of the other store.
        store.unpin_for(SECOND)
        assert [one.pinned for one in store.versions()] == [True, True, True, False]
        store.unpin_for(FIRST)
        assert [one.pinned for one in store.versions()] == [True, False, True, False]


def test_the_single_file_reads_it_too(reader: ModuleType) -> None:
    """The reader of docs/reference passes over pins."""
    assert reader.restore(GOLDEN, "gpt")["model.w"][:3].tolist() == [3.0, 4.0, 5.0]
