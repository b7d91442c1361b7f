"""What the POSIX backend does when system calls fail: typed errors, and no torn or false object."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from faultydisk import Disk, fail

from ckptstore import errors, limits
from ckptstore.backends import posix
from ckptstore.backends.posix import PosixBackend, open_posix
from ckptstore.backends.posix_settings import SETTINGS
from ckptstore.backends.retrying import RetryingBackend
from ckptstore.config import SystemEnvironment

pytestmark = pytest.mark.probes  # what the disk could do before a test broke it is nothing here

CALLS = ("open", "write", "writev", "fsync", "fstat", "close", "link", "unlink", "mkdir", "preadv")


class Patient(SystemEnvironment):
    """Waits no time."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


class Calls:
    """Counts the system calls of the backend, and lets one of them fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int = 0, number: int = 0) -> None:
        self.seen = 0
        self.name = ""
        self._at = at
        self._number = number
        for name in CALLS:
            monkeypatch.setattr(os, name, self._wrap(name, getattr(os, name)))

    def _wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: object, **kwargs: object) -> object:
            self.seen += 1
            if self.seen == self._at:
                self.name = name
                if name == "close":  # a close that fails has closed all the same: close(2)
                    real(*args, **kwargs)
                raise OSError(self._number, os.strerror(self._number))
            return real(*args, **kwargs)

        return call


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    """Return a new folder with a backend."""
    return Disk(tmp_path, open_posix(str(tmp_path)), monkeypatch)


def write_by(backend: PosixBackend, method: str, key: str, data: bytes) -> None:
    """Write by one of the three ways."""
    if method == "open_writer":
        with backend.open_writer(key) as writer:
            writer.write(data)
            writer.commit()
    else:
        getattr(backend, method)(key, data)


def record(monkeypatch: pytest.MonkeyPatch, root: Path) -> list[str]:
    """Return a list that fills with what makes names and contents durable, in order.

    Paths are relative to `root`; a temporary file is ``FILE``.
    """
    calls: list[str] = []
    paths: dict[int, str] = {}
    real = {
        name: getattr(os, name) for name in ("open", "fsync", "link", "mkdir", "write", "writev")
    }

    def note(name: str, path: str) -> None:
        short = os.path.relpath(path, root)
        calls.append(f"{name} {'FILE' if '.tmp-' in short else short}")

    def opened(path: str, flags: int, *rest: Any) -> int:  # noqa: ANN401 - passed on
        descriptor: int = real["open"](path, flags, *rest)
        paths[descriptor] = path
        if flags & os.O_DIRECTORY:
            note("open", path)
        return descriptor

    def of_descriptor(name: str) -> Callable[..., Any]:
        def call(descriptor: int, *rest: object) -> object:
            note(name.removesuffix("v"), paths[descriptor])
            return real[name](descriptor, *rest)

        return call

    def linked(source: str, target: str, **options: bool) -> None:
        note("link", target)
        real["link"](source, target, **options)

    def made(path: str | Path, *rest: Any) -> None:  # noqa: ANN401 - passed on
        note("mkdir", str(path))
        real["mkdir"](path, *rest)

    for name, call in {"open": opened, "link": linked, "mkdir": made}.items():
        monkeypatch.setattr(os, name, call)
    for name in ("fsync", "write", "writev"):
        monkeypatch.setattr(os, name, of_descriptor(name))
    return calls


def synced(folder: str) -> list[str]:
    """Return how the names in a folder are made durable: the second open finds a failed disk."""
    return [f"open {folder}", f"fsync {folder}", f"open {folder}"]


@pytest.mark.parametrize("method", ["put", "put_if_absent", "open_writer"])
def test_order_of_syncs(method: str, disk: Disk) -> None:
    """Each name is durable before what lies below it, the content before its name, then the name.

    Folders on the way to a new root too; one that another process has made as well, as that one may
    have died before it came to it.
    """
    backend = open_posix(str(disk.path / "new" / "root"))
    with disk.patch.context() as patch:
        calls = record(patch, disk.path)
        write_by(backend, method, "a/b/first", b"data")
        assert calls == [
            "mkdir new", *synced("."), "mkdir new/root", *synced("new"),
            "mkdir new/root/a", "open new/root/a", *synced("new/root"),
            "mkdir new/root/a/b", "open new/root/a/b", *synced("new/root/a"),
            "write FILE", "fsync FILE", "link new/root/a/b/first", *synced("new/root/a/b"),
        ]  # fmt: skip
        calls.clear()
        write_by(backend, method, "a/b/second", b"data")
        assert calls == [
            "write FILE", "fsync FILE", "link new/root/a/b/second", *synced("new/root/a/b"),
        ]  # fmt: skip
        (disk.path / "new" / "root" / "others").mkdir()
        calls.clear()
        write_by(backend, method, "others/one", b"data")
        assert calls[:4] == ["mkdir new/root/others", *synced("new/root")]


@pytest.mark.parametrize("method", ["put", "put_if_absent", "open_writer"])
def test_every_system_call_failing(method: str, disk: Disk) -> None:
    """Whichever call fails: an error of our tree or success, never half an object."""
    with disk.patch.context() as patch:
        counted = Calls(patch)
        write_by(open_posix(str(disk.path / "count")), method, "a/b", b"data")
    assert counted.seen > 10
    raised = set()
    for at in range(1, counted.seen + 1):
        root = disk.path / str(at)
        with disk.patch.context() as patch:
            calls = Calls(patch, at, errno.EIO)
            try:
                write_by(open_posix(str(root)), method, "a/b", b"data")
                told = True
            except errors.StorageError:
                raised.add(calls.name)
                told = False
        path = root / "a" / "b"
        there = path.exists()
        assert not there or path.read_bytes() == b"data"
        assert there or not told, f"call {at} ({calls.name}) failed, and success was claimed"
    assert {"open", "fsync", "fstat", "mkdir"} <= raised


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.ENOSPC, errors.StorageFullError), (errno.EDQUOT, errors.StorageFullError),
        (errno.EACCES, errors.StoragePermissionError), (errno.EROFS, errors.StoragePermissionError),
        (errno.EIO, errors.StorageError), (errno.ETIMEDOUT, errors.TransientStorageError),
        (errno.ESTALE, errors.TransientStorageError), (errno.EAGAIN, errors.TransientStorageError),
        (errno.ENAMETOOLONG, errors.InvalidUrlError), (errno.ENOENT, errors.StorageError),
    ],
)  # fmt: skip
@pytest.mark.parametrize("call", ["write", "fsync", "open"])
def test_numbers_are_typed(
    call: str, number: int, expected: type[errors.CkptStoreError], disk: Disk
) -> None:
    """Each error number becomes one error of the tree, and no temporary file stays behind."""
    disk.backend.put("warm", b"")
    with disk.patch.context() as patch:
        fail(patch, call, number)
        with pytest.raises(expected) as caught:
            disk.backend.put_if_absent("a", b"x")
    assert type(caught.value) is expected
    assert disk.names() == ["warm"]


def test_folder_that_cannot_be_synced_is_no_success(disk: Disk) -> None:
    """An object whose name is perhaps not durable is not reported as written."""
    disk.backend.put("warm", b"")
    real, count = os.fsync, 0

    def fsync(descriptor: int) -> None:
        nonlocal count
        count += 1
        if count == 2:  # first the file, then its folder
            raise OSError(errno.EIO, "folder")
        real(descriptor)

    disk.patch.setattr(os, "fsync", fsync)
    with pytest.raises(errors.StorageError, match="folder could not be synced"):
        disk.backend.put_if_absent("a", b"mine")


def test_short_writes(disk: Disk) -> None:
    """System calls that write less than they were given are continued."""
    write, writev = os.write, os.writev
    disk.patch.setattr(os, "write", lambda fd, data: write(fd, data[:7]))
    disk.patch.setattr(os, "writev", lambda fd, parts: writev(fd, [parts[0][:5]]))
    data = bytes(range(100))
    disk.backend.put("a", data)
    write_by(disk.backend, "open_writer", "b", data)
    assert (disk.path / "a").read_bytes() == (disk.path / "b").read_bytes() == data


def test_short_reads(disk: Disk) -> None:
    """System calls that read less than they were asked for are continued."""
    disk.backend.put("a", bytes(range(100)))
    real = os.preadv
    disk.patch.setattr(os, "preadv", lambda fd, parts, at: real(fd, [parts[0][:3]], at))
    parts = [memoryview(bytearray(size)) for size in (10, 5, 20)]
    disk.backend.read_into("a", 4, parts)
    assert b"".join(parts) == bytes(range(4, 39))


def test_wrong_length_is_noticed(disk: Disk) -> None:
    """A file that does not have the bytes that were written never gets its name."""
    disk.backend.put("warm", b"")
    real = os.write

    def write(descriptor: int, data: memoryview) -> int:
        return real(descriptor, data[:-1]) + 1

    disk.patch.setattr(os, "write", write)
    with pytest.raises(errors.StorageError, match="bytes are in the file"):
        disk.backend.put_if_absent("a", b"mine")
    assert disk.names() == ["warm"]


def test_stale_handles_are_opened_again(disk: Disk) -> None:
    """ESTALE, on opening and on reading, is tried again a few times, and then given up."""
    patient = Patient()
    backend = PosixBackend(str(disk.path), settings=SETTINGS["nfs"], environment=patient)
    backend.put("a", b"data")
    real, left = os.preadv, 3

    def preadv(*args: Any) -> int:  # noqa: ANN401
        nonlocal left
        left -= 1
        if left >= 0:
            raise OSError(errno.ESTALE, "stale")
        return real(*args)

    disk.patch.setattr(os, "preadv", preadv)
    assert backend.get("a", bytes_max=10) == b"data"
    assert len(patient.slept) == 3
    disk.fail("preadv", errno.ESTALE)
    with pytest.raises(errors.TransientStorageError):
        backend.get("a", bytes_max=10)
    assert len(patient.slept) == 3 + limits.STALE_TRIES - 1


def test_stale_enoent_is_not_believed(disk: Disk) -> None:
    """On NFS a name that its folder lists is opened again, though the first open says ENOENT."""
    patient = Patient()
    backend = PosixBackend(str(disk.path), settings=SETTINGS["nfs"], environment=patient)
    backend.put("a/b", b"data")
    real, left = os.open, 2

    def opened(path: str, *args: Any, **kwargs: Any) -> int:  # noqa: ANN401
        nonlocal left
        if str(path).endswith("a/b") and left:
            left -= 1
            raise OSError(errno.ENOENT, "cached")
        return real(path, *args, **kwargs)

    disk.patch.setattr(os, "open", opened)
    assert backend.get("a/b", bytes_max=10) == b"data"
    assert len(patient.slept) == 2
    with pytest.raises(errors.ObjectNotFoundError):
        backend.get("a/c", bytes_max=10)
    assert len(patient.slept) == 2


def test_folder_taken_away(tmp_path: Path) -> None:
    """A folder that somebody removed is made again."""
    backend = open_posix(str(tmp_path))
    backend.put("a/b/c", b"1")
    (tmp_path / "a" / "b" / "c").unlink()
    (tmp_path / "a" / "b").rmdir()
    backend.put("a/b/d", b"2")
    assert (tmp_path / "a" / "b" / "d").read_bytes() == b"2"


def test_special_files_are_no_objects(tmp_path: Path) -> None:
    """Pipes, links and folders in a hostile store neither hang nor lead a reader outside."""
    (tmp_path / "secret").write_bytes(b"outside")
    root = tmp_path / "store"
    root.mkdir()
    os.mkfifo(root / "pipe")
    (root / "link").symlink_to(tmp_path / "secret")
    (root / "folder").mkdir()
    (root / "outside").symlink_to(tmp_path)
    backend = open_posix(str(root))
    for key in ("pipe", "link", "folder"):
        with pytest.raises(errors.ObjectNotFoundError):
            backend.get(key, bytes_max=100)
    assert list(backend.list("")) == []


@pytest.mark.parametrize("call", ["fsync", "link"])
def test_failed_commit_is_not_repeated(call: str, disk: Disk) -> None:
    """A pack whose fsync or link failed is given up, even where the number looks transient."""
    backend = RetryingBackend(open_posix(str(disk.path)), environment=Patient())
    with backend.open_writer("a") as writer:
        writer.write(b"data")
        disk.fail(call, errno.ETIMEDOUT)
        with pytest.raises(errors.StorageError) as caught:
            writer.commit()
    assert type(caught.value) is errors.StorageError
    assert disk.names() == []


def test_write_back_errors_are_not_lost(disk: Disk) -> None:
    """An error that early write-back reports, which fsync would not repeat, fails the write."""
    disk.patch.setattr(limits, "WRITEBACK_WINDOW_BYTES", 10)
    disk.patch.setattr(posix, "sync_range", lambda: lambda *_: errno.EIO)
    writer = open_posix(str(disk.path)).open_writer("a")
    with pytest.raises(errors.StorageError):
        writer.write(bytes(100))
    writer.abort()
    assert disk.names() == []


def test_write_back_that_is_not_there(disk: Disk) -> None:
    """Where the file system does not know the call, writing works without it."""
    disk.patch.setattr(limits, "WRITEBACK_WINDOW_BYTES", 10)
    calls = 0

    def unknown(*_: int) -> int:
        nonlocal calls
        calls += 1
        return errno.EINVAL

    for key, answer in (("a", unknown), ("b", None)):
        disk.patch.setattr(posix, "sync_range", lambda answer=answer: answer)
        write_by(open_posix(str(disk.path)), "open_writer", key, bytes(99))
    assert calls == 1
    assert disk.names() == ["a", "b"]


def test_write_back_follows_the_writer(disk: Disk) -> None:
    """Whole windows are started at once and waited for when they lie far enough back."""
    disk.patch.setattr(limits, "WRITEBACK_WINDOW_BYTES", 10)
    disk.patch.setattr(limits, "WRITEBACK_LAG_BYTES", 20)
    seen: list[tuple[int, int, int]] = []

    def sync(_: int, offset: int, count: int, flags: int) -> int:
        seen.append((offset, count, flags))
        return 0

    disk.patch.setattr(posix, "sync_range", lambda: sync)
    with open_posix(str(disk.path)).open_writer("a") as writer:
        for _ in range(9):
            writer.write(b"12345")
        writer.commit()
    assert seen == [(0, 10, 2), (10, 10, 2), (20, 10, 2), (0, 10, 7), (30, 10, 2), (10, 10, 7)]


def test_what_another_left_visible_is_made_durable(disk: Disk) -> None:
    """Each folder is synced once; a folder that cannot be synced is an error."""
    keys = ["packs/aa/1.pack", "packs/aa/2.pack", "packs/bb/3.pack"]
    for key in keys:
        disk.backend.put(key, b"data")
    real, synced = os.fsync, []

    def fsync(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_ino)
        real(descriptor)

    disk.patch.setattr(os, "fsync", fsync)
    disk.backend.make_durable(keys)
    assert sorted(synced) == sorted(
        (disk.path / f"packs/{one}").stat().st_ino for one in ("aa", "bb")
    )

    def broken(descriptor: int) -> None:
        raise OSError(errno.EIO, "broken")

    disk.patch.setattr(os, "fsync", broken)
    with pytest.raises(errors.StorageError, match="sync"):
        disk.backend.make_durable(keys)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOTDIR])
def test_a_listing_asks_nothing_of_names_that_are_no_keys(code: int, disk: Disk) -> None:
    """Another's broken file neither fails a listing nor empties it, where types take a stat."""

    class Entry:
        """An entry of a folder whose kind the file system does not tell, so that it is asked."""

        def __init__(self, entry: os.DirEntry[str]) -> None:
            self.name, self.path, self.stat = entry.name, entry.path, entry.stat
            self._is_dir = entry.is_dir

        def is_dir(self, *, follow_symlinks: bool) -> bool:
            if self.name == "Broken":
                raise OSError(code, "broken")
            return self._is_dir(follow_symlinks=follow_symlinks)

    disk.backend.put("packs/aa/1.pack", b"data")
    (disk.path / "packs/Broken").touch()
    real = os.scandir

    @contextmanager
    def scandir(path: str) -> Iterator[Iterator[Entry]]:
        with real(path) as entries:
            yield map(Entry, entries)

    disk.patch.setattr(os, "scandir", scandir)
    assert [info.key for info in disk.backend.list("packs/")] == ["packs/aa/1.pack"]


