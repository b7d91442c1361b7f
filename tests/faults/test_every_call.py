"""Every call to the storage fails, in every way, once and for good: what is left is right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from faultkit.states import differences, state_of
from faultkit.stores import contents, create, load_id, memory_with, reopen, version_ids
from shortening import is_short, places
from simulated_environment import SimulatedEnvironment
from threadwatch import threads_left

from ckptstore import limits
from ckptstore.backends.base import Backend
from ckptstore.backends.memory import MemoryBackend
from ckptstore.backends.retrying import RetryingBackend
from ckptstore.errors import (
    AmbiguousWriteError,
    CkptStoreError,
    StorageError,
    StorageFullError,
    TransientStorageError,
)
from ckptstore.model import Version
from ckptstore.store import Store
from ckptstore.testing.faulty import CALLS, Fault, FaultyBackend, When

pytestmark = pytest.mark.timeout(180)

Action = Callable[[Store], object]
Opening = Callable[[Backend], Store]


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way in which a call may fail."""

    name: str
    when: When
    error: type[CkptStoreError]
    times: int = 1
    # put-if-absent is atomic by contract: a backend that tears a commit is not one of ours.
    calls: frozenset[str] = CALLS

    def fault(self, at: int) -> Fault:
        """Return the fault that hits call number `at`."""
        return Fault(
            calls=self.calls,
            at=at,
            times=self.times,
            when=self.when,
            error=lambda: self.error("injected failure"),
        )


WAYS = [
    Way(name="transient", when=When.BEFORE, error=TransientStorageError),
    Way(name="permanent", when=When.BEFORE, error=StorageError),
    Way(name="full", when=When.BEFORE, error=StorageFullError, times=0),
    Way(name="for-good", when=When.BEFORE, error=TransientStorageError, times=0),
    Way(name="lost-reply", when=When.AFTER, error=TransientStorageError),
    Way(name="lost-reply-permanent", when=When.AFTER, error=StorageError),
    Way(name="lost-replies", when=When.AFTER, error=TransientStorageError, times=0),
    Way(name="torn", when=When.TRUNCATED, error=StorageError, calls=CALLS - {"put_if_absent"}),
]


def outcomes(
    objects: dict[str, bytes], opening: Opening, action: Action, way: Way, *, retry: bool = False
) -> Iterator[tuple[int, MemoryBackend, object]]:
    """Yield ``(n, storage, result or error)`` for a failure at each call n that there is."""
    count = Fault(calls=way.calls, at=0)
    with opening(FaultyBackend(memory_with(objects), count)) as store:
        action(store)
    assert count.seen > 0
    for at in places(count.seen, way.name):
        inner = memory_with(objects)
        fault = way.fault(at)
        backend: Backend = FaultyBackend(inner, fault)
        if retry:
            backend = RetryingBackend(backend, environment=SimulatedEnvironment(at))
        result: object
        try:
            with opening(backend) as store:
                result = action(store)
        except CkptStoreError as error:
            result = error
        assert fault.hits, f"call {at} was not made"
        assert not threads_left()
        yield at, inner, result


def check_store(storage: Backend, seeds: list[int], newest: int | None) -> None:
    """Hold that the versions are exactly of these seeds, and that a further save works."""
    with reopen(storage) as store:
        versions = store.versions()
        meant = seeds if newest is None else [*seeds, newest]
        assert [version.step for version in versions] == meant
        for version in versions:
            assert differences(load_id(store, version), state_of(version.step)) == []
        saved = store.run("gpt").save(state_of(50), step=50)
        assert differences(load_id(store, saved), state_of(50)) == []
        assert store.verify().ok


def save_third(store: Store) -> Any:  # noqa: ANN401
    """Save state 3."""
    return store.run("gpt").save(state_of(3), step=3, tags=["third"])


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
@pytest.mark.short(sample=4)
def test_a_save_raises_and_leaves_no_version_or_returns_and_leaves_one(
    base: dict[str, bytes], way: Way
) -> None:
    """Whichever call of a save fails: a version shows if it returned, none shows if it raised.

    After an AmbiguousWriteError, and only then, either may be; earlier versions stay as they are
    and the next save works in all cases.
    """
    raised = 0
    for at, storage, result in outcomes(base, reopen, save_third, way):
        with reopen(storage) as store:
            shown = len(store.versions()) == 3
        if isinstance(result, CkptStoreError):
            raised += 1
            assert not shown or isinstance(result, AmbiguousWriteError), f"call {at}: {result}"
        else:
            assert shown, f"call {at}"
        check_store(storage, [1, 2], 3 if shown else None)
    assert raised > (0 if is_short() else 3)


