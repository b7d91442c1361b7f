"""Every crash point of three saves, on ext4 and xfs: the disk as it was after each of its writes.

The saves run in a small Linux host on dm-log-writes, which records every request to the disk in
the order of completion. The recordings are replayed here, one request after the other, and after
each the file system is mounted (its journal recovers) and the store is checked.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from labkit.campaign import rounds
from labkit.peers import Peer, guest_peer
from labkit.saving import Acked, Place, collect, start_writers
from labkit.systems import LabPool, Linux
from labkit.writelog import Entry, apply, read_log

SAVES = 3
DISK_MB = {"ext4": 64, "xfs": 320}  # xfs wants 300 at least
MAKE = {
    # the whole disk at once: what the kernel would fill in later is no part of a save
    "ext4": ["mkfs.ext4", "-q", "-F", "-b", "4096", "-E", "lazy_itable_init=0,lazy_journal_init=0"],
    "xfs": ["mkfs.xfs", "-q", "-f"],
}
CREATED = "created"
PROMISE = "acked-"  # marks of our own begin so; the driver adds one at the end
LOG_MB = 1024
ROOM_BYTES = 2 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What happened to one disk."""

    base: Path
    """The disk before the first save."""
    log: Path
    """What was written to it."""
    acked: list[tuple[str, list[int]]]
    """The promises in their order: version id, and writer and number."""


@pytest.fixture(scope="module")
def memory() -> Iterator[Path]:
    """Return a folder in memory, where there is room for it: a sync of a trial disk is free."""
    room = shutil.disk_usage("/dev/shm").free > ROOM_BYTES  # noqa: S108
    with TemporaryDirectory(dir="/dev/shm" if room else None) as folder:  # noqa: S108
        yield Path(folder)


@pytest.fixture(scope="module")
def recordings(lab_pool: LabPool, memory: Path) -> dict[tuple[str, bool], Recording]:
    """Record three saves on each file system, with and without the fsync of packs."""
    folder = memory
    linux = lab_pool.get(Linux)
    variants = [(fs, synced) for fs in MAKE for synced in (True, False)]
    disks = [path for variant in variants for path in make_disk(folder, *variant)]
    linux.tell("up", "h1", "10.78.0.21", "1200M", *map(str, disks))
    devices = [f"/dev/ubd{chr(ord('a') + n)}" for n in range(len(disks))]
    found = {}
    with guest_peer(linux, "h1", "saver.py") as peer:
        for n, variant in enumerate(variants):
            pair = devices[2 * n : 2 * n + 2]
            acked = record(linux, peer, name_of(*variant), pair, synced=variant[1])
            base, log = folder / f"{name_of(*variant)}.base", disks[2 * n + 1]
            found[variant] = Recording(base=base, log=log, acked=acked)
    lab_pool.close()
    return found


def name_of(fs: str, synced: bool) -> str:
    """Return a name for files and devices."""
    return f"{fs}-{'synced' if synced else 'unsynced'}"


def make_disk(folder: Path, fs: str, synced: bool) -> tuple[Path, Path]:
    """Make a disk with a file system, a copy of it, and an empty disk for the log."""
    base, disk, log = (folder / f"{name_of(fs, synced)}.{part}" for part in ("base", "disk", "log"))
    for path, size_mb in ((base, DISK_MB[fs]), (log, LOG_MB)):
        with path.open("wb") as file:
            file.truncate(size_mb << 20)
    subprocess.run([*MAKE[fs], str(base)], check=True, capture_output=True)
    copy(base, disk)
    return disk, log


