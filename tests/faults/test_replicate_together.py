"""Replication among everything else at once: both directions, savers, retention, collections."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from simulated_environment import SimulatedEnvironment

import ckptstore
from ckptstore.backends.memory import MemoryBackend
from ckptstore.errors import CondemnedError, PolicyError
from ckptstore.repo import create_on

ZERO: dict[str, Any] = {"grace_s": 0.0, "orphan_age_s": 0.0}
CHUNK = 1 << 16


def _state(run: str, step: int) -> dict[str, dict[str, torch.Tensor]]:
    own = float(sum(map(ord, run)))
    return {"model": {"w": torch.full((40_000,), own + step), "same": torch.full((20_000,), own)}}


class Place:
    """A location that every thread opens for itself, as processes do."""

    def __init__(self, name: str, *, chunk_bytes: int = CHUNK) -> None:
        self.backend = MemoryBackend(name)
        self.chunk_bytes = chunk_bytes
        self.open()

    def open(self, environment: Any = None) -> ckptstore.Store:  # noqa: ANN401
        """Return a store with a catalog of its own."""
        more = {} if environment is None else {"environment": environment}
        repo = create_on(self.backend, exist_ok=True, chunk_bytes=self.chunk_bytes, **more)
        return ckptstore.Store(repo)


def _all_at_once(*works: Callable[[], None]) -> None:
    """Run functions in a thread each; raise what any of them raised."""
    failures: list[BaseException] = []
    start = threading.Barrier(len(works))

    def guarded(work: Callable[[], None]) -> None:
        try:
            start.wait()
            work()
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def _assert_whole(place: Place) -> dict[str, str]:
    """Load all that a store shows; return the level of each version by id."""
    store = place.open()
    assert store.verify().ok
    for version in store.versions():
        if version.level != "record":
            found = store.load(f"#{version.id}")["model"]
            meant = _state(version.run, version.step)["model"]
            assert all(torch.equal(found[name], tensor) for name, tensor in meant.items())
    return {version.id: version.level for version in store.versions()}


def _saver(place: Place, run: str, steps: range) -> Callable[[], None]:
    def work() -> None:
        store = place.open()
        for step in steps:
            store.run(run, metrics={"loss": "min"}).save(
                _state(run, step), step=step, metrics={"loss": 1 / (step + 1)}
            )

    return work


def _copier(source: Place, target: Place, times: int, failed: list[str]) -> Callable[[], None]:
    def work() -> None:
        here, there = source.open(), target.open()
        for _ in range(times):
            try:
                report = here.replicate(there)
            except CondemnedError:  # collections that never pause are let win after some tries
                continue
            failed.extend(one.message for one in report.failures)

    return work


def _collector(place: Place, times: int) -> Callable[[], None]:
    def work() -> None:
        store = place.open()
        for _ in range(times):
            store.gc(**ZERO)

    return work


def test_both_directions_at_once(request: pytest.FixtureRequest) -> None:
    """Two stores that train and are replicated to each other end up with the same versions."""
    one, two = (Place(f"{request.node.nodeid}/{n}", chunk_bytes=CHUNK << n) for n in (0, 1))
    failed: list[str] = []
    _all_at_once(
        _saver(one, "a", range(8)),
        _saver(two, "b", range(8)),
        _copier(one, two, 4, failed),
        _copier(two, one, 4, failed),
        _copier(one, two, 4, failed),
    )
    assert not failed
    for here, there in ((one, two), (two, one)):
        here.open().replicate(there.open())
    assert _assert_whole(one) == _assert_whole(two)
    assert len(one.open().versions()) == 16
    heads = [{info.name: info.head for info in place.open().runs()} for place in (one, two)]
    assert heads[0] == heads[1]


def test_collections_without_grace_on_both_sides(request: pytest.FixtureRequest) -> None:
    """What is copied while both stores collect without pause is whole, or not there."""
    source, target = (Place(f"{request.node.nodeid}/{n}") for n in (0, 1))
    _saver(source, "a", range(6))()
    failed: list[str] = []
    _all_at_once(
        _copier(source, target, 3, failed),
        _copier(source, target, 3, failed),
        _collector(target, 25),
        _collector(source, 25),
        _saver(source, "a", range(6, 12)),
        _saver(target, "own", range(6)),
    )
    assert not failed
    _assert_whole(source)
    _assert_whole(target)
    source.open().replicate(target.open())
    there = _assert_whole(target)
    assert all(there[version.id] == "full" for version in source.open().versions())


def test_a_source_that_is_thinned_out_meanwhile(request: pytest.FixtureRequest) -> None:
    """What the source deletes, ages and collects while it is read is left out, or comes whole."""
    source, target = (Place(f"{request.node.nodeid}/{n}") for n in (0, 1))
    _saver(source, "a", range(10))()
    failed: list[str] = []

    def thin() -> None:
        store = source.open()
        for last in (8, 6, 4, 2):
            try:
                store.retain({"full": f"last {last}", "weights": "every 2 steps"})
            except PolicyError:
                continue
            store.gc(**ZERO)

    _all_at_once(_copier(source, target, 3, failed), thin, _saver(source, "a", range(10, 14)))
    _assert_whole(source)
    _assert_whole(target)
    source.open().replicate(target.open())
    there = _assert_whole(target)
    for version in source.open().versions():
        if version.level == "full":
            assert there[version.id] == "full"


@pytest.mark.parametrize("skew_s", [-(10**9), 10**9])
def test_clocks_that_differ_by_decades(request: pytest.FixtureRequest, skew_s: int) -> None:
    """Nothing is decided by a clock: not what comes, nor in which order, nor whose head counts."""
    source, target = (Place(f"{request.node.nodeid}/{n}") for n in (0, 1))
    _saver(source, "a", range(3))()
    odd = SimulatedEnvironment(7, now_ms=1_700_000_000_000 + skew_s * 1000)
    here, there = source.open(), target.open(odd)
    here.replicate(there)
    run = there.run("a")
    assert run.head is not None
    assert run.head.step == 2
    assert [v.created_at for v in there.versions()] == [v.created_at for v in here.versions()]
    run.save(_state("a", 3), step=3)
    assert [len(there.replicate(here).copied), len(here.replicate(there).copied)] == [1, 0]
    head = here.run("a").head
    assert head is not None
    assert head.step == 3
    there.gc(**ZERO)
    _assert_whole(target)
