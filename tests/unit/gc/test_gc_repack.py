"""Packs that are mostly dead are written anew, and every version still holds what it held."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
from gckit import CHUNK_BYTES, Place, delete, equal, needs, parts_of, undelete

import ckptstore
from ckptstore import limits
from ckptstore.backends.base import Buffer, Leftovers
from ckptstore.checkpoint.content import read_content
from ckptstore.format.pack import HEADER_BYTES, TRAILER_BYTES
from ckptstore.maintenance.collect.gc import GcReport
from ckptstore.maintenance.core.live_set import Footprint, Tally, live_versions
from ckptstore.maintenance.core.relocate import relocating
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