def record(
    linux: Linux, peer: Peer, name: str, devices: list[str], *, synced: bool
) -> list[tuple[str, list[int]]]:
    """Save three versions in the guest while the disk's writes are recorded."""
    script = ["bash", "/mnt/share/guest_record_writes.sh"]
    modules = str(linux.folder / "modules")
    linux.tell("exec", "h1", *script, "start", name, *devices, modules)
    mark = ["dmsetup", "message", name, "0", "mark", PROMISE + "{}"]
    place = Place(url=f"/mnt/{name}/store")
    peer.ask("create", **place.words())
    linux.tell("exec", "h1", "dmsetup", "message", name, "0", "mark", CREATED)
    skipped = "" if synced else "/packs/"
    calls = start_writers(peer, place, [0], saves=SAVES, mark=mark, without_fsync=skipped)
    promises = collect(calls)
    linux.tell("exec", "h1", *script, "stop", name)
    assert promises.failed == []
    return list(promises.acked.items())


def copy(source: Path, target: Path) -> None:
    """Copy a disk, holes and all."""
    command = ["cp", "--sparse=always", "--reflink=auto", str(source), str(target)]
    subprocess.run(command, check=True)


@contextmanager
def mounted(disk: Path, folder: Path) -> Iterator[Path]:
    """Mount a disk, which recovers its journal."""
    folder.mkdir(exist_ok=True)
    attach = ["losetup", "--find", "--show", str(disk)]
    device = subprocess.run(attach, check=True, capture_output=True, text=True).stdout.strip()
    try:
        # all copies of one xfs bear the same identity
        options = ["-o", "nouuid"] if "xfs" in disk.name else []
        subprocess.run(["mount", *options, device, str(folder)], check=True)
        try:
            yield folder
        finally:
            subprocess.run(["umount", str(folder)], check=True)
    finally:
        subprocess.run(["losetup", "--detach", device], check=True)


def crash_points(recording: Recording, folder: Path) -> Iterator[tuple[int, Acked, Path]]:
    """Yield, after each write, its number, what had been promised, and a disk that may be used.

    The creation of the store, whose probe writes ten times as much as a save, comes first; its
    points are left out unless the campaign is a long one.
    """
    rolling, trial = folder / "rolling", folder / f"trial-{recording.base.name}"
    copy(recording.base, rolling)
    promised = 0
    wanted = rounds(short=0, long=1) == 1
    entries: list[Entry] = read_log(recording.log)
    with recording.log.open("rb") as log, rolling.open("r+b", buffering=0) as disk:
        for n, entry in enumerate(entries):
            if entry.mark.startswith(PROMISE):
                promised = int(entry.mark.removeprefix(PROMISE))
            wanted = wanted or entry.mark == CREATED
            if not wanted or not (entry.mark or entry.size_bytes):
                apply(entry, log, disk)
                continue
            apply(entry, log, disk)
            copy(rolling, trial)
            yield n, dict(recording.acked[:promised]), trial


def problems_at(saver: Peer, disk: Path, folder: Path, acked: Acked) -> list[str]:
    """Return what is wrong with the store on a disk that a crash left like this."""
    with mounted(disk, folder / "mnt") as mount:
        place = Place(url=str(mount / "store"))
        found = saver.ask("check", **place.words(), acked=acked, save=True)
    problems: list[str] = found["problems"]
    return problems


@pytest.mark.parametrize("fs", MAKE)
def test_every_crash_point(
    recordings: dict[tuple[str, bool], Recording], saver: Peer, memory: Path, fs: str
) -> None:
    """Wherever the disk stops: what was promised is there, nothing torn, and saving goes on."""
    broken = {}
    tried = promised = 0
    for n, acked, disk in crash_points(recordings[fs, True], memory):
        tried += 1
        promised = len(acked)
        if problems := problems_at(saver, disk, memory, acked):
            broken[n] = problems

    assert broken == {}
    assert promised == SAVES, "the log must hold all three promises"
    assert tried > 50, "so few writes cannot be three durable saves"


@pytest.mark.parametrize("fs", MAKE)
def test_missing_fsync_is_noticed(
    recordings: dict[tuple[str, bool], Recording], saver: Peer, memory: Path, fs: str
) -> None:
    """Without the fsync of packs some crash point breaks a promise: the test has teeth."""
    for _, acked, disk in crash_points(recordings[fs, False], memory):
        if acked and problems_at(saver, disk, memory, acked):
            return
    pytest.fail("no crash point shows that packs were not synced")
