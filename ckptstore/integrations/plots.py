"""Picture of a metric over a run: its line, forks, rollbacks, tags, and versions to be dropped.

Needs matplotlib, which the extra ``plots`` installs; it is imported when a picture is drawn, and no
window system is used.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ckptstore.catalog import retention
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.history import History, Point, history
from ckptstore.errors import VersionNotFoundError
from ckptstore.integrations.figures import check_picture, dress, save_picture
from ckptstore.maintenance.retention.retain import AnyPolicy, check_policy
from ckptstore.store import Store

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot_history"]

_SIZE_INCHES: Final = (10.0, 5.6)
# Colours that colour-blind people can distinguish. Source: M. Okabe and
# K. Ito, Color universal design (2008).
_LINE, _ABANDONED, _LOST, _BEST = "#0072B2", "#8c8c8c", "#D55E00", "#E69F00"
_FORKS: Final = ("#009E73", "#CC79A7", "#56B4E9", "#6a4c93")
_FORKS_MAX: Final = 8
_TAGS_MAX: Final = 12


def plot_history(
    store: Store,
    run: str,
    metric: str,
    path: str | os.PathLike[str],
    *,
    policy: AnyPolicy | None = None,
) -> Path:
    """Draw a metric over the steps of a run, as SVG, PNG or PDF by the suffix of the file.

    Parameters
    ----------
    path
        Replaced if it exists.
    policy
        Policy whose result is shown; None for the stored policy of the run, if any.

    Raises
    ------
    MissingDependencyError
        matplotlib is not installed.
    InvalidInputError
        The file has another suffix, or the policy is not accepted.
    RunNotFoundError, VersionNotFoundError
        There is no such run, or no version of it has the metric.
    StorageError
        The file cannot be written.
    """
    target = check_picture(path)
    picture = _picture(store, run, metric, policy)
    save_picture(target, _SIZE_INCHES, lambda figure: _draw(figure, picture))
    return target


@dataclass(frozen=True, slots=True, kw_only=True)
class _Picture:
    """Content of a picture, without its appearance."""

    history: History
    points: Mapping[str, Point]
    """By version id; those whose value is finite."""
    numberless: Sequence[int]
    """Steps of the others."""
    above: Mapping[str, str]
    """Version id to the nearest version before it that is among `points`; "" for none."""
    fates: Mapping[str, str]
    """Version id to retention's decision, for those that lose something."""
    policy: str
    origin: str
    """Version that the run was forked from; empty without one."""
    forks: Sequence[tuple[History, Point | None]] = field(default=())
    """Runs that were forked from this one, and from these, each with the point that its line begins
    at; None where no version before it has a number."""


def _picture(store: Store, run: str, metric: str, policy: AnyPolicy | None) -> _Picture:
    catalog = store.repo.refresh()
    found = history(catalog, run, metric)
    points = _finite(found.points)
    checked = None if policy is None else check_policy(policy)
    now_ms = store.repo.environment.now_ms()
    (plan,) = retention.plan(catalog, policy=checked, run=run, now_ms=now_ms)
    return _Picture(
        history=found,
        points=points,
        numberless=[p.version.step for p in found.points if p.version.id not in points],
        above={one: _above(catalog, one, points) for one in points},
        fates={d.version.id: d.fate for d in plan.changes},
        policy=str(plan.policy) if plan.policy else "",
        origin=_origin(catalog, run),
        forks=_forks(catalog, run, metric, points),
    )


def _finite(points: Iterable[Point]) -> dict[str, Point]:
    """Return the points with a value that can be drawn, by version id."""
    return {point.version.id: point for point in points if math.isfinite(point.value)}


def _origin(catalog: Catalog, run: str) -> str:
    origin = catalog.run(run).origin
    version = catalog.version(origin) if origin else None
    return f"{version.run}@{version.step}" if version else ""


