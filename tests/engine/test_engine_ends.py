"""How engines end: Ctrl-C and death of the coordinator leave no process and no task behind."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from daskcluster import Cluster
from enginetasks import square

from ckptstore.engine.engine import open_engine

CODE = """
import sys
from concurrent.futures import ProcessPoolExecutor
from enginetasks import hold
from ckptstore.engine.engine import open_engine

if __name__ == "__main__":
    spec, folder = sys.argv[1:]
    with ProcessPoolExecutor(2) as pool:
        with open_engine(pool if spec == "own processes" else spec, workers=2) as engine:
            list(engine.map(hold, [folder] * 8))
"""


def start(folder: Path, spec: str) -> tuple[subprocess.Popen[str], list[int]]:
    """Start a program whose two workers hold a task each; return it and their process ids."""
    script = folder / "coordinator.py"
    script.write_text(CODE)
    program = subprocess.Popen(
        [sys.executable, str(script), spec, str(folder)],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a group of its own, as a terminal gives one
    )
    until(lambda: len(list(folder.glob("*.pid"))) == 2 or program.poll() is not None)
    assert program.poll() is None
    return program, [int(file.stem) for file in folder.glob("*.pid")]


def until(there: Callable[[], bool]) -> None:
    """Wait for something that comes; the time limit of the test is what ends it otherwise."""
    while not there():
        time.sleep(0.02)


def lives(pid: int) -> bool:
    """Say whether a process runs; one that is dead and not yet waited for does not."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


def group(pid: int) -> list[int]:
    """Return the processes that live in the session of a program."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if os.getsid(int(entry.name)) == pid and lives(int(entry.name)):
                    found.append(int(entry.name))
            except ProcessLookupError:
                continue
    return found


@pytest.mark.timeout(180)
@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_who_ends_leaves_a_scheduler_as_it_was(
    tmp_path: Path, cluster: Cluster, number: signal.Signals
) -> None:
    """At once, though tasks are under way: no process is left, and waiting tasks are dropped.

    The workers are the scheduler's: they stay, and take the next tasks.
    """
    program, pids = start(tmp_path, cluster.address)
    program.send_signal(number)
    _, said = program.communicate()
    assert program.returncode == -number
    assert ("KeyboardInterrupt" in said) is (number == signal.SIGINT)
    assert group(program.pid) == []
    assert all(map(lives, pids))
    for file in tmp_path.glob("*.pid"):
        file.unlink()
    distributed: Any = importlib.import_module("distributed")  # an extra; it has no types
    with distributed.Client(cluster.address.replace("dask", "tcp", 1)) as client:
        until(lambda: not any(client.processing().values()))
    (tmp_path / "go").touch()
    with open_engine(cluster.address) as engine:
        assert list(engine.map(square, range(4))) == [0, 1, 4, 9]
    assert list(tmp_path.glob("*.pid")) == []  # of the other six tasks none has begun


@pytest.mark.timeout(180)
@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("whole_group", [False, True])
def test_ctrl_c_drops_the_tasks_of_an_executor(tmp_path: Path, whole_group: bool) -> None:
    """What runs in a pool ends as its owner says, what waits is dropped; no process is left."""
    program, pids = start(tmp_path, "own processes")
    if whole_group:
        os.killpg(program.pid, signal.SIGINT)
    else:
        program.send_signal(signal.SIGINT)
    (tmp_path / "go").touch()  # the pool waits for what runs
    _, said = program.communicate()
    assert program.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in said
    until(lambda: not any(map(lives, pids)))
    assert group(program.pid) == []
