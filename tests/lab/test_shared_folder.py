"""A folder that a group shares: two users with different umasks save in turns."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

import ckptstore

pytestmark = pytest.mark.lab

GROUP = 60_000
USERS = {60_001: 0o002, 60_002: 0o022}
"""User ids, and the umask of each."""
TURNS = 100


def _member(user: int, mask: int, url: Path, pipe: Connection) -> None:
    """Be a member of the group: save whenever told, and say what came of it."""
    os.setgroups([GROUP])
    os.setgid(user)
    os.setuid(user)
    os.umask(mask)
    while (step := pipe.recv()) is not None:
        try:
            with ckptstore.open(url) as store:
                store.run("r").save({"w": os.urandom(20_000)}, step=step)
        except Exception as error:  # noqa: BLE001 - the test decides
            pipe.send(repr(error))
        else:
            pipe.send("saved")


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return a folder that every user can reach, of the group."""
    found = Path(tempfile.mkdtemp(prefix="ckptstore-shared-"))
    os.chown(found, 0, GROUP)
    found.chmod(0o2775)
    yield found
    shutil.rmtree(found)


def test_members_with_different_umasks_save_in_turns(folder: Path) -> None:
    """No save fails, of 200 in turns, whoever made the folders before."""
    before = os.umask(0o002)
    try:
        with ckptstore.open(folder / "s", create=True) as store:
            store.run("r").save({"w": b"0"}, step=0)  # and all modules are loaded before the forks
            assert store.load("r") == {"w": b"0"}
    finally:
        os.umask(before)
    context = multiprocessing.get_context("fork")
    pipes = []
    members = []
    for user, mask in USERS.items():
        mine, theirs = context.Pipe()
        members.append(context.Process(target=_member, args=(user, mask, folder / "s", theirs)))
        members[-1].start()
        pipes.append(mine)
    said = []
    for turn in range(2 * TURNS):
        pipes[turn % 2].send(turn + 1)
        said.append(pipes[turn % 2].recv())
    for pipe, member in zip(pipes, members, strict=True):
        pipe.send(None)
        member.join()
    assert said == ["saved"] * 2 * TURNS
    with ckptstore.open(folder / "s") as store:
        assert len(store.versions("r")) == 2 * TURNS + 1
        assert store.verify().ok
