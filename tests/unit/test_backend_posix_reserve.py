"""The reserve of a store on a disk: kept, given up, and never at the cost of other files."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

import pytest

import ckptstore
from ckptstore import limits
from ckptstore.backends.memory import MemoryBackend
from ckptstore.backends.posix import NAME, open_posix
from ckptstore.committing import on_reserve
from ckptstore.errors import StorageFullError


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
