"""States of four ranks, loaded by one, two, three and eight, and by a process that is no rank.

Real processes that gloo connects; every comparison is of bits, with a state that never was
sharded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rankkit import jobs
from rankkit.groups import run_ranks
from rankkit.states import MODELS, differences, state_of, tensors

import ckptstore
from ckptstore.errors import TensorIndexError
from ckptstore.format.manifest import FLAG_BLOCKS

pytestmark = pytest.mark.timeout(300)

SEEDS = (1, 2)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a store with two versions that four ranks saved."""
    url = str(tmp_path_factory.mktemp("resharding") / "store")
    ckptstore.open(url, create=True, chunk_bytes=65536).close()
    # One thread each: then chunks lie in the order of the tensors, and no gaps are read with them.
    ids = run_ranks(jobs.save, 4, url, {"workers": 1}, "four", SEEDS)
    assert all(found == ids[0] for found in ids), "every rank is told the version's id"
    return url


@pytest.mark.slow
def test_one_commit_a_version_whoever_reads(saved: str) -> None:
    """Without torch.distributed, the nested state comes back with whole tensors, bit by bit."""
    with ckptstore.open(saved, read_only=True) as store:
        versions = store.versions("four")
        found = [list(differences(store.load(f"four@{s}"), state_of(0, seed=s))) for s in SEEDS]
        commits = len(store.log())
        report = store.verify()

    assert found == [[], []]
    assert [version.step for version in versions] == [1, 2]
    assert (versions[1].parent, versions[0].metrics) == (versions[0].id, {"loss": 1.0})
    assert versions[0].receipt["ranks_count"] == 4
    assert commits == 2
    assert report.ok


@pytest.mark.short(sample=1)
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_loaded_by_another_number_of_ranks(saved: str, world: int) -> None:
    """FSDP2, HSDP, tensor-parallel and both, DTensors of every placement, and plain values."""
    # Three ranks are no mesh of two dimensions that both divide.
    models = MODELS if world != 3 else ("fsdp", "hsdp", "tensor_parallel")
    problems = run_ranks(jobs.load, world, saved, {}, "four@1", 1, models)

    assert problems == [[]] * world


def test_slabs_are_plain_tensors_and_tiles_are_blocks(saved: str) -> None:
    """What ranks hold by rows is stored as if one had written it; columns and tiles are boxes."""
    with ckptstore.open(saved, read_only=True) as store:
        lazy = store.version("four@1")
        records = {
            leaf.path[-1]: lazy._content.manifest.tensors[leaf.index]
            for leaf in lazy._content.leaves
            if leaf.path[0] == "tensors"
        }
        data = store.repo.backend.get(lazy.info.manifest_key, bytes_max=1 << 24)
    blocked = {str(name) for name, record in records.items() if record.blocks is not None}

    assert blocked == {
        "columns", "tiles", "tiles_turned", "hybrid_columns", "half", "complex_columns", "float8",
        "deep", "large_columns",
    }  # fmt: skip
    tiles = records["tiles"].blocks
    assert tiles is not None
    assert [sizes for _, sizes in tiles] == [(11, 11), (11, 11), (10, 11), (10, 11)]
    assert data[10] == FLAG_BLOCKS


def test_parts_of_a_tensor_in_blocks(saved: str) -> None:
    """A lazy tensor gives the same part as the tensor itself, whatever the index."""
    whole = tensors(1)
    indices: list[Any] = [3, -1, slice(2, 9), (slice(None), 5), (slice(1, 8, 3), slice(4, 11)), ...]
    indices += [(2, 3), (slice(5, 5), slice(None)), (..., -1), (slice(None), slice(3, None, 2))]
    with ckptstore.open(saved, read_only=True) as store:
        lazy = store.version("four@1")
        for name in ("tiles", "columns", "large_columns", "half", "complex_columns"):
            for index in indices:
                part = lazy[f"tensors.{name}"][index]
                assert not list(differences(part, whole[name][index])), (name, index)
        with pytest.raises(TensorIndexError):
            lazy["tensors.tiles"][21]
        with pytest.raises(TensorIndexError):
            lazy["tensors.tiles"][1, 2, 3]


@pytest.mark.parametrize("world", [4])
def test_ranks_read_what_they_need(saved: str, world: int) -> None:
    """Rows out of rows, columns out of columns: a rank reads its own, and a chunk at either end.

    Rows out of columns too: only the pieces that hold an element of the rank are fetched.
    """
    found = run_ranks(jobs.load_counting, world, saved, "four@1")
    total = {name: tensors()[name].nbytes for name in ("large", "large_columns")}
    edge = 2 * (65536 + 64)

    for by in found:
        for what, (read, needed) in by.items():
            name, _, way = what.partition(" by ")
            aligned = (name, way) in {("large", "rows"), ("large_columns", "columns")}
            if aligned or name == "large_columns":
                assert needed * 0.5 < read <= needed + (edge if aligned else 4 * edge), what
            else:  # every row of a piece holds a part of every column
                assert read <= total[name] + edge, what
    rows = sum(by["large by rows"][0] for by in found)
    columns = sum(by["large_columns by columns"][0] for by in found)
    assert rows <= total["large"] + 4 * edge
    assert columns <= total["large_columns"] + 4 * edge


def test_the_next_version_shares_whatever_the_number_of_ranks(tmp_path: Path) -> None:
    """A second save stores nothing, by as many ranks or by others, where they hold rows."""
    url = str(tmp_path / "store")
    with ckptstore.open(url, create=True, chunk_bytes=65536) as store:
        store.run("a").save({"tensors": tensors()}, step=0)
    run_ranks(jobs.save, 4, url, {}, "a", [1, 1])
    run_ranks(jobs.save, 3, url, {}, "a", [1])
    with ckptstore.open(url, read_only=True) as store:
        first, second, again, three = store.versions("a")
        ids = [
            {row.tobytes() for row in _pieces(store, f"#{version.id}", "tensors.large")}
            for version in (first, second, again, three)
        ]
    new = [sum(role.new for role in v.roles.values()) for v in (first, second, again, three)]

    assert new[2] == 0
    assert (
        new[3] < sum(role.logical for role in three.roles.values()) - tensors()["large"].nbytes / 2
    )
    # 13 pieces of 54 rows. Borders after 175, 350 and 525 rows cut three of them, others two more.
    assert len(ids[0] & ids[1]) == 10
    assert len(ids[1] & ids[3]) == 8


def _pieces(store: ckptstore.Store, ref: str, path: str) -> Any:  # noqa: ANN401
    lazy = store.version(ref)
    index = lazy[path]._leaf.index
    manifest = lazy._content.manifest
    return np.asarray(manifest.pieces.ids[manifest.first[index] : manifest.first[index + 1]])
