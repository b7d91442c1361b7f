"""Backends that wait, or fail, at a test's command: also in a child process, by files."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

from ckptstore.backends.base import Backend, Buffer, ObjectWriter
from ckptstore.backends.wrapper import WrapperBackend, WrapperWriter
from ckptstore.errors import StorageError

__all__ = ["BrokenBackend", "HeldBackend", "KilledBackend", "OnlyHereBackend", "wait_until_there"]

_PATIENCE_S = 300.0


def wait_until_there(path: Path) -> None:
    """Return once a file exists; raise if that takes minutes."""
    end = time.monotonic() + _PATIENCE_S
    while not path.exists():
        if time.monotonic() > end:
            raise StorageError(f"{path} did not appear")
        time.sleep(0.002)


class HeldBackend(WrapperBackend):
    """Holds every pack back until its folder has a file ``go``; writes a file ``held`` then."""

    def __init__(self, inner: Backend, folder: Path) -> None:
        super().__init__(inner)
        self._folder = folder

    def open_writer(self, key: str) -> ObjectWriter:
        """Wait, then pass on."""
        (self._folder / "held").touch()
        wait_until_there(self._folder / "go")
        return self.inner.open_writer(key)

    def hold(self) -> None:
        """Hold back packs from now on."""
        (self._folder / "go").unlink(missing_ok=True)
        (self._folder / "held").unlink(missing_ok=True)

    def wait_held(self) -> None:
        """Wait until a pack is held back."""
        wait_until_there(self._folder / "held")

    def go(self) -> None:
        """Let all packs pass."""
        (self._folder / "go").touch()

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.inner, self._folder)


class BrokenBackend(WrapperBackend):
    """Makes the kernel fail writes of packs with an error number while a file exists."""

    def __init__(self, inner: Backend, code: int, switch: Path) -> None:
        super().__init__(inner)
        self._code = code
        self._switch = switch

    def open_writer(self, key: str) -> ObjectWriter:
        """Return a writer that fails."""
        return _BrokenWriter(self.inner.open_writer(key), self._code, self._switch)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.inner, self._code, self._switch)


class _BrokenWriter(WrapperWriter):
    def __init__(self, inner: ObjectWriter, code: int, switch: Path) -> None:
        super().__init__(inner)
        self._code = code
        self._switch = switch

    def write(self, data: Buffer | Sequence[Buffer]) -> None:
        if self._switch.exists():
            with patch("os.writev", side_effect=OSError(self._code, os.strerror(self._code))):
                self.inner.write(data)
        else:
            self.inner.write(data)


class KilledBackend(WrapperBackend):
    """Ends another process than the one that made it, right before or after its first commit."""

    def __init__(self, inner: Backend, owner: int, when: str) -> None:
        super().__init__(inner)
        self.owner, self.when = owner, when

    def put_if_absent(self, key: str, data: Buffer) -> None:
        """Create an object, and end."""
        mine = os.getpid() != self.owner and key.startswith("commits/")
        if mine and self.when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        self.inner.put_if_absent(key, data)
        if mine:
            os.kill(os.getpid(), signal.SIGKILL)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.inner, self.owner, self.when)


class OnlyHereBackend(WrapperBackend):
    """Can be pickled but not unpickled, like a class of a notebook."""

    def __reduce__(self) -> tuple[object, ...]:
        return _refuse, ()


def _refuse() -> None:
    raise AttributeError("there is no such class in this process")