def _above(catalog: Catalog, version_id: str, points: Mapping[str, Point]) -> str:
    ancestors = catalog.ancestors(version_id)
    next(ancestors)
    return next((version.id for version in ancestors if version.id in points), "")


def _forks(
    catalog: Catalog, run: str, metric: str, points: Mapping[str, Point]
) -> list[tuple[History, Point | None]]:
    """Return the forks; a fork of a fork comes after its parent."""
    known = dict(points)
    infos = [info for info in catalog.runs() if info.origin]
    names = [run]
    found: list[tuple[History, Point | None]] = []
    for name in names:  # the loop appends to it
        for info in infos:
            if info.name in names or catalog.version(info.origin).run != name:
                continue
            names.append(info.name)
            try:
                fork = history(catalog, info.name, metric)
            except VersionNotFoundError:
                continue  # it lacks the metric; its own forks may have it
            line = (version.id for version in catalog.ancestors(info.origin))
            found.append((fork, next((known[one] for one in line if one in known), None)))
            known |= _finite(fork.points)
    return found[:_FORKS_MAX]


def _draw(figure: Figure, picture: _Picture) -> None:
    axes = figure.add_subplot()
    _draw_links(axes, picture)
    _draw_forks(axes, picture)
    _draw_points(axes, picture)
    _draw_rollbacks(axes, picture)
    _draw_tags(axes, picture)
    _draw_numberless(axes, picture)
    _dress(axes, picture)


def _draw_links(axes: Axes, picture: _Picture) -> None:
    """Join each version to the one that it continues."""
    if any(point.version.abandoned for point in picture.points.values()):
        axes.plot([], [], color=_ABANDONED, linestyle=(0, (3, 2)), label="abandoned by a rollback")
    for one, point in picture.points.items():
        before = picture.points.get(picture.above[one])
        if before is None:
            continue
        left = point.version.abandoned
        axes.plot(
            [before.version.step, point.version.step],
            [before.value, point.value],
            color=_ABANDONED if left else _LINE,
            linestyle=(0, (3, 2)) if left else "-",
            linewidth=1.2 if left else 1.8,
            zorder=1 if left else 2,
        )


def _draw_forks(axes: Axes, picture: _Picture) -> None:
    for place, (fork, start) in enumerate(picture.forks):
        color = _FORKS[place % len(_FORKS)]
        line = _finite(fork.line).values()
        steps = [p.version.step for p in line]
        values = [p.value for p in line]
        if start is not None:
            steps, values = [start.version.step, *steps], [start.value, *values]
        if steps:
            axes.plot(
                steps, values, color=color, marker="o", markersize=3.5, linewidth=1.4, zorder=2,
                label=f"fork {fork.run}",
            )  # fmt: skip


def _draw_points(axes: Axes, picture: _Picture) -> None:
    groups: dict[str, list[Point]] = {}
    for one, point in picture.points.items():
        groups.setdefault(_kind(picture, one, point), []).append(point)
    for kind, style in _STYLES.items():
        if kind in groups:
            axes.scatter(
                [point.version.step for point in groups[kind]],
                [point.value for point in groups[kind]],
                label=kind,
                **style,
            )
    best = picture.points.get(picture.history.best)
    if best is not None:
        label = f"best: {best.value:.6g} at step {best.version.step}"
        axes.scatter(
            [best.version.step], [best.value], marker="*", s=190, color=_BEST, edgecolors="black",
            linewidths=0.6, zorder=6, label=label,
        )  # fmt: skip


def _kind(picture: _Picture, one: str, point: Point) -> str:
    if point.version.deleted:
        return "deleted"
    fate = picture.fates.get(one)
    if fate == "gone":
        return "retention would delete"
    if fate is not None:
        return f"retention would keep the {fate.partition('-')[0]}"
    if point.version.level != "full":
        return f"only the {_KEPT[point.version.level.partition('-')[0]]} kept"
    return "abandoned" if point.version.abandoned else "version"


