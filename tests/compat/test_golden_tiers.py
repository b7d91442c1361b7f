"""The golden store with names of replicas, which must be read as it is for ever."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from goldenkit import copied, golden, sizes

import ckptstore

GOLDEN = golden("v1-tiers")
FILES = {
    "commits/000000/000000000001.json": 357,
    "commits/000000/000000000002.json": 419,
    "commits/000000/000000000003.json": 1055,
    "commits/000000/000000000004.json": 414,
    "commits/000000/000000000005.json": 419,
    "commits/000000/000000000006.json": 352,
    "commits/000000/000000000007.json": 418,
    "commits/000000/000000000008.json": 1042,
    "manifests/08/082cbafbbee13a6fbb08a950a6ca84ca.manifest": 351,
    "manifests/09/098fda330df4c2c47995967dd17b3bfb.manifest": 351,
    "packs/7e/7e600bd7dfda9947448b939e9b613537.pack": 730,
    "packs/c8/c8645f4b172cbeebe4ec2ffa9ecd98bb.pack": 730,
    "snapshots/000000000004.snap": 564,
    "snapshots/000000000008.snap": 690,
    "store.json": 360,
}
REPLICAS = [
    ("cold", "s3://bucket/moved", f"{1:032x}"),
    ("tape-2", "/mnt/tape/ckpts", f"{2:032x}"),
    ("near", "file:///mnt/near", f"{4:032x}"),
]


def test_every_file_of_the_golden_store_is_there() -> None:
    """A missing, added or changed fixture is a failure: it must be read as it was written."""
    assert sizes(GOLDEN) == FILES


@pytest.mark.parametrize("without", [(), ("*8.snap",), ("*.snap",)], ids=str)
def test_names_of_replicas(without: tuple[str, ...], tmp_path: Path) -> None:
    """From the newest snapshot, from an older one and the log after it, from the log alone."""
    place = copied(GOLDEN, tmp_path / "copy", without=without)
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


def test_the_single_file_reads_it_too(reader: ModuleType) -> None:
    """The reader of docs/reference passes over names of replicas."""
    assert reader.restore(GOLDEN, "gpt")["model.w"][:3].tolist() == [1.0, 2.0, 3.0]
