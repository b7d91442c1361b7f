"""Collections: repacks, leftovers, and engines that share the work."""

from __future__ import annotations

import dataclasses
import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from daskcluster import Cluster
from gckit import CHUNK_BYTES, Place, delete, equal, needs, parts_of, undelete
from simulated_environment import SimulatedEnvironment

import ckptstore
from ckptstore import limits
from ckptstore.backends.base import Backend, Buffer, Leftovers, ObjectInfo
from ckptstore.backends.memory import MemoryBackend
from ckptstore.checkpoint.content import read_content
from ckptstore.config import SYSTEM, Options, SystemEnvironment
from ckptstore.engine.calls import Shared
from ckptstore.engine.engine import open_engine
from ckptstore.errors import InvalidInputError
from ckptstore.format.keys import MANIFESTS_PREFIX, PACKS_PREFIX, pack_key
from ckptstore.format.pack import HEADER_BYTES, TRAILER_BYTES
from ckptstore.maintenance.collect.gc import GcReport
from ckptstore.maintenance.core.live_set import Footprint, Tally, list_objects, live_versions
from ckptstore.maintenance.core.relocate import relocating
from ckptstore.maintenance.core.task_pool import Tasks, grouped
from ckptstore.maintenance.retention.reduce import Target
from ckptstore.maintenance.retention.retain import prepare
from ckptstore.model import Version
from ckptstore.store import Store
from ckptstore.testing.faulty import Fault, FaultyBackend, When


def collect(store: Store, below: float = 1.0) -> GcReport:
    """Collect with no patience; return the report."""
    return store.gc(grace_s=0, orphan_age_s=0, repack_below=below)


def dead_bytes(place: Place, store: Store) -> int:
    """Return the bytes of chunks in packs that no version needs."""
    live: dict[tuple[str, int], int] = {}
    for version in live_versions(store.repo.refresh()):
        need = Footprint.of(store.repo.manifests.load(version))
        for pack, chunks in zip(need.packs, need.chunks, strict=True):
            for offset, size in zip(chunks.offset, chunks.stored, strict=True):
                live[pack, int(offset)] = int(size) + 64 + 48
    packs = [len(item.data) for key, item in place.backend.objects.items() if key[:5] == "packs"]
    return sum(packs) - len(packs) * (HEADER_BYTES + TRAILER_BYTES) - sum(live.values())


def history(store: Store, count: int = 4) -> list[Version]:
    """Save versions that share one part with the first and have two of their own; drop it."""
    run = store.run("gpt")
    versions = [run.save(parts_of(0, n, n), step=n) for n in range(count)]
    delete(store, versions[0].id)
    return versions[1:]


def test_a_pack_that_is_mostly_dead_is_written_anew(place: Place, store: Store) -> None:
    """Its live chunk moves, for all versions that share it; what was dead is freed."""
    versions = history(store)
    shared = set.intersection(*(needs(store, version) for version in versions))
    before = dead_bytes(place, store)

    report = collect(store, 0.5)

    assert report.repacked.packs_count == 1
    assert report.repacked.versions_count == 3
    assert report.repacked.freed_bytes >= before > dead_bytes(place, store) == 0
    assert not shared & place.stored()
    assert place.stored() == place.needed()
    for version in versions:
        moved = store.repo.catalog.version(version.id)
        assert moved.manifest_digest != version.manifest_digest
        assert moved.content == version.content
        assert moved.roles == version.roles
        assert equal(store.load(f"#{version.id}"), parts_of(0, version.step, version.step))
    with place.open() as again:
        assert again.verify().ok


def test_the_threshold_decides(place: Place, store: Store) -> None:
    """A third of the pack is live: it stays below 0.3 and without a repack, and goes at 0.4."""
    versions = history(store)
    for below in (None, 0.0, 0.3):
        report = store.gc(grace_s=0, orphan_age_s=0, repack_below=below)
        assert report.repacked.packs_count == report.repacked.versions_count == 0
    planned = store.gc(repack_below=0.4, dry_run=True).repacked

    done = collect(store, 0.4).repacked

    assert planned.packs_count == done.packs_count == 1
    assert planned.freed_bytes == done.freed_bytes
    assert equal(store.load(f"#{versions[0].id}"), parts_of(0, 1, 1))


