"""Descriptors and temporary files of this process, before and after something that fails."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from ckptstore.backends.base import Backend
from ckptstore.backends.posix import open_posix
from ckptstore.backends.wrapper import WrapperBackend

__all__ = ["Holding", "assert_no_leak", "descriptors", "open_holding", "temporary_files"]


class Holding(WrapperBackend):
    """Holds a descriptor until it is closed, as a connection does."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self._held: int | None = os.open(os.devnull, os.O_RDONLY)
        self.url: str = f"holding://{inner.url}"  # what the log calls it, where it is a replica

    def close(self) -> None:
        """Close the descriptor."""
        held, self._held = self._held, None
        if held is not None:
            os.close(held)
        self.inner.close()


def open_holding(url: str, **_options: object) -> Holding:
    """Open ``holding:///PATH``, a folder."""
    return Holding(open_posix(url.removeprefix("holding://")))


def descriptors(pid: int | str = "self") -> Mapping[str, int]:
    """Return what the open descriptors of a process stand for, and how many do for each."""
    found: Counter[str] = Counter()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found[entry.readlink().as_posix().partition(":[")[0]] += 1
        except FileNotFoundError:
            continue  # of this listing
    return found


def temporary_files(folder: Path) -> set[Path]:
    """Return the files of writers that did not come to their end."""
    return {path for path in folder.rglob("*") if path.name.startswith((".tmp", "tmp"))}


def assert_no_leak(folder: Path, error: type[BaseException], fail: Callable[[], object]) -> None:
    """Assert that `fail` raises, and leaves no descriptor and no temporary file; call it twice.

    What the first call loads for good does not count. The error is held while it is looked, so
    that nothing is released only since its last frame went. What earlier tests left is frozen up to
    the end: it takes most of a second to look through, and its files would close in between.
    """
    gc.freeze()
    try:
        with pytest.raises(error):
            fail()
        gc.collect()  # what only the first error held
        before = descriptors(), temporary_files(folder)
        with pytest.raises(error) as caught:
            fail()
        assert (descriptors(), temporary_files(folder)) == before
        assert isinstance(caught.value, error)
    finally:
        gc.unfreeze()