@contextmanager
def umask(mask: int) -> Iterator[None]:
    """Create files with a umask."""
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def mode_of(path: Path) -> int:
    """Return the permissions of a folder, with the setgid and the sticky bit."""
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(
    ("root", "mask", "folder"),
    [
        (0o2775, 0o077, 0o2770), (0o2750, 0o077, 0o2750), (0o775, 0o022, 0o775),
        (0o777, 0o022, 0o775), (0o777, 0o077, 0o770), (0o1777, 0o022, 0o1775),
        (0o1777, 0o077, 0o1770), (0o755, 0o002, 0o775), (0o700, 0o022, 0o755),
    ],
    ids=oct,
)  # fmt: skip
def test_new_folders_have_the_groups_rights_of_the_root(
    root: int, mask: int, folder: int, tmp_path: Path
) -> None:
    """A group shares a store, whatever the umask; nobody else gets rights, and none are taken away.

    Where a sticky root keeps members from deleting one another's files, so do the folders in it.
    """
    tmp_path.chmod(root)
    with umask(mask):
        open_posix(str(tmp_path)).put("packs/ab/1.pack", b"x")
    assert mode_of(tmp_path / "packs") == folder
    assert mode_of(tmp_path / "packs" / "ab") == folder


def owned(patch: pytest.MonkeyPatch, *, user: int | None = None, group: int | None = None) -> None:
    """Let open folders belong to another user or group."""
    real = os.fstat

    def fstat(descriptor: int) -> os.stat_result:
        found = real(descriptor)
        fields = list(found)
        if stat.S_ISDIR(found.st_mode):
            fields[stat.ST_UID] = found.st_uid if user is None else user
            fields[stat.ST_GID] = found.st_gid if group is None else group
        return os.stat_result(fields)

    patch.setattr(os, "fstat", fstat)


