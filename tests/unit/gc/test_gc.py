"""Collections: what is condemned, what is deleted, when, and what never is."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from gckit import Place, delete, equal, needs, new_place, parts_of, undelete

from ckptstore import errors, limits
from ckptstore.catalog import run_ops
from ckptstore.format.pack import CHUNK_HEADER_BYTES, INDEX_ROW_BYTES
from ckptstore.model import Version
from ckptstore.store import Store
from ckptstore.testing.faulty import WRITES, Fault, FaultyBackend, When

HOUR = 3600.0
DAY = 86_400.0
PARTS = {1: "ab", 2: "bc"}


def count(kinds: object) -> int:
    """Return how many objects a report's figures count."""
    return sum(tally["count"] for tally in msgspec.to_builtins(kinds).values())


def test_nothing_is_condemned_in_a_store_of_live_versions(place: Place, store: Store) -> None:
    """With no grace and no age, what versions need stays, and no commit is made."""
    for step in range(3):
        store.run("gpt").save(parts_of(0, step), step=step)
    before = place.apart_from_caches()

    report = store.gc(grace_s=0, orphan_age_s=0)

    assert place.apart_from_caches() == before
    assert count(report.condemned) == count(report.swept) == 0
    assert report.versions_count == 3
    assert report.stored == report.live


def test_deleted_versions_are_condemned_at_once_and_deleted_after_the_grace(
    place: Place, store: Store
) -> None:
    """Their own pieces go, what others share stays; the grace is by the storage's clock."""
    run = store.run("gpt")
    first, second = (run.save(parts_of(0, step), step=step) for step in range(2))
    own = needs(store, second) - needs(store, first)
    delete(store, second.id)

    condemned = store.gc(grace_s=HOUR, repack_below=None)
    assert own <= place.stored()
    assert set(store.repo.catalog.condemned) == own
    assert count(condemned.condemned) == len(own)
    assert count(condemned.swept) == 0
    place.environment.sleep(HOUR - 1)
    assert count(store.gc(grace_s=HOUR, repack_below=None).swept) == 0
    place.environment.sleep(2)
    swept = store.gc(grace_s=HOUR, repack_below=None)

    assert count(swept.swept) == len(own)
    assert place.stored() == needs(store, first) == place.needed()
    assert not store.repo.catalog.condemned
    assert equal(store.load(f"#{first.id}"), parts_of(0, 0))


def test_orphans_wait_for_their_age(place: Place, store: Store) -> None:
    """What no commit names is left alone until it is old, by the storage's clock."""
    store.run("gpt").save(parts_of(1), step=1)
    key = place.orphan()

    young = store.gc(grace_s=0)
    assert key in place.stored()
    assert count(young.young) == 1
    place.environment.sleep(DAY - 60)
    assert count(store.gc(grace_s=0).condemned) == 0
    place.environment.sleep(61)
    old = store.gc(grace_s=0)

    assert count(old.orphans) == count(old.swept) == 1
    assert old.orphan_age_s_max >= DAY
    assert place.stored() == place.needed()


@pytest.mark.parametrize("ahead_s", [-HOUR, HOUR])
def test_grace_and_age_are_by_the_storages_clock(ahead_s: float) -> None:
    """A storage whose clock is an hour off deletes nothing too early, and nothing too late."""
    place = new_place(ahead_s=ahead_s)
    patience: dict[str, Any] = {"grace_s": 600.0, "orphan_age_s": 600.0}
    with place.open() as store:
        run = store.run("gpt")
        first, second = (run.save(parts_of(0, step), step=step) for step in range(2))
        own = needs(store, second) - needs(store, first)
        orphan = place.orphan()
        delete(store, second.id)

        young = store.gc(**patience)
        assert set(store.repo.catalog.condemned) == own
        assert count(young.young) == 1
        place.environment.sleep(599)
        assert count(store.gc(**patience, dry_run=True).swept) == 0
        assert count(store.gc(**patience).swept) == 0
        assert own | {orphan} <= place.stored()
        place.environment.sleep(2)
        old = store.gc(**patience)
        assert count(old.swept) == len(own)
        assert count(old.orphans) == 1
        place.environment.sleep(601)
        assert count(store.gc(**patience).swept) == 1
        assert place.stored() == needs(store, first)


