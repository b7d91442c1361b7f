"""A folder that a group shares: users with different umasks save in turns, and tidy up."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
from damaging import flip_pack
from labkit.campaign import rounds

import ckptstore
from ckptstore.backends.posix import NAME, open_posix
from ckptstore.store import Store

pytestmark = pytest.mark.lab

GROUP = 60_000
USERS = {60_001: 0o002, 60_002: 0o022}
"""User ids, and the umask of each."""
TURNS = rounds(short=100, long=500)
"""Saves of each."""
KEPT = 5

Work = Callable[[Store], object]


def save(step: int) -> Work:
    """Return what saves a version, with a tensor that all share."""
    own = np.random.default_rng().integers(0, 255, 50_000, dtype=np.uint8)
    state = {"shared": np.arange(5_000), "own": own}
    return lambda store: store.run("r").save(state, step=step)


def _member(user: int, mask: int, url: Path, work: Work) -> None:
    """Become a member of the group and work with the store; end with status 0 if all went well."""
    os.setgroups([GROUP])
    os.setgid(user)
    os.setuid(user)
    os.umask(mask)
    with ckptstore.open(url) as store:
        work(store)


def _serve(user: int, mask: int, url: Path, pipe: Connection) -> None:
    """Be a member of the group: save whenever told, and say what came of it."""
    os.setgroups([GROUP])
    os.setgid(user)
    os.setuid(user)
    os.umask(mask)
    while (step := pipe.recv()) is not None:
        try:
            with ckptstore.open(url, create=True) as store:
                save(step)(store)
        except Exception as error:  # noqa: BLE001 - the test decides
            pipe.send(repr(error))
        else:
            pipe.send("saved")


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return the folder of a store of the group, which every user can reach."""
    found = Path(tempfile.mkdtemp(prefix="ckptstore-shared-"))
    os.chown(found, 0, GROUP)
    found.chmod(0o2775)
    with ckptstore.open(found / "warm", create=True) as store:  # modules, before the forks
        save(0)(store)
        store.gc(grace_s=0)
    shutil.rmtree(found / "warm")
    yield found
    shutil.rmtree(found)


def save_in_turns(url: Path, first: int, turns: int) -> list[str]:
    """Let both members save, one of them first, who makes the store; return the answers."""
    context = multiprocessing.get_context("fork")
    users = [*USERS.items()]
    pipes, members = [], []
    for user, mask in (users[first], users[1 - first]):
        mine, theirs = context.Pipe()
        members.append(context.Process(target=_serve, args=(user, mask, url, theirs)))
        members[-1].start()
        pipes.append(mine)
    said = []
    for turn in range(turns):
        pipes[turn % 2].send(turn)
        said.append(pipes[turn % 2].recv())
    for pipe, member in zip(pipes, members, strict=True):
        pipe.send(None)
        member.join()
    return said


def work_as(which: int, url: Path, work: Work) -> None:
    """Let one member do something in a process of its own, and expect that it can."""
    user, mask = [*USERS.items()][which]
    context = multiprocessing.get_context("fork")
    member = context.Process(target=_member, args=(user, mask, url, work))
    member.start()
    member.join()
    assert member.exitcode == 0


@pytest.mark.parametrize("first", [0, 1], ids=["umask 002 first", "umask 022 first"])
def test_members_with_different_umasks_save_in_turns(folder: Path, first: int) -> None:
    """No save fails, of 200 in turns, whoever made the folders before."""
    assert save_in_turns(folder, first, 2 * TURNS) == ["saved"] * 2 * TURNS
    with ckptstore.open(folder, read_only=True) as store:
        assert len(store.versions("r")) == 2 * TURNS
        assert store.verify().ok
    (remark,) = open_posix(str(folder)).remarks()
    assert "suit" in remark


@pytest.mark.parametrize("other", [0, 1], ids=["umask 002", "umask 022"])
def test_members_tidy_up_after_one_another(folder: Path, other: int) -> None:
    """A member deletes, collects, rewrites and repairs what the other saved; both go on saving."""
    assert save_in_turns(folder, 1 - other, 10) == ["saved"] * 10
    gone = [f"r@{n}" for n in range(10 - KEPT)]
    work_as(other, folder, lambda store: store.remove(gone))

    def collect(store: Store) -> None:
        report = store.gc(grace_s=0, repack_below=1.0)
        assert report.swept["packs"].count
        assert report.repacked.packs_count  # the shared tensor lay in one that went
        assert store.verify().ok

    work_as(other, folder, collect)
    damaged = max((folder / "packs").rglob("*.pack"), key=lambda path: path.stat().st_mtime_ns)
    flip_pack(damaged)

    def mend(store: Store) -> None:
        assert not store.verify().ok
        store.repair()

    work_as(other, folder, mend)
    work_as(1 - other, folder, save(100))
    work_as(other, folder, save(101))
    work_as(1 - other, folder, lambda store: store.gc(grace_s=0, orphan_age_s=0))
    # The reserve of one member can be given up, and kept again, by the other.
    assert (folder / NAME).exists()

    def swap(store: Store) -> None:
        store.repo.backend.drop_reserve()
        store.repo.backend.keep_reserve()

    for which in (0, 1):
        work_as(which, folder, swap)
        assert (folder / NAME).stat().st_uid == [*USERS][which]


@pytest.mark.parametrize("mode", [0o1777, 0o777, 0o2777], ids=oct)
def test_odd_rights_of_the_root(folder: Path, mode: int) -> None:
    """A root that everybody may write to gives nobody outside the group rights further down."""
    user, _ = [*USERS.items()][1]
    os.chown(folder, 0, 0)  # a group that the members are not in
    folder.chmod(mode)
    assert save_in_turns(folder, 1, 1) == ["saved"]
    made = [path for path in folder.rglob("*") if path.is_dir() and path.stat().st_uid == user]
    assert made
    for path in made:
        assert not path.stat().st_mode & 0o022, f"others can change {path}"
        assert bool(path.stat().st_mode & 0o2000) == bool(mode & 0o2000)
