"""Many writers on NFS from two hosts, and power cuts of the server under them."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from labkit.campaign import moment, rounds
from labkit.peers import Call, Peer, guest_peer
from labkit.saving import Acked, Place, Promises, assert_kept, collect, note, start_writers
from labkit.systems import Nfs

POWER_CUTS = rounds(short=2, long=10)
SAVES = 25

Savers = tuple[Peer, Peer]


@pytest.fixture(scope="module")
def savers(nfs: Nfs) -> Iterator[Savers]:
    """Return a process on each host that saves and checks in children of its own."""
    with guest_peer(nfs, "c1", "saver.py") as one, guest_peer(nfs, "c2", "saver.py") as two:
        yield one, two


def test_eight_processes_on_two_hosts(nfs: Nfs, savers: Savers) -> None:
    """2 hosts x 4 processes x 25 saves: 200 versions, none lost, commit numbers without gaps."""
    one, two = savers
    place = Place(url=f"{nfs.mount}/many")
    calls = start_writers(one, place, range(4), saves=SAVES)
    calls += start_writers(two, place, range(4, 8), saves=SAVES)
    promises = collect(calls)
    assert promises.failed == []
    assert len(promises.acked) == 200
    for peer in savers:
        found = assert_kept(peer, place, promises.acked, save=False)
        assert found["versions"] == found["commits"] == 200


def wait_for_one_more(call: Call) -> None:
    """Wait until a writer has saved again: it is through the outage."""
    while call.next()["event"] != "acked":
        continue


def save_through_a_power_cut(nfs: Nfs, savers: Savers, place: Place, turn: int) -> Promises:
    """Let a process on each host save while the server goes down and comes back."""
    calls = [
        start_writers(peer, place, [2 * turn + n], saves=0)[0] for n, peer in enumerate(savers)
    ]
    pids = [call.next()["pid"] for call in calls]
    for call in calls:
        wait_for_one_more(call)
    time.sleep(moment(turn, 0.0, 2.0))  # the moment itself is what is varied
    nfs.tell("cut-server")
    nfs.tell("start-server")
    for call in calls:
        # what is heard from here on was saved after the outage
        assert not any(event["event"] == "failed" for event in call.heard())
        wait_for_one_more(call)
    for peer, pid in zip(savers, pids, strict=True):
        peer.ask("kill", pid=pid)
    promises = Promises()
    note(calls, promises)
    return promises


def test_promises_outlive_power_cuts_of_the_server(nfs: Nfs, savers: Savers) -> None:
    """The server loses its power under two saving hosts: no promise is broken, and both go on."""
    place = Place(url=f"{nfs.mount}/cut")
    acked: Acked = {}
    for turn in range(POWER_CUTS):
        acked |= save_through_a_power_cut(nfs, savers, place, turn).acked
        assert_kept(savers[turn % 2], place, acked)
    assert len(acked) >= 4 * POWER_CUTS