@pytest.mark.parametrize("root", [0o775, 0o777, 0o1777, 0o2777], ids=oct)
def test_a_foreign_group_gets_no_rights(root: int, disk: Disk) -> None:
    """A new folder of another group than the root's, as without setgid, is not opened to it."""
    disk.path.chmod(root)
    with disk.patch.context() as patch, umask(0o022):
        owned(patch, group=disk.path.stat().st_gid + 1)
        open_posix(str(disk.path)).put("packs/1.pack", b"x")
    assert mode_of(disk.path / "packs") & 0o777 == 0o755


@pytest.mark.parametrize("member", [True, False])
def test_folders_keep_their_setgid_bit(member: bool, disk: Disk) -> None:
    """``chmod`` by a user outside the group would take the bit away: it is not called."""
    disk.path.chmod(0o2777)
    group = disk.path.stat().st_gid
    disk.patch.setattr(os, "geteuid", lambda: 12345)
    owned(disk.patch, user=12345)
    disk.patch.setattr(os, "getegid", lambda: group + 1)
    disk.patch.setattr(os, "getgroups", lambda: [group] if member else [])
    with umask(0o022):
        open_posix(str(disk.path)).put("packs/1.pack", b"x")
    assert mode_of(disk.path / "packs") == (0o2775 if member else 0o2755)


