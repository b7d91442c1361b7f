"""The POSIX backend: remarks on folders, the table of mounts, and the reserve of a full disk."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
from mounttable import MOUNTS, Mount

import ckptstore
from ckptstore import limits
from ckptstore.backends import posix_settings
from ckptstore.backends.memory import MemoryBackend
from ckptstore.backends.posix import NAME, open_posix
from ckptstore.backends.posix_remarks import BUCKET_MOUNTS, find_remarks
from ckptstore.backends.posix_settings import (
    LINKLESS_DISKS,
    SETTINGS,
    find_fs_type,
    settings_for,
    stripe_folder,
)
from ckptstore.committing import on_reserve
from ckptstore.errors import StorageFullError

LAB = Path(__file__).parents[1] / "lab" / "systems" / "mounts.sh"


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """Return the folder of a store that its group may write to, with a folder in it."""
    tmp_path.chmod(0o2775)
    before = os.umask(0o002)
    open_posix(str(tmp_path)).put("packs/ab/1.pack", b"x")
    os.umask(before)
    return tmp_path


def remarks(root: Path, mask: int) -> list[str]:
    """Return the remarks of a process with a umask."""
    before = os.umask(mask)
    try:
        return list(open_posix(str(root)).remarks())
    finally:
        os.umask(before)


def test_a_group_that_can_work_is_told_so(shared: Path) -> None:
    """Setgid, readable files and open folders: one line says that they suit."""
    for mask in (0o002, 0o022, 0o027):
        (remark,) = remarks(shared, mask)
        assert "this umask suit" in remark


@pytest.mark.parametrize(
    ("mode", "mask", "folder", "advice"),
    [
        (0o775, 0o022, 0o775, "chmod g+s"),
        (0o2775, 0o077, 0o2775, "umask 002"),
        (0o2775, 0o022, 0o2755, "chmod -R g+rwX"),
    ],
    ids=["no setgid", "hidden files", "closed folder"],
)
def test_a_group_that_cannot_work_is_told_why(
    mode: int, mask: int, folder: int, advice: str, shared: Path
) -> None:
    """Each thing that would make other members' saves or loads fail has its line and its remedy."""
    shared.chmod(mode)
    (shared / "packs" / "ab").chmod(folder)
    (remark,) = remarks(shared, mask)
    assert advice in remark


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives folders to any group")
@pytest.mark.parametrize("name", ["packs", "packs/ab"])
def test_a_folder_of_another_group_is_told(shared: Path, name: str) -> None:
    """Folders from before the setgid bit have the group of who saved: others cannot save there."""
    os.chown(shared / name, -1, 54321)
    (shared / name).chmod(0o2775)
    (remark,) = remarks(shared, 0o002)
    assert f"{shared}/{name} is not of the group" in remark
    assert "chgrp -R root" in remark


def test_a_store_that_the_group_cannot_read_is_told(shared: Path) -> None:
    """``store.json`` of someone with a closed umask: nobody else can open the store."""
    (shared / "store.json").write_bytes(b"{}")
    (shared / "store.json").chmod(0o600)
    (remark,) = remarks(shared, 0o002)
    assert remark.endswith(f"chmod -R g+rX {shared}")
    (shared / "store.json").chmod(0o640)
    (remark,) = remarks(shared, 0o002)
    assert "this umask suit" in remark


@pytest.mark.parametrize("mode", [0o755, 0o2755, 0o700, 0o777], ids=oct)
def test_other_folders_have_no_remark(mode: int, tmp_path: Path) -> None:
    """Folders of one user, and mounts on which everybody may do everything."""
    tmp_path.chmod(mode)
    found = remarks(tmp_path, 0o022)
    assert not [line for line in found if "chmod" in line]


def test_a_folder_that_is_not_there_has_no_remark(tmp_path: Path) -> None:
    """Doctor also tests locations without a folder."""
    assert find_remarks(str(tmp_path / "none"), "ext4") == []


@pytest.mark.parametrize("row", MOUNTS, ids=lambda row: row.name)
def test_rows_agree_with_the_settings(row: Mount) -> None:
    """The documented kind is that of the type; unlinked disks are shared, buckets have a remark."""
    assert settings_for(row.fs_type).name == row.kind
    assert row.store in {"shared", "single writer", "read-only"}
    assert bool(find_remarks("/none", row.fs_type)) == (row.fs_type in BUCKET_MOUNTS)
    if row.fs_type in BUCKET_MOUNTS:
        assert row.store != "shared"
    if row.fs_type in LINKLESS_DISKS:
        assert row.store == "shared"


def test_the_lab_tries_what_the_table_says() -> None:
    """Each row that claims to be tried has a mount in the lab, and the other way round."""
    kinds = subprocess.run([LAB, "kinds"], capture_output=True, text=True, check=True).stdout
    assert sorted(kinds.split()) == sorted(row.name for row in MOUNTS if row.tried)


