"""The best versions of runs, for tables that mark them."""

from __future__ import annotations

from collections.abc import Iterable

from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.metrics import best
from ckptstore.model import RunInfo


def best_marks(catalog: Catalog, runs: Iterable[RunInfo]) -> dict[str, set[str]]:
    """Return, by version id, the declared metrics that the version is the best of its run by."""
    marks: dict[str, set[str]] = {}
    for run in runs:
        for metric, direction in run.metrics.items():
            winner = best(catalog.metric_values(run.name, metric), direction)
            if winner is not None:
                marks.setdefault(winner, set()).add(metric)
    return marks
