"""Bases live as long as a delta to them does, and no longer than they help; kills beside it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from deltakit import deltas_of, manifest_of, open_store, same, state_of
from hypothesis import given, settings
from hypothesis import strategies as st
from shortening import examples, places

from ckptstore.backends.memory import MemoryBackend
from ckptstore.backends.registry import open_backend
from ckptstore.errors import CkptStoreError, StorageError, StorageFullError
from ckptstore.format.keys import MANIFESTS_PREFIX, PACKS_PREFIX, pack_key
from ckptstore.maintenance.collect import gc, inline_deltas
from ckptstore.maintenance.collect.gc import GcReport
from ckptstore.maintenance.collect.inline_deltas import Rebased
from ckptstore.maintenance.core.live_set import live_versions
from ckptstore.store import Store
from ckptstore.testing.faulty import Fault, FaultyBackend, When

Backends = Callable[[], MemoryBackend]


def fill(store: Store, count: int) -> None:
    """Save the first versions of a run."""
    for step in range(count):
        store.run("gpt").save(state_of(step), step=step)


def collect(store: Store, below: float | None = 1.0) -> GcReport:
    """Collect with no patience; return the report."""
    return store.gc(grace_s=0, orphan_age_s=0, repack_below=below)


def check(store: Store, backend: MemoryBackend) -> None:
    """Hold that all live versions load, and that nothing is stored that they do not need."""
    needed = set()
    for version in live_versions(store.repo.refresh()):
        assert same(store.load(f"#{version.id}"), state_of(version.step))
        assert deltas_of(store, version) >= 0
        needed |= {version.manifest_key}
        needed |= {pack_key(pack) for pack in manifest_of(store, version).pieces.packs}
    kinds = (PACKS_PREFIX, MANIFESTS_PREFIX)
    assert {key for key in backend.objects if key.startswith(kinds)} == needed


def stored_bytes(backend: MemoryBackend) -> int:
    """Return the bytes of all packs."""
    return sum(len(i.data) for key, i in backend.objects.items() if key.startswith(PACKS_PREFIX))


@pytest.mark.parametrize("below", [None, 0.5, 1.0])
def test_a_base_stays_while_a_delta_lives(
    store: Store, backend: MemoryBackend, below: float | None
) -> None:
    """Its version is deleted and collected; what refers to it still loads, again and again."""
    fill(store, 4)
    store.remove(["gpt@0"])
    for _ in range(3):
        collect(store, below)
        check(store, backend)
    assert store.verify().ok


def test_a_base_of_one_delta_is_merged_with_it(store: Store, backend: MemoryBackend) -> None:
    """With one delta left, the piece is stored by itself, and the base is freed."""
    fill(store, 3)
    store.remove(["gpt@0", "gpt@1"])
    before = stored_bytes(backend)
    plan = store.gc(grace_s=0, orphan_age_s=0, repack_below=1.0, dry_run=True)

    report = collect(store)

    assert plan.rebased.pieces_count == report.rebased.pieces_count > 0
    assert report.rebased.written_bytes == pytest.approx(plan.rebased.written_bytes, rel=0.1)
    assert report.rebased.versions_count == 1
    assert deltas_of(store, store.versions()[0]) == 0
    assert stored_bytes(backend) < 0.75 * before
    check(store, backend)
    alone = open_store(MemoryBackend("alone"))
    alone.run("gpt").save(state_of(2), step=2)
    assert stored_bytes(backend) < 1.02 * stored_bytes(alone.repo.backend)  # type: ignore[arg-type]


def test_a_base_of_several_deltas_stays(store: Store, backend: MemoryBackend) -> None:
    """Where they take less with it than without, nothing is written anew but what is moved."""
    fill(store, 4)
    store.remove(["gpt@0"])

    report = collect(store)

    assert report.rebased.pieces_count == 0
    assert all(deltas_of(store, version) > 0 for version in store.versions())
    check(store, backend)


def test_a_base_that_a_version_shows_stays(store: Store, backend: MemoryBackend) -> None:
    """The keyframe's version is there: its one delta stays a delta."""
    fill(store, 2)

    report = collect(store)

    assert report.rebased.pieces_count == 0
    assert deltas_of(store, store.versions()[1]) > 0
    check(store, backend)


