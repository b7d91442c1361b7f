"""The golden store of a replica that decided for itself, which must be read as it is for ever."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from goldenkit import copied, golden, sizes

import ckptstore

GOLDEN = golden("v1-again")
FILES = {
    "commits/000000/000000000001.json": 295,
    "commits/000000/000000000002.json": 1168,
    "commits/000000/000000000003.json": 1200,
    "commits/000000/000000000004.json": 1200,
    "commits/000000/000000000005.json": 1200,
    "commits/000000/000000000006.json": 1213,
    "commits/000000/000000000007.json": 1200,
    "commits/000000/000000000008.json": 1200,
    "commits/000000/000000000009.json": 1200,
    "commits/000000/000000000010.json": 963,
    "commits/000000/000000000011.json": 391,
    "commits/000000/000000000012.json": 447,
    "commits/000000/000000000013.json": 445,
    "commits/000000/000000000014.json": 1202,
    "commits/000000/000000000015.json": 413,
    "commits/000000/000000000016.json": 486,
    "manifests/02/0212dee90e0b2c65c57542e7300f09ce.manifest": 351,
    "manifests/12/125bf668620a74ea8385594962b7593e.manifest": 351,
    "manifests/14/14703278da941938ac1327e730c9213e.manifest": 351,
    "manifests/44/44cde93d58640e87708aa4feef406e6b.manifest": 351,
    "manifests/98/98f010de80651398543c31270498dc5e.manifest": 351,
    "manifests/cb/cb5114d31b0b2d20d3308f7a0c7c91a0.manifest": 351,
    "manifests/cc/ccd9c4161a7b451fc4a089327cd506e1.manifest": 351,
    "manifests/f6/f6e95ebee7fb1ddec0fa7ae21dc433ef.manifest": 351,
    "packs/07/075b57fc66ed40c9e7dc49502724e5b1.pack": 913,
    "packs/18/187eb9cee1dd444ef9047d7dead993f1.pack": 915,
    "packs/24/2464d894097bda8e12baf57e34efcc57.pack": 914,
    "packs/2f/2f5d4cae687ceb5c6965b5e42d3fc1e6.pack": 915,
    "packs/3f/3f7b1d421baa51d0ae37a2c824dfe819.pack": 915,
    "packs/a8/a809700ff921b4980d81a22580335196.pack": 914,
    "packs/d0/d0211cec73be763a7f6d51adcbcdb606.pack": 913,
    "packs/e8/e8382a4b7db8c29e6d1f8c86677e7db2.pack": 915,
    "snapshots/000000000012.snap": 1463,
    "snapshots/000000000016.snap": 1415,
    "store.json": 360,
}
# Run, step: id, whether a rollback left it; in the order of the log.
VERSIONS = {
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


def test_every_file_of_the_golden_store_is_there() -> None:
    """A missing, added or changed fixture is a failure: it must be read as it was written."""
    assert sizes(GOLDEN) == FILES


@pytest.mark.parametrize("left_out", [(), ("*16.snap",), ("*16.snap", "*12.snap")])
def test_what_came_back_and_who_decided(left_out: tuple[str, ...], tmp_path: Path) -> None:
    """From each snapshot as from the log alone: order, tags, heads, and who put them there."""
    place = copied(GOLDEN, tmp_path / "copy", without=left_out)
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

    assert list(found.items()) == list(VERSIONS.items())
    assert heads == HEADS


def test_the_single_file_reads_it_too(reader: ModuleType) -> None:
    """The reader of docs/reference knows what came back."""
    for name, step in (("gpt", 2), ("vit", 1), (VERSIONS["gpt", 1][0], 1)):
        assert reader.restore(GOLDEN, name)["model.w"][0] == step
