"""The mount table tells which settings a path gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptstore.backends import posix_settings
from ckptstore.backends.posix import open_posix
from ckptstore.backends.posix_settings import SETTINGS, find_fs_type, settings_for, stripe_folder

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
        ("/data", "ext4"),
        ("/mnt/nfs", "nfs4"),
        ("/mnt/nfs/a/b", "nfs4"),
        ("/mnt/nfs/inner/x", "tmpfs"),
        ("/mnt/nfsother", "ext4"),
        ("/mnt/with space/x", "lustre"),
        ("/mnt/twice/x", "fuse.glusterfs"),
    ],
)
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
        ("ext4", "local"),
        ("xfs", "local"),
        ("btrfs", "local"),
        ("tmpfs", "local"),
        ("overlay", "local"),
        ("nfs", "nfs"),
        ("nfs4", "nfs"),
        ("lustre", "parallel"),
        ("gpfs", "parallel"),
        ("wekafs", "parallel"),
        ("beegfs", "parallel"),
        ("ceph", "parallel"),
        ("fuse.ceph-fuse", "parallel"),
        ("fuse.glusterfs", "parallel"),
        ("fuse.mfs", "parallel"),
        ("fuse", "parallel"),
    ],
)
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
