"""Repair under a storage that fails, a crash at any call, a second repair, and a collector."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from faultkit.states import differences, state_of
from faultkit.stores import contents, create, load_id, memory_with, reopen
from shortening import places

from ckptstore.backends.memory import MemoryBackend
from ckptstore.catalog import content_ops
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.state import Op
from ckptstore.errors import CkptStoreError, StorageError
from ckptstore.format.keys import commit_key, pack_key
from ckptstore.model import Version
from ckptstore.store import Store
from ckptstore.testing.faulty import CALLS, WRITES, Fault, FaultyBackend, When

pytestmark = pytest.mark.timeout(180)


class Crash(BaseException):
    """Stands for the end of the process: nothing catches it."""


@pytest.fixture(scope="module")
def whole() -> dict[str, bytes]:
    """Return the objects of a store with three versions of two runs."""
    storage = memory_with({})
    with create(storage) as store:
        for seed, name in [(1, "gpt"), (2, "gpt"), (2, "copy")]:
            store.run(name).save(state_of(seed), step=seed)
    return contents(storage)


@pytest.fixture(scope="module")
def torn(whole: dict[str, bytes]) -> dict[str, bytes]:
    """Return them with a pack gone, another flipped, a manifest cut and a commit missing."""
    packs = sorted(key for key in whole if key.startswith("packs/"))
    manifest = max(key for key in whole if key.startswith("manifests/"))
    flipped = bytearray(whole[packs[1]])
    flipped[len(flipped) // 2] ^= 8
    gone = (packs[0], commit_key(2))
    kept = {key: data for key, data in whole.items() if key not in gone}
    return {**kept, packs[1]: bytes(flipped), manifest: whole[manifest][:-5]}


def check_whole(storage: MemoryBackend) -> None:
    """Hold that everything is sound and bit-identical."""
    with reopen(storage) as store:
        assert store.verify().ok
        for version in store.versions():
            assert differences(load_id(store, version), state_of(version.step)) == []


def calls_of(torn: dict[str, bytes], whole: dict[str, bytes], calls: frozenset[str]) -> int:
    """Return how many calls a repair makes."""
    count = Fault(calls=calls, at=0)
    with (
        reopen(FaultyBackend(memory_with(torn), count)) as store,
        reopen(memory_with(whole)) as source,
    ):
        assert store.repair(source).ok
    return count.seen


WAYS = {
    "fails": (CALLS, When.BEFORE, StorageError),
    "loses its reply": (WRITES - {"writer.write"}, When.AFTER, StorageError),
    "crashes before": (CALLS, When.BEFORE, Crash),
    "crashes after": (WRITES - {"writer.write"}, When.AFTER, Crash),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.short(sample=1)
def test_a_repair_that_fails_at_any_call_is_finished_by_the_next(
    way: str, torn: dict[str, bytes], whole: dict[str, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever call fails or is the last: nothing that loaded before is lost, and the next mends.

    No object that was there is changed or removed by the one that failed.
    """
    caplog.set_level("ERROR", logger="ckptstore")
    calls, when, error = WAYS[way]
    total = calls_of(torn, whole, calls)
    for at in range(1, total + 1):
        storage = memory_with(torn)

        def fail(error: type[BaseException] = error) -> Exception:
            return error("injected failure")  # type: ignore[return-value]  # Crash passes all

        fault = Fault(calls=calls, at=at, when=when, error=fail)
        try:
            with (
                reopen(FaultyBackend(storage, fault)) as store,
                reopen(memory_with(whole)) as source,
            ):
                store.repair(source)
        except (CkptStoreError, Crash):
            assert fault.hits == 1
        found = contents(storage)
        assert {key: found.get(key) for key in torn} == torn
        with reopen(storage) as store, reopen(memory_with(whole)) as source:
            assert store.repair(source).ok
        check_whole(storage)


