"""Clock, randomness and environment enter here and nowhere else; the rest is passed them."""

from __future__ import annotations

import getpass
import os
import secrets
import socket
import time
from dataclasses import dataclass, field
from typing import Protocol

from ckptstore import limits

__all__ = [
    "SYSTEM",
    "Environment",
    "Options",
    "SystemEnvironment",
    "workers_default",
    "writer_identity",
]


class Environment(Protocol):
    """What a program gets from outside: time, randomness, patience. Tests pass their own."""

    def now_ms(self) -> int:
        """Return the wall clock in milliseconds since 1970, for records that people read."""

    def monotonic(self) -> float:
        """Return seconds on a clock that never goes back, for durations."""

    def sleep(self, seconds: float) -> None:
        """Wait."""

    def random_hex(self, bytes_count: int) -> str:
        """Return `bytes_count` random bytes as lower-case hex; never repeats."""

    def jitter(self) -> float:
        """Return a random number in [0, 1)."""


class SystemEnvironment:
    """The real clock and the operating system's randomness; safe in forked children."""

    def now_ms(self) -> int:
        """Return the wall clock in milliseconds since 1970."""
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        """Return the monotonic clock in seconds."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)

    def random_hex(self, bytes_count: int) -> str:
        """Return random bytes as hex, from the operating system at each call."""
        return secrets.token_hex(bytes_count)

    def jitter(self) -> float:
        """Return a random number in [0, 1)."""
        return secrets.randbelow(1 << 30) / (1 << 30)


SYSTEM = SystemEnvironment()


def workers_default() -> int:
    """Return the number of worker threads: the usable processors, at most ``WORKERS_MAX``."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(usable or 1, limits.WORKERS_MAX))


def writer_identity() -> str:
    """Return who writes, for people who read the log: ``user@host pid``."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError, ImportError):
        user = str(os.getuid()) if hasattr(os, "getuid") else "unknown"  # a container without names
    return f"{user}@{socket.gethostname()} {os.getpid()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a store is used by this process; nothing here is stored."""

    host_bytes: int = limits.HOST_BYTES_DEFAULT
    """Host memory for chunks in flight, in bytes, of one save or load."""
    workers: int = field(default_factory=workers_default)
    """Threads that hash, encode and decode."""
    codec: str = "auto"
    """``auto`` (planes+zstd where it pays), ``raw``, or ``zstd``."""
    read_only: bool = False
    """Refuse every write."""
    single_writer: bool = False
    """The user vouches that no one else writes: allows storage without put-if-absent."""