def test_deltas_that_forks_share_are_merged_for_all(store: Store, backend: MemoryBackend) -> None:
    """One delta in three versions is one: each is relocated to the piece that replaces it."""
    fill(store, 2)
    store.fork("gpt@1", "one")
    store.fork("gpt@1", "two")
    store.remove(["gpt@0"])

    report = collect(store)

    assert report.rebased.versions_count == 3
    assert all(deltas_of(store, version) == 0 for version in store.versions())
    check(store, backend)


def test_deltas_are_merged_after_a_collection_that_stopped(
    store: Store, backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without room for the rewriting, or killed before it: the old record does not count."""
    store.run("other").save(state_of(9), step=9)
    collect(store, 0.01)  # no pack is sparse
    fill(store, 2)
    store.remove(["gpt@0"])

    def full(*_: object, **__: object) -> NoReturn:
        raise StorageFullError("full")

    with monkeypatch.context() as patch:
        patch.setattr(gc, "rebase", full)
        with pytest.raises(StorageFullError):
            collect(store, 0.01)

    assert collect(store, 0.01).rebased.versions_count == 1
    check(store, backend)


@pytest.mark.parametrize("change", ["a base goes", "a delta comes"])
def test_deltas_are_merged_that_changed_beside_a_rewriting(
    change: str, store: Store, backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What came or went after a collection looked at deltas is left to the next one."""
    whole = {**state_of(9), "other": torch.arange(50_000.0)}
    store.run("whole").save(whole, step=9)
    store.fork("whole@9", "part", include=["other"])
    store.remove(["whole@9"])
    store.run("gpt").save(state_of(0), step=0)
    if change == "a base goes":
        store.run("gpt").save(state_of(1), step=1)
    real = inline_deltas.rebase

    def meanwhile(*args: Any, **options: Any) -> Rebased:  # noqa: ANN401 - passed on
        done = real(*args, **options)
        with open_store(backend) as other:
            if change == "a delta comes":
                other.run("gpt").save(state_of(1), step=1)
            other.remove(["gpt@0"])
        return done

    with monkeypatch.context() as patch:
        patch.setattr(gc, "rebase", meanwhile)
        assert collect(store).repacked.versions_count == 1

    assert collect(store, 0.01).rebased.versions_count == 1


def test_a_dead_delta_frees_its_base(store: Store, backend: MemoryBackend) -> None:
    """The delta's version goes after the keyframe's: nothing is left of either."""
    fill(store, 2)
    store.run("other").save(state_of(9), step=9)
    store.remove(["gpt@0"])
    collect(store)
    store.remove(["gpt@1"], force=True)
    collect(store)

    assert [version.step for version in store.versions()] == [9]
    check(store, backend)


def test_retention_leaves_what_it_says(store: Store, backend: MemoryBackend) -> None:
    """A policy that keeps every third version and the last two: they load, the rest is gone."""
    fill(store, 9)
    store.retain({"full": ["last 2", "every 3 steps"]})
    for _ in range(2):
        collect(store)

    assert [version.step for version in store.versions()] == [0, 3, 6, 7, 8]
    check(store, backend)


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["save", "save", "save", "fork", "remove", "gc", "gc", "repack", "reopen"]),
        st.integers(0, 99),
    ),
    min_size=3,
    max_size=14,
)


@settings(max_examples=examples(25))
@given(actions=ACTIONS)
def test_any_history_loads_and_leaves_nothing_behind(actions: list[tuple[str, int]]) -> None:
    """Saves, forks, removals, collections and repacks in any order: all live versions load."""
    backend = MemoryBackend(f"history/{hash(str(actions))}")
    store = open_store(backend)
    fill(store, 2)
    for number, (action, draw) in enumerate(actions, 2):
        versions = store.versions()
        chosen = versions[draw % len(versions)] if versions else None
        if action == "save" or chosen is None:
            run = chosen.run if chosen else "gpt"
            store.run(run).save(state_of(number), step=number)
        elif action == "fork":
            store.fork(f"#{chosen.id}", f"fork{number}")
        elif action == "remove":
            store.remove([f"#{chosen.id}"], force=True)
        elif action == "reopen":
            store = open_store(backend, base_bytes=draw * 4096)
        else:
            collect(store, 0.5 if action == "gc" else 1.0)
    collect(store)
    collect(store)
    check(store, backend)
    assert store.verify().ok


