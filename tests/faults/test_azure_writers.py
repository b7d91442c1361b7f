"""Savers on Azure: several at once, killed at each of their requests; no promise is broken."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from buckets import AzureBucket
from faultproxy import Fault, FaultProxy, Kind
from labkit.peers import Call, Peer, local_peer
from labkit.saving import Acked, Place, Promises, assert_kept, collect, note, start_writers

import ckptstore

_STILL_S = 3600.0


@pytest.fixture(scope="module")
def saver() -> Iterator[Peer]:
    """Return a process that saves and checks in children of its own."""
    with local_peer("saver.py") as peer:
        yield peer


@pytest.fixture
def place(azure_bucket: AzureBucket, azure_proxy: FaultProxy) -> Place:
    """Return a new store's location, behind the proxy."""
    options = azure_bucket.options(f"http://127.0.0.1:{azure_proxy.port}")
    with ckptstore.open(azure_bucket.url, create=True, **options):
        return Place(url=azure_bucket.url, options=options)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_four_processes_save_at_once(azure_bucket: AzureBucket, place: Place, saver: Peer) -> None:
    """Two to one run and two each to its own: all versions are there, numbered without gaps."""
    promises = collect(start_writers(saver, place, range(4), saves=5))
    assert promises.failed == []
    assert len(promises.acked) == 20
    found = assert_kept(saver, place, promises.acked, save=False)
    assert (found["versions"], found["commits"]) == (20, 20)
    listed = azure_bucket.keys()
    commits = {key for key in listed if key.startswith("commits/")}
    assert commits == {f"commits/000000/{number:012d}.json" for number in range(1, 21)}


def _kill_at(saver: Peer, place: Place, proxy: FaultProxy, fault: Fault, first: int) -> Acked:
    """Save until a request hangs at the proxy, then kill the saver; return its promises."""
    proxy.set(fault)
    call: Call = saver.send(
        "save", **place.words(), run="killed", writer=0, first=first, count=0, numbers=4096
    )
    pid = call.next()["pid"]
    promises = Promises()
    assert fault.reached.wait(120)
    saver.ask("kill", pid=pid)
    note([call], promises)
    proxy.set()
    return promises.acked


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_savers_killed_at_each_request(place: Place, saver: Peer, azure_proxy: FaultProxy) -> None:
    """Before a pack, a manifest or a commit is sent, and when a commit's answer is due."""
    acked: Acked = {}
    points = [
        Fault(kind=Kind.DELAY, method="PUT", path="/packs/", skip=2, seconds=_STILL_S),
        Fault(kind=Kind.DELAY, method="PUT", path="/manifests/", skip=1, seconds=_STILL_S),
        Fault(kind=Kind.DELAY, method="PUT", path="/commits/", skip=1, seconds=_STILL_S),
        Fault(kind=Kind.HELD, method="PUT", path="/commits/", skip=1, seconds=_STILL_S),
        Fault(kind=Kind.DELAY, method="GET", path="", skip=1, seconds=_STILL_S),
    ]
    for number, fault in enumerate(points):
        acked |= _kill_at(saver, place, azure_proxy, fault, first=10 * number)
        found = assert_kept(saver, place, acked, save=False)
        silent = fault.kind is Kind.HELD  # committed, and nobody was told
        assert found["versions"] - len(acked) in ({1} if silent else {0, 1})
    assert len(acked) >= 3
    assert_kept(saver, place, acked)