def test_programs_without_a_type_go_by_their_source(tmp_path: Path) -> None:
    """Some FUSE programs show as plain ``fuse``: those of buckets are told by their source."""
    table = tmp_path / "mountinfo"
    table.write_text(
        "30 22 0:26 / /mnt/a rw - fuse mountpoint-s3 rw\n"
        "31 22 0:27 / /mnt/b rw - fuse blobfuse2 rw\n"
        "32 22 0:28 / /mnt/c rw - fuse something rw\n"
    )
    found = [find_fs_type(f"/mnt/{name}/x", table=table) for name in "abc"]
    assert found == ["fuse.mountpoint-s3", "fuse.blobfuse2", "fuse"]


TABLE = r"""22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 22 0:26 / /mnt/nfs rw shared:5 - nfs4 server:/export rw,vers=4.2
31 22 0:27 / /mnt/nfs/inner rw - tmpfs tmpfs rw
32 22 0:28 / /mnt/with\040space rw master:1 - lustre 10.0.0.1@tcp:/fs rw
33 22 0:29 / /mnt/twice rw - ext4 /dev/vdb rw
34 22 0:30 / /mnt/twice rw - fuse.glusterfs host:/vol rw
broken line
35 22 0:31 / /short - xfs
"""


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Return a mount table of many kinds."""
    path = tmp_path / "mountinfo"
    path.write_text(TABLE)
    return path


@pytest.mark.parametrize(
    ("path", "fs_type"),
    [
        ("/data", "ext4"), ("/mnt/nfs", "nfs4"), ("/mnt/nfs/a/b", "nfs4"),
        ("/mnt/nfs/inner/x", "tmpfs"), ("/mnt/nfsother", "ext4"), ("/mnt/with space/x", "lustre"),
        ("/mnt/twice/x", "fuse.glusterfs"),
    ],
)  # fmt: skip
def test_longest_mount_point_wins(path: str, fs_type: str, table: Path) -> None:
    """The deepest mount point that holds a path decides; of two at one point, the later."""
    assert find_fs_type(path, table=table) == fs_type


def test_symbolic_links_are_followed(table: Path, tmp_path: Path) -> None:
    """A link onto another file system leads there."""
    (tmp_path / "link").symlink_to("/mnt/nfs")
    assert find_fs_type(str(tmp_path / "link" / "x"), table=table) == "nfs4"


def test_no_table() -> None:
    """Without a mount table the type is unknown, and the settings are those of a disk."""
    fs_type = find_fs_type("/x", table=Path("/no/such/table"))
    assert fs_type == "unknown"
    assert settings_for(fs_type).name == "local"


def test_broken_lines_are_skipped(table: Path) -> None:
    """Lines that do not follow the format are left out."""
    assert find_fs_type("/short/x", table=table) == "ext4"


@pytest.mark.parametrize(
    ("fs_type", "name"),
    [
        ("ext4", "local"), ("xfs", "local"), ("btrfs", "local"), ("tmpfs", "local"),
        ("overlay", "local"), ("nfs", "nfs"), ("nfs4", "nfs"), ("lustre", "parallel"),
        ("gpfs", "parallel"), ("wekafs", "parallel"), ("beegfs", "parallel"), ("ceph", "parallel"),
        ("fuse.ceph-fuse", "parallel"), ("fuse.glusterfs", "parallel"), ("fuse.mfs", "parallel"),
        ("fuse", "parallel"),
    ],
)  # fmt: skip
def test_kinds(fs_type: str, name: str) -> None:
    """Each file system type gets the settings of its kind, under the kind's own name."""
    settings = settings_for(fs_type)
    assert settings is SETTINGS[name]
    assert settings.name == name


def test_remote_kinds_distrust_lookups() -> None:
    """Only a disk is believed when it says that a name is absent."""
    assert not SETTINGS["local"].relist
    assert SETTINGS["nfs"].relist
    assert SETTINGS["nfs"].capabilities.lookup_lag_s >= 30


def test_new_store_on_lustre_is_striped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new root on Lustre gets the striping hint, once; an old root is left alone."""
    asked: list[tuple[str, int]] = []
    monkeypatch.setattr(posix_settings, "find_fs_type", lambda _: "lustre")
    monkeypatch.setattr(
        posix_settings, "stripe_folder", lambda root, count: asked.append((root, count))
    )
    for _ in range(2):
        backend = open_posix(str(tmp_path / "new"))
        backend.put("a/1", b"x")
        backend.put("a/2", b"x")
        backend.delete("a/1")
        backend.delete("a/2")
    assert backend.name == "parallel"
    assert asked == [(str(tmp_path / "new"), SETTINGS["parallel"].stripe_count)]


@pytest.mark.parametrize("program", ["exit 0", "exit 3", "kill -9 $$"])
def test_striping_never_fails(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tool is called with the folder; what becomes of it is its own affair."""
    log = tmp_path / "log"
    tool = tmp_path / "bin" / "lfs"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\necho "$@" >> {log}\n{program}\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")
    stripe_folder("/some/folder", 4)
    assert log.read_text().split()[-3:] == ["-c", "4", "/some/folder"]
    monkeypatch.setenv("PATH", str(tmp_path))
    stripe_folder("/some/folder", 4)
    assert len(log.read_text().splitlines()) == 1


