"""A folder of the POSIX backend, whose system calls fail at a test's command."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from ckptstore.backends.posix import PosixBackend

__all__ = ["Disk", "fail", "names"]


def fail(monkeypatch: pytest.MonkeyPatch, name: str, number: int, *, after: bool = False) -> None:
    """Let every call of one system call fail, before or `after` it was carried out."""
    real = getattr(os, name)

    def call(*args: object, **kwargs: object) -> object:
        if after:
            real(*args, **kwargs)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, name, call)


def names(folder: Path) -> list[str]:
    """Return what lies in a folder, hidden files included."""
    return sorted(path.name for path in folder.iterdir())


@dataclass(frozen=True, slots=True)
class Disk:
    """A folder, the backend on it, and what makes system calls fail."""

    path: Path
    backend: PosixBackend
    patch: pytest.MonkeyPatch

    def fail(self, name: str, number: int) -> None:
        """Let every call of one system call fail."""
        fail(self.patch, name, number)

    def names(self) -> list[str]:
        """Return what lies in the folder."""
        return names(self.path)
