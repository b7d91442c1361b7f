"""Small requests to a storage, many at once: order, bounds, and what a failure leaves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from ckptstore.backends.base import Capabilities
from ckptstore.backends.memory import MemoryBackend
from ckptstore.config import Options
from ckptstore.engine.calls import Shared
from ckptstore.maintenance.core.task_pool import Tasks, at_once

WAIT_S = 120.0


class Storage(MemoryBackend):
    """A storage that likes so many requests at once."""

    def __init__(self, concurrency: int) -> None:
        super().__init__("at-once")
        self._concurrency = concurrency

    @property
    def capabilities(self) -> Capabilities:
        """Return what memory can do, but for the requests at once."""
        return replace(super().capabilities, concurrency=self._concurrency)


@pytest.mark.parametrize("concurrency", [1, 3])
@pytest.mark.parametrize("count", [0, 1, 2, 500])
def test_results_come_in_the_order_of_the_items(concurrency: int, count: int) -> None:
    """Every item is worked on once, and its result comes in its place."""
    items = list(range(count))
    assert list(at_once(Storage(concurrency), lambda item: item * 2, items)) == [
        item * 2 for item in items
    ]


def test_as_many_run_at_once_as_the_storage_likes() -> None:
    """The threads meet: as many requests are under way together as are allowed."""
    meeting = threading.Barrier(4)
    found = at_once(Storage(4), lambda _: meeting.wait(WAIT_S), range(8))
    assert sorted(found) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_one_at_a_time_uses_the_callers_thread() -> None:
    """A storage that likes one request at a time is asked by the caller itself."""
    found = list(at_once(Storage(1), lambda _: threading.get_ident(), range(3)))
    assert set(found) == {threading.get_ident()}


def test_who_takes_slowly_is_not_run_ahead_of() -> None:
    """While nothing is taken, only a bounded part of many items is begun."""
    begun: list[int] = []
    results: Iterator[None] = at_once(Storage(2), begun.append, range(100_000))
    next(results)
    results.close()  # type: ignore[attr-defined]  # a generator, which waits for its threads
    assert len(begun) < 100


def test_no_more_are_ahead_than_asked_for() -> None:
    """A caller whose results are large bounds how many wait for it."""
    begun: list[int] = []
    results: Iterator[None] = at_once(Storage(4), begun.append, range(1000), most=2)
    next(results)
    results.close()  # type: ignore[attr-defined]  # a generator, which waits for its threads
    assert len(begun) <= 3


def test_large_tasks_run_one_by_one_when_asked_for_in_this_process() -> None:
    """Without an engine a task begins when its result is taken, in the calling thread."""
    begun: list[tuple[int, int]] = []
    told: list[int] = []

    def step(task: int, tell: Callable[[int], None] = told.append) -> int:
        begun.append((task, threading.get_ident()))
        tell(task)
        return task * 2

    results = Tasks(storage=Shared(Storage(4)), options=Options()).run(step, range(3), told.append)
    assert begun == []
    assert next(results) == 0
    assert begun == [(0, threading.get_ident())]
    assert list(results) == [2, 4]
    assert told == [0, 1, 2]


def test_a_failure_comes_in_its_turn_and_stops_the_rest() -> None:
    """What came before is yielded, the failure is raised, and what was not begun is not."""
    begun: list[int] = []

    def work(item: int) -> int:
        begun.append(item)
        if item == 3:
            raise ValueError(item)
        return item

    results = at_once(Storage(2), work, range(100_000))
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="3"):
        next(results)
    assert len(begun) < 100
