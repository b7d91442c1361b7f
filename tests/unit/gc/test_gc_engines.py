"""Collections over engines: whoever lists, reads, copies and deletes, the result is the same."""

from __future__ import annotations

import dataclasses
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
from daskcluster import Cluster
from gckit import CHUNK_BYTES, Place, delete, equal, needs, parts_of
from simulated_environment import SimulatedEnvironment

import ckptstore
from ckptstore import limits
from ckptstore.backends.base import Backend, ObjectInfo
from ckptstore.backends.memory import MemoryBackend
from ckptstore.config import SYSTEM, Options, SystemEnvironment
from ckptstore.engine.calls import Shared
from ckptstore.engine.engine import open_engine
from ckptstore.errors import InvalidInputError
from ckptstore.format.keys import MANIFESTS_PREFIX, PACKS_PREFIX, pack_key
from ckptstore.maintenance.core.live_set import list_objects
from ckptstore.maintenance.core.task_pool import Tasks, grouped
from ckptstore.model import Version
from ckptstore.store import Store

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
        """Wait for every object."""
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