def room(monkeypatch: pytest.MonkeyPatch, size_bytes: int) -> None:
    """Let the disk have room for so many bytes more."""
    real, left = os.write, size_bytes

    def write(descriptor: int, data: bytes) -> int:
        nonlocal left
        if len(data) > left:
            raise OSError(errno.ENOSPC, "No space left on device")
        left -= len(data)
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", write)


def test_it_is_no_object(tmp_path: Path) -> None:
    """It takes up its size, is made once, and no listing shows it."""
    backend = open_posix(str(tmp_path))
    for _ in range(2):
        backend.keep_reserve()
        assert (tmp_path / NAME).stat().st_size == limits.RESERVE_BYTES
    assert list(backend.list("")) == []
    assert len(set((tmp_path / NAME).read_bytes())) == 256  # nothing that compresses
    backend.drop_reserve()
    backend.drop_reserve()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("before", [0, 40_960])
def test_a_disk_without_enough_room(
    whole: bool, before: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ordinary writers leave the last room to others; a deletion keeps what is left of it."""
    (tmp_path / NAME).write_bytes(bytes(before))
    room(monkeypatch, before + 8192)  # what a short one took is free again
    open_posix(str(tmp_path)).keep_reserve(whole=whole)
    assert (tmp_path / NAME).stat().st_size == before + (0 if whole else 8192)


def test_it_is_made_up_again(tmp_path: Path) -> None:
    """One that was cut short, by a crash or a full disk, grows to its size."""
    (tmp_path / NAME).write_bytes(bytes(1000))
    open_posix(str(tmp_path)).keep_reserve()
    assert (tmp_path / NAME).stat().st_size >= limits.RESERVE_BYTES


@pytest.mark.parametrize("trap", ["hard link", "symbolic link", "dangling", "pipe", "folder"])
def test_files_under_its_name_are_left_alone(
    trap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever others put in its place is neither followed nor written to, and nothing hangs.

    Also where file systems report one name for every file, as by SFTP.
    """
    real = os.fstat

    def one_name(descriptor: int) -> os.stat_result:
        fields = list(real(descriptor))
        fields[stat.ST_NLINK] = 1
        return os.stat_result(fields)

    monkeypatch.setattr(os, "fstat", one_name)
    root, other = tmp_path / "store", tmp_path / "other"
    root.mkdir()
    other.write_bytes(b"precious")
    match trap:
        case "hard link":
            (root / NAME).hardlink_to(other)
        case "symbolic link":
            (root / NAME).symlink_to(other)
        case "dangling":
            (root / NAME).symlink_to(tmp_path / "none")
        case "pipe":
            os.mkfifo(root / NAME)
        case _:
            (root / NAME).mkdir()
    backend = open_posix(str(root))
    backend.keep_reserve()
    backend.keep_reserve(whole=False)
    assert other.read_bytes() == b"precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "store"]
    backend.drop_reserve()
    backend.put("a", b"x")
    assert other.read_bytes() == b"precious"


@pytest.mark.parametrize("call", ["open", "fstat", "write", "close", "unlink"])
def test_no_failure_of_it_fails_a_save(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a help and no condition: each call that it makes may be refused."""
    backend = open_posix(str(tmp_path))
    real = getattr(os, call)

    def refused(*args: Any, **options: Any) -> Any:  # noqa: ANN401 - passed on
        if call == "close":
            real(*args, **options)
        raise OSError(errno.EACCES, "refused")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, refused)
        backend.keep_reserve()
        backend.keep_reserve(whole=False)
        backend.drop_reserve()


def test_readers_make_none(tmp_path: Path) -> None:
    """Only a process that may commit keeps a reserve; opening and reading leave no file."""
    with ckptstore.open(tmp_path / "s", create=True) as store:
        assert not (tmp_path / "s" / NAME).exists()
        store.run("r").save({"w": b"1"}, step=1)
    assert (tmp_path / "s" / NAME).exists()
    (tmp_path / "s" / NAME).unlink()
    with ckptstore.open(tmp_path / "s") as store:
        assert store.load("r") == {"w": b"1"}
        store.gc(dry_run=True)
    assert not (tmp_path / "s" / NAME).exists()


def test_a_write_is_repeated_once() -> None:
    """Another process may have given the reserve up: one more try, whether there was one or not."""
    tries = 0

    def write() -> str:
        nonlocal tries
        tries += 1
        if tries % 3:
            raise StorageFullError("full")
        return "written"

    with pytest.raises(StorageFullError):
        on_reserve(MemoryBackend("reserve"), write)
    assert on_reserve(MemoryBackend("reserve"), write) == "written"
    assert tries == 3
