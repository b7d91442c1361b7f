"""Numbers, times and names as text for people; pure functions."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ckptstore import limits
from ckptstore.catalog.commits import Commit
from ckptstore.catalog.retention_rules import parse_bytes as parse_bytes
from ckptstore.catalog.retention_rules import parse_duration
from ckptstore.config import SYSTEM
from ckptstore.maintenance.reports.usage import sum_roles
from ckptstore.model import Version
from ckptstore.shown import bytes_text as bytes_text
from ckptstore.shown import count_text as count_text
from ckptstore.shown import counted as counted
from ckptstore.suggestions import listed as listed

if TYPE_CHECKING:
    from ckptstore.maintenance.core.live_set import Tally

# Steps of an age: unit, its seconds, and up to how many of them it is used.
_AGES = (("s", 1, 120), ("m", 60, 120), ("h", 3600, 48), ("d", 86_400, 730), ("y", 31_557_600, 0))


def parse_wait(text: str) -> float:
    """Return the seconds of a duration, such as ``6h``, or of none: ``0`` or ``0s``.

    Raises
    ------
    InvalidInputError
        It is neither.
    """
    return 0.0 if text.strip() in {"0", "0s"} else float(parse_duration(text))


def printable(text: str) -> str:
    """Return `text` with everything that does not print as an escape.

    Names, metadata and messages come from storage that others write: an escape sequence in them
    must not reach the terminal.
    """
    if text.isprintable():
        return text
    return "".join(x if x.isprintable() else x.encode("unicode_escape").decode() for x in text)


def version_text(version: Version) -> str:
    """Return what names a version to people: run, step and the beginning of its id."""
    return f"{version.run}@{version.step} {version.id[:8]}"


def version_is(version: Version) -> str:
    """Return which id the version at a step of a run has."""
    return f"{version.run}@{version.step} is {version.id[:8]}"


def version_age(version: Version) -> str:
    """Return the time since a version was saved."""
    return age_text(SYSTEM.now_ms() / 1000 - version.created_at.timestamp())


def saved_text(version: Version, how: str) -> str:
    """Return how large a version is, and how much of it was stored or copied."""
    total = sum_roles(version.roles.values())
    return f"{bytes_text(total.logical)}, {bytes_text(total.stored)} {how}"


def packs_text(tally: Tally) -> str:
    """Return a number of packs and their size: ``2 packs of 1.50 GiB``."""
    return f"{counted(tally.count, 'pack')} of {bytes_text(tally.size_bytes)}"


def metric_text(value: float) -> str:
    """Return a metric to six digits."""
    return f"{value:.6g}"


def seconds_text(seconds: float) -> str:
    """Return a duration: ``0.42 ms``, ``3.1 s``, ``12 min``, ``12 h``."""
    if abs(seconds) < 0.9995:
        return f"{seconds * 1000:.3g} ms"
    if abs(seconds) < 119.5:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if abs(seconds) < 7170 else f"{seconds / 3600:,.4g} h"


def receipt_text(name: str, value: float) -> str:
    """Return an entry of a receipt in the unit given by the end of its name."""
    if not math.isfinite(value):
        return str(value)
    if name.endswith("bytes_per_s"):
        return f"{bytes_text(value)}/s"
    if name.endswith("_s"):
        return seconds_text(value)
    if name.endswith("_bytes"):
        return bytes_text(value)
    return count_text(int(value)) if name.endswith("_count") else f"{value:,.6g}"


def freed_later(size_bytes: int) -> str:
    """Return how what was deleted is freed: a collection condemns it, and a second deletes it."""
    wait = seconds_text(limits.GC_GRACE_S)
    if not size_bytes:
        return "nothing for ckptstore gc to free"
    return (
        f"at most {bytes_text(size_bytes)} for ckptstore gc to free: one run condemns, "
        f"one {wait} later (--grace) deletes"
    )


def age_text(seconds: float) -> str:
    """Return an age in its largest sensible unit: ``45s``, ``90m``, ``3d``.

    A writer's clock that is ahead gives ``in 5m``, not a negative age.
    """
    past = abs(seconds)
    unit, size, _ = next(step for step in _AGES if past < step[1] * step[2] or not step[2])
    text = f"{int(past // size)}{unit}"
    return f"in {text}" if seconds <= -1 else text


def time_text(moment: datetime, *, utc: bool) -> str:
    """Return date and time to the second, local or in UTC; UTC is marked with a Z."""
    if utc:
        return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    return moment.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def committed_at(commit: Commit) -> datetime:
    """Return when a commit was made, by the clock of its writer."""
    return datetime.fromtimestamp(commit.body.at_ms / 1000, UTC)
