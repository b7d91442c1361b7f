"""Repair from stores of which a part lies in an archive class."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from coldbackend import ColdBackend, Shelf

import ckptstore
from ckptstore.backends.memory import MemoryBackend
from ckptstore.format.keys import pack_key
from ckptstore.repo import create_on, open_on

STEPS = (1, 2, 3)


def _state(step: int) -> dict[str, dict[str, torch.Tensor]]:
    return {"model": {"w": torch.full((30_000,), float(step))}, "m": {"v": torch.arange(9.0)}}


@pytest.fixture
def hot(tmp_path: Path) -> ckptstore.Store:
    """Return a store of three versions, whose packs are their own."""
    store = ckptstore.Store(create_on(MemoryBackend(f"repair-hot/{tmp_path}")))
    for step in STEPS:
        store.run("gpt").save(_state(step), step=step)
    return store


def _replica(hot: ckptstore.Store, name: str, shelf: Shelf) -> ckptstore.Store:
    store = ckptstore.Store(create_on(ColdBackend(MemoryBackend(name), shelf)))
    assert not hot.replicate(store).failures
    return store


def _packs(store: ckptstore.Store, ref: str) -> set[str]:
    table = store.repo.manifests.load(store.resolve(ref)).pieces
    return set(map(pack_key, table.packs))


def _lose(store: ckptstore.Store) -> None:
    """Delete all packs, past the log."""
    for info in list(store.repo.backend.list("packs/")):
        store.repo.backend.delete(info.key)


def _assert_loads(store: ckptstore.Store, step: int) -> None:
    assert torch.equal(store.load(f"gpt@{step}")["model"]["w"], _state(step)["model"]["w"])


def test_what_is_cold_there_is_left_and_the_rest_is_mended(
    hot: ckptstore.Store, tmp_path: Path
) -> None:
    """The report names the versions and the command; after the thaw the next repair mends them."""
    shelf = Shelf()
    cold = _replica(hot, f"repair-cold/{tmp_path}", shelf)
    frozen = _packs(cold, "gpt@2") - _packs(cold, "gpt@1")
    shelf.classes.update(dict.fromkeys(frozen, "GLACIER"))
    _lose(hot)
    report = hot.repair(cold)

    assert not report.ok
    assert [one.step for one in report.lost] == [2]
    (left,) = report.cold
    version = hot.resolve("gpt@2")
    assert (left.version, left.run, left.step) == (version.id, "gpt", 2)
    assert left.url == cold.url
    assert left.command == f"ckptstore thaw {version.id[:12]} --store {cold.url}"
    assert left.pieces_count >= 1
    for step in (1, 3):
        _assert_loads(hot, step)

    shelf.restored.update(frozen)
    again = hot.repair(cold)
    assert again.ok
    assert again.cold == ()
    for step in STEPS:
        _assert_loads(hot, step)
    assert hot.verify().ok


def test_what_one_has_only_cold_comes_from_the_next(hot: ckptstore.Store, tmp_path: Path) -> None:
    """All of the first is cold: nothing is lost, and nothing is said to be cold."""
    shelf = Shelf()
    first = _replica(hot, f"repair-first/{tmp_path}", shelf)
    second = _replica(hot, f"repair-second/{tmp_path}", Shelf())
    keys = [info.key for info in first.repo.backend.list("packs/")]
    shelf.classes.update(dict.fromkeys(keys, "DEEP_ARCHIVE"))
    _lose(hot)
    dry = hot.repair([first, second], dry_run=True)
    assert dry.ok
    report = hot.repair([first, second])
    assert report.ok
    assert report.cold == ()
    assert report.pieces["source"] > 0
    for step in STEPS:
        _assert_loads(hot, step)


def test_everything_cold(hot: ckptstore.Store, tmp_path: Path) -> None:
    """Each version is told once, of each store; nothing is asked for twice."""
    shelf = Shelf()
    cold = _replica(hot, f"repair-all/{tmp_path}", shelf)
    keys = [info.key for info in cold.repo.backend.list("packs/")]
    shelf.classes.update(dict.fromkeys(keys, "GLACIER"))
    _lose(hot)
    report = hot.repair(cold, dry_run=True)
    assert {one.step for one in report.lost} == set(STEPS)
    assert {one.step for one in report.cold} <= set(STEPS)
    assert sum(one.pieces_count for one in report.cold) == 4  # w of each step, v of all


def test_the_log_from_one_and_pieces_from_another(hot: ckptstore.Store, tmp_path: Path) -> None:
    """A copy of the log comes from whoever has it, whatever its place among the sources."""
    inner = hot.repo.backend
    while not isinstance(inner, MemoryBackend):
        inner = inner.inner  # type: ignore[attr-defined]
    copy = MemoryBackend(f"repair-copy/{tmp_path}")
    for info in list(inner.list("")):
        copy.put(info.key, inner.get(info.key, bytes_max=1 << 20))
    other = _replica(hot, f"repair-other/{tmp_path}", Shelf())
    twin = ckptstore.Store(open_on(copy))
    commits = sorted(info.key for info in inner.list("commits/"))
    inner.delete(commits[1])
    _lose(hot)
    again = ckptstore.Store(open_on(inner))
    report = again.repair([other, twin])
    assert report.ok
    assert [one.mended for one in report.commits] == [True]
    for step in STEPS:
        _assert_loads(again, step)
