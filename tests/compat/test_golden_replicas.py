"""Golden stores of replicas, pins, and versions of another store: each is read for ever."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from goldenkit import copied, golden

import ckptstore
from ckptstore.errors import PolicyError

# Run, step: id, whether a rollback left it; in the order of the log.
CAME_BACK = {
    ("gpt", 0): ("7fbeeb379905d89d545c3bb4f8a42376", False),
    ("gpt", 1): ("35ee575030efdab59be409148b8b7236", False),  # deleted, collected, and back
    ("gpt", 2): ("537b0b684230c7455d6ac9f582734fa1", False),
    ("gpt", 3): ("0cc41c7caba5f2175f0490e7594afca8", True),
    ("vit", 0): ("d4f41b13184773f9374cbeffdfeb8e65", False),
    ("vit", 1): ("2db6673f9041cf10fe2bfb2a62e8ee68", False),
    ("vit", 2): ("c18ff53055e7f566d363d205f143bb5a", True),
    ("vit", 3): ("f0b4b17a37cac3c0b6249f1936fd24ed", True),
}
HEADS = {"gpt": (2, True), "vit": (1, False)}
"""By run: the step of the head, and whether a rollback of this store's own put it there."""
SOURCE = "70dfa4e25a304be52508a60a71016361"
"""Id of the store that the versions came from."""
# Run, step: id, parent's step, level, abandoned, whether it was first saved here.
OTHERS = {
    ("gpt", 0): ("7d21364db6e4ab2e9fa29137a2d470b8", None, "weights", False, False),
    ("gpt", 1): ("1f93274c2e1e6058c41b0308f9454e61", 0, "record", False, False),
    ("gpt", 2): ("bd15c5a907eeed345db28c19bf12d813", 1, "full", False, False),
    ("gpt", 3): ("fcd927e27c399306dc5ebb975434cdaa", 2, "record", True, False),
    ("ft", 2): ("6aeb49566678fc072e018f34b805664b", 2, "record", False, False),
    ("ft", 9): ("dae16f7bd36dcd4dfde8ec0e7ef4c7f9", 2, "full", False, False),
    ("ft", 10): ("75fe83055248ab1e4ba1f1f19fc28893", 9, "full", False, True),
}
REPLICAS = [
    ("cold", "s3://bucket/moved", f"{1:032x}"),
    ("tape-2", "/mnt/tape/ckpts", f"{2:032x}"),
    ("near", "file:///mnt/near", f"{4:032x}"),
]
FIRST, SECOND = f"{1:032x}", f"{2:032x}"
PINS = [(True, ()), (True, (FIRST, SECOND)), (True, (SECOND,)), (False, ())]


@pytest.mark.parametrize("left_out", [(), ("*16.snap",), ("*16.snap", "*12.snap")])
def test_what_came_back_and_who_decided(left_out: tuple[str, ...], tmp_path: Path) -> None:
    """From each snapshot as from the log alone: order, tags, heads, and who put them there."""
    place = copied(golden("v1-again"), tmp_path / "copy", without=left_out)
    with ckptstore.open(place, read_only=True) as store:
        found = {(v.run, v.step): (v.id, v.abandoned) for v in store.versions()}
        catalog = store.repo.catalog
        heads = {
            info.name: (catalog.version(info.head).step, catalog.holds_head(info.name))
            for info in store.runs()
        }
        for version in store.versions():
            loaded = store.load(f"#{version.id}")["model"]["w"]
            assert torch.equal(loaded, torch.arange(700.0) + version.step)
        assert store.resolve("gpt@t1").step == 1
        assert store.verify().ok

    assert list(found.items()) == list(CAME_BACK.items())
    assert heads == HEADS


@pytest.mark.parametrize("snapshots", [True, False])
def test_what_came_from_another_store(snapshots: bool, tmp_path: Path) -> None:
    """From the snapshot as from the log alone: lineage, levels, metrics, tags, where it is too."""
    place = golden("v1-replica")
    if not snapshots:
        place = copied(golden("v1-replica"), tmp_path / "log-only", without=("*.snap",))
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

    assert found == OTHERS
    assert {v.origin for v in versions.values()} == {SOURCE, ""}
    noted = {key for key, v in versions.items() if v.replicas == (SOURCE,)}
    assert noted == {("gpt", 0), ("gpt", 3), ("ft", 9), ("ft", 10)}
    losses = {step: repr(versions["gpt", step].metrics["loss"]) for step in range(4)}
    assert losses == {0: "1.0", 1: "nan", 2: repr(1 / 3), 3: "0.25"}
    assert versions["gpt", 2].tags == ("good",)
    assert versions["gpt", 2].metadata == {"note": "größer"}
    assert (runs["gpt"].head, runs["ft"].head) == (OTHERS["gpt", 2][0], OTHERS["ft", 10][0])
    assert runs["ft"].origin == OTHERS["gpt", 2][0]
    changed = {("gpt", 0): 1, ("gpt", 2): 3, ("ft", 9): 4, ("ft", 10): 4}
    for key, count in changed.items():
        assert loaded[key]["model"]["w"][: count + 1].tolist() == [-1.5] * count + [count]
        assert loaded[key]["model"]["w"].sum().item() == pytest.approx(
            12_497_500 - 2 * count, abs=9
        )
        assert ("optimizer" in loaded[key]) == (key != ("gpt", 0))
    assert torch.equal(loaded["ft", 9]["optimizer"]["m"], torch.ones(300))
    assert sound


@pytest.mark.parametrize("without", [(), ("*8.snap",), ("*.snap",)], ids=str)
def test_names_of_replicas(without: tuple[str, ...], tmp_path: Path) -> None:
    """From the newest snapshot, from an older one and the log after it, from the log alone."""
    place = copied(golden("v1-tiers"), tmp_path / "copy", without=without)
    with ckptstore.open(place, read_only=True) as store:
        found = [(one.name, one.url, one.store) for one in store.replicas()]
        versions = {(v.run, v.step): v.id for v in store.versions()}
        loaded = store.load("gpt@2")["model"]["w"]
        sound = store.verify().ok

    assert found == REPLICAS
    assert versions == {
        ("gpt", 1): "082cbafbbee13a6fbb08a950a6ca84ca",
        ("gpt", 2): "098fda330df4c2c47995967dd17b3bfb",
    }
    assert loaded.tolist() == [float(n + 1) for n in range(500)]
    assert sound


@pytest.mark.parametrize(
    "without", [(), ("*12.snap",), ("*8.snap", "*12.snap"), ("*.snap",)], ids=str
)
def test_pins(without: tuple[str, ...], tmp_path: Path) -> None:
    """From the newest snapshot, from older ones and the log after them, from the log alone."""
    place = copied(golden("v1-pins"), tmp_path / "copy", without=without)
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
