"""Transfers: what is counted, and how many requests go at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import ckptstore
from ckptstore import limits
from ckptstore.backends.base import Capabilities
from ckptstore.backends.bucket import ANSWERS, MEDIANS, MIN_S, SHARE, Patience
from ckptstore.backends.httperrors import error_for_answer
from ckptstore.backends.memory import MemoryBackend
from ckptstore.backends.transfers import Meter, Recorder, Threads, Transfers, operation
from ckptstore.backends.width import REST_TICKS, Width, check_requests, moved
from ckptstore.config import Options
from ckptstore.engine.calls import Shared
from ckptstore.errors import InvalidInputError, StorageError, TransientStorageError
from ckptstore.maintenance.core.task_pool import Tasks, at_once


def _send(recorder: Recorder, size: int = 10, call: str = "get") -> None:
    with recorder.request(call) as sent:
        sent["requests_bytes"] = size


def test_seconds_are_those_in_which_a_request_was_on_its_way() -> None:
    """Overlapping requests count once, pauses not; the most at once stays."""
    now = 0.0
    meter = Meter(lambda: now)
    for moment, step in ((1.0, 1), (2.0, 1), (4.0, -1), (5.0, -1), (100.0, 1), (101.0, -1)):
        now = moment
        meter.add(step)
    found = meter.figures()
    assert (found.requests_s, found.at_once_count) == (5.0, 2)


def test_a_request_on_its_way_counts_until_now() -> None:
    """Figures that are read in the middle of a request have its seconds so far."""
    now = 0.0
    meter = Meter(lambda: now)
    with meter:
        now = 3.0
        assert meter.figures().requests_s == 3.0
        now = 4.0
    now = 9.0
    assert meter.figures().requests_s == 4.0


def test_an_operation_inside_another_belongs_to_it() -> None:
    """What a user called counts, not what that calls; afterwards it is over."""
    recorder = Recorder()
    with operation("verify") as outer:
        with operation("load") as inner:
            _send(recorder)
        _send(recorder, call="put")
    _send(recorder)
    assert inner is outer
    assert recorder.stats().keys() == {"verify", "other"}
    for found in (outer.figures(), recorder.stats()["verify"]):
        assert {way: one.requests_count for way, one in found.items()} == {"read": 1, "write": 1}


def test_threads_belong_to_the_operation_that_submits() -> None:
    """Also those of a pool that other operations use; threads of other makers do not."""
    recorder = Recorder()
    with Threads(2) as pool, ThreadPoolExecutor(1) as foreign:
        for name in ("save", "load"):
            with operation(name):
                list(pool.map(lambda _: _send(recorder), range(5)))
                pool.submit(_send, recorder, size=1).result()
        with operation("verify"):
            foreign.submit(_send, recorder).result()
    counts = {name: one["read"].requests_bytes for name, one in recorder.stats().items()}
    assert counts == {"save": 51, "load": 51, "other": 10}


def test_failures_for_a_while_are_retries() -> None:
    """Refusals and late reads are among them; other errors are none; failed bytes do not count."""
    recorder = Recorder(7)
    busy = TransientStorageError("busy")
    busy.slow_down = True
    for failure in (TransientStorageError("cut"), busy, StorageError("denied")):
        with pytest.raises(StorageError), recorder.request("get"):
            raise failure
    recorder.late()
    _send(recorder)
    assert recorder.stats()["other"]["read"] == Transfers(
        requests_count=4,
        requests_bytes=10,
        requests_s=recorder.stats()["other"]["read"].requests_s,
        at_once_count=1,
        retries_count=2,
        refused_count=1,
        late_count=1,
        limit_count=7,
    )


def test_no_request_is_lost_among_threads() -> None:
    """Sums are exact, and no more are on their way at once than threads."""
    recorder = Recorder()
    with operation("load"), Threads(8) as pool:
        list(pool.map(lambda size: _send(recorder, size), range(400)))
    found = recorder.stats()["load"]["read"]
    assert (found.requests_count, found.requests_bytes) == (400, sum(range(400)))
    assert 1 <= found.at_once_count <= 8


def test_a_local_store_tells_what_it_moved(tmp_path: Path) -> None:
    """Calls, bytes and threads at once, by operation; without a limit of requests."""
    state = {"w": torch.arange(1 << 20, dtype=torch.int64)}
    with ckptstore.open(tmp_path / "s", create=True, codec="raw", chunk_bytes=1 << 16) as store:
        store.run("r").save(state, step=1)
        store.load("r")
        assert store.version("r")["w"][5] == 5
        store.verify()
        store.replicate(tmp_path / "t", ["r"])
        found = store.transfers()
    size = state["w"].nbytes
    assert found["save"]["write"].requests_bytes > size
    for name in ("load", "verify", "replicate"):
        assert found[name]["read"].requests_bytes > size, name
        assert 1 <= found[name]["read"].at_once_count <= 16
    assert 0 < found["lazy"]["read"].requests_bytes < size // 4
    assert {one.limit_count for ways in found.values() for one in ways.values()} == {0}


def test_the_receipt_of_a_save_has_its_own_requests(tmp_path: Path) -> None:
    """Two saves at once do not mix, and neither do earlier ones."""
    sizes = {"small": 1 << 16, "large": 1 << 22}
    together = threading.Barrier(2)

    def save(name: str) -> Transfers:
        state = {"w": torch.randint(0, 255, (sizes[name],), dtype=torch.uint8)}
        together.wait()
        return Transfers.of(store.run(name).save(state, step=1).receipt)

    with (
        ckptstore.open(tmp_path / "s", create=True, codec="raw") as store,
        ThreadPoolExecutor(2) as pool,
    ):
        store.run("large").save({"w": torch.ones(1 << 20)}, step=0)
        small, large = pool.map(save, sizes)
        total = store.transfers()["save"]["write"]
    assert sizes["small"] < small.requests_bytes < 2 * sizes["small"]
    assert sizes["large"] < large.requests_bytes < 1.5 * sizes["large"]
    assert total.requests_bytes > small.requests_bytes + large.requests_bytes + (4 << 20)


@pytest.mark.parametrize("engine", ["thread", "process"])
def test_a_save_in_the_background_has_them_too(tmp_path: Path, engine: str) -> None:
    """Whoever writes it; this process counts what it writes itself."""
    with ckptstore.open(tmp_path / "s", create=True, codec="raw", engine=engine) as store:
        version = store.run("r").save_async({"w": torch.ones(1 << 18)}, step=1).result()
        found = store.transfers().get("save", {})
    receipt = Transfers.of(version.receipt)
    assert receipt.requests_bytes > 1 << 20
    assert receipt.at_once_count >= 1
    assert ("write" in found) == (engine == "thread")


def test_figures_of_a_receipt_without_them_are_none() -> None:
    """As in stores of earlier versions."""
    assert Transfers.of({"writing_s": 3.0}) == Transfers()
    assert Transfers().bytes_per_s == 0.0


MOST = 64
MB = 1e6


class Link:
    """A clock, and a width whose requests always move as many bytes as a storage gives them."""

    def __init__(self, bytes_per_s: Callable[[int], float], *, first: int = 4) -> None:
        self.now = 0.0
        self.width = Width(MOST, first=first, clock=lambda: self.now)
        self._bytes_per_s = bytes_per_s

    def run(self, ticks: int) -> list[int]:
        """Let time pass; return the widths."""
        found = []
        for _ in range(ticks):
            width = self.width.now
            self.now += 1.0
            self.width._full = True  # others wait, as in a long transfer
            self.width.moved(int(max(self._bytes_per_s(width), width * limits.MIB)))
            found.append(self.width.now)
        return found


def test_many_slow_connections_are_all_used() -> None:
    """Each connection brings as much as the first: the width doubles up to the most."""
    assert Link(lambda width: width * 10 * MB).run(6) == [8, 16, 32, 64, 64, 64]


def test_a_storage_that_many_requests_slow_down_gets_fewer() -> None:
    """It goes back to the width that was faster, and tries again only after a rest."""
    link = Link(lambda width: 100 * MB if width <= 8 else 70 * MB)
    widths = link.run(REST_TICKS)
    assert widths[:3] == [8, 16, 8]
    assert set(widths[3:]) == {8}
    assert 16 in link.run(5)


def test_buffers_that_fill_do_not_make_it_narrow() -> None:
    """More bytes move in the first tick of a width than the storage takes: it is tried again."""
    before = 0

    def buffered(width: int) -> float:
        nonlocal before
        burst = 3.0 if width > before else 1.0
        before = max(before, width)
        return width * 10 * MB * burst

    widths = Link(buffered).run(REST_TICKS)
    assert widths[-10:] == [MOST] * 10
    assert widths.count(MOST // 2) <= 3


def test_a_tick_without_throughput_does_not_make_it_narrow() -> None:
    """Other work may take the processor for a moment."""
    rates = iter([4, 8, 16, 1, 24, 32, 64, 64])
    link = Link(lambda width: width * next(rates) * MB)
    assert min(link.run(8)[2:]) >= 16


def test_a_refusal_halves_the_width_once_and_growth_is_careful() -> None:
    """Requests that were refused within a second count once; the width never falls below one."""
    link = Link(lambda width: width * 10 * MB, first=32)
    for _ in range(10):
        link.width.refused()
        link.now += 0.09
    assert link.width.now == 16
    widths = link.run(REST_TICKS + 3)
    assert widths[-1] > 16
    assert max(after - before for before, after in pairwise(widths)) <= 3
    for _ in range(20):
        link.now += 1
        link.width.refused()
    assert link.width.now == 1


def test_no_more_requests_pass_than_the_width() -> None:
    """From any thread; each passes in the end, and a failed one lets the next one pass."""
    width = Width(3, first=3)
    inside = 0
    most = 0
    lock = threading.Lock()

    def request(number: int) -> None:
        nonlocal inside, most
        try:
            with width.request(10):
                with lock:
                    inside += 1
                    most = max(most, inside)
                moved(4)
                with lock:
                    inside -= 1
                if number % 7 == 0:
                    raise OSError
        except OSError:
            pass

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(request, range(500)))
    assert most <= 3


@pytest.mark.parametrize(("status", "code"), [(503, "SlowDown"), (429, ""), (503, "ServerBusy")])
def test_busy_storages_ask_to_slow_down(status: int, code: str) -> None:
    """Whatever a storage calls it; other passing failures do not."""
    busy = error_for_answer(status, code, "put", conditional=False)
    assert isinstance(busy, TransientStorageError)
    assert busy.slow_down
    broken = error_for_answer(500, "InternalError", "put", conditional=False)
    assert isinstance(broken, TransientStorageError)
    assert not broken.slow_down


@pytest.mark.parametrize("requests", [1, "8", 1024])
def test_a_number_of_requests_is_taken(requests: object) -> None:
    """As a number, or as a text from the command line."""
    assert check_requests(requests) == int(str(requests))


@pytest.mark.parametrize("requests", [0, -1, 1025, 1.5, True, None, "", "many", "9" * 5000])
def test_another_number_of_requests_is_refused(requests: object) -> None:
    """The message names the bounds and the value, the hint a right one."""
    with pytest.raises(InvalidInputError, match="from 1 to 1024") as caught:
        check_requests(requests)
    assert repr(requests)[:40] in caught.value.message
    assert "requests=16" in caught.value.hint


def test_patience_is_some_medians_and_only_a_few_requests_are_replaced() -> None:
    """None before there are answers to judge by; not so short that usual answers miss it."""
    patience = Patience()
    assert patience.limit_s() == 0.0
    for _ in range(ANSWERS):
        assert patience.limit_s() in {0.0, MIN_S}
        patience.begun(0.001)
    assert patience.limit_s() == MIN_S
    for _ in range(ANSWERS):
        patience.begun(1.0)
    assert patience.limit_s() == MEDIANS
    replaced = 0
    for _ in range(1000):
        if patience.limit_s():
            patience.over()
            replaced += 1
    assert 0 < replaced <= 1200 * SHARE


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
