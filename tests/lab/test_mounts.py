"""Stores on mounts of many kinds: what the table in the documentation says of each, tried."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from labkit.campaign import moment, rounds
from labkit.peers import Peer, PeerError
from labkit.saving import Acked, Place, Promises, assert_kept, collect, note, start_writers
from labkit.systems import LabPool, Mounts
from mounttable import MOUNTS, Mount

import ckptstore
from ckptstore.backends.base import PutIfAbsent
from ckptstore.backends.posix_settings import find_fs_type
from ckptstore.backends.probe import probe
from ckptstore.backends.registry import open_backend
from ckptstore.errors import StoragePermissionError

KILLS = rounds(short=5, long=100)
SAVES = rounds(short=3, long=25)
WRITERS = 4


def rows(store: str) -> pytest.MarkDecorator:
    """Run a test for each mount that was tried and holds such stores."""
    found = [row for row in MOUNTS if row.tried and row.store == store]
    return pytest.mark.parametrize("row", found, ids=lambda row: row.name)


@pytest.fixture
def mounted(lab_pool: LabPool, row: Mount) -> Iterator[Mounts]:
    """Return the mount of a row; removed after the test."""
    yield lab_pool.get(Mounts, KIND=row.name)
    lab_pool.close()


def places(mounted: Mounts, **options: bool) -> list[Place]:
    """Return one store, by each mount that shows it."""
    shown = [mount for mount in mounted.mounts if mount.is_mount()]
    return [Place(url=str(mount / "store"), options=options) for mount in shown]


def assert_seen(place: Place, row: Mount, verdict: PutIfAbsent) -> None:
    """Check the type, the kind and the verdict of a probe."""
    assert find_fs_type(place.url) == row.fs_type
    backend = open_backend(place.url)
    assert backend.name == row.kind
    assert probe(backend).put_if_absent is verdict
    assert any("URL" in remark for remark in backend.remarks()) == (row.name in {"rclone", "s3fs"})


def save_and_kill(saver: Peer, shown: list[Place], acked: Acked) -> None:
    """Save and kill the saver in the middle of it, over and over; add what was acknowledged."""
    for turn in range(KILLS):
        call = start_writers(saver, shown[turn % len(shown)], [100 + turn], saves=0)[0]
        pid = call.next()["pid"]
        while call.next()["event"] != "acked":
            continue
        time.sleep(moment(turn, 0.0, 0.3))  # the moment itself is what is varied
        saver.ask("kill", pid=pid)
        promises = Promises()
        note([call], promises)
        acked |= promises.acked


@rows("shared")
def test_writers_share_a_store(mounted: Mounts, row: Mount, saver: Peer) -> None:
    """Four writers at once, then kills: no save fails, every version is there, bit by bit."""
    shown = places(mounted)
    assert len(shown) == (2 if row.name == "sshfs" else 1)
    assert_seen(shown[0], row, PutIfAbsent.ATOMIC)
    saver.ask("create", **shown[0].words())
    promises = collect(
        [
            call
            for writer in range(WRITERS)
            for call in start_writers(saver, shown[writer % len(shown)], [writer], saves=SAVES)
        ]
    )
    assert promises.failed == []
    assert len(promises.acked) == WRITERS * SAVES
    save_and_kill(saver, shown, promises.acked)
    assert_kept(saver, shown[-1], promises.acked)  # sshfs keeps listings for 20 s in the first


@rows("single writer")
def test_one_writer_at_a_time(mounted: Mounts, row: Mount, saver: Peer) -> None:
    """A shared store is refused; one writer's survives kills, and every version is compared."""
    place = places(mounted)[0]
    assert_seen(place, row, PutIfAbsent.REFUSED)
    with pytest.raises(PeerError) as refused:
        saver.ask("create", **place.words())
    assert refused.value.kind == "unsafe_backend"
    alone = places(mounted, single_writer=True)
    promises = collect(start_writers(saver, alone[0], [0], saves=SAVES))
    assert promises.failed == []
    save_and_kill(saver, alone, promises.acked)
    assert_kept(saver, alone[0], promises.acked)


@rows("read-only")
def test_readers_need_no_write(mounted: Mounts, row: Mount, saver: Peer) -> None:
    """A store that was made elsewhere is read; a save and a probe say that it is mounted so."""
    place = places(mounted)[0]
    promises = collect(start_writers(saver, place, range(2), saves=SAVES))
    mounted.tell("freeze")
    assert find_fs_type(place.url) == row.fs_type
    found = assert_kept(saver, place, promises.acked, save=False)
    assert found["versions"] == 2 * SAVES
    with pytest.raises(PeerError, match="mounted read-only"):
        start_writers(saver, place, [9], saves=1)[0].result()
    with pytest.raises(StoragePermissionError, match="mounted read-only"):
        probe(open_backend(place.url))
    refused = pytest.raises(StoragePermissionError, match="mounted read-only")
    with ckptstore.open(place.url) as store, refused:
        store.gc()
