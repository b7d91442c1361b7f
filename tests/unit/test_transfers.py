"""Requests, bytes and times are counted by operation, whichever threads send them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import ckptstore
from ckptstore.backends.transfers import Meter, Recorder, Threads, Transfers, operation
from ckptstore.errors import StorageError, TransientStorageError


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
