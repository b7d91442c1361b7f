"""The history of one metric over a run, and its best versions. Pure; answered from the catalog."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ckptstore import limits
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.metrics import best, ranked, sign
from ckptstore.errors import InvalidInputError, VersionNotFoundError
from ckptstore.format.fields import Direction
from ckptstore.model import RunInfo, Version
from ckptstore.suggestions import did_you_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One version with the metric."""

    version: Version
    """May be abandoned, reduced to its record, or deleted: its metrics stay."""
    value: float
    """May be NaN or infinite."""
    improved: bool
    """It was better than everything before it on its line; False where the metric has no direction
    that is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """A metric over the versions of a run, in the order of their commits."""

    run: str
    metric: str
    direction: Direction | None
    """None: not declared."""
    points: tuple[Point, ...]
    best: str
    """Id of the best version that can be loaded; empty if there is none."""
    head: str
    """Id of the head of the run; empty if it has none."""

    @property
    def line(self) -> tuple[Point, ...]:
        """The points on the line of the run: those that no rollback abandoned."""
        return tuple(point for point in self.points if not point.version.abandoned)


def history(catalog: Catalog, run: str, metric: str) -> History:
    """Return every value that a metric had in a run, deleted versions included.

    Raises
    ------
    RunNotFoundError
        There is no such run.
    VersionNotFoundError
        No version has the metric; the hint names similar ones.
    """
    info = catalog.run(run)
    direction = info.metrics.get(metric)
    there = [*catalog.versions(run), *catalog.versions(run, deleted=True)]
    there.sort(key=lambda version: version.commit)
    versions = [version for version in there if metric in version.metrics]
    if not versions:
        msg = f"no version of run {run!r} has the metric {metric!r}"
        raise VersionNotFoundError(msg, hint=did_you_mean(metric, catalog.metric_names(run)))
    records = _records(there, metric, direction) if direction else set()
    winner = best(catalog.metric_values(run, metric), direction) if direction else None
    return History(
        run=run,
        metric=metric,
        direction=direction,
        points=tuple(
            Point(version=version, value=version.metrics[metric], improved=version.id in records)
            for version in versions
        ),
        best=winner or "",
        head=info.head,
    )


def top(
    catalog: Catalog,
    run: str,
    metric: str,
    *,
    n: int,
    steps: tuple[int, int | None] = (0, None),
    directions: Mapping[str, Direction] | None = None,
) -> list[Version]:
    """Return the best versions of a run by a metric, the best first; at most `n`.

    Parameters
    ----------
    steps
        The first and the last step that count; None: no bound.
    directions
        Directions that the caller knows besides those that the run has declared.

    Raises
    ------
    RunNotFoundError
        There is no such run.
    InvalidInputError
        `n` is below 1, or the direction of the metric is not known.
    """
    direction = {**(directions or {}), **catalog.run(run).metrics}.get(metric)
    if n < 1:
        raise InvalidInputError(f"n={n}", hint="from 1 on")
    if direction is None:
        msg = f"it is not known whether {metric!r} is better low or high"
        fix = f"store.run({run!r}, metrics={{{metric!r}: 'min'}}) or 'max'"
        raise InvalidInputError(msg, hint=fix)
    low, high = steps
    high = limits.STEP_MAX if high is None else high
    values = [each for each in catalog.metric_values(run, metric) if low <= each[1] <= high]
    return [catalog.version(version_id) for version_id in ranked(values, direction)[:n]]


def best_marks(catalog: Catalog, runs: Iterable[RunInfo]) -> dict[str, set[str]]:
    """Return, by version id, the declared metrics that the version is the best of its run by."""
    marks: dict[str, set[str]] = {}
    for run in runs:
        for metric, direction in run.metrics.items():
            winner = best(catalog.metric_values(run.name, metric), direction)
            if winner is not None:
                marks.setdefault(winner, set()).add(metric)
    return marks


def _records(versions: list[Version], metric: str, direction: Direction) -> set[str]:
    """Return the ids of versions that were better than all before them on their own line."""
    best_at: dict[str, float] = {}
    found = set()
    for version in versions:
        before = best_at.get(version.parent, math.inf)
        value = sign(direction) * version.metrics.get(metric, math.nan)
        if value < before:
            found.add(version.id)
        best_at[version.id] = before if math.isnan(value) else min(before, value)
    return found
