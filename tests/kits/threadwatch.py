"""Detects threads of ckptstore that a test has left running."""

from __future__ import annotations

import threading

__all__ = ["begin", "threads_left"]

_before: set[threading.Thread] = set()


def begin() -> None:
    """Begin a test: threads that run now are not its own."""
    _before.clear()
    _before.update(threading.enumerate())


def threads_left() -> list[str]:
    """Return the names of ckptstore's threads that started since and still run."""
    now = (thread for thread in threading.enumerate() if thread not in _before)
    return [thread.name for thread in now if thread.name.startswith("ckptstore")]
