"""Metrics: checks of names and values, directions, the best versions, and the history over a run.

NaN never wins and a missing value is left out, whatever the direction. Of equal values the
earliest step wins, and of the same step saved twice the newer version.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TypeVar, get_args

from ckptstore import limits
from ckptstore.argument_checks import integer
from ckptstore.catalog.catalog import Catalog
from ckptstore.errors import InvalidInputError, LimitError, VersionNotFoundError
from ckptstore.format.fields import Direction
from ckptstore.format.names import check_metric_name, entries_of
from ckptstore.model import RunInfo, Version
from ckptstore.shown import shown
from ckptstore.suggestions import did_you_mean

V = TypeVar("V")


def check_metrics(metrics: object) -> dict[str, float]:
    """Return the metrics of a save as floats.

    Anything that Python turns into a float is accepted: ints, NumPy scalars, one-element tensors;
    text is not.

    Raises
    ------
    InvalidInputError
        If a name or a value is not accepted; it is named.
    LimitError
        If there are more than ``METRICS_MAX``.
    """
    if not issubclass(type(metrics), Mapping):  # a single number, in code that nobody type-checks
        msg = f"metrics must map names to numbers, not {shown(metrics)}"
        raise InvalidInputError(msg, hint=f"such as metrics={{'loss': {shown(metrics)}}}")
    metrics = entries_of(metrics, "metrics")
    if len(metrics) > limits.METRICS_MAX:
        raise LimitError(f"{len(metrics)} metrics are more than the {limits.METRICS_MAX} allowed")
    return {check_metric_name(name): _number(name, value) for name, value in metrics.items()}


def check_directions(directions: object) -> dict[str, Direction]:
    """Return which way each metric gets better.

    Raises
    ------
    InvalidInputError
        If they are no mapping, one is neither ``min`` nor ``max``, or a name is not accepted.
    LimitError
        If there are more than ``METRICS_MAX``.
    """
    if not isinstance(directions, Mapping):  # a list of names, in code that nobody type-checks
        msg = f"metrics must map names to 'min' or 'max', not {directions!r:.60}"
        raise InvalidInputError(msg, hint="such as metrics={'val_loss': 'min'}")
    if len(directions) > limits.METRICS_MAX:
        msg = f"{len(directions)} metrics are more than the {limits.METRICS_MAX} allowed"
        raise LimitError(msg)
    checked: dict[str, Direction] = {}
    for name, text in directions.items():
        for direction in get_args(Direction):
            if text == direction:
                checked[check_metric_name(name)] = direction
        if name not in checked:
            msg = f"metric {name!r} has the direction {text!r}"
            raise InvalidInputError(msg, hint="write 'min' or 'max'")
    return checked


def sign(direction: Direction) -> int:
    """Return 1 where less is better, else -1."""
    return 1 if direction == "min" else -1


def best(candidates: Iterable[tuple[V, int, float]], direction: Direction) -> V | None:
    """Return the best of versions that are given as (version, step, value), oldest first.

    Returns
    -------
    The version with the least or greatest value, or None where every value is NaN.
    """
    found = min(_newest_first(candidates), key=_rank(direction), default=None)
    return None if found is None else found[0]


def ranked(candidates: Iterable[tuple[V, int, float]], direction: Direction) -> list[V]:
    """Return versions from the best to the worst, those left out whose value is NaN.

    The first is what :func:`best` returns; candidates are given as for it.
    """
    return [each[0] for each in sorted(_newest_first(candidates), key=_rank(direction))]


def _newest_first(candidates: Iterable[tuple[V, int, float]]) -> list[tuple[V, int, float]]:
    """Return the candidates whose value is a number; of equals the first then counts."""
    return [each for each in candidates if not math.isnan(each[2])][::-1]


def _rank(direction: Direction) -> Callable[[tuple[V, int, float]], tuple[float, int]]:
    return lambda each: (sign(direction) * each[2], each[1])


def _number(name: str, value: object) -> float:
    if not issubclass(type(value), str | bytes | bytearray):
        try:
            detach = getattr(type(value), "detach", None)  # torch warns about a loss with its graph
            return float(value if detach is None else detach(value))  # type: ignore[arg-type]
        except Exception as error:
            what, why = f"{type(value).__name__} {shown(value, 40)}", shown(error, 200)
            msg = f"metric {name!r} is {what}: {why}"
            raise InvalidInputError(msg, hint="one number, such as value.mean().item()") from error
    msg = f"metric {name!r} is the text {shown(value, 40)}, not a number"
    raise InvalidInputError(msg, hint="float(value)")


# --- the history of a metric --------------------------------------------------------------------


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
    n = integer("n", n)
    if direction is None:
        raise no_direction(metric, catalog.run(run).metrics, repr(run))
    low, high = steps
    high = limits.STEP_MAX if high is None else high
    values = [each for each in catalog.metric_values(run, metric) if low <= each[1] <= high]
    return [catalog.version(version_id) for version_id in ranked(values, direction)[:n]]


def no_direction(metric: str, known: Iterable[str], run: str = "NAME") -> InvalidInputError:
    """Return the error for a metric that may be better low or high; it may be misspelled."""
    fix = f"store.run({run}, metrics={{{metric!r}: 'min'}}) or 'max'"
    for close in get_close_matches(metric, known, 1):
        fix = f"did you mean {close}? or {fix}"
    return InvalidInputError(f"it is not known whether {metric!r} is better low or high", hint=fix)


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
