"""Nothing is left open, and no temporary file behind, by what ends in an error."""

from __future__ import annotations

import errno
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from damaging import flip_pack
from leaks import Holding, assert_no_leak, descriptors

import ckptstore
from ckptstore import errors
from ckptstore.backends import registry
from ckptstore.backends.posix import open_posix
from ckptstore.jobs import read_job, run_job
from ckptstore.repo import create_on
from ckptstore.saver.messages import Channel
from ckptstore.store import Store
from ckptstore.testing.faulty import WRITES, Fault, FaultyBackend

_STATE = {"w": torch.arange(50_000.0), "b": torch.ones(7)}


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Return a function that names a store whose backend holds a descriptor until it is closed."""
    monkeypatch.setitem(registry.FACTORIES, "holding", "leaks:open_holding")
    return lambda name: f"holding://{tmp_path}/{name}"


def _made(url: str) -> str:
    with ckptstore.open(url, create=True) as store:
        store.run("r").save(_STATE, step=1)
    return url


def _absent(url: Callable[[str], str], _folder: Path) -> object:
    return ckptstore.open(url("none"))


def _damaged_superblock(url: Callable[[str], str], folder: Path) -> object:
    (folder / "s/store.json").write_bytes(b"{}")
    return ckptstore.open(url("s"))


def _wrong_key(url: Callable[[str], str], _folder: Path) -> object:
    return ckptstore.open(url("s"), encryption_key=bytes(range(32)))


def _damaged_pack(url: Callable[[str], str], folder: Path) -> object:
    for pack in (folder / "s/packs").rglob("*.pack"):
        shutil.copy(pack, folder / "pack")
        flip_pack(pack)
        try:
            with ckptstore.open(url("s")) as store:
                store.load("r")
        finally:
            shutil.move(folder / "pack", pack)
    return None


def _same_target(url: Callable[[str], str], _folder: Path) -> object:
    with ckptstore.open(url("s")) as store:
        return store.replicate(url("s"))


def _other_replica(url: Callable[[str], str], folder: Path) -> object:
    with ckptstore.open(url("s")) as store:
        if not store.replicas():
            store.add_replica("there", url("t"))
            shutil.rmtree(folder / "t")
            _made(url("t"))
        return store.replicate("replica:there")


def _replica_of_itself(url: Callable[[str], str], _folder: Path) -> object:
    with ckptstore.open(url("s")) as store:
        return store.add_replica("self", url("s"))


def _target_without_key(url: Callable[[str], str], _folder: Path) -> object:
    with ckptstore.open(url("s")) as store:
        return store.replicate(url("t"), to_key=bytes(range(32)))


def _job_without_target(url: Callable[[str], str], folder: Path) -> object:
    (folder / "t/store.json").write_bytes(b"{}")
    job = folder / "job.toml"
    job.write_text(f'[source]\nurl = "{url("s")}"\n[target]\nurl = "{url("t")}"\n')
    return run_job(read_job(job))


FAILURES: dict[str, tuple[type[Exception], Callable[[Callable[[str], str], Path], object]]] = {
    "no store": (errors.StoreNotFoundError, _absent),
    "damaged superblock": (errors.CkptStoreError, _damaged_superblock),
    "wrong key": (errors.EncryptionKeyError, _wrong_key),
    "damaged pack": (errors.CorruptTensorError, _damaged_pack),
    "target is the source": (errors.ConflictError, _same_target),
    "another store in place of a replica": (errors.ReplicaChangedError, _other_replica),
    "replica that is the store itself": (errors.ConflictError, _replica_of_itself),
    "target that another key opens": (errors.EncryptionKeyError, _target_without_key),
    "job without a target": (errors.CkptStoreError, _job_without_target),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_leaves_nothing_open(
    url: Callable[[str], str], tmp_path: Path, name: str
) -> None:
    """A store that does not open, a refused replica, damage: what was opened for it is closed."""
    for each in ("s", "t"):
        _made(url(each))
    error, fail = FAILURES[name]
    assert_no_leak(tmp_path, error, lambda: fail(url, tmp_path))


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    """Whichever write of a save fails, of a pack's header, chunks or footer, or of its commit."""
    for at in range(1, 100):
        place = tmp_path / str(at)
        create_on(open_posix(str(place))).close()
        fault = Fault(calls=WRITES, at=at)

        def save(place: Path = place, fault: Fault = fault) -> None:
            fault.seen = 0
            backend = FaultyBackend(Holding(open_posix(str(place))), fault)
            with Store(create_on(backend, exist_ok=True)) as store:
                store.run("r").save(_STATE, step=1)

        try:
            save()
        except errors.CkptStoreError as error:
            assert_no_leak(place, type(error), save)
        if not fault.hits:
            break
    assert at > 5


def _no_child(*_: object, **__: object) -> None:
    raise OSError(errno.EAGAIN, "no more processes")


def _unsent(self: Channel, *_: object) -> None:
    raise OSError(errno.ETOOMANYREFS, "no more descriptors")


@pytest.mark.parametrize("how", ["not started", "not told"])
def test_an_engine_that_does_not_start_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Neither sockets nor a process, whether none can be started or it can't be told its store."""
    with ckptstore.open(tmp_path, create=True, engine="process") as store:
        if how == "not started":
            monkeypatch.setattr(subprocess, "Popen", _no_child)
        else:
            monkeypatch.setattr(Channel, "send", _unsent)
        save = lambda: store.run("r").save_async(_STATE, step=1)  # noqa: E731
        assert_no_leak(tmp_path, errors.SaverDiedError, save)
        monkeypatch.undo()


def test_a_child_gives_back_arenas_that_are_forgotten(tmp_path: Path) -> None:
    """Descriptor and mapping of each staging area end with it: the child has those in use."""
    with ckptstore.open(tmp_path, create=True, engine="process") as store:
        run = store.run("r")
        for step in range(5):  # each needs a larger area than the one before
            run.save_async({"w": torch.ones(1 << 18 + step)}, step=step).result()
        pid = store._session.saver.dispatcher.pid
        mapped = Path(f"/proc/{pid}/maps").read_text().count("memfd:ckptstore")
        held = sum(count for name, count in descriptors(pid).items() if "memfd" in name)
    assert (mapped, held) == (1, 1)  # a mapping holds a descriptor
