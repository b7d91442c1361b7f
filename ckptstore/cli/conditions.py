"""Choice and order of the versions that ``ckptstore ls`` lists."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from ckptstore.catalog.catalog import Catalog
from ckptstore.errors import InvalidInputError
from ckptstore.maintenance.reports.usage import sum_roles
from ckptstore.model import RunInfo, Version
from ckptstore.suggestions import did_you_mean

_CONDITION: Final = re.compile(r"\s*(.+?)\s*(<=|>=|!=|==|<|>|=)\s*(\S+)\s*\Z")
_COMPARE: Final[dict[str, Callable[[float, float], bool]]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
}
_OWN: Final[dict[str, Callable[[Version], float]]] = {
    "step": lambda version: version.step,
    "size": lambda version: sum_roles(version.roles.values()).logical,
}
"""Numbers of a version beside its metrics."""


def chosen(
    catalog: Catalog,
    runs: Sequence[RunInfo],
    versions: Iterable[Version],
    where: Sequence[str],
    *,
    tag: str | None,
    sort: str | None,
) -> list[Version]:
    """Return the versions that have the tag and fit all conditions, in the order asked for.

    Raises
    ------
    InvalidInputError
        A condition does not follow the grammar, or no version has its metric, or that of `sort`.
    """
    tests = [_parsed(text) for text in where]
    named = [name for name, _, _ in tests] + ([] if sort is None else [sort])
    metrics = {metric for info in runs for metric in catalog.metric_names(info.name)}
    for name in named:
        if name not in _OWN and name not in metrics:
            msg = f"no version has the metric {name!r}"
            raise InvalidInputError(msg, hint=did_you_mean(name, [*sorted(metrics), *_OWN]))
    found = [
        version
        for version in versions
        if (tag is None or tag in version.tags)
        and all(_COMPARE[how](_number(version, name), bound) for name, how, bound in tests)
    ]
    if sort is None:
        return found
    directions = {name: side for info in runs for name, side in info.metrics.items()}
    greatest = sort in _OWN or directions.get(sort) == "max"

    def rank(version: Version) -> tuple[bool, float]:
        """Put versions without a value last."""
        value = _number(version, sort)
        return math.isnan(value), -value if greatest else value

    return sorted(found, key=rank)


def _number(version: Version, name: str) -> float:
    """Return a metric, or another number, of a version; NaN if it has none."""
    own = _OWN.get(name)
    return version.metrics.get(name, math.nan) if own is None else own(version)


def _parsed(text: str) -> tuple[str, str, float]:
    """Return name, comparison and bound of a condition."""
    parts = _CONDITION.match(text)
    try:
        return parts[1], parts[2], float(parts[3])  # type: ignore[index]  # or below
    except (TypeError, ValueError):
        msg = f"--where {text!r} is not a metric, a comparison and a number"
        raise InvalidInputError(msg, hint="in quotes, such as --where 'val_loss<1.3'") from None
