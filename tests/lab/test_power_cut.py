"""The power goes off under saving processes, on ext4 and xfs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from labkit.campaign import moment, rounds
from labkit.peers import Call, Peer
from labkit.saving import Acked, Place, Promises, assert_kept, collect, note, start_writers
from labkit.systems import LabPool, LoopDisk

ROUNDS = rounds(short=5, long=50)
TEETH_ROUNDS = 5
WRITERS = 2


@pytest.fixture(params=["ext4", "xfs"])
def disk(lab_pool: LabPool, request: pytest.FixtureRequest) -> Iterator[LoopDisk]:
    """Return a new file system, mounted; removed after the test."""
    yield lab_pool.get(LoopDisk, FS=request.param)
    lab_pool.close()


def awaited(turn: int) -> int:
    """Return how many saves of each process the power cut of a round waits for: none, 1, 2 or 3."""
    return 0 if turn % 2 else 1 + turn // 2 % 3


def wait_for(call: Call, acked: int) -> None:
    """Wait until a process has told of so many promises, however long that takes."""
    while acked:
        acked -= call.next()["event"] == "acked"


def save_until_the_power_goes(
    disk: LoopDisk, saver: Peer, turn: int, *, without_fsync: str = ""
) -> Promises:
    """Let two processes save, cut the power, and return what was promised.

    In every second round it happens soon after the start, when the store may not even be there
    yet, else once each process has told of as many promises as :func:`awaited` says.
    """
    place = Place(url=str(disk.mount / "store"))
    writers = [WRITERS * turn + n for n in range(WRITERS)]
    calls = start_writers(saver, place, writers, saves=0, without_fsync=without_fsync)
    pids = [call.next()["pid"] for call in calls]
    for call in calls:
        wait_for(call, awaited(turn))
    time.sleep(moment(turn, 0.0, 0.6))  # the moment itself is what is varied
    disk.tell("cut")
    for pid in pids:
        saver.ask("kill", pid=pid)
    promises = Promises()
    note(calls, promises)
    disk.tell("remount")
    return promises


def test_promises_outlive_power_cuts(disk: LoopDisk, saver: Peer) -> None:
    """Whenever the power goes: all that was acknowledged is there, nothing torn, and it goes on."""
    place = Place(url=str(disk.mount / "store"))
    acked: Acked = {}
    for turn in range(ROUNDS):
        promises = save_until_the_power_goes(disk, saver, turn)
        acked |= promises.acked
        assert_kept(saver, place, acked)
    assert len(acked) >= WRITERS * sum(map(awaited, range(ROUNDS)))


@pytest.mark.parametrize("kind", ["packs", "manifests", "commits"])
def test_missing_fsync_is_noticed(disk: LoopDisk, saver: Peer, kind: str) -> None:
    """The same test finds out when one kind of object is not synced: it has teeth."""
    place = Place(url=str(disk.mount / "store"))
    acked: Acked = {}
    for turn in range(TEETH_ROUNDS):
        promises = save_until_the_power_goes(disk, saver, turn, without_fsync=f"/{kind}/")
        acked |= promises.acked
        found = saver.ask("check", **place.words(), acked=acked, save=False)
        if found["problems"]:
            return
    pytest.fail(f"{TEETH_ROUNDS} power cuts without the fsync of {kind}, and nothing was noticed")


@pytest.mark.parametrize("left_bytes", [0, 40])
def test_a_damaged_end_is_set_aside_through_power_cuts(
    disk: LoopDisk, saver: Peer, left_bytes: int
) -> None:
    """However often the power ends a repair: the record goes aside, and all before it is kept."""
    store = disk.mount / "store"
    place = Place(url=str(store))
    promises = collect(start_writers(saver, place, [0], saves=4))
    newest = max((store / "commits").rglob("*.json"))
    os.truncate(newest, left_bytes)
    *kept, _ = promises.acked.items()
    command = [sys.executable, "-m", "ckptstore", "repair", "--store", str(store)]
    for turn in range(TEETH_ROUNDS):
        repair = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(moment(turn, 0.5, 3.0))  # the moment itself is what is varied
        disk.tell("cut")
        repair.kill()
        repair.wait()
        disk.tell("remount")
    subprocess.run(command, check=True)
    assert_kept(saver, place, dict(kept))
