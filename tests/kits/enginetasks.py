"""Tasks for the tests of engines; workers find them by their names, on the path of the tests."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from ckptstore import errors

__all__ = ["Strange", "die", "die_once", "fail", "hold", "number_of", "square", "strange"]


class Strange(Exception):
    """An error that cannot be rebuilt from its arguments."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def square(number: int) -> int:
    """Return a square."""
    return number * number


def fail(kind: str) -> None:
    """Raise an error of ckptstore, by the name of its class."""
    error = getattr(errors, kind)("it failed", hint="do better")
    if isinstance(error, errors.CondemnedError):
        error.keys = frozenset({"packs/a"})
    raise error


def strange(_: object) -> None:
    """Raise an error that no pickle survives."""
    raise Strange("never", "seen")


def die(_: object) -> None:
    """Kill the process that runs this."""
    os.kill(os.getpid(), signal.SIGKILL)


def die_once(marker: str) -> int:
    """Kill the process on the first call for a marker; then return a process id."""
    path = Path(marker)
    if not path.exists():
        path.touch()
        die(None)
    return os.getpid()


def hold(folder: str) -> int:
    """Write the process id of the worker, and wait until the folder has a file ``go``."""
    path = Path(folder)
    (path / f"{os.getpid()}.pid").touch()
    while not (path / "go").exists():
        time.sleep(0.01)
    return os.getpid()


def number_of(_: object) -> int:
    """Return the process id of the worker."""
    return os.getpid()