def test_a_file_system_without_modes_has_folders_all_the_same(disk: Disk) -> None:
    """Where a mount decides on modes, chmod is refused, and folders are made as they come."""
    disk.path.chmod(0o777)

    def refused(descriptor: int, mode: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    disk.patch.setattr(os, "fchmod", refused)
    with umask(0o077):
        open_posix(str(disk.path)).put("packs/ab/1.pack", b"x")
    assert (disk.path / "packs" / "ab" / "1.pack").read_bytes() == b"x"


@pytest.mark.parametrize("trap", ["link", "folder of another user"])
def test_a_folder_that_others_put_in_its_place_keeps_its_rights(trap: str, disk: Disk) -> None:
    """A member of the group may swap a new folder at once: only what was made here is shared."""
    root, private = disk.path / "store", disk.path / "private"
    root.mkdir()
    root.chmod(0o2770)
    with umask(0o077):
        private.mkdir()
    os.chown(private, -1, root.stat().st_gid)
    real = os.mkdir

    def swapped(path: str | Path, *rest: int) -> None:
        real(path, *rest)
        if Path(path).name == "packs":
            Path(path).rename(root / "away")
            if trap == "link":
                Path(path).symlink_to(private)
            else:
                private.rename(path)

    disk.patch.setattr(os, "mkdir", swapped)
    if trap == "link":
        with pytest.raises(errors.StorageError):
            open_posix(str(root)).put("packs/1.pack", b"x")
        assert mode_of(private) == 0o700
    else:
        owned(disk.patch, user=os.geteuid() + 1)
        open_posix(str(root)).put("packs/1.pack", b"x")
        assert mode_of(root / "packs") == 0o700
