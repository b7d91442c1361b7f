"""The width of requests follows the storage: wider while that is no slower, narrower if refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest

from ckptstore import limits
from ckptstore.backends.bucket import ANSWERS, MEDIANS, MIN_S, SHARE, Patience
from ckptstore.backends.httperrors import error_for_answer
from ckptstore.backends.width import REST_TICKS, Width, check_requests, moved
from ckptstore.errors import InvalidInputError, TransientStorageError

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
    """Requests that were refused together count once; the width never falls below one."""
    link = Link(lambda width: width * 10 * MB, first=32)
    for _ in range(10):
        link.width.refused()
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
