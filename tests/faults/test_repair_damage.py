"""Random damage to every kind of object: verify says exactly what it touches, repair mends it."""

from __future__ import annotations

import random  # noqa: TID251 - seeded
from dataclasses import dataclass

import pytest
from faultkit.states import differences, state_of
from faultkit.stores import contents, create, load_id, memory_with, reopen

from ckptstore import limits
from ckptstore.backends.memory import MemoryBackend
from ckptstore.errors import CkptStoreError, CorruptObjectError, InvalidInputError
from ckptstore.format.keys import commit_key
from ckptstore.maintenance.repair.repair import RepairReport
from ckptstore.store import Store

pytestmark = pytest.mark.timeout(180)

TRIES = 25
Objects = dict[str, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stores:
    """A store, and one that holds the same states, saved again by another run."""

    objects: Objects
    again: Objects


@pytest.fixture(scope="module")
def stores() -> Stores:
    """Return the objects of both."""
    patch = pytest.MonkeyPatch()
    patch.setattr(limits, "SNAPSHOT_COMMITS_MIN", 3)
    first, second = memory_with({}), memory_with({})
    with create(first) as store:
        for seed, name in [(1, "gpt"), (2, "gpt"), (3, "gpt"), (2, "copy")]:
            store.run(name).save(state_of(seed), step=seed)
    with create(second) as store:
        for seed in (3, 1, 2):
            store.run("other").save(state_of(seed), step=100 + seed, codec="raw")
    patch.undo()
    return Stores(objects=contents(first), again=contents(second))


def damage(objects: Objects, chance: random.Random, kinds: tuple[str, ...]) -> Objects:
    """Return the objects with one to three of these kinds flipped, cut, shifted or gone."""
    torn = dict(objects)
    keys = [key for key in sorted(objects) if key.startswith(kinds)]
    for key in chance.sample(keys, chance.randint(1, min(3, len(keys)))):
        data = bytearray(torn[key])
        at = chance.randrange(len(data))
        match chance.choice(("flip", "cut", "shift", "gone")):
            case "flip":
                data[at] ^= 1 << chance.randrange(8)
            case "cut":
                del data[at:]
            case "shift":
                data[at:at] = b"xyz"
            case _:
                del torn[key]
                continue
        torn[key] = bytes(data)
    return torn


def touched(store: Store) -> dict[str, set[str]]:
    """Return version id to tensors, of every problem that a version has."""
    found: dict[str, set[str]] = {}
    for problem in store.verify().problems:
        if problem.version:
            found.setdefault(problem.version, set()).add(problem.tensor)
    return found


def really_damaged(store: Store) -> dict[str, set[str]]:
    """Return the same by loading: each tensor of each version by itself."""
    found: dict[str, set[str]] = {}
    for version in store.versions():
        try:
            lazy = store.version(f"#{version.id}")
        except CorruptObjectError:
            found[version.id] = {""}
            continue
        for path in {tensor.path for tensor in lazy.tensors()}:
            try:
                lazy.load(include=[path])
            except CkptStoreError:
                found.setdefault(version.id, set()).add(path)
    return found


def check_rest(store: Store, report: RepairReport) -> None:
    """Hold that what is not lost loads bit-identical, tensor by tensor, and the rest is named."""
    lost = {item.version: set(item.tensors) for item in report.lost}
    meant = {version: tensors or {""} for version, tensors in lost.items()}
    assert really_damaged(store) == meant
    for version in store.versions():
        assert version.damaged == (version.id in lost)
        if version.id not in lost:
            assert differences(load_id(store, version), state_of(version.step)) == []


@pytest.mark.parametrize("kind", ["packs/", "manifests/", "snapshots/", "all"])
@pytest.mark.short(sample=1)
def test_verify_names_exactly_what_is_touched(
    stores: Stores, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """For any damage: verify's versions and tensors are those that do not load, and no others."""
    caplog.set_level("ERROR", logger="ckptstore")
    chance = random.Random(f"verify {kind}")
    kinds = ("packs/", "manifests/", "snapshots/") if kind == "all" else (kind,)
    hit = 0
    for _ in range(TRIES):
        with reopen(memory_with(damage(stores.objects, chance, kinds))) as store:
            found = touched(store)
            assert found == really_damaged(store)
            hit += bool(found)
    assert hit or kind == "snapshots/"


@pytest.mark.short("copy")
@pytest.mark.parametrize("source", ["copy", "again"])
def test_a_second_store_mends_everything(
    stores: Stores, source: str, caplog: pytest.LogCaptureFixture
) -> None:
    """From a copy, or from a store that holds the same states, every damage is mended.

    A dry run says so before, and writes nothing; a second repair finds nothing to do.
    """
    caplog.set_level("ERROR", logger="ckptstore")
    chance = random.Random(source)
    other = stores.objects if source == "copy" else stores.again
    origins: set[str] = set()
    wanted = {"source", "elsewhere", "moved", "scanned"}
    # Names are random, and with them what is hit: a few more tries until each kind was.
    for tries in range(8 * TRIES):
        if tries >= TRIES and wanted <= origins:
            break
        torn = damage(stores.objects, chance, ("packs/", "manifests/", "snapshots/"))
        storage, second = memory_with(torn), memory_with(other)
        with reopen(storage) as store, reopen(second, read_only=True) as from_store:
            dry = store.repair(from_store, dry_run=True)
            assert dry.ok
            assert contents(storage) == dict(sorted(torn.items()))
            report = store.repair(from_store)
            assert report.ok
            assert [m.version for m in dry.mended] == [m.version for m in report.mended]
            assert set(torn) - set(contents(storage)) <= set(report.snapshots)
            assert store.verify().ok
            check_rest(store, report)
            origins.update(report.pieces)
            commits = store.repo.catalog.number
            nothing = store.repair(from_store)
            assert nothing.ok
            assert not nothing.problems
            assert store.repo.catalog.number == commits
        with reopen(storage) as store:
            assert store.verify().ok
    assert wanted <= origins


@pytest.mark.slow
def test_without_a_second_store_it_says_what_is_lost(
    stores: Stores, caplog: pytest.LogCaptureFixture
) -> None:
    """What cannot be had is named exactly; the rest stays loadable; nothing is ever deleted.

    Lost versions are recorded as damaged, once, and mended later by a second store.
    """
    caplog.set_level("ERROR", logger="ckptstore")
    chance = random.Random("alone")
    lost = 0
    for _ in range(TRIES):
        torn = damage(stores.objects, chance, ("packs/", "manifests/", "snapshots/"))
        storage = memory_with(torn)
        with reopen(storage) as store:
            before = really_damaged(store)
            report = store.repair()
            assert {item.version for item in report.lost} <= set(before)
            assert set(torn) - set(contents(storage)) <= set(report.snapshots)
            check_rest(store, report)
            assert set(report.quarantined) == {item.version for item in report.lost}
            commits = store.repo.catalog.number
            again = store.repair()
            assert set(again.lost) == set(report.lost)
            assert (again.quarantined, store.repo.catalog.number) == ((), commits)
            lost += bool(report.lost)
            with reopen(memory_with(stores.again)) as second:
                assert store.repair(second).ok
            assert store.verify().ok
            assert not any(version.damaged for version in store.versions())
    assert lost


def test_a_save_after_a_loss_shares_nothing_with_it(
    stores: Stores, caplog: pytest.LogCaptureFixture
) -> None:
    """What repair recorded as damaged is written again by the next save, which then is sound."""
    packs = [key for key in stores.objects if key.startswith("packs/")]
    storage = memory_with({k: v for k, v in stores.objects.items() if k not in packs})
    with reopen(storage) as store:
        assert len(store.repair().lost) == 4
        with caplog.at_level("WARNING", logger="ckptstore"):
            saved = store.run("gpt").save(state_of(3), step=4)
        assert "parts of which are lost" in caplog.text
        assert differences(load_id(store, saved), state_of(3)) == []
        # And now the store has again what the others lost.
        mended = store.repair()
        assert {item.step for item in mended.mended} == {1, 2, 3}
        assert [item.step for item in mended.lost] == [1, 2, 2]
        assert not store.resolve("gpt@3").damaged


def put_back(storage: MemoryBackend, stores: Stores) -> None:
    """Put the objects that are missing or torn back, as a person with a backup would."""
    for key, data in stores.objects.items():
        storage.delete(key)
        storage.put(key, data)


def test_damage_that_a_person_mended_is_no_damage_any_more(stores: Stores) -> None:
    """After the right objects were put back by hand, a repair clears what it had recorded."""
    torn = {k: v for k, v in stores.objects.items() if not k.startswith("packs/")}
    storage = memory_with(torn)
    with reopen(storage) as store:
        assert not store.repair().ok
        put_back(storage, stores)
        assert store.repair().ok
        assert all(v.verified and not v.damaged for v in store.versions())


@pytest.mark.parametrize("what", ["missing", "damaged"])
def test_commits_are_put_back_with_proof_only(stores: Stores, what: str) -> None:
    """Each commit that a later one vouches for comes back from a copy, alone or several at once.

    A damaged one keeps its name until the caller vouches to be the only writer. The report names
    the number and what can be read before it.
    """
    keys = sorted(key for key in stores.objects if key.startswith("commits/"))
    bare = {k: v for k, v in stores.objects.items() if not k.startswith("snapshots/")}
    for hit in (keys[:1], keys[1:3], keys[:3]):
        torn = {k: v for k, v in bare.items() if k not in hit}
        if what == "damaged":
            torn |= {key: bare[key][:-9] for key in hit}
        storage = memory_with(torn)
        with reopen(storage) as store:
            alone = store.repair()
            assert [c.key for c in alone.commits] == hit
            assert {c.what for c in alone.commits} == {what}
            assert not any(c.mended for c in alone.commits)
            readable = keys.index(hit[0])
            assert (alone.commits_readable, alone.versions_readable) == (readable, readable)
            with reopen(memory_with(stores.again)) as other:
                assert not store.repair(other).ok
            assert contents(storage) == dict(sorted(torn.items()))
            with reopen(memory_with(bare)) as copy:
                assert store.repair(copy).ok == (what == "missing")
        with reopen(storage, single_writer=True) as store, reopen(memory_with(bare)) as copy:
            assert store.repair(copy).ok
            assert store.verify().ok
        assert contents(storage) == dict(sorted(bare.items()))


def test_a_copy_that_went_on_as_another_log_mends_no_commit(stores: Stores) -> None:
    """A commit of the same number but another history is never taken."""
    bare = {k: v for k, v in stores.objects.items() if not k.startswith("snapshots/")}
    forked = memory_with({k: v for k, v in bare.items() if k < commit_key(3) or "commits" not in k})
    with reopen(forked) as store:
        for seed in (7, 8):
            store.run("gpt").save(state_of(seed), step=seed)
    torn = {k: v for k, v in bare.items() if k != commit_key(3)}
    storage = memory_with(torn)
    with reopen(storage) as store, reopen(forked) as other:
        report = store.repair(other)
    assert [c.mended for c in report.commits] == [False]
    assert "no copy of this log" in report.commits[0].why
    assert contents(storage) == dict(sorted(torn.items()))


def test_records_level_finds_what_is_gone_without_reading_it_all(stores: Stores) -> None:
    """A lost pack and a lost manifest are mended at level records, too."""
    gone = [next(k for k in stores.objects if k.startswith(p)) for p in ("packs/", "manifests/")]
    storage = memory_with({k: v for k, v in stores.objects.items() if k not in gone})
    with reopen(storage) as store, reopen(memory_with(stores.again)) as other:
        report = store.repair(other, level="records")
        assert report.ok
        assert report.mended
        assert store.verify().ok


def flip(data: bytes, at: int) -> bytes:
    """Return the bytes with one bit changed."""
    torn = bytearray(data)
    torn[at] ^= 1
    return bytes(torn)


@pytest.mark.parametrize(("part", "at"), [("header", 3), ("trailer", -3), ("index", -60)])
def test_a_pack_whose_frame_is_damaged_is_left_for_a_new_one(
    stores: Stores, part: str, at: int
) -> None:
    """Header, trailer or index: nothing is lost, the versions move, the old pack stays there."""
    for key in [key for key in stores.objects if key.startswith("packs/")]:
        torn = {**stores.objects, key: flip(stores.objects[key], at)}
        storage = memory_with(torn)
        with reopen(storage) as store:
            assert not touched(store)
            report = store.repair()
            assert report.ok
            assert report.relocated, part
            assert not report.mended
            assert store.verify().ok
            assert contents(storage)[key] == torn[key]
            check_rest(store, report)


def test_a_chunk_whose_header_is_damaged_is_read_all_the_same(stores: Stores) -> None:
    """The manifest knows lengths and digests: content behind a damaged header is not lost."""
    key = max(
        (k for k in stores.objects if k.startswith("packs/")), key=lambda k: len(stores.objects[k])
    )
    torn = {**stores.objects, key: flip(stores.objects[key], 32 + 10)}
    with reopen(memory_with(torn)) as store:
        assert touched(store)
        report = store.repair()
        assert report.ok
        assert report.pieces["salvaged"]
        assert store.verify().ok


def test_a_read_only_store_is_not_repaired(stores: Stores) -> None:
    """But a dry run says what would be done."""
    torn = {k: v for k, v in stores.objects.items() if not k.startswith("packs/")}
    with reopen(memory_with(torn), read_only=True) as store:
        assert len(store.repair(dry_run=True).lost) == 4
        with pytest.raises(CkptStoreError, match="read-only"):
            store.repair()


def test_arguments_that_exclude_each_other_are_refused(stores: Stores) -> None:
    """A sample cannot be recorded, records have no sample, and a share is above 0."""
    with reopen(memory_with(stores.objects)) as store:
        for wrong in (
            {"sample": 0.5, "record": True},
            {"level": "records", "sample": 0.5},
            {"level": "records", "record": True},
            {"sample": 0.0},
            {"sample": 1.5},
            {"refs": ["gpt"], "unverified": True},
        ):
            with pytest.raises(InvalidInputError):
                store.verify(**wrong)


def test_the_end_of_the_log_comes_back_where_a_snapshot_knows_it(stores: Stores) -> None:
    """If the newest commits are gone, a snapshot of them tells, and vouches for those of a copy.

    Not once the log went on without them: what is put back must follow what is there.
    """
    snapshot = max(key for key in stores.objects if key.startswith("snapshots/"))
    last = int(snapshot.split("/")[1].split(".")[0])
    assert last == 3
    cut = {k: v for k, v in stores.objects.items() if k[:7] != "commits" or k < commit_key(2)}
    storage = memory_with(cut)
    with reopen(storage) as store:
        assert "commit that is gone" in store.verify().problems[0].message
        alone = store.repair()
        assert [(c.number, c.mended) for c in alone.commits] == [(2, False), (3, False)]
        assert (alone.commits_readable, alone.versions_readable) == (1, 1)
        with reopen(memory_with(stores.objects)) as copy:
            assert store.repair(copy).ok
        assert [version.step for version in store.versions()] == [1, 2, 3]
        assert store.verify().ok
    went_on = memory_with(cut)
    with reopen(went_on) as store, reopen(memory_with(stores.objects)) as copy:
        store.run("gpt").save(state_of(9), step=9)
        report = store.repair(copy)
        assert [(c.number, c.mended) for c in report.commits] == [(3, False)]
        assert "does not follow" in report.commits[0].why
        assert [version.step for version in store.versions()] == [1, 9]