# --- failures -------------------------------------------------------------------------------------
def histories(backends: Backends) -> Iterator[tuple[str, Callable[[Store], Any], MemoryBackend]]:
    """Yield actions on a store that has versions with deltas, each on a storage of its own."""

    def save(store: Store) -> object:
        return store.run("gpt").save(state_of(3), step=3)

    def load(store: Store) -> object:
        return same(store.load("gpt@2"), state_of(2)) or pytest.fail("loaded something else")

    for name, action in (("save", save), ("load", load), ("gc", collect)):
        backend = backends()
        with open_store(backend) as store:
            fill(store, 3)
            store.remove(["gpt@0", *(["gpt@1"] if name == "gc" else [])])
        yield name, action, backend


@pytest.mark.short("1-before")
@pytest.mark.parametrize("when", [When.BEFORE, When.AFTER])
@pytest.mark.parametrize("times", [1, 0])
def test_every_call_may_fail(backends: Backends, when: When, times: int) -> None:
    """A save, a load and a merging collection, each with a failure at every call that it makes."""
    for name, action, original in histories(backends):
        objects = {key: item.data for key, item in original.objects.items()}

        def copied(objects: dict[str, bytes] = objects) -> MemoryBackend:
            inner = backends()
            for key, data in objects.items():
                inner.put(key, data)
            return inner

        counting = Fault(at=0)
        with open_store(FaultyBackend(copied(), counting), workers=1) as store:
            action(store)
        assert counting.seen > 5, name
        for at in places(counting.seen, name):
            inner = copied()
            fault = Fault(at=at, times=times, when=when, error=lambda: StorageError("injected"))
            done = True
            try:
                with open_store(FaultyBackend(inner, fault), workers=1) as store:
                    action(store)
            except CkptStoreError:
                done = False
            assert fault.hits
            if name != "load":
                with open_store(inner) as store:
                    steps = [version.step for version in store.versions()]
                    for step in steps:
                        assert same(store.load(f"gpt@{step}"), state_of(step))
                    assert 2 in steps
                    assert not (done and name == "save") or 3 in steps
                    assert store.verify(level="records").ok


PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from deltakit import open_store, state_of
from ckptstore.backends.registry import open_backend
from faultkit.tripwire import Tripwire
store = open_store(open_backend(sys.argv[2]))
run = store.run("gpt")
versions = store.versions()
step = versions[-1].step + 1 if versions else 0
Tripwire(int(sys.argv[3]), after=False)
while True:
    run.save(state_of(step), step=step)
    if step % 3 == 2:
        store.retain({"full": ["last 2"]})
        store.gc(grace_s=0, orphan_age_s=0, repack_below=1.0)
    step += 1
"""


def killed(folder: Path, at: int) -> None:
    """Let a process save, prune and collect until it kills itself at a call on files."""
    words = [str(Path(__file__).parent), str(folder), str(at)]
    ended = subprocess.run([sys.executable, "-c", PROGRAM, *words], check=False, timeout=1200)
    assert ended.returncode == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_savers_of_deltas_leave_versions_absent_or_whole(tmp_path: Path) -> None:
    """After each kill every version loads bit by bit, and verify finds nothing."""
    newest, deltas = -1, 0
    for at in (1200, 333, 40, 711, 1000):
        killed(tmp_path / "store", at)
        with open_store(open_backend(tmp_path / "store")) as store:
            versions = store.versions()
            for version in versions:
                assert same(store.load(f"#{version.id}"), state_of(version.step))
                deltas += deltas_of(store, version)
            steps = [version.step for version in versions]
            assert store.verify().ok
        assert steps == sorted(steps)
        assert not steps or steps[-1] >= newest
        newest = steps[-1] if steps else newest
    assert newest > 0
    assert deltas > 0
