"""How engines end: Ctrl-C and death of the coordinator leave no worker processes behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from enginetasks import hang

from ckptstore import limits
from ckptstore.engine.engine import open_engine
from ckptstore.errors import LimitError

CODE = """
import sys
from enginetasks import hold
from ckptstore.engine.engine import open_engine

if __name__ == "__main__":
    spec, folder = sys.argv[1:]
    with open_engine(spec, workers=2) as engine:
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


@pytest.mark.short("True-processes")
@pytest.mark.timeout(180)
@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("spec", ["processes", "dask:local"])
@pytest.mark.parametrize("whole_group", [False, True])
def test_ctrl_c_leaves_no_process_behind(tmp_path: Path, spec: str, whole_group: bool) -> None:
    """At once, though tasks are under way; a terminal sends it to the workers too."""
    program, pids = start(tmp_path, spec)
    if whole_group:
        os.killpg(program.pid, signal.SIGINT)
    else:
        program.send_signal(signal.SIGINT)
    _, said = program.communicate()
    assert program.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in said
    until(lambda: not any(map(lives, pids)))
    until(lambda: not group(program.pid))


@pytest.mark.timeout(180)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_workers_end_with_who_they_work_for(tmp_path: Path, number: signal.Signals) -> None:
    """The coordinator is killed: its workers stop what they do, and are gone."""
    program, pids = start(tmp_path, "processes")
    program.send_signal(number)
    program.communicate()
    until(lambda: not any(map(lives, pids)))
    assert group(program.pid) == []


def plan(folder: Path) -> Iterator[str]:
    """Yield a task that hangs, and fail once it does."""
    yield str(folder)
    until(lambda: any(folder.glob("*.pid")))
    raise LimitError("enough")


@pytest.mark.timeout(180)
def test_a_worker_that_hangs_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that does not let itself be stopped is not waited for."""
    monkeypatch.setattr(limits, "CHILD_EXIT_S", 0.5)

    def run() -> None:
        with open_engine("processes", workers=1) as engine:
            list(engine.map(hang, plan(tmp_path)))

    with pytest.raises(LimitError, match="enough"):
        run()
    pids = [int(file.stem) for file in tmp_path.glob("*.pid")]
    assert len(pids) == 1
    assert not any(map(lives, pids))
