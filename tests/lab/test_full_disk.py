"""Disks without a byte left, of each kind: deleting versions makes room, also after kills."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from faultkit.full_disk import fill
from labkit.campaign import rounds
from labkit.systems import LabPool, LoopDisk, Mounts

import ckptstore
from ckptstore import limits
from ckptstore.backends.posix import NAME
from ckptstore.backends.posix_settings import find_fs_type
from ckptstore.errors import CkptStoreError, StorageFullError
from ckptstore.store import Store

KILLS = rounds(short=10, long=100)
DISKS = {"ext4": "24", "ext4-1k": "24", "xfs": "320", "btrfs": "160", "tmpfs": ""}
"""File systems, and the size of each in MB."""


@pytest.fixture(params=list(DISKS))
def disk(lab_pool: LabPool, request: pytest.FixtureRequest) -> Iterator[Path]:
    """Return a small file system of its own; removed after the test."""
    if request.param == "tmpfs":
        yield lab_pool.get(Mounts, KIND="tmpfs").mounts[0]
    else:
        yield lab_pool.get(LoopDisk, FS=request.param, MB=DISKS[request.param]).mount
    lab_pool.close()


def state(step: int) -> dict[str, torch.Tensor]:
    """Return a state of 400 KB of its own."""
    return {"w": torch.rand(100_000, generator=torch.Generator().manual_seed(step))}


def saved(folder: Path, count: int = 5) -> Store:
    """Return a store with some versions, which is open for writing."""
    store = ckptstore.open(folder / "store", create=True)
    for step in range(count):
        store.run("r").save(state(step), step=step)
    return store


def assert_whole(store: Store, steps: list[int]) -> None:
    """Check that versions are there, bit by bit, and that a further save works."""
    store.run("r").save(state(99), step=99)
    assert [version.step for version in store.versions("r")] == [*steps, 99]
    for step in (*steps, 99):
        assert store.load(f"r@{step}")["w"].equal(state(step)["w"])
    assert store.verify().ok


def test_versions_are_deleted_and_the_disk_is_used_again(disk: Path) -> None:
    """``rm``, ``gc``, then a save work with 0 bytes free, and deletions take little of the room."""
    with saved(disk) as store:
        assert (disk / "store" / NAME).stat().st_size == limits.RESERVE_BYTES
        fill(disk)
        with pytest.raises(StorageFullError):
            store.run("r").save(state(5), step=5)
        for step in (0, 1, 2):
            store.remove([f"r@{step}"])
            fill(disk)
        assert store.gc(grace_s=0, repack_below=None).swept["packs"].count == 3
        assert_whole(store, [3, 4])


def test_retention_frees_a_full_disk(disk: Path) -> None:
    """``retain`` and ``gc`` free it in a process that was started after it was full."""
    saved(disk).close()
    fill(disk)
    code = (
        "import sys, ckptstore\n"
        "from ckptstore.catalog.policy import Policy\n"
        "with ckptstore.open(sys.argv[1]) as store:\n"
        "    store.retain(policy=Policy.parse(full='last 2'))\n"
        "    assert store.gc(grace_s=0).swept['packs'].count == 3\n"
    )
    subprocess.run([sys.executable, "-c", code, str(disk / "store")], check=True, timeout=120)
    with ckptstore.open(disk / "store") as store:
        assert_whole(store, [3, 4])


def test_what_was_condemned_goes_without_a_reserve(disk: Path) -> None:
    """A store of an older version, without a reserve, is freed of what it had condemned."""
    with saved(disk) as store:
        store.remove(["r@0", "r@1"])
        store.gc()
        (disk / "store" / NAME).unlink()
        filler = fill(disk)
        try:
            assert store.gc(grace_s=1e-9).swept["packs"].count == 2
        except StorageFullError:
            # There is no room for the name of the empty file by which the clock is read.
            assert find_fs_type(str(disk)) == "xfs"
            filler.unlink()
        assert_whole(store, [2, 3, 4])


def test_two_collections_at_once(disk: Path) -> None:
    """Two processes that free one full disk do not stand in each other's way."""
    with saved(disk) as store:
        fill(disk)
        store.remove(["r@0", "r@1"])
    code = (
        "import sys, ckptstore\n"
        "with ckptstore.open(sys.argv[1]) as store: store.gc(grace_s=0, repack_below=None)\n"
    )
    command = [sys.executable, "-c", code, str(disk / "store")]
    both = [subprocess.Popen(command) for _ in range(2)]
    assert 0 in [one.wait(120) for one in both]
    with ckptstore.open(disk / "store") as store:
        assert_whole(store, [2, 3, 4])


def test_kills_while_the_reserve_is_in_use(disk: Path) -> None:
    """A process that is killed at any moment of a deletion leaves a store that can be freed."""
    with saved(disk) as store:
        fill(disk)
        for turn in range(KILLS):
            child = os.fork()
            if not child:
                _die_after(turn)
                try:
                    with ckptstore.open(disk / "store") as mine:
                        mine.remove([f"r@{turn % 3}"])
                        mine.gc(grace_s=0, repack_below=None)
                except CkptStoreError:
                    pass
                os._exit(0)
            os.waitpid(child, 0)
        left = [version.step for version in store.versions("r") if version.step < 3]
        if left:
            store.remove([f"r@{step}" for step in left])
        store.gc(grace_s=0, orphan_age_s=0, repack_below=None)
        assert_whole(store, [3, 4])


def _die_after(turn: int) -> None:
    """Kill this process at its n-th call that changes names: the hand-over is full of them."""
    left = turn

    def counted(name: str) -> None:
        real = getattr(os, name)

        def call(*args: object, **options: object) -> object:
            nonlocal left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **options)

        setattr(os, name, call)

    for name in ("link", "rename", "unlink", "write"):
        counted(name)
