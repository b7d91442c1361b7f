"""Findings of the probe, remembered: the store of a test is not probed unless it asks for it.

A probe writes dozens of files; most tests that create a store are about something else. A finding
is remembered for the memory backend, and for each disk and user of the POSIX backend; a backend
that is wrapped or changed is probed. In a test marked ``probes`` every store is probed.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

from ckptstore.backends import probe as probing
from ckptstore.backends.base import Backend
from ckptstore.backends.memory import MemoryBackend
from ckptstore.backends.posix import PosixBackend
from ckptstore.backends.retrying import RetryingBackend
from ckptstore.config import SYSTEM, Environment
from ckptstore.events import ProgressCallback, silent

__all__ = ["forget", "remember"]

_genuine = probing.probe
_known: dict[object, probing.ProbeReport] = {}


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


@functools.wraps(_genuine)
def _remembered(
    backend: Backend, *, environment: Environment = SYSTEM, progress: ProgressCallback = silent
) -> probing.ProbeReport:
    place = _place(backend) if environment is SYSTEM and progress is silent else None
    if place is None:
        return _genuine(backend, environment=environment, progress=progress)
    if place not in _known:
        _known[place] = _genuine(backend)
    return _known[place]


def remember() -> None:
    """Let stores be opened by what is remembered."""
    probing.probe = _remembered


def forget() -> None:
    """Let each store be probed."""
    probing.probe = _genuine