def test_reading_from_a_source_that_fails_changes_nothing(
    torn: dict[str, bytes], whole: dict[str, bytes]
) -> None:
    """A second store that fails at any call leaves this one as it can be repaired later."""
    count = Fault(at=0)
    with (
        reopen(memory_with(torn)) as store,
        reopen(FaultyBackend(memory_with(whole), count)) as source,
    ):
        assert store.repair(source).ok
    for at in places(count.seen, "repair"):
        storage = memory_with(torn)
        broken = FaultyBackend(memory_with(whole), Fault(at=at))
        with reopen(storage) as store:
            try:
                with reopen(broken) as source:
                    store.repair(source)
            except StorageError:
                pass
            with reopen(memory_with(whole)) as source:
                assert store.repair(source).ok
        check_whole(storage)


def at_call(
    torn: dict[str, bytes], at: int, calls: frozenset[str], action: Callable[[MemoryBackend], None]
) -> tuple[MemoryBackend, FaultyBackend]:
    """Return storage at whose call number `at` something else happens first."""
    storage = memory_with(torn)
    fault = Fault(
        calls=calls, at=at, when=When.CALLBACK, callback=lambda _call, _key: action(storage)
    )
    return storage, FaultyBackend(storage, fault)


def packs_of(store: Store, version: Version) -> tuple[str, ...]:
    """Return the packs that a version's manifest names."""
    return tuple(store.repo.manifests.load(version).pieces.packs)


def test_two_repairs_at_once_are_harmless(torn: dict[str, bytes], whole: dict[str, bytes]) -> None:
    """A second repair that runs whole between any two calls of the first: both end well."""

    def other(storage: MemoryBackend) -> None:
        with reopen(storage) as store, reopen(memory_with(whole)) as source:
            assert store.repair(source).ok

    for at in places(calls_of(torn, whole, WRITES), "writes"):
        storage, backend = at_call(torn, at, WRITES, other)
        with reopen(backend) as store, reopen(memory_with(whole)) as source:
            assert store.repair(source).ok
        check_whole(storage)


def test_a_collector_that_condemns_new_packs_makes_the_repair_write_them_again(
    torn: dict[str, bytes], whole: dict[str, bytes]
) -> None:
    """With no grace for orphans at all, what was condemned is written again, never relocated to."""
    condemned: set[str] = set()
    torn = {**torn, commit_key(2): whole[commit_key(2)]}  # else no collector can commit

    def collect(storage: MemoryBackend) -> None:
        fresh = [k for k in storage.objects if k.startswith(("packs/", "manifests/"))]
        keys = set(fresh) - set(whole)

        def build(now: Catalog) -> list[Op]:
            return content_ops.condemn(now, keys)

        with reopen(storage) as store:
            if store.repo.log.append_any(build) is not None:
                condemned.update(keys)

    for at in places(calls_of(torn, whole, WRITES), "writes"):
        storage, backend = at_call(torn, at, WRITES, collect)
        with reopen(backend) as store, reopen(memory_with(whole)) as source:
            assert store.repair(source).ok
        check_whole(storage)
        with reopen(storage) as store:
            gone = set(store.repo.refresh().condemned)
            live = {version.manifest_key for version in store.versions()}
            live |= {pack_key(p) for v in store.versions() for p in packs_of(store, v)}
            assert not live & gone
    assert condemned


def test_verifications_of_several_threads_record_each_version_once(whole: dict[str, bytes]) -> None:
    """Whoever records, every version is recorded, and no commit says it twice."""
    storage = memory_with(whole)
    stores: list[Store] = [reopen(storage) for _ in range(4)]
    failures: list[BaseException] = []

    def check(store: Store) -> None:
        try:
            assert store.verify(record=True).ok
        except BaseException as error:  # noqa: BLE001 - told to the test
            failures.append(error)

    threads = [threading.Thread(target=check, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    with reopen(storage) as store:
        assert all(version.verified for version in store.versions())
        named = [v for c in store.log() for op in c.ops for v in getattr(op, "versions", ())]
        assert sorted(named) == sorted(version.id for version in store.versions())
