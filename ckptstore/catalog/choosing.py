"""Which versions each rule of a policy chooses. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ckptstore.catalog.metrics import ranked
from ckptstore.catalog.retention_rules import (
    Abandoned,
    All,
    Best,
    EverySteps,
    EveryTime,
    Last,
    Rule,
    Tagged,
    Within,
)
from ckptstore.errors import InvalidInputError
from ckptstore.format.fields import Direction
from ckptstore.model import Version

__all__ = ["CONTESTED", "View", "choose"]

CONTESTED: Final = frozenset({Last, EverySteps, EveryTime, Best})
"""Rules that choose between versions; the others look at each by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What rules go by besides the versions."""

    directions: Mapping[str, Direction]
    """Which way each metric of the run gets better."""
    now_ms: int
    """Milliseconds since 1970."""

    def age_s(self, version: Version) -> float:
        """Return how old a version is, by its writer's clock."""
        return self.now_ms / 1000 - version.created_at.timestamp()


def choose(rule: Rule, among: Sequence[Version], view: View) -> Iterable[str]:
    """Return the ids of the versions that a rule chooses.

    Parameters
    ----------
    among
        Oldest first.

    Raises
    ------
    InvalidInputError
        The rule does not fit the run: the metric has no direction, say.
    """
    return _CHOOSE[type(rule)](view, rule, among)


def _last(_: View, rule: Last, among: Sequence[Version]) -> Iterable[str]:
    return [version.id for version in among[-rule.count :]]


def _every_steps(_: View, rule: EverySteps, among: Sequence[Version]) -> Iterable[str]:
    chosen: dict[int, Version] = {}
    for version in among:
        stretch = version.step // rule.steps
        # Of one step that was saved twice the newer one, as for refs.
        if stretch not in chosen or version.step <= chosen[stretch].step:
            chosen[stretch] = version
    return [version.id for version in chosen.values()]


def _every_time(_: View, rule: EveryTime, among: Sequence[Version]) -> Iterable[str]:
    chosen: dict[int, str] = {}
    for version in among:
        chosen.setdefault(math.floor(version.created_at.timestamp() / rule.seconds), version.id)
    return list(chosen.values())


def _best(view: View, rule: Best, among: Sequence[Version]) -> Iterable[str]:
    direction = view.directions.get(rule.metric)
    if direction is None:
        msg = f"it is not known whether {rule.metric!r} is better low or high"
        fix = f"store.run(NAME, metrics={{{rule.metric!r}: 'min'}}) or 'max'"
        raise InvalidInputError(msg, hint=fix)
    values = [(v.id, v.step, v.metrics[rule.metric]) for v in among if rule.metric in v.metrics]
    chosen = ranked(values, direction)[: rule.count]
    if rule.missing == "keep":
        chosen += [v.id for v in among if rule.metric not in v.metrics]
    return chosen


def _within(view: View, rule: Within, among: Sequence[Version]) -> Iterable[str]:
    line = (version for version in among if not version.abandoned)
    return [version.id for version in line if view.age_s(version) < rule.seconds]


def _tagged(_: View, __: Tagged, among: Sequence[Version]) -> Iterable[str]:
    return [version.id for version in among if version.tags]


def _abandoned(view: View, rule: Abandoned, among: Sequence[Version]) -> Iterable[str]:
    left = (version for version in among if version.abandoned)
    return [version.id for version in left if view.age_s(version) < rule.seconds]


def _all(_: View, __: All, among: Sequence[Version]) -> Iterable[str]:
    return [version.id for version in among]


_CHOOSE: Final[dict[type[Rule], Callable[[View, Any, Sequence[Version]], Iterable[str]]]] = {
    Last: _last,
    EverySteps: _every_steps,
    EveryTime: _every_time,
    Within: _within,
    Best: _best,
    Tagged: _tagged,
    Abandoned: _abandoned,
    All: _all,
}
"""By the type of a rule, what it chooses."""