@pytest.mark.parametrize("when", [When.BEFORE, When.AFTER])
def test_a_commit_that_gets_no_answer_is_never_taken_for_written(
    base: dict[str, bytes], when: When
) -> None:
    """Where only put-if-absent fails, for good: reading back tells, and what is unclear raises."""
    commits = frozenset({"put_if_absent"})
    way = Way(name="deaf", when=when, error=TransientStorageError, times=0, calls=commits)
    for _, storage, result in outcomes(base, reopen, save_third, way):
        if when is When.BEFORE:
            assert isinstance(result, AmbiguousWriteError)
        else:
            assert isinstance(result, Version)
        check_store(storage, [1, 2], 3 if when is When.AFTER else None)


def test_a_single_transient_failure_below_the_retries_goes_unnoticed(
    base: dict[str, bytes],
) -> None:
    """With the retry wrapper, a save survives one transient failure of any call but a write.

    What an open writer was given is gone with the failure; there the save raises.
    """
    for way in (WAYS[0], WAYS[4]):
        calls = Way(name=way.name, when=way.when, error=way.error, calls=CALLS - {"writer.write"})
        for at, storage, result in outcomes(base, reopen, save_third, calls, retry=True):
            assert not isinstance(result, CkptStoreError), f"call {at}: {result!r}"
            check_store(storage, [1, 2], 3)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_creating_and_first_save(way: Way) -> None:
    """Whichever call of the creation and first save fails, both work when tried again."""
    for at, storage, result in outcomes({}, create, save_third, way):
        with create(storage) as store:
            shown = version_ids(store)
            if not isinstance(result, CkptStoreError):
                assert len(shown) == 1
            elif not isinstance(result, AmbiguousWriteError):
                assert not shown, f"call {at}: {result}"
        check_store(storage, [], 3 if shown else None)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_a_load_raises_or_returns_the_right_bits(base: dict[str, bytes], way: Way) -> None:
    """A load never returns anything but what was saved, and changes nothing."""
    for at, storage, result in outcomes(base, reopen, lambda s: s.load("gpt@1"), way):
        if not isinstance(result, CkptStoreError):
            assert differences(result, state_of(1)) == [], f"call {at}"
        assert contents(storage) == base


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_a_lazy_slice_raises_or_returns_the_right_bits(base: dict[str, bytes], way: Way) -> None:
    """The same holds for a part of one tensor."""

    def look(store: Store) -> Any:  # noqa: ANN401
        return store.version("gpt@2")["model.weight"][19_000:19_010]

    meant = state_of(2)["model"]["weight"][19_000:19_010]
    for at, _, result in outcomes(base, reopen, look, way):
        if not isinstance(result, CkptStoreError):
            assert differences(result, meant) == [], f"call {at}"


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_a_tag_is_set_or_not(base: dict[str, bytes], way: Way) -> None:
    """A tag shows if the call returned, and not if it raised anything but AmbiguousWriteError."""
    for at, storage, result in outcomes(base, reopen, lambda s: s.tag("gpt@1", "good"), way):
        with reopen(storage) as store:
            shown = "good" in store.runs()[0].tags
        if isinstance(result, CkptStoreError):
            assert not shown or isinstance(result, AmbiguousWriteError), f"call {at}: {result}"
        else:
            assert shown, f"call {at}"
        check_store(storage, [1, 2], None)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
@pytest.mark.short(sample=4)
def test_a_snapshot_that_fails_changes_nothing(
    base: dict[str, bytes], way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a save also writes and drops catalog snapshots, its outcome is as clear as without."""
    monkeypatch.setattr(limits, "SNAPSHOT_COMMITS_MIN", 1)
    for at, storage, result in outcomes(base, reopen, save_third, way):
        with reopen(storage) as store:
            shown = len(store.versions()) == 3
        assert shown or isinstance(result, CkptStoreError), f"call {at}"
        if isinstance(result, CkptStoreError) and not isinstance(result, AmbiguousWriteError):
            assert not shown, f"call {at}: {result!r}"
        check_store(storage, [1, 2], 3 if shown else None)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_verify_never_says_that_all_is_well_after_a_failure_of_a_read(
    base: dict[str, bytes], way: Way
) -> None:
    """A verify that could not read something raises or reports it, and changes nothing.

    A listing that is silently cut is beyond what any reader can notice, so it may pass there.
    """
    calls = way.calls - {"list"} if way.when is When.TRUNCATED else way.calls
    narrowed = Way(name=way.name, when=way.when, error=way.error, times=way.times, calls=calls)
    for at, storage, result in outcomes(base, reopen, lambda s: s.verify(), narrowed):
        assert isinstance(result, CkptStoreError) or not getattr(result, "ok", True), f"call {at}"
        assert contents(storage) == base
