"""Messages between a process and the child that saves for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from ckptstore.backends.base import Backend, PutIfAbsent
from ckptstore.config import Options
from ckptstore.format.superblock import Superblock
from ckptstore.model import Version
from ckptstore.saver.staged import Digests


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """To the child, first: where to save to."""

    backend: Backend
    superblock: Superblock
    put_if_absent: PutIfAbsent
    """What is known about the storage, so that the child need not probe it."""
    options: Options


@dataclass(frozen=True, slots=True, kw_only=True)
class Lend:
    """To the child: an arena, whose descriptor comes with the message."""

    arena: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Forget:
    """To the child: an arena that was given up."""

    arena: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Compare:
    """To the child: the digests of a job, which it waits for as long as the parent lives."""

    number: int
    digests: Digests


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """To the child: cancel a job, and answer."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Close:
    """To the child: finish, and exit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """From the child, first: it has understood the setup; or it has not."""

    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrote:
    """From the child: how far a job is."""

    number: int
    done: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """From the child: a version is durable."""

    number: int
    version: Version
    receipt: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """From the child: a job came to nothing."""

    number: int
    error: BaseException


Report: TypeAlias = Wrote | Done | Failed
"""What becomes of a job: an engine in this process tells it too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """From the child: whether a job was cancelled."""

    number: int
    cancelled: bool
