"""A storage that is really full: a typed error, nothing left behind, earlier versions untouched."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from faultkit.states import differences, state_of
from faultkit.stores import load_id, trusting
from threadwatch import threads_left

from ckptstore import limits
from ckptstore.backends import posix
from ckptstore.backends.registry import open_backend
from ckptstore.catalog.policy import Policy
from ckptstore.config import Options
from ckptstore.errors import StorageFullError
from ckptstore.repo import create_on
from ckptstore.store import Store

BLOCK = 4096
SMALL = 1_000
SOME = 30_000
LARGE = 2_000_000


def open_folder(folder: Path) -> Store:
    """Open or create the store in a folder."""
    options = Options(workers=2)
    repo = create_on(open_backend(folder), prober=trusting, exist_ok=True, options=options)
    return Store(repo)


def check_full(folder: Path) -> None:
    """Save until the storage is full, and hold what must hold then."""
    with open_folder(folder) as store:
        run = store.run("gpt")
        first = run.save(state_of(1, elements=SMALL), step=1)
        before = sorted(path for path in folder.rglob("*") if path.is_file())

        with pytest.raises(StorageFullError):
            run.save(state_of(2, elements=LARGE), step=2)

        assert not threads_left()
        assert [version.id for version in store.versions()] == [first.id]
        assert sorted(path for path in folder.rglob("*") if path.is_file()) == before
        assert differences(load_id(store, first), state_of(1, elements=SMALL)) == []
        again = run.save(state_of(3, elements=SMALL), step=3)
        assert differences(load_id(store, again), state_of(3, elements=SMALL)) == []
        assert store.verify().ok


class Disk:
    """A folder as a disk of some size: writes to files in it that do not fit give ENOSPC."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.size_bytes = 1 << 30
        write = os.write

        def checked(descriptor: int, data: bytes | memoryview) -> int:
            self._check(descriptor, len(data))
            return write(descriptor, data)

        monkeypatch.setattr(os, "write", checked)
        monkeypatch.setattr(os, "writev", lambda to, parts: checked(to, b"".join(parts)))

    def used_bytes(self) -> int:
        """Return the bytes in all files, each a multiple of a block."""
        used = 0
        for path in self.folder.rglob("*"):
            with suppress(FileNotFoundError):  # a temporary file of another thread has just gone
                if path.is_file():
                    used += -(-path.stat().st_size // BLOCK) * BLOCK
        return used

    def fill(self) -> None:
        """Leave no room."""
        self.size_bytes = self.used_bytes()

    def _check(self, descriptor: int, count: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115 - pipes have no path
        grown = -(-count // BLOCK) * BLOCK
        if path.startswith(str(self.folder)) and self.used_bytes() + grown > self.size_bytes:
            raise OSError(errno.ENOSPC, "No space left on device", path)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    """Return a disk with much room."""
    return Disk(tmp_path, monkeypatch)


def five_versions(folder: Path) -> Store:
    """Return a store with versions 1 to 5 of a run, of some 100 KB each."""
    store = open_folder(folder)
    for step in range(1, 6):
        store.run("gpt").save(state_of(step, elements=SOME), step=step)
    return store


def check_freed(store: Store) -> None:
    """Hold that the disk has room again, and that nothing was lost on the way."""
    saved = store.run("gpt").save(state_of(6, elements=SMALL), step=6)
    assert [version.step for version in store.versions("gpt")] == [3, 4, 5, 6]
    assert differences(load_id(store, saved), state_of(6, elements=SMALL)) == []
    assert store.verify().ok


@pytest.mark.short(sample=2)
@pytest.mark.parametrize("way", ["remove", "retain"])
@pytest.mark.parametrize("patient", [False, True], ids=["no grace", "grace"])
def test_a_full_disk_is_freed(way: str, patient: bool, tmp_path: Path, disk: Disk) -> None:
    """With 0 bytes left, versions can be deleted and collected; then a save works."""
    with five_versions(tmp_path / "store") as store:
        reserve = tmp_path / "store" / posix.NAME
        assert reserve.stat().st_size == limits.RESERVE_BYTES
        disk.fill()
        with pytest.raises(StorageFullError) as caught:
            store.run("gpt").save(state_of(9, elements=SMALL), step=9)
        assert "ckptstore gc" in caught.value.hint
        assert reserve.stat().st_size == limits.RESERVE_BYTES  # nothing but deletions takes it
        if way == "remove":
            store.remove(["gpt@1", "gpt@2"])
        else:
            store.retain(policy=Policy.parse(full="last 3"))
        # What the commit did not take is kept: another process would have filled the disk.
        assert disk.used_bytes() == disk.size_bytes
        assert reserve.stat().st_size > limits.RESERVE_BYTES // 2
        if patient:
            assert store.gc(repack_below=None).condemned["manifests"].count == 2
            assert disk.used_bytes() == disk.size_bytes
        assert store.gc(grace_s=0).swept["manifests"].count >= 2
        assert disk.used_bytes() < disk.size_bytes
        check_freed(store)


def test_retention_deletes_where_it_has_no_room_to_age(tmp_path: Path, disk: Disk) -> None:
    """Versions that go are deleted, though others, which would keep their weights, need room."""
    policy = Policy.parse(full="last 2", weights="last 3")
    with open_folder(tmp_path / "store") as store:
        for step in range(1, 6):
            state = {"w": torch.randn(SOME), "o": torch.randn(SOME)}
            store.run("gpt").save(state, step=step, roles={"w": "weights", "o": "optimizer"})
        disk.fill()
        with pytest.raises(StorageFullError):
            store.retain(policy=policy)
        assert [version.step for version in store.versions("gpt")] == [3, 4, 5]
        assert store.gc(grace_s=0, repack_below=None).swept["manifests"].count == 2
        store.retain(policy=policy)
        assert [version.level for version in store.versions("gpt")] == ["weights", "full", "full"]
        assert store.verify().ok


def test_a_full_disk_without_a_reserve(tmp_path: Path, disk: Disk) -> None:
    """What was condemned before is deleted without writing first; that makes room for the rest."""
    with five_versions(tmp_path / "store") as store:
        store.remove(["gpt@1"])
        store.gc()
        store.remove(["gpt@2"])
        (tmp_path / "store" / posix.NAME).unlink()
        disk.fill()
        with pytest.raises(StorageFullError):
            store.remove(["gpt@3"])
        swept = store.gc(grace_s=1e-9).swept  # only what an earlier collection has condemned
        assert swept["manifests"].count >= 1
        assert store.gc(grace_s=0).swept["manifests"].count >= 1
        check_freed(store)


def test_a_collection_that_cannot_rewrite_has_freed_all_the_same(
    tmp_path: Path, disk: Disk
) -> None:
    """Rewriting a pack needs more room than there is: it is said, after what could be deleted."""
    with open_folder(tmp_path / "store") as store:
        run = store.run("gpt")
        kept = torch.arange(100_000)
        run.save({"kept": kept, "other": torch.randn(400_000)}, step=1)
        run.save({"kept": kept}, step=2)
        disk.fill()
        store.remove(["gpt@1"])
        with pytest.raises(StorageFullError) as caught:
            store.gc(grace_s=0)
        assert "--no-repack" in caught.value.hint
        report = store.gc(grace_s=0, repack_below=None)
        assert report.repacked.packs_count == 0
        assert store.load("gpt@2")["kept"].equal(kept)
        disk.size_bytes += 4 << 20
        assert store.gc(grace_s=0).repacked.packs_count == 1
        assert store.load("gpt@2")["kept"].equal(kept)


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("file_size_limit")
def test_a_file_that_may_not_grow(tmp_path: Path) -> None:
    """A quota on the size of a file fails the save and nothing else."""
    check_full(tmp_path / "store")


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_a_file_system_without_room(tmp_path: Path) -> None:
    """ENOSPC from a real file system of 4 MiB fails the save and nothing else.

    In a mount namespace of its own, which needs the right to make one.
    """
    script = (
        "import sys; sys.path[:0] = json.loads(sys.argv[1]); "
        "from pathlib import Path; import test_no_space; "
        "test_no_space.check_full(Path(sys.argv[2]) / 'store'); print('all held')"
    )
    mount = f'mount -t tmpfs -o size=4m none {tmp_path} && exec "$@"'
    paths = json.dumps([str(Path(__file__).parent), *filter(None, sys.path)])
    command = ["unshare", "--mount", "--map-root-user", "sh", "-c", mount, "sh"]
    if os.geteuid() == 0:
        command.remove("--map-root-user")
    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespaces here")  # in a container, or refused by AppArmor
    done = subprocess.run(
        [*command, sys.executable, "-c", "import json; " + script, paths, str(tmp_path)],
        capture_output=True,
        check=False,
    )
    assert done.stdout == b"all held\n", done.stderr.decode()[-3000:]