def test_a_dry_run_says_what_a_run_does_and_changes_nothing(place: Place, store: Store) -> None:
    """Same figures; no object, no commit; also in a store that is open for reading only."""
    run = store.run("gpt")
    versions = [run.save(parts_of(0, step), step=step) for step in range(3)]
    delete(store, versions[1].id)
    place.orphan()
    place.environment.sleep(DAY)
    before = place.apart_from_caches()

    planned = store.gc(grace_s=0, dry_run=True)
    with place.open(read_only=True) as reading:
        told = reading.gc(grace_s=0, orphan_age_s=0, dry_run=True)
    assert place.apart_from_caches() == before
    done = store.gc(grace_s=0)

    for name in ("condemned", "swept", "orphans", "stored", "live", "reclaimable_now"):
        assert getattr(planned, name) == getattr(done, name) == getattr(told, name)
    assert count(planned.swept) == 3
    assert planned.dry_run
    assert not done.dry_run


def test_a_read_only_store_is_not_collected(store: Store, place: Place) -> None:
    """Nothing is written, not even to read the clock."""
    with place.open(read_only=True) as reading:
        before = place.apart_from_caches()
        with pytest.raises(errors.ReadOnlyError):
            reading.gc()
    assert place.apart_from_caches() == before


@pytest.mark.parametrize(
    "wrong",
    [{"grace_s": -1}, {"orphan_age_s": float("nan")}, {"repack_below": 1.5}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_parameters_out_of_range_are_refused(store: Store, wrong: dict[str, float]) -> None:
    """Before anything is looked at."""
    with pytest.raises(errors.InvalidInputError):
        store.gc(**wrong)  # type: ignore[arg-type]


def test_the_report_is_json(store: Store) -> None:
    """Every figure can be written down."""
    run = store.run("gpt")
    run.save(parts_of(0, 1), step=1, tags=["keep"])
    run.save(parts_of(0, 2), step=2)

    report = store.gc(dry_run=True)

    assert json.loads(msgspec.json.encode(report))["versions_count"] == 2


# --- damage -------------------------------------------------------------------------------------
@pytest.mark.parametrize("how", ["cut", "gone"])
def test_a_damaged_manifest_of_a_live_version_stops_the_collection(
    place: Place, store: Store, how: str
) -> None:
    """It is not known what the version needs: nothing is condemned, the error names it."""
    run = store.run("gpt")
    damaged = run.save(parts_of(1, 1), step=7)
    other = run.save(parts_of(2, 2), step=8)
    delete(store, other.id)
    place.orphan()
    if how == "gone":
        place.backend.delete(damaged.manifest_key)
    else:
        whole = place.backend.get(damaged.manifest_key, bytes_max=1 << 20)
        place.backend.put(damaged.manifest_key, whole[:-1])
    before = place.stored()

    with place.open() as again, pytest.raises(errors.CorruptObjectError) as caught:
        again.gc(grace_s=0, orphan_age_s=0)
    assert "gpt@7" in caught.value.message
    assert "verify" in caught.value.hint
    assert place.stored() == before
    delete(store, damaged.id)
    with place.open() as again:
        again.gc(grace_s=0, orphan_age_s=0)

    assert place.stored() == set()


def test_a_damaged_manifest_of_a_deleted_version_stops_nothing(place: Place, store: Store) -> None:
    """It goes; its packs are orphans, and go when they are old."""
    version = store.run("gpt").save(parts_of(1), step=1)
    packs = needs(store, version) - {version.manifest_key}
    delete(store, version.id)
    place.backend.put(version.manifest_key, b"damaged")

    with place.open() as again:
        again.gc(grace_s=0)
        assert place.stored() == packs
        place.environment.sleep(DAY)
        again.gc(grace_s=0)

    assert place.stored() == set()


# --- beside others ------------------------------------------------------------------------------
def disturbed_save(place: Place, how: str) -> Version:
    """Save `parts_of(0, 2)`; a collection comes right before the first try of its commit."""
    with place.open() as store:
        parent = store.run("gpt").save(parts_of(0, 1), step=1)

    def collect(_call: str, key: str) -> None:
        if key.startswith("commits/"):
            with place.open() as other:
                if how == "shared":
                    delete(other, parent.id)
                other.gc(grace_s=0, orphan_age_s=0)

    fault = Fault(calls=frozenset({"put_if_absent"}), when=When.CALLBACK, callback=collect)
    with place.open(FaultyBackend(place.backend, fault)) as disturbed:
        version = disturbed.run("gpt").save(parts_of(0, 2), step=2)
    assert fault.hits == 1
    return version


@pytest.mark.parametrize("how", ["shared", "uploaded"])
def test_a_save_survives_a_collection_between_look_up_and_commit(place: Place, how: str) -> None:
    """What was condemned under it is written again: the version is there, bit by bit."""
    version = disturbed_save(place, how)

    with place.open() as reading:
        assert equal(reading.load(f"#{version.id}"), parts_of(0, 2))
        assert needs(reading, version) <= place.stored()
        assert reading.verify().ok
    assert version.receipt["packs_count"] == 2


@pytest.mark.parametrize("how", ["shared", "uploaded"])
def test_without_the_check_in_the_commit_a_version_is_lost(
    place: Place, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above sees the loss: it is the check, and nothing else, that prevents it."""
    monkeypatch.setattr(run_ops, "check_not_condemned", lambda _catalog, _keys: None)

    version = disturbed_save(place, how)

    with place.open() as reading:
        assert not reading.verify().ok
        with pytest.raises(errors.IntegrityError):
            reading.load(f"#{version.id}")


def test_what_becomes_live_between_listing_and_commit_is_not_condemned(
    place: Place, store: Store
) -> None:
    """A save whose pack was listed as an orphan commits first: the collection looks again."""
    state = parts_of(5, 6)
    saved = []

    def save(_call: str, key: str) -> None:
        if key.startswith("commits/"):
            with place.open() as other:
                saved.append(other.run("late").save(state, step=1))

    # The pack is there before the listing: a first try of the same save, whose commit is held up.
    version = store.run("gpt").save(parts_of(1), step=1)
    delete(store, version.id)
    undone = store.run("gpt").save(parts_of(2), step=2)
    delete(store, undone.id)

    def revive(_call: str, key: str) -> None:
        if key.startswith("commits/"):
            with place.open() as other:
                undelete(other, undone.id)
            save(_call, key)

    fault = Fault(calls=frozenset({"put_if_absent"}), when=When.CALLBACK, callback=revive)
    with place.open(FaultyBackend(place.backend, fault)) as collector:
        report = collector.gc(grace_s=0, orphan_age_s=0)

    with place.open() as reading:
        assert equal(reading.load(f"#{undone.id}"), parts_of(2))
        assert equal(reading.load(f"#{saved[0].id}"), state)
        with pytest.raises(errors.VersionNotFoundError):
            reading.load(f"#{version.id}")
    assert count(report.condemned) == 2
    assert place.stored() == place.needed()


def test_whoever_can_read_a_deleted_manifest_knows_that_its_packs_are_condemned(
    place: Place, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Manifests of deleted versions are condemned first, however many commits it takes."""
    monkeypatch.setattr(limits, "KEYS_PER_OP_MAX", 1)
    run = store.run("gpt")
    versions = [run.save(parts_of(step), step=step) for step in range(3)]
    delete(store, *(version.id for version in versions[:2]))

    store.gc(grace_s=HOUR, orphan_age_s=0, repack_below=None)

    order = sorted(store.repo.catalog.condemned.items(), key=lambda item: item[1])
    kinds = [key.partition("/")[0] for key, _ in order]
    assert kinds == ["manifests", "manifests", "packs", "packs"]
    with pytest.raises(errors.CondemnedError):
        undelete(store, versions[0].id)


def test_a_version_deleted_while_its_pack_is_repacked_takes_its_manifest_along(
    place: Place, store: Store
) -> None:
    """Its manifest is condemned with the pack: a client that comes later cannot undelete it."""
    run = store.run("gpt")
    first, second, third = (run.save(parts_of(1, n, n), step=n) for n in range(3))
    pack = needs(store, first) & needs(store, second)
    delete(store, first.id)
    commits = []

    def drop(_call: str, key: str) -> None:
        commits.append(key)
        if len(commits) == 2:  # the first commit condemns, the second relocates
            with place.open() as other:
                delete(other, second.id)

    fault = Fault(calls=frozenset({"put_if_absent"}), when=When.CALLBACK, times=0, callback=drop)
    with place.open(FaultyBackend(place.backend, fault)) as collector:
        collector.gc(grace_s=HOUR, repack_below=0.9)
        condemned = set(collector.repo.catalog.condemned)

    assert pack <= condemned
    assert {first.manifest_key, second.manifest_key, third.manifest_key} <= condemned
    with place.open() as late, pytest.raises(errors.CondemnedError):
        undelete(late, second.id)
    with place.open() as late:
        assert equal(late.load(f"#{third.id}"), parts_of(1, 2, 2))


def test_a_manifest_that_was_written_anew_with_the_same_bytes_is_found(
    place: Place, store: Store
) -> None:
    """Swept while a collection was about to read it: the version is read where it lies now."""
    version = store.run("gpt").save(parts_of(1), step=1)  # nothing but weights: ageing keeps all

    def move(_call: str, key: str) -> None:
        if key == version.manifest_key:
            with place.open() as other:
                other.age([f"#{version.id}"], "weights", force=True)
                aged = other.resolve(f"#{version.id}")
                assert aged.manifest_digest == version.manifest_digest
                assert aged.manifest_key != version.manifest_key
                other.gc(grace_s=0, orphan_age_s=0)

    fault = Fault(calls=frozenset({"get"}), times=0, when=When.CALLBACK, callback=move)
    with place.open(FaultyBackend(place.backend, fault)) as collector:
        collector.gc(grace_s=0, orphan_age_s=0)

    assert version.manifest_key not in place.stored()
    assert place.stored() == place.needed()
    assert equal(store.load(f"#{version.id}"), parts_of(1))


def test_an_object_that_comes_back_after_its_deletion_goes_again(
    place: Place, store: Store
) -> None:
    """A request that arrives late creates it anew: the same collector condemns it once more."""
    version = store.run("gpt").save(parts_of(1), step=1)
    pack = next(iter(needs(store, version) - {version.manifest_key}))
    data = place.backend.get(pack, bytes_max=1 << 20)
    delete(store, version.id)
    store.gc(grace_s=0)
    assert pack not in place.stored()
    place.backend.put(pack, data)
    place.environment.sleep(DAY)

    report = store.gc(grace_s=0)

    assert count(report.swept) == 1
    assert place.stored() == set()


def _with_dead_versions() -> Place:
    place = new_place()
    with place.open() as store:
        versions = [store.run("gpt").save(parts_of(step), step=step) for step in range(12)]
        delete(store, *(version.id for version in versions[:-1]))
    return place


@pytest.mark.parametrize("further", [4, 5, 8, 15])
def test_collections_that_all_die_at_the_same_call_get_done(further: int) -> None:
    """Each that gets some calls beyond the condemnation deletes what those before it have not."""
    calls: list[str] = []
    watch = Fault(when=When.CALLBACK, times=0, callback=lambda call, _: calls.append(call))
    place = _with_dead_versions()
    with place.open(FaultyBackend(place.backend, watch), workers=1) as whole:
        whole.gc(grace_s=0)
    place = _with_dead_versions()
    left, condemned = [len(place.stored())], True
    while condemned:
        fault = Fault(at=calls.index("put_if_absent") + 1 + further, times=0)
        dying = FaultyBackend(place.backend, fault)
        with suppress(errors.StorageError), place.open(dying, workers=1) as collector:
            collector.gc(grace_s=0)
        left.append(len(place.stored()))
        with place.open() as seen:
            condemned = bool(seen.repo.catalog.condemned)
        assert left[-1] < left[-2] or not condemned
    assert place.stored() == place.needed()


@pytest.mark.parametrize(("when", "times"), [(When.BEFORE, 0), (When.AFTER, 1)])
def test_a_collection_can_fail_at_every_call(when: When, times: int) -> None:
    """Wherever it ends, versions load; and the next collection finishes what was begun."""
    at, hit = 0, 1
    while hit:
        at, place = at + 1, new_place()
        with place.open() as store:
            first = store.run("gpt").save(parts_of(1, 1, 1), step=1)
            kept = store.run("gpt").save(parts_of(1, 2, 2), step=2)
            delete(store, first.id)
            place.orphan()
        fault = Fault(calls=WRITES, at=at, times=times, when=when)
        dying = FaultyBackend(place.backend, fault)
        with suppress(errors.StorageError), place.open(dying) as collector:
            collector.gc(grace_s=0, orphan_age_s=0, repack_below=1.0)
        with place.open() as reading:
            assert equal(reading.load(f"#{kept.id}"), parts_of(1, 2, 2))
            for _ in range(2):
                reading.gc(grace_s=0, orphan_age_s=0, repack_below=1.0)
            assert equal(reading.load(f"#{kept.id}"), parts_of(1, 2, 2))
            assert place.stored() == place.needed()
            assert not reading.repo.refresh().condemned
        hit = fault.hits
    assert at > 8


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_live_bytes_of_a_pack_that_versions_share(store: Store, order: tuple[int, int]) -> None:
    """Each of two versions needs two of its three chunks, one of them both: all three are live.

    The pack is not rewritten; once one version goes, two chunks are left.
    """
    first = store.run("gpt").save(parts_of(0, 0, 0), step=0)
    for n in order:
        store.fork("gpt@0", f"part-{n}", include=[f"model.{name}" for name in PARTS[n]])
    table = store.repo.manifests.load(first).pieces
    each = (table.stored + CHUNK_HEADER_BYTES + INDEX_ROW_BYTES).tolist()
    assert table.pack.tolist() == [0, 0, 0]
    delete(store, first.id)

    report = store.gc(grace_s=0, orphan_age_s=0, repack_below=1.0)

    assert report.live_chunk_bytes == sum(each)
    assert report.repacked.packs_count == 0
    delete(store, store.resolve("part-2").id)
    report = store.gc(grace_s=0, orphan_age_s=0, dry_run=True)
    assert report.live_chunk_bytes == sum(each[:2])
