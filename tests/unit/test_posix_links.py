"""How the POSIX backend creates names: by hard links, or where there are none by renames."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from faultydisk import Disk, fail

from ckptstore import errors
from ckptstore.backends import posix_publish
from ckptstore.backends.base import PutIfAbsent
from ckptstore.backends.posix import open_posix
from ckptstore.backends.probe import probe
from ckptstore.config import Options
from ckptstore.repo import create_on
from ckptstore.store import Store

pytestmark = pytest.mark.probes  # what the disk could do before a test broke it is nothing here


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    """Return a new folder with a backend."""
    return Disk(tmp_path, open_posix(str(tmp_path)), monkeypatch)


@pytest.mark.parametrize("number", [errno.EIO, errno.ETIMEDOUT, errno.EEXIST, errno.ESTALE])
def test_lost_reply_of_link(number: int, disk: Disk) -> None:
    """A link that was made is a success, whatever its reply: the link count tells."""
    with disk.patch.context() as patch:
        fail(patch, "link", number, after=True)
        disk.backend.put_if_absent("a", b"mine")
    assert (disk.path / "a").read_bytes() == b"mine"
    assert disk.names() == ["a"]


@pytest.mark.parametrize("number", [errno.EIO, errno.ETIMEDOUT])
def test_link_that_was_not_made(number: int, disk: Disk) -> None:
    """A link that failed, and cannot come late since its source is gone, is no ambiguity."""
    disk.fail("link", number)
    with pytest.raises(errors.StorageError) as caught:
        disk.backend.put_if_absent("a", b"mine")
    assert not isinstance(caught.value, errors.AmbiguousWriteError)
    assert disk.names() == []


def test_link_of_unknown_outcome(disk: Disk) -> None:
    """When the temporary file cannot be looked at either, the outcome is ambiguous."""
    real = os.link

    def link(*args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        real(*args, **kwargs)
        disk.fail("open", errno.EIO)
        raise OSError(errno.EIO, "lost")

    disk.patch.setattr(os, "link", link)
    with pytest.raises(errors.AmbiguousWriteError):
        disk.backend.put_if_absent("a", b"mine")


def test_late_link_over_taken_name(disk: Disk) -> None:
    """A failed link beside a name that somebody took meanwhile is ambiguous, not a success."""

    def link(*_: object, **__: object) -> None:
        (disk.path / "a").write_bytes(b"theirs")
        raise OSError(errno.EIO, "lost")

    disk.patch.setattr(os, "link", link)
    with pytest.raises((errors.AmbiguousWriteError, errors.ObjectExistsError)):
        disk.backend.put_if_absent("a", b"mine")
    assert (disk.path / "a").read_bytes() == b"theirs"


def test_a_backup_by_hard_links_makes_no_lost_conflict_a_success(disk: Disk) -> None:
    """``cp -al`` may give a temporary file its second name while another's commit is there."""
    real = os.link
    disk.backend.put_if_absent("a", b"theirs")

    def link(source: str, target: str, **options: bool) -> None:
        real(source, disk.path.parent / "backup")
        real(source, target, **options)

    disk.patch.setattr(os, "link", link)
    with pytest.raises((errors.AmbiguousWriteError, errors.ObjectExistsError)):
        disk.backend.put_if_absent("a", b"mine")
    assert (disk.path / "a").read_bytes() == b"theirs"


NO_LINKS = pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])


@NO_LINKS
def test_a_disk_without_links_creates_names_by_the_kernels_rename(number: int, disk: Disk) -> None:
    """On such a disk RENAME_NOREPLACE lets one creator win, and keeps what is there."""
    disk.backend.fs_type = "vfat"
    disk.fail("link", number)
    disk.backend.put_if_absent("a", b"first")
    with pytest.raises(errors.ObjectExistsError):
        disk.backend.put_if_absent("a", b"second")
    assert disk.backend.get("a", bytes_max=9) == b"first"
    assert probe(disk.backend).passed
    assert disk.names() == ["a", "probe"]


@pytest.mark.short(sample=4)
@NO_LINKS
@pytest.mark.parametrize("kind", ["", "vfat", "nfs", "parallel"])
def test_a_single_writer_needs_neither_links_nor_flags(kind: str, number: int, disk: Disk) -> None:
    """Names are created by looking and renaming, but never for a claim against other writers.

    Where other machines may mount the same files, this kernel's rename knows nothing of theirs.
    """
    backend = open_posix(str(disk.path), kind="" if kind == "vfat" else kind)
    disk.fail("link", number)
    if kind == "vfat":
        backend.fs_type = kind
        disk.patch.setattr(posix_publish, "_rename_if_absent", lambda *_: errno.EINVAL)
    with pytest.raises(errors.UnsafeBackendError, match="no hard links"):
        backend.put_if_absent("a", b"mine")
    assert disk.names() == []
    backend.put("a", b"mine")
    backend.put("a", b"mine")
    with pytest.raises(errors.ObjectExistsError):
        backend.put("a", b"other")
    with backend.open_writer("b") as writer:
        writer.write(b"streamed")
        writer.commit()
    assert probe(backend).put_if_absent is PutIfAbsent.REFUSED
    with create_on(backend, options=Options(single_writer=True)) as repo, Store(repo) as store:
        for step in range(3):
            store.run("r").save({"w": b"%d" % step}, step=step)
        assert [version.step for version in store.versions("r")] == [0, 1, 2]
        assert store.verify().ok
        assert store.load("r@1") == {"w": b"1"}


