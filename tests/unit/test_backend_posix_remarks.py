"""Doctor's remarks on a folder, and the documentation's table of mounts."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from mounttable import MOUNTS, Mount

from ckptstore.backends.posix import open_posix
from ckptstore.backends.posix_remarks import BUCKET_MOUNTS, find_remarks
from ckptstore.backends.posix_settings import LINKLESS_DISKS, find_fs_type, settings_for

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