_KEPT: Final = {"weights": "weights are", "record": "record is"}
_OPEN: Final[dict[str, Any]] = {"facecolors": "white", "s": 28}
_STYLES: Final[dict[str, dict[str, Any]]] = {
    "version": {"color": _LINE, "s": 28, "zorder": 4},
    "abandoned": {"color": _ABANDONED, "s": 24, "zorder": 3},
    "only the weights are kept": {**_OPEN, "edgecolors": _LINE, "marker": "s", "zorder": 4},
    "only the record is kept": {**_OPEN, "edgecolors": _LINE, "zorder": 4},
    "retention would keep the weights": {**_OPEN, "edgecolors": _LOST, "marker": "s", "zorder": 5},
    "retention would keep the record": {**_OPEN, "edgecolors": _LOST, "zorder": 5},
    "retention would delete": {"color": _LOST, "marker": "x", "s": 34, "zorder": 5},
    "deleted": {"color": _ABANDONED, "marker": "x", "s": 22, "zorder": 3},
}
"""Styles of the points, in the order of the legend."""


def _draw_rollbacks(axes: Axes, picture: _Picture) -> None:
    """Draw an arrow from the end of each abandoned branch back to the rollback's target."""
    continued = set(picture.above.values())
    label = "rollback"
    for one, point in picture.points.items():
        if not point.version.abandoned or one in continued:
            continue
        target = picture.points.get(picture.above[one])
        while target is not None and target.version.abandoned:
            target = picture.points.get(picture.above[target.version.id])
        if target is None:
            continue
        axes.annotate(
            "",
            xy=(target.version.step, target.value),
            xytext=(point.version.step, point.value),
            arrowprops={
                "arrowstyle": "-|>",
                "color": _ABANDONED,
                "linewidth": 1.0,
                "linestyle": ":",
                "connectionstyle": "arc3,rad=0.35",
                "shrinkA": 4,
                "shrinkB": 5,
            },
            zorder=3,
        )
        axes.plot([], [], color=_ABANDONED, linestyle=":", marker="<", markersize=4, label=label)
        label = "_again"


def _draw_tags(axes: Axes, picture: _Picture) -> None:
    tagged = [p for p in picture.points.values() if p.version.tags]
    for point in tagged[-_TAGS_MAX:]:
        text = ", ".join(point.version.tags[:3]) + (" ..." if len(point.version.tags) > 3 else "")
        axes.annotate(
            text.replace("$", r"\$"),
            xy=(point.version.step, point.value),
            xytext=(0, 22),
            textcoords="offset points",
            ha="center",
            fontsize=8,
            bbox={"boxstyle": "round,pad=0.25", "facecolor": "#fff7d6", "edgecolor": "#b8a35a"},
            arrowprops={"arrowstyle": "-", "color": "#b8a35a", "linewidth": 0.8},
            zorder=7,
        )


def _draw_numberless(axes: Axes, picture: _Picture) -> None:
    """Mark the steps whose value cannot be drawn along the upper edge."""
    steps = picture.numberless
    if steps:
        edge = axes.get_xaxis_transform()
        axes.scatter(
            steps, [0.985] * len(steps), transform=edge, marker="v", color=_LOST, s=40, zorder=6,
            label="NaN or infinite", clip_on=False,
        )  # fmt: skip


def _dress(axes: Axes, picture: _Picture) -> None:
    found = picture.history
    better = {"min": " (lower is better)", "max": " (higher is better)"}.get(found.direction or "")
    axes.set_xlabel("step")
    axes.set_ylabel((found.metric + (better or "")).replace("$", r"\$"))
    title = f"{found.run}: {found.metric}"
    if picture.origin:
        title += f", forked from {picture.origin}"
    if picture.policy:
        title += f"\nretention {picture.policy}"
    axes.set_title(title.replace("$", r"\$"), fontsize=10, loc="left")
    axes.margins(x=0.03, y=0.12)
    dress(axes, grid="both")
