"""What long operations tell about themselves: one small callback, no logging framework."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Progress", "ProgressCallback", "silent"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """One step forward of a long operation."""

    stage: str
    """What is being done: ``write``, ``read``, ``verify``, ``probe`` ..."""
    done: int
    """Units done so far (bytes, unless `unit` says otherwise)."""
    total: int
    """Units in all; 0 when not known."""
    unit: str = "bytes"
    detail: str = ""
    """Name of the tensor, object or step, for people."""


ProgressCallback = Callable[[Progress], None]
"""Called from worker threads, one call at a time; must return quickly and not raise."""


def silent(_: Progress) -> None:
    """Ignore progress."""
