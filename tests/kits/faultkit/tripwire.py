"""Processes that kill themselves at the n-th of their calls on files."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["Fuse", "Tripwire"]

CALLS = ("open", "write", "writev", "fsync", "link", "mkdir", "unlink", "close")


class Tripwire:
    """Counts the calls on files of this process, and kills it at one of them."""

    def __init__(self, at: int, *, after: bool) -> None:
        self.seen = 0
        self._at = at
        self._after = after
        self._lock = threading.Lock()
        for name in CALLS:
            setattr(os, name, self._wrapped(getattr(os, name)))

    def count(self) -> bool:
        """Count a call; return whether it is the one."""
        with self._lock:
            self.seen += 1
            hit = self.seen == self._at
        if hit and not self._after:
            os.kill(os.getpid(), signal.SIGKILL)
        return hit

    def _wrapped(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **words: Any) -> Any:  # noqa: ANN401
            hit = self.count()
            result = real(*args, **words)
            if hit:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call


class Fuse(Tripwire):
    """Kills the process that takes a file after as many calls as it says, if it is there still."""

    def __init__(self, file: str) -> None:
        self._file = Path(file)
        self._taken = Path(f"{file}.{os.getpid()}")
        super().__init__(0, after=False)

    def count(self) -> bool:
        """Look for the file, and count a call."""
        with contextlib.suppress(FileNotFoundError):
            self._file.rename(self._taken)
            self._at = self.seen + int(self._taken.read_text())
        return self._taken.exists() and super().count()
