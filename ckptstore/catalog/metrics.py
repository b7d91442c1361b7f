"""Metrics: what is accepted, which way is better, and which version is the best.

NaN never wins and a missing value is left out, whatever the direction. Of equal values the
earliest step wins, and of the same step saved twice the newer version.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TypeVar, get_args

from ckptstore import limits
from ckptstore.errors import InvalidInputError, LimitError
from ckptstore.format.fields import Direction
from ckptstore.format.names import check_metric_name

V = TypeVar("V")


def check_metrics(metrics: Mapping[str, object]) -> dict[str, float]:
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
    if len(metrics) > limits.METRICS_MAX:
        msg = f"{len(metrics)} metrics are more than the {limits.METRICS_MAX} allowed"
        raise LimitError(msg)
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


def best(candidates: Iterable[tuple[V, int, float]], direction: Direction) -> V | None:
    """Return the best of versions that are given as (version, step, value), oldest first.

    Returns
    -------
    The version with the least or greatest value, or None where every value is NaN.
    """
    sign = 1 if direction == "min" else -1
    least, first = math.inf, limits.STEP_MAX
    found: V | None = None
    for version, step, value in candidates:
        rank = sign * value
        # NaN is not below anything. Equal value and step: the later candidate is the newer version.
        if rank < least or (rank == least and step <= first):
            least, first, found = rank, step, version
    return found


def ranked(candidates: Iterable[tuple[V, int, float]], direction: Direction) -> list[V]:
    """Return versions from the best to the worst, those left out whose value is NaN.

    The first is what :func:`best` returns; candidates are given as for it.
    """
    sign = 1 if direction == "min" else -1
    numbers = [each for each in candidates if not math.isnan(each[2])]
    numbers.reverse()  # the sort keeps the order of equals: the newer version first
    numbers.sort(key=lambda each: (sign * each[2], each[1]))
    return [version for version, _, _ in numbers]


def _number(name: str, value: object) -> float:
    if not isinstance(value, str | bytes | bytearray):
        try:
            detach = getattr(value, "detach", None)  # torch warns about a loss with its graph
            return float(value if detach is None else detach())  # type: ignore[arg-type]  # or below
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            msg = f"metric {name!r} is {type(value).__name__} {str(value)[:40]!r}: {error}"
            raise InvalidInputError(msg) from error
    msg = f"metric {name!r} is the text {value[:40]!r}, not a number"
    raise InvalidInputError(msg)
