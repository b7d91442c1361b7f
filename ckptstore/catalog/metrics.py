"""Metrics: checks of names and values, directions, and the best versions.

NaN never wins and a missing value is left out, whatever the direction. Of equal values the
earliest step wins, and of the same step saved twice the newer version.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar, get_args

from ckptstore import limits
from ckptstore.errors import InvalidInputError, LimitError
from ckptstore.format.fields import Direction
from ckptstore.format.names import check_metric_name, entries_of
from ckptstore.shown import shown

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
