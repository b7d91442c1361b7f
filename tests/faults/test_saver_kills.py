"""A trainer that dies with staged saves: a process of its own makes them durable, and goes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from faultkit.trainer import state_at

import ckptstore
from ckptstore.saver.process_engine import ProcessEngine

_PATIENCE_S = 300.0


def _trainer(folder: Path, how: str, engine: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "faultkit.trainer", str(folder), how, engine],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _gone(pid: int) -> bool:
    """Return whether a process has ended; one that nobody has waited for yet has."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    except OSError:
        return True
    return text.rpartition(")")[2].split()[0] == "Z"


def _wait_until_gone(pid: int) -> None:
    """Wait for the end of a process; the time limit of the test ends it otherwise."""
    while not _gone(pid):
        time.sleep(0.02)


def _check(folder: Path) -> None:
    """Assert that three versions are there, each the state at its call."""
    with ckptstore.open(folder / "store", read_only=True) as store:
        versions = store.versions("gpt")
        assert [version.step for version in versions] == [1, 2, 3]
        for version in versions:
            loaded = store.load(f"#{version.id}")
            meant = state_at(version.step)
            assert all(torch.equal(loaded[name], tensor) for name, tensor in meant.items())
        assert store.verify().ok


@pytest.mark.short("fork")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["wait", "fork"])
def test_staged_saves_survive_sigkill(tmp_path: Path, how: str) -> None:
    """SIGKILL while the storage is held back: both staged saves appear, whole; the child goes.

    With a fork of the trainer alive too, as a data loader's worker is, which has its sockets.
    """
    trainer = _trainer(tmp_path, how, "process")
    assert trainer.stdout is not None
    saver = int(trainer.stdout.readline())
    assert saver
    trainer.kill()
    assert trainer.wait() == -signal.SIGKILL
    assert not _gone(saver)

    (tmp_path / "go").touch()
    _wait_until_gone(saver)
    _check(tmp_path)
    trainer.communicate()


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_a_trainer_that_dies_before_its_child_has_begun(tmp_path: Path) -> None:
    """What was staged lies in memory and in a socket: the child finds both, and nobody to tell."""
    trainer = _trainer(tmp_path, "early", "process")
    trainer.communicate()
    assert trainer.returncode == -signal.SIGKILL

    steps: list[int] = []
    while steps != [1, 2]:  # the time limit of the test ends it otherwise
        with ckptstore.open(tmp_path / "store", read_only=True) as store:
            steps = [version.step for version in store.versions()]
            if steps == [1, 2]:
                loaded = store.load("gpt@2")
        time.sleep(0.05)

    assert all(torch.equal(loaded[name], tensor) for name, tensor in state_at(2).items())


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_a_child_that_is_told_nonsense_ends(tmp_path: Path) -> None:
    """An order that cannot be understood ends the child, after what was staged; none is left."""
    with ckptstore.open(tmp_path / "s", create=True, engine="process") as store:
        run = store.run("gpt")
        run.save_async(state_at(1), step=1).result()
        engine = store._session.saver.dispatcher.start()
        assert isinstance(engine, ProcessEngine)
        engine._send("nonsense")
        _wait_until_gone(engine.pid)
        run.save_async(state_at(2), step=2).result()
        assert [version.step for version in run.versions()] == [1, 2]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sigkill_with_the_thread_engine_leaves_no_part(tmp_path: Path) -> None:
    """The thread dies with its process: what was staged is not there, and nothing is half there."""
    trainer = _trainer(tmp_path, "wait", "thread")
    assert trainer.stdout is not None
    assert trainer.stdout.readline() == "0\n"
    trainer.kill()
    trainer.communicate()

    (tmp_path / "go").touch()
    with ckptstore.open(tmp_path / "store") as store:
        assert [version.step for version in store.versions("gpt")] == [1]
        assert store.verify().ok
        store.run("gpt").save(state_at(4), step=4)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", ["thread", "process"])
@pytest.mark.slow
def test_an_exit_without_close_finishes(tmp_path: Path, engine: str) -> None:
    """A script that just ends has saved what it staged, with either engine, and says nothing."""
    trainer = _trainer(tmp_path, "exit", engine)
    output, _ = trainer.communicate(timeout=_PATIENCE_S)

    assert trainer.returncode == 0
    assert output == ""
    _check(tmp_path)