def test_a_repack_of_small_and_tied_and_encoded_tensors(place: Place, store: Store) -> None:
    """Slabs, compressed chunks, views and repeated pieces: all come back bit by bit."""
    run = store.run("gpt")
    small = [torch.full((5,), float(n), dtype=torch.bfloat16) for n in range(9)]
    zeros = torch.zeros(1 << 15)
    big = torch.arange(1 << 15, dtype=torch.int64)
    state = {"small": small, "zeros": zeros, "view": zeros[3:9], "tied": zeros, "big": big}
    first = run.save({**state, "own": torch.randn(1 << 15)}, step=1)
    second = run.save(state, step=2)
    delete(store, first.id)

    report = collect(store)

    assert report.repacked.packs_count == 1
    assert report.repacked.skipped == ()
    found = store.load(f"#{second.id}")
    assert all(torch.equal(a, b) for a, b in zip(found["small"], small, strict=True))
    assert torch.equal(found["zeros"], zeros)
    assert torch.equal(found["big"], big)
    assert found["view"].untyped_storage().data_ptr() == found["zeros"].untyped_storage().data_ptr()
    assert dead_bytes(place, store) == 0


def test_many_versions_are_relocated_in_several_commits(
    place: Place, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of packs and of versions: each is whole in itself, and so is the result."""
    monkeypatch.setattr(limits, "RELOCATES_PER_COMMIT", 2)
    monkeypatch.setattr(limits, "GC_REPACK_BATCH_BYTES", 1)
    run = store.run("gpt")
    for n in range(4):
        run.save(parts_of(n, n, n), step=n)
        for twin in range(3):
            run.save(parts_of(n, n, 100 + twin), step=10 * (n + 1) + twin)
        delete(store, run.resolve(n).id)

    report = collect(store)

    assert report.repacked.packs_count == 4
    assert report.repacked.versions_count == 12
    relocations = [
        [op.__struct_config__.tag for op in commit.ops if op.__struct_config__.tag != "condemn"]
        for commit in store.log()
    ]
    assert sum(each == ["relocate"] * 2 for each in relocations) == 4
    for version in store.versions():
        n, twin = divmod(version.step, 10)
        assert equal(store.load(f"#{version.id}"), parts_of(n - 1, n - 1, 100 + twin))
    assert dead_bytes(place, store) == 0


def test_a_pack_with_a_damaged_chunk_stays(place: Place, store: Store) -> None:
    """Damage is never copied: the pack is left, the report says why, other packs are done."""
    versions = history(store)
    other = store.run("other")
    dropped = other.save(parts_of(7, 7, 7), step=0)
    kept = other.save(parts_of(7, 8, 8), step=1)
    delete(store, dropped.id)
    pack = next(iter(set.intersection(*(needs(store, version) for version in versions))))
    table = store.repo.manifests.load(versions[0]).pieces
    row = next(row for row, at in enumerate(table.pack) if table.packs[at] in pack)
    data = bytearray(place.backend.get(pack, bytes_max=1 << 24))
    data[int(table.offset[row]) + 64 + 10] ^= 1
    place.backend.put(pack, data)

    report = collect(store)

    assert len(report.repacked.skipped) == 1
    assert "checksum" in report.repacked.skipped[0]
    assert pack in place.stored()
    assert report.repacked.packs_count == 1
    assert equal(store.load(f"#{kept.id}"), parts_of(7, 8, 8))
    assert set(store.verify().damaged_versions) == {version.id for version in versions}


def test_a_chunk_that_comes_back_to_life_after_the_plan_is_not_lost(
    place: Place, store: Store
) -> None:
    """Undeleted, and shared anew, after it was planned what to copy: those versions stay put."""
    run = store.run("gpt")
    first = run.save(parts_of(0, 5, 5), step=0)
    second = run.save(parts_of(0, 1, 1), step=1)
    delete(store, first.id)
    saved: list[Version] = []

    def revive(_call: str, key: str) -> None:
        if key.startswith("commits/"):
            with place.open() as other:
                undelete(other, first.id)
                other.rollback(f"#{first.id}")
                saved.append(other.run("gpt").save(parts_of(0, 5, 7), step=7))

    fault = Fault(calls=frozenset({"put_if_absent"}), when=When.CALLBACK, callback=revive)
    with place.open(FaultyBackend(place.backend, fault)) as collector:
        report = collector.gc(grace_s=0, orphan_age_s=0, repack_below=1.0)

    assert report.repacked.packs_count == report.repacked.versions_count == 1
    with place.open() as reading:
        moved = {
            v.id for v in reading.versions() if v.manifest_digest not in _digests(first, *saved)
        }
        assert moved == {second.id}
        assert needs(reading, saved[0]) & needs(reading, first)
        for version, numbers in ((first, (0, 5, 5)), (second, (0, 1, 1)), (saved[0], (0, 5, 7))):
            assert equal(reading.load(f"#{version.id}"), parts_of(*numbers))
        collect(reading)
        assert place.stored() == place.needed()
        assert reading.verify().ok


def _digests(*versions: Version) -> set[str]:
    return {version.manifest_digest for version in versions}


def test_a_collection_without_patience_condemns_what_a_repack_copied(
    place: Place, store: Store
) -> None:
    """The repack leaves the versions where they are; the next one moves them."""
    versions = history(store)

    def interfere(_call: str, key: str) -> None:
        if key.startswith("commits/") and fault.hits == 3:
            with place.open() as other:
                other.gc(grace_s=0, orphan_age_s=0, repack_below=None)

    fault = Fault(
        calls=frozenset({"put_if_absent"}), when=When.CALLBACK, times=3, callback=interfere
    )
    with place.open(FaultyBackend(place.backend, fault)) as collector:
        report = collector.gc(grace_s=0, orphan_age_s=0)
    assert report.repacked.versions_count == 0
    for version in versions:
        assert equal(store.load(f"#{version.id}"), parts_of(0, version.step, version.step))

    assert collect(store).repacked.versions_count == 3
    assert place.stored() == place.needed()


def test_versions_of_which_less_is_kept_are_repacked_at_their_level(
    place: Place, store: Store
) -> None:
    """Only weights of one, only the record of another: what is not kept any more is freed."""
    run = store.run("gpt")
    states = [
        {"model": parts_of(n)["model"], "optimizer": parts_of(50 + n)["model"]} for n in range(3)
    ]
    versions = [run.save(state, step=n) for n, state in enumerate(states)]
    targets = [Target(level="weights"), Target(level="record")]
    moves = [
        prepare(store.repo, version, target, []).move
        for version, target in zip(versions, targets, strict=False)
    ]
    store.repo.log.append(lambda now: relocating(now, moves))

    report = collect(store)

    assert report.repacked.packs_count == 1
    assert report.versions_count == 2
    assert place.stored() == place.needed()
    assert dead_bytes(place, store) == 0
    aged = store.repo.catalog.version(versions[0].id)
    assert aged.level == "weights"
    assert equal(store.load(f"#{aged.id}")["model"], states[0]["model"])
    assert equal(store.load(f"#{versions[2].id}"), states[2])
    assert read_content(store.repo.manifests.load(aged)).tensors()[0].role == "weights"


def test_a_repack_stays_within_its_memory(place: Place, store: Store) -> None:
    """Half of ``host_bytes`` bounds the reads of chunks at once, however many threads there are."""
    versions = history(store, 6)
    at_once = most = 0
    lock = threading.Lock()

    class Counting(FaultyBackend):
        def read_into(self, key: str, offset: int, buffers: list[memoryview]) -> None:  # type: ignore[override]
            nonlocal at_once, most
            is_chunk = threading.current_thread().name.startswith("ckptstore-gc")  # no index
            with lock:
                at_once += is_chunk
                most = max(most, at_once)
            super().read_into(key, offset, buffers)
            with lock:
                at_once -= is_chunk

    each = min(place.backend.capabilities.read_bytes_max, 2 << 20) + CHUNK_BYTES
    with place.open(Counting(place.backend), workers=8, host_bytes=4 * each) as collector:
        collect(collector)
    assert 1 <= most <= 2
    assert equal(store.load(f"#{versions[0].id}"), parts_of(0, 1, 1))


# --- temporary files ----------------------------------------------------------------------------
@pytest.mark.parametrize("orphan_age_s", [0.0, 5 * 3600.0, 86_400.0])
def test_temporary_files_of_dead_writers_are_removed(tmp_path: Path, orphan_age_s: float) -> None:
    """Those beyond the age, which is an hour at least; a dry run and the wrapper remove none.

    Young ones and what is not ours stay; so does the file of a writer that is open.
    """
    with ckptstore.open(tmp_path, create=True) as store:
        store.run("r").save({"w": torch.zeros(9)}, step=1)
    folders = {"": 0.5, "packs/ab": 2.0, "commits": 10.0, "manifests": 48.0}  # to hours of age
    temps = {tmp_path / folder / f".tmp-{1:032x}": age for folder, age in folders.items()}
    foreign = [tmp_path / "mine" / f".tmp-{4:032x}", tmp_path / "packs" / ".tmp-short"]
    for path in (*temps, *foreign):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"12345")
        os.utime(path, (path.stat().st_mtime - temps.get(path, 48.0) * 3600,) * 2)
    bound = max(1.0, orphan_age_s / 3600)
    left = {path for path, hours in temps.items() if hours <= bound}
    store = ckptstore.open(tmp_path)
    with store, store.repo.backend.open_writer("packs/ab/x") as writer:
        writer.write(b"x" * (1 << 20))
        told = store.gc(orphan_age_s=orphan_age_s, dry_run=True)
        assert all(path.exists() for path in temps)
        done = store.gc(orphan_age_s=orphan_age_s)
        writer.commit()
    gone = len(temps) - len(left)
    assert told.leftovers == done.leftovers == Tally(count=gone, size_bytes=5 * gone)
    assert {path for path in temps if path.exists()} == left
    assert all(path.exists() for path in foreign)


def test_a_storage_without_temporary_files_has_none(place: Place) -> None:
    """Memory keeps nothing of a writer that died."""
    data: Buffer = b"x"
    with place.backend.open_writer("packs/00/x") as writer:
        writer.write(data)
    assert place.backend.remove_leftovers(modified_before=1e12) == Leftovers()


ENGINES = ("threads", "executor of threads", "executor of processes", "dask")


@pytest.fixture(autouse=True)
def _small_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split what a small store has: nothing of it would be worth it."""
    for name, value in {
        "GC_LIST_TOGETHER": 3,
        "GC_TASK_MANIFESTS": 2,
        "GC_TASK_DELETES": 2,
        "GC_TASK_COPY_BYTES_MIN": 1,
    }.items():
        monkeypatch.setattr(limits, name, value)


def grown(folder: Path) -> None:
    """Make a store in which all that a collection does is to be done."""
    with ckptstore.open(folder, create=True, chunk_bytes=CHUNK_BYTES) as store:
        for run in ("a", "b", "c"):
            versions = [store.run(run).save(parts_of(0, n, n, n // 2), step=n) for n in range(6)]
            delete(store, *(version.id for version in versions[:3]))
        store.repo.backend.put(pack_key(f"{7:032x}"), b"left behind")


@contextmanager
def executor_of(name: str) -> Iterator[Executor | str | None]:
    """Yield what is passed to ``gc`` for an engine."""
    if name == "dask":
        with Cluster(workers=2) as running:
            yield running.address
    elif name == "threads":
        yield None
    elif name == "executor of threads":
        with ThreadPoolExecutor(3) as threads:
            yield threads
    else:
        with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as processes:
            yield processes


def collected(folder: Path, engine: str) -> dict[str, Any]:
    """Collect a store of its own with an engine; return all that can be seen of it."""
    with ckptstore.open(folder) as store:
        with executor_of(engine) as executor:
            report = store.gc(
                grace_s=0, orphan_age_s=0, repack_below=1.0, executor=executor, workers=2
            )
        again = store.gc(grace_s=0, orphan_age_s=0, dry_run=True)
        for version in store.versions():
            step = version.step
            assert equal(store.load(f"#{version.id}"), parts_of(0, step, step, step // 2))
        assert store.verify().ok
        seen = dataclasses.asdict(report)
        left = dataclasses.asdict(again)
        return {
            **{key: seen[key] for key in seen if key not in {"seconds", "orphan_age_s_max"}},
            "versions": [(v.id, v.run, v.step, v.content, v.level) for v in store.versions()],
            "live": left["live"]["manifests"]["count"],
            "garbage": left["stored"] != left["live"],
        }


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_result_is_the_same_with_every_engine(tmp_path: Path) -> None:
    """Reports, versions and what is left are equal, and every version loads what was saved."""
    grown(tmp_path / "first")
    found = {}
    for engine in ENGINES:
        copy = tmp_path / engine
        shutil.copytree(tmp_path / "first", copy)
        found[engine] = collected(copy, engine)

    threads = found["threads"]
    assert threads["repacked"]["packs_count"] > 2
    assert threads["repacked"]["versions_count"] > 2
    assert sum(kind["count"] for kind in threads["swept"].values()) > 6
    assert not threads["garbage"]
    for engine, seen in found.items():
        assert seen == threads, engine


def test_what_is_in_memory_cannot_be_spread(place: Place) -> None:
    """A store in the memory of this process is refused before anything is done."""
    with place.open() as store:
        version = store.run("a").save(parts_of(1), step=1)
        delete(store, version.id)
        before = place.stored(), store.repo.refresh().number
        with ProcessPoolExecutor(1) as pool, pytest.raises(InvalidInputError):
            store.gc(grace_s=0, orphan_age_s=0, executor=pool)
        assert (place.stored(), store.repo.refresh().number) == before


def test_an_unknown_engine_is_refused(place: Place) -> None:
    """The hint names those that there are."""
    with place.open() as store, pytest.raises(InvalidInputError) as caught:
        store.gc(executor="spark")
    assert "dask scheduler" in str(caught.value)


class _Slow(MemoryBackend):
    """Lists a page of one object in a second; says who lists."""

    def __init__(self, environment: SimulatedEnvironment) -> None:
        super().__init__(f"slow-{SYSTEM.random_hex(8)}", environment=environment)
        self.clock = environment
        self.prefixes: list[str] = []
        self.threads: set[int] = set()

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        self.prefixes.append(prefix)
        self.threads.add(threading.get_ident())
        for info in super().list(prefix, after=after):
            self.clock.sleep(1.0)
            yield info


def _filled(backend: MemoryBackend, count: int) -> list[str]:
    keys = {PACKS_PREFIX + name for name in ("0/odd", "zz/odd", "odd")}
    keys |= {pack_key(SYSTEM.random_hex(16)) for _ in range(count)}
    for key in keys:
        backend.put(key, b"x")
    return sorted(keys)


def tasks_on(backend: Backend) -> Tasks:
    """Return the tasks of this process on a storage."""
    return Tasks(storage=Shared(backend), options=Options())


def _is_pack(key: str) -> bool:
    return key.endswith(".pack")


@pytest.mark.parametrize("count", [0, 1, 3, 4, 40])
def test_a_listing_in_parts_is_the_listing(count: int) -> None:
    """Every object of the store comes once, in order, however many parts there are."""
    backend = MemoryBackend(f"listed-{SYSTEM.random_hex(8)}", environment=SystemEnvironment())
    keys = list(filter(_is_pack, _filled(backend, count)))
    with open_engine(workers=3) as engine:
        here = tasks_on(backend)
        for each in (here, replace(here, engine=engine)):
            found = list_objects(each, PACKS_PREFIX, environment=SYSTEM)
            assert [info.key for info in found if _is_pack(info.key)] == keys
            none = list_objects(each, MANIFESTS_PREFIX, environment=SYSTEM)
            assert list(none) == []


def test_slow_storage_is_listed_by_several_threads() -> None:
    """Where one waits for pages, the rest is listed by folder; nothing is lost or listed twice."""
    environment = SimulatedEnvironment(1)
    backend = _Slow(environment)
    keys = list(filter(_is_pack, _filled(backend, 40)))

    found = list(list_objects(tasks_on(backend), PACKS_PREFIX, environment=environment))

    assert [info.key for info in found if _is_pack(info.key)] == keys
    assert len(backend.prefixes) > 200
    assert len(backend.threads) > 1


def test_quick_storage_is_listed_by_one_thread() -> None:
    """Where listing is work, one thread lists everything, with one more request at the most."""
    environment = SimulatedEnvironment(1)
    backend = MemoryBackend(f"quick-{SYSTEM.random_hex(8)}", environment=environment)
    keys = _filled(backend, 40)

    found = list(list_objects(tasks_on(backend), PACKS_PREFIX, environment=environment))

    assert [info.key for info in found] == keys


def test_groups_end_at_their_size_and_their_count() -> None:
    """Everything comes once, in order, in groups that are no larger than they need be."""
    sizes = [5, 1, 1, 1, 9, 1, 1]
    groups = list(grouped(range(7), sizes, size=6, count=3))
    assert groups == [[0, 1], [2, 3, 4], [5, 6]]
    assert list(grouped([], [], size=6, count=3)) == []


def test_damage_is_told_alike(place: Place) -> None:
    """A pack of which a live chunk is damaged stays as it is, and the report says why."""
    with place.open() as store:
        run = store.run("a")
        first = run.save(parts_of(0, 1, 1), step=1)
        second = run.save(parts_of(0, 2, 2), step=2)
        shared = needs(store, first) & needs(store, second)
        _damage_shared_chunk(place, store, second, shared.pop())
        delete(store, first.id)
        with ThreadPoolExecutor(2) as executor:
            report = store.gc(grace_s=0, orphan_age_s=0, repack_below=1.0, executor=executor)
        assert len(report.repacked.skipped) == 1
        assert "stays as it is" in report.repacked.skipped[0]
        assert report.repacked.packs_count == 0


def _damage_shared_chunk(place: Place, store: Store, version: Version, key: str) -> None:
    """Change a byte of the chunk in a pack that a version needs."""
    table = store.repo.manifests.load(version).pieces
    row = next(row for row in range(len(table)) if pack_key(table.packs[table.pack[row]]) == key)
    data = bytearray(place.backend.objects[key].data)
    data[int(table.offset[row]) + 100] ^= 1
    place.backend.delete(key)
    place.backend.put(key, bytes(data))
