"""The golden store of tensors in blocks, which every version of ckptstore must read as it is."""

from __future__ import annotations

import struct
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from goldenkit import golden, sizes

import ckptstore

GOLDEN = golden("v1-blocks")
VERSION = "2b075ff5a57a271ce0d62c54fc783b72"
FILES = {
    "store.json": 360,
    "commits/000000/000000000001.json": 1045,
    f"manifests/2b/{VERSION}.manifest": 1059,
    "packs/42/420e826105553617149fbaaf8a495ae9.pack": 2316,
    "packs/f1/f155f9382b9d66416c1f6588c69ec8bf.pack": 4337,
}
TILES = [[9 * row + column for column in range(9)] for row in range(7)]
DEEP = [[[(15 * a + 5 * b + c) % 13 for c in range(5)] for b in range(3)] for a in range(4)]


def test_every_file_of_the_golden_store_is_there() -> None:
    """A missing, added or changed fixture is a failure: it must be read as it was written."""
    assert sizes(GOLDEN) == FILES


def test_whole_tensors_come_back() -> None:
    """Tensors that two ranks wrote, by rows, by columns and in tiles; and plain values."""
    with ckptstore.open(GOLDEN, read_only=True) as store:
        state = store.load("ranks@3")
        lazy = store.version(f"#{VERSION}")
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
        0,
        2,
        4,
        2,
    ]
    assert (version.metrics, version.content[:8], sound) == ({"loss": 0.25}, "7fd99b8f", True)


def test_the_manifest_has_the_flag() -> None:
    """A reader that does not know blocks refuses the record instead of mixing up its elements."""
    data = (GOLDEN / f"manifests/2b/{VERSION}.manifest").read_bytes()

    assert struct.unpack_from("<8sHH", data) == (b"CKPTMANI", 1, 1)


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
        reader.restore(GOLDEN, "ranks")


def test_read_without_ckptstore(reader: ModuleType) -> None:
    """The single-file reader puts the boxes together."""
    found = reader.restore(GOLDEN, "ranks")

    numbers = np.arange(20_000, dtype=np.float32).reshape(100, 200) / 8
    assert np.array_equal(found["model.rows"], numbers)
    assert np.array_equal(found["model.columns"], numbers)
    assert found["model.tiles"].tolist() == TILES
    bits = torch.tensor(DEEP).to(torch.bfloat16).view(torch.uint16)
    assert found["model.deep"].tolist() == bits.tolist()
    assert found["step"] == 3