def test_only_on_mounts_of_rclone_eio_means_no_links(disk: Disk) -> None:
    """Its mount has no other answer; anywhere else it is a failure, after which none is guessed."""
    disk.fail("link", errno.EIO)
    backend = open_posix(str(disk.path), kind="parallel")
    with pytest.raises(errors.StorageError, match="EIO"):
        backend.put("a", b"mine")
    assert disk.names() == []
    backend.fs_type = "fuse.rclone"
    backend.put("a", b"mine")
    with backend.open_writer("b") as writer:
        writer.write(b"streamed")
        writer.commit()
    assert disk.names() == ["a", "b"]
    with pytest.raises(errors.UnsafeBackendError, match="no hard links"):
        backend.put_if_absent("c", b"mine")


@pytest.mark.parametrize("done", [False, True], ids=["not done", "done"])
def test_a_rename_that_fails_is_told_from_one_that_was_done(done: bool, disk: Disk) -> None:
    """An error with the temporary file gone is no clear answer; else nothing was created."""
    backend = open_posix(str(disk.path), kind="parallel")
    disk.fail("link", errno.EPERM)
    disk.patch.setattr(posix_publish, "_rename_if_absent", lambda *_: errno.EINVAL)
    rename = os.rename

    def failing(source: str, target: str) -> None:
        if done:
            rename(source, target)
        raise OSError(errno.EIO, "lost")

    disk.patch.setattr(os, "rename", failing)
    with pytest.raises(errors.AmbiguousWriteError if done else errors.StorageError) as caught:
        backend.put("a", b"mine")
    assert done or not isinstance(caught.value, errors.AmbiguousWriteError)
    assert disk.names() == (["a"] if done else [])


@pytest.mark.parametrize("kept", [False, True], ids=["removed", "cannot be removed"])
def test_a_mount_that_cannot_rename_names_the_buckets_url(kept: bool, disk: Disk) -> None:
    """Mountpoint for S3 neither links nor renames, and deletes only on demand: the hint helps."""
    backend = open_posix(str(disk.path), kind="parallel")
    for name in ("link", "rename", *(["unlink"] if kept else [])):
        disk.fail(name, errno.ENOSYS)
    disk.patch.setattr(posix_publish, "_rename_if_absent", lambda *_: errno.ENOSYS)
    with pytest.raises(errors.AmbiguousWriteError if kept else errors.StorageError) as caught:
        backend.put("a", b"mine")
    assert "s3://" in caught.value.hint
    assert "a" not in disk.names()
    with pytest.raises(errors.UnsafeBackendError) as refused:
        backend.put_if_absent("a", b"mine")
    assert "s3://" in refused.value.hint
    backend.fs_type = "fuse.mountpoint-s3"
    with pytest.raises(errors.StorageError, match="cannot hold a store") as unusable:
        create_on(backend, options=Options(single_writer=True))
    assert "s3://" in unusable.value.hint


def test_a_taken_name_is_no_lack_of_links(disk: Disk) -> None:
    """Sshfs answers EPERM to ``link()`` on a taken name; on a free one it tells that none work."""
    backend = open_posix(str(disk.path), kind="parallel")
    backend.put_if_absent("a", b"first")
    disk.fail("link", errno.EPERM)
    with pytest.raises(errors.ObjectExistsError):
        backend.put_if_absent("a", b"second")
    backend.put("a", b"first")
    with pytest.raises(errors.UnsafeBackendError, match="no hard links"):
        backend.put_if_absent("b", b"second")
    assert disk.names() == ["a"]
    assert backend.get("a", bytes_max=9) == b"first"


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP])
def test_other_answers_tell_of_links_alone(number: int, disk: Disk) -> None:
    """Codes that say that the call is not served say nothing of the name."""
    backend = open_posix(str(disk.path), kind="parallel")
    backend.put_if_absent("a", b"first")
    disk.fail("link", number)
    with pytest.raises(errors.UnsafeBackendError, match="no hard links"):
        backend.put_if_absent("a", b"second")
