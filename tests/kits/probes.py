"""Findings of the probe, remembered: the store of a test is not probed unless it asks for it.

A probe writes dozens of files; most tests that create a store are about something else. A finding
is remembered for the memory backend, and for each disk and user of the POSIX backend; a backend
that is wrapped or changed is probed. In a test marked ``probes`` every store is probed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ckptstore import repo
from ckptstore.backends.base import Backend
from ckptstore.backends.memory import MemoryBackend
from ckptstore.backends.posix import PosixBackend
from ckptstore.backends.retrying import RetryingBackend
from ckptstore.config import SYSTEM, Environment
from ckptstore.maintenance.repair import fix_superblock
from ckptstore.repo import Finding, probe_backend

__all__ = ["forget", "remember"]

_known: dict[object, Finding] = {}
_asked: list[Any] = [
    repo.create_on,
    repo.open_on,
    repo.Repo.__init__,
    fix_superblock.mend_superblock,
]


def _place(backend: Backend) -> object:
    """Return what storages of one verdict share; None if it is not known."""
    if type(backend) is RetryingBackend:
        backend = backend.inner
    if type(backend) is MemoryBackend:
        return "memory"
    if type(backend) is not PosixBackend:
        return None
    folder = Path(backend.url.removeprefix("file://"))
    while not folder.exists():
        folder = folder.parent
    return folder.stat().st_dev, os.geteuid()


def _remembered(backend: Backend, environment: Environment) -> Finding:
    place = _place(backend) if environment is SYSTEM else None
    if place is None:
        return probe_backend(backend, environment)
    if place not in _known:
        _known[place] = probe_backend(backend, environment)
    return _known[place]


def remember() -> None:
    """Let stores be opened by what is remembered."""
    for function in _asked:
        function.__kwdefaults__["prober"] = _remembered


def forget() -> None:
    """Let each store be probed."""
    for function in _asked:
        function.__kwdefaults__["prober"] = probe_backend
