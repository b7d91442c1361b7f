"""Clock, randomness and environment enter here and nowhere else; other modules are passed them."""

from __future__ import annotations

import getpass
import os
import secrets
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, Protocol, cast, get_args

from ckptstore import limits
from ckptstore.argument_checks import check_among, integer
from ckptstore.errors import InvalidInputError, InvalidUrlError, StorageError

ENGINES: Final = ("auto", "process", "thread")
"""Engines that write background saves."""


class Environment(Protocol):
    """A program's inputs from outside: time, randomness, waiting. Tests pass their own."""

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


def memory_bytes() -> int:
    """Return the memory that this process may use, in bytes: the machine's or its container's."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in _memory_limits():
        try:
            text = file.read_text(encoding="ascii").strip()
        except OSError:
            continue  # the other version of cgroups, or no limit at this level
        if text.isdecimal():
            found.append(int(text))
    return min(found)


def _memory_limits() -> Iterator[Path]:
    """Yield the files that may hold a memory limit of this process's cgroup or of one above."""
    root = Path("/sys/fs/cgroup")
    yield root / "memory" / "memory.limit_in_bytes"
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        number, _, path = line.split(":", 2)
        if number == "0":  # the one hierarchy of cgroups 2
            own = root / path.strip("/")
            yield from (
                level / "memory.max" for level in (own, *own.parents) if level.is_relative_to(root)
            )


def variable(*names: str) -> str:
    """Return the first of these environment variables that is set; empty if none is."""
    return next(filter(None, map(os.environ.get, names)), "")


def set_variable(name: str, value: str) -> None:
    """Set an environment variable of this process."""
    os.environ[name] = value


def writer_identity() -> str:
    """Return the writer's name in the log, for its readers: ``user@host pid``."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError, ImportError):
        user = str(os.getuid()) if hasattr(os, "getuid") else "unknown"  # a container without names
    return f"{user}@{socket.gethostname()} {os.getpid()}"


CodecChoice = Literal["auto", "planes", "raw", "zstd", "delta"]
CODEC_CHOICES: Final[tuple[CodecChoice, ...]] = get_args(CodecChoice)
"""``auto``: ``planes`` or ``raw`` for a whole save, by the backend's speed and the threads
(:mod:`ckptstore.objects.auto_codec`); ``planes``: always the fewest bytes of a chunk: planes for
floats and integers, zstd for bytes, raw where neither pays; ``raw``: never compress;
``zstd``: zstd without planes, raw where it does not pay; ``delta``: as ``planes``, or the
difference to the version before, where that is smaller."""


def check_choice(choice: str) -> CodecChoice:
    """Return `choice` if it is a codec choice.

    Raises
    ------
    InvalidInputError
        It is none; the hint lists the choices.
    """
    check_among("codec", choice, CODEC_CHOICES)
    return cast("CodecChoice", choice)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options for the use of a store by this process; none of them is stored.

    Raises
    ------
    InvalidInputError
        An option has another type, is out of its bounds, or is none of its choices.
    """

    host_bytes: int = limits.HOST_BYTES_DEFAULT
    """Host memory for chunks in flight, in bytes, of one save or load."""
    workers: int = field(default_factory=workers_default)
    """Threads that hash, encode and decode."""
    codec: str = "auto"
    """One of ``CODEC_CHOICES``."""
    base_bytes: int = limits.BASE_BYTES_DEFAULT
    """Host memory for the base pieces of the next save's deltas, in bytes, with codec ``delta``:
    kept from one save to the next, so that they are not read again. 0 keeps none."""
    read_only: bool = False
    """Refuse every write."""
    single_writer: bool = False
    """The user vouches that no one else writes: allows storage without put-if-absent."""
    engine: str = "auto"
    """Engine that writes background saves: ``process``, ``thread``, or ``auto``, which is a process
    if one can reach the storage."""
    staging_bytes: int | None = None
    """Host memory for staged states, in bytes; None for a share of the process's memory."""
    in_flight: int = limits.IN_FLIGHT_DEFAULT
    """Saves in the background that are not yet durable."""
    cache_folder: str | os.PathLike[str] = field(
        default_factory=lambda: variable("CKPTSTORE_CACHE")
    )
    """Folder for blocks of this store, which loads of all processes of this host share; empty for
    none."""
    cache_bytes: int = limits.CACHE_BYTES_DEFAULT
    """Bytes of all blocks in that folder, at most."""

    def __post_init__(self) -> None:
        """Check each option before any is used."""
        check_choice(self.codec)
        check_among("engine", self.engine, ENGINES)
        for name in ("host_bytes", "workers", "staging_bytes", "in_flight", "cache_bytes"):
            value = getattr(self, name)
            if value is not None or name != "staging_bytes":
                object.__setattr__(self, name, _positive(name, value))
        if self.cache_folder != "":
            cache_path(self.cache_folder)
        if self.base_bytes != 0:
            object.__setattr__(self, "base_bytes", _positive("base_bytes", self.base_bytes))


CACHE_HINT: Final = "give /dev/shm/ckptstore in cache_folder, --cache or CKPTSTORE_CACHE"


def cache_path(folder: object) -> Path:
    """Return a folder for a cache as an absolute path.

    Raises
    ------
    InvalidInputError
        It is no path, or a URL.
    """
    if not isinstance(folder, str | os.PathLike) or "://" in str(folder):
        msg = f"the folder of the cache is a path on this host, not {folder!r:.80}"
        raise InvalidInputError(msg, hint=CACHE_HINT)
    return absolute_path(folder)


def absolute_path(path: str | os.PathLike[str]) -> Path:
    """Return a path from the root on, with ``~`` and ``~user`` replaced; ``~unknown`` is a folder.

    Raises
    ------
    InvalidUrlError
        The user has no home folder.
    StorageError
        It is relative, and the working directory was deleted.
    """
    text = os.path.expanduser(path)  # noqa: PTH111 - pathlib's raises, and expands ./~user too
    if text.partition("/")[0] == "~":
        hint = "set HOME, or give an absolute path; a folder of this name is ./~"
        raise InvalidUrlError("the home folder ~ is not known", hint=hint)
    try:
        text = str(Path(text).absolute())
    except OSError as error:
        hint = "change to another folder, or give an absolute path"
        raise StorageError(f"the working directory of {text!r} was deleted", hint=hint) from error
    return Path("/" + text.lstrip("/"))  # pathlib keeps two slashes


def _positive(name: str, value: object) -> int:
    return integer(name, value, hint=f"leave {name} out for its default")
