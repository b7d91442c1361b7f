"""Every call of a fork or rollback fails once, or from then on: all of it happened, or nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from faultkit.states import differences, state_of
from faultkit.stores import contents, create, memory_with, reopen

from ckptstore.errors import CkptStoreError, StorageError
from ckptstore.store import Store
from ckptstore.testing.faulty import CALLS, Fault, FaultyBackend, When

WAYS = [(When.BEFORE, 1), (When.BEFORE, 0), (When.AFTER, 1), (When.TRUNCATED, 1)]


@pytest.fixture(scope="module")
def empty() -> dict[str, bytes]:
    """Return the objects of a store with nothing in it."""
    backend = memory_with({})
    create(backend).close()
    return contents(backend)


def _fault(at: int, way: tuple[When, int]) -> Fault:
    when, times = way
    # put-if-absent is atomic by contract: a backend that tears a commit is not one of ours.
    calls = CALLS - {"put_if_absent"} if when is When.TRUNCATED else CALLS
    return Fault(
        calls=calls, at=at, times=times, when=when, error=lambda: StorageError("injected failure")
    )


def _each(
    objects: dict[str, bytes], way: tuple[When, int], action: Callable[[Store], object]
) -> list[tuple[bool, Store]]:
    """Return, for each call that failed, whether the action raised, and the store after it."""
    found: list[tuple[bool, Store]] = []
    for at in range(1, 1000):
        backend = memory_with(objects)
        fault = _fault(at, way)
        raised = False
        try:
            action(reopen(FaultyBackend(backend, fault)))
        except CkptStoreError:
            raised = True
        if not fault.hits:
            return found
        found.append((raised, reopen(backend)))
    raise AssertionError


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_fork_appears_whole_or_not_at_all(base: dict[str, bytes], way: tuple[When, int]) -> None:
    """Whatever call failed; and what was there still loads."""
    for raised, store in _each(base, way, lambda s: s.fork("gpt@1", "ft")):
        names = [info.name for info in store.runs()]
        assert names == ["gpt", "ft"] or (raised and names == ["gpt"])
        for run in names:
            assert not differences(state_of(1), store.load(f"{run}@1"))


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("side", ["source", "target"])
def test_a_fork_into_another_store_appears_whole_or_not_at_all(
    base: dict[str, bytes], empty: dict[str, bytes], way: tuple[When, int], side: str
) -> None:
    """Whichever of the two storages fails."""
    for at in range(1, 1000):
        here, there = memory_with(base), memory_with(empty)
        fault = _fault(at, way)
        faulty: Any = {"source": here, "target": there}
        faulty[side] = FaultyBackend(faulty[side], fault)
        raised = False
        try:
            target = reopen(faulty["target"])
            reopen(faulty["source"]).fork("gpt@2", "copy", store=target)
        except CkptStoreError:
            raised = True
        if not fault.hits:
            return
        store = reopen(there)
        names = [info.name for info in store.runs()]
        assert names == ["copy"] or (raised and not names)
        if names:
            assert not differences(state_of(2), store.load("copy"))
    raise AssertionError


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_rollback_happened_or_did_not(base: dict[str, bytes], way: tuple[When, int]) -> None:
    """The head is where it was or where it should be, and marks agree with it."""
    for raised, store in _each(base, way, lambda s: s.rollback("gpt@1")):
        step = store.resolve("gpt").step
        assert step == 1 or (raised and step == 2)
        abandoned = [version.step for version in store.versions() if version.abandoned]
        assert abandoned == ([2] if step == 1 else [])
