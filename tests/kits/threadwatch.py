"""Threads of ckptstore that a test has left behind, and not one before it in this process."""

from __future__ import annotations

import threading

__all__ = ["begin", "threads_left"]

_before: set[threading.Thread] = set()


def begin() -> None:
    """Begin a test: what runs now is not of its making."""
    _before.clear()
    _before.update(threading.enumerate())


def threads_left() -> list[str]:
    """Return the names of ckptstore's threads that have begun since and still run."""
    now = (thread for thread in threading.enumerate() if thread not in _before)
    return [thread.name for thread in now if thread.name.startswith("ckptstore")]
