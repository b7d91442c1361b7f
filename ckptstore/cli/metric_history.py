"""The history of a metric in a terminal: a line of blocks, and a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from ckptstore.catalog.history import History, Point
from ckptstore.cli.output import Column, Screen
from ckptstore.cli.text import counted, metric_text, time_text
from ckptstore.maintenance.reports.documents import metrics_document, time_document
from ckptstore.pages.thinning import means

_BLOCKS: Final = "▁▂▃▄▅▆▇█"
_ASCII: Final = "_.-=+*#"
_WIDTH_MAX: Final = 72
_OF_VERSION: Final = ("id", "step", "level", "abandoned", "deleted", "tags")


def sparkline(values: Sequence[float], *, width: int = _WIDTH_MAX, blocks: str = _BLOCKS) -> str:
    """Return values as a line of blocks from the least to the greatest, at most `width` long.

    Where there are more values than blocks, a block stands for the mean of a few that follow each
    other. What has no number among them is ``!``.
    """
    # Halves, so that the span between the largest numbers is one, too.
    halves = [None if mean is None else mean / 2 for mean in means(values, max(width, 1))]
    finite = [half for half in halves if half is not None]
    low = min(finite, default=0.0)
    span = max(finite, default=0.0) - low
    top = len(blocks) - 1
    return "".join(
        "!" if half is None else blocks[round((half - low) / span * top) if span else top // 2]
        for half in halves
    )


def history_document(found: History) -> dict[str, Any]:
    """Return a history, oldest version first."""
    return {
        "run": found.run,
        "metric": found.metric,
        "direction": found.direction,
        "best": found.best or None,
        "head": found.head or None,
        "points": [
            {
                **{name: getattr(point.version, name) for name in _OF_VERSION},
                **metrics_document({"value": point.value}),
                "created_at": time_document(point.version.created_at),
                "improved": point.improved,
            }
            for point in found.points
        ],
    }


def draw_history(screen: Screen, found: History, *, limit: int, utc: bool) -> None:
    """Draw the line of the run as blocks, then its versions, newest first; `limit` 0: all."""
    line = [point.value for point in found.line if not point.version.deleted]
    if line:
        screen.line(f"{found.run}: {found.metric}, {_extent(line)}", "bold")
        screen.line(sparkline(line, blocks=_blocks(screen)))
        screen.line()
    shown = found.points[-limit:] if limit else found.points
    screen.listing(
        shown[::-1],
        Column("STEP", lambda point: str(point.version.step), right=True, wrap=False),
        Column("ID", lambda point: point.version.id[:8], wrap=False),
        Column("SAVED", lambda p: time_text(p.version.created_at, utc=utc), wrap=False, drop=1),
        Column(found.metric.upper(), partial(_value, found), right=True, wrap=False),
        Column("KEPT", _kept, wrap=False),
        Column("TAGS", partial(_tags, found)),
    )


def _extent(values: Sequence[float]) -> str:
    finite = [value for value in values if math.isfinite(value)]
    count = counted(len(values), "version")
    if not finite:
        return f"{count}, no number"
    return f"{metric_text(min(finite))} to {metric_text(max(finite))}, {count}"


def _blocks(screen: Screen) -> str:
    """Return characters that the terminal's encoding has."""
    try:
        _BLOCKS.encode(screen.console.encoding)
    except (UnicodeEncodeError, LookupError):
        return _ASCII
    return _BLOCKS


def _value(found: History, point: Point) -> str:
    mark = "*" if point.version.id == found.best else "+" if point.improved else " "
    return metric_text(point.value) + mark


def _kept(point: Point) -> str:
    kept: str = "deleted" if point.version.deleted else point.version.level
    return f"{kept}, abandoned" if point.version.abandoned else kept


def _tags(found: History, point: Point) -> str:
    latest = ["latest"] if point.version.id == found.head else []
    return " ".join([*latest, *point.version.tags])
