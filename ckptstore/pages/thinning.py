"""Choice of the versions of a long run that are drawn: notable ones and extremes. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Sequence
from typing import TypeVar

from ckptstore.catalog.best_marks import best_marks
from ckptstore.catalog.catalog import Catalog
from ckptstore.format.snapshot import Flag, VersionRow
from ckptstore.model import RunInfo

T = TypeVar("T")


def notable(catalog: Catalog, run: RunInfo, versions: Sequence[VersionRow]) -> set[str]:
    """Return the ids of versions that a picture of the run must not lose.

    The first, the last, best, tagged, pinned and damaged ones; points where lines part or runs
    fork, and ends of abandoned lines.
    """
    ids = {version.id for version in versions}
    parents = [version.parent for version in versions]
    continued = set(parents)
    found = {run.head, *best_marks(catalog, [run]), *run.tags.values()}
    found |= {version.id for version in (*versions[:1], *versions[-1:])}
    found |= {one.origin for one in catalog.runs() if one.origin}
    for version in versions:
        if version.flags & (Flag.PINNED | Flag.DAMAGED) or version.id not in continued:
            found.add(version.id)
    seen: set[str] = set()
    for parent in parents:
        if parent in seen:
            found.add(parent)
        seen.add(parent)
    return found & ids


def thinned(
    versions: Sequence[VersionRow],
    marked: Container[str],
    value: Callable[[VersionRow], float],
    *,
    most: int,
) -> list[VersionRow]:
    """Return at most `most` versions, in order: marked ones first, then extremes of each stretch.

    Of each stretch of the others the least and the greatest value stay, so that no peak is lost.
    """
    if len(versions) <= most:
        return list(versions)
    certain = [number for number, version in enumerate(versions) if version.id in marked]
    kept = {stretch[-1] for stretch in _stretches(certain, most // 2)}
    others = [number for number, version in enumerate(versions) if version.id not in marked]
    values = [value(version) for version in versions]
    for stretch in _stretches(others, max(1, (most - len(kept)) // 2)):
        ranked = [number for number in stretch if math.isfinite(values[number])] or stretch[:1]
        kept |= {min(ranked, key=values.__getitem__), max(ranked, key=values.__getitem__)}
    return [versions[number] for number in sorted(kept)]


def nearest_kept(
    versions: Sequence[VersionRow], kept: Container[str]
) -> dict[str, tuple[str, int]]:
    """Return for each version its nearest ancestor in `kept`, and the number of those between.

    The ancestor is empty if no version of this run before it is kept.
    """
    found: dict[str, tuple[str, int]] = {}
    for version in versions:
        above, between = found.get(version.parent, ("", 0))
        known = version.parent in found
        if known and version.parent in kept:
            above, between = version.parent, 0
        elif known:
            between += 1
        found[version.id] = (above, between)
    return found


def means(values: Sequence[float], most: int) -> list[float | None]:
    """Return at most `most` means of stretches of values; None where a stretch has no number."""
    found: list[float | None] = []
    for stretch in _stretches(values, most):
        finite = [value for value in stretch if math.isfinite(value)]
        found.append(rounded(math.fsum(x / len(finite) for x in finite)) if finite else None)
    return found


def rounded(value: float) -> float:
    """Return a value to six digits, as it is shown."""
    return float(f"{value:.6g}")


def _stretches(items: Sequence[T], count: int) -> Iterator[Sequence[T]]:
    count = min(count, len(items))
    for place in range(count):
        yield items[len(items) * place // count : len(items) * (place + 1) // count]
