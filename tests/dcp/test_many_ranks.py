"""Saves by four ranks: who writes what, what failures leave, saves in the background."""

from __future__ import annotations

from pathlib import Path

import pytest
from rankkit import jobs
from rankkit.groups import run_ranks

import ckptstore

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Return the place of a store that is there."""
    ckptstore.open(tmp_path / "store", create=True, chunk_bytes=65536).close()
    return str(tmp_path / "store")


def test_equal_replicas_are_written_once_and_evenly(url: str) -> None:
    """Ten replicated tensors, plain or DTensors, and hybrid shards: once, by all ranks alike."""
    by_rank = run_ranks(jobs.replicas, 4, url)

    for number in range(3):
        mine = [found[number][0] for found in by_rank]
        logical, stored = by_rank[0][number][1:]
        assert logical == 4 * 1_990_000 + (4 * 24 if number == 1 else 0)
        assert stored <= logical * 1.01
        assert sum(mine) <= logical * 1.01
        # The largest tensor is 30% of all: no one can have less than that.
        assert max(mine) <= max(2_400_000, logical / 4) * 1.03, mine
        assert min(mine) >= logical / 4 * 0.8, mine
    with ckptstore.open(url, read_only=True) as store:
        assert store.load("replicas-0")["rank"] == 0, "values are those of the first rank"
        own = [store.load("replicas-1")[f"random.{rank}"].tolist() for rank in range(4)]
    assert own == [[rank] * 3 for rank in range(4)], "unless they have keys of their own"


def test_a_planner_that_keeps_its_plans(url: str) -> None:
    """Plans kept from save to save, with tensors that come and go: every version is whole."""
    assert run_ranks(jobs.cached_plans, 4, url) == [[]] * 4


def test_any_rank_that_fails_fails_all(url: str) -> None:
    """ENOSPC or EIO in each rank at each step: every rank raises, and there is no version."""
    by_rank = run_ranks(jobs.fail_in_turn, 4, url)

    assert len(by_rank[0]) == 14
    for turns in zip(*by_rank, strict=True):
        for _, call, victim, said, who, versions in turns:
            assert said, f"{call} of rank {victim} failed, and a rank was not told"
            assert [entry.split(":")[0] for entry in who] == [str(victim)]
            assert "CheckpointException" in said
            assert versions == 0
    names = {entry.split(":")[1] for turn in by_rank[0] for entry in turn[4]}
    assert names <= {"StorageFullError", "StorageError"}
    with ckptstore.open(url) as store:
        assert store.log() == []
        left = [info.key for info in store.repo.backend.list("packs/")]
        assert left, "what others had written is left for a collection"
        store.gc(orphan_age_s=0, grace_s=0)
        assert [info.key for info in store.repo.backend.list("packs/")] == []


def test_a_save_in_the_background(url: str) -> None:
    """dcp.async_save saves what the state was, while training changes it."""
    assert run_ranks(jobs.background, 4, url) == [[]] * 4


@pytest.mark.slow
def test_a_save_by_torch_s_own_process(url: str) -> None:
    """``AsyncCheckpointerType.PROCESS``: the writer is sent to it, and opens the store there."""
    assert run_ranks(jobs.from_another_process, 1, url) == [[]]


def test_ranks_that_see_different_heads_load_one_version(url: str) -> None:
    """The coordinator's version is loaded by all."""
    assert run_ranks(jobs.other_heads, 3, url) == [[]] * 3


def test_what_cannot_be_saved_is_refused_by_all(url: str) -> None:
    """A value, a step, a tag, ranks that disagree, no step: every rank is told, and all raise."""
    by_rank = run_ranks(jobs.refused, 2, url)

    expected = ("'code'", "step", "no tag!", "w", "no step")
    for said in by_rank:
        for text, word in zip(said, expected, strict=True):
            assert word in text
