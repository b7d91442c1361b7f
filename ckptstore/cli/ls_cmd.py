"""``ckptstore ls``: runs, and versions newest first."""

from __future__ import annotations

import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.metrics import best_marks
from ckptstore.cli.output import Column, Screen
from ckptstore.cli.session import opened
from ckptstore.cli.store_options import CommonOptions, Utc
from ckptstore.cli.text import bytes_text, count_text, metric_text, time_text, version_age
from ckptstore.errors import InvalidInputError
from ckptstore.maintenance.reports.documents import run_document, state_marks, version_document
from ckptstore.maintenance.reports.usage import sum_roles
from ckptstore.model import RoleBytes, RunInfo, Version
from ckptstore.suggestions import did_you_mean

if TYPE_CHECKING:
    from rich.text import Text


_ROWS = 20
"""Versions in a table unless ``--limit`` says otherwise."""
_METRIC_COLUMNS_MAX = 4
"""Metrics that get a column of their own unless ``--metric`` names them."""


def ls(
    run: Annotated[str | None, typer.Argument(metavar="RUN")] = None,
    *,
    limit: Annotated[int | None, typer.Option("--limit", "-n", min=0, metavar="N")] = None,
    metric: Annotated[list[str] | None, typer.Option(metavar="NAME")] = None,
    sort: Annotated[str | None, typer.Option(metavar="NAME")] = None,
    where: Annotated[list[str] | None, typer.Option(metavar="CONDITION")] = None,
    tag: Annotated[str | None, typer.Option(metavar="TAG")] = None,
    utc: Utc = False,
    options: CommonOptions,
) -> None:
    """List runs and versions, newest first; the best of each run is marked with *.

    Parameters
    ----------
    run
        Only the versions of this run.
    limit
        Show the newest N versions; 0 for all. Default: 20; all with --json.
    metric
        A metric to show as a column. Repeatable.
    sort
        Sort by a metric, the best first; or by step or size, the greatest first. Default: the
        newest first.
    where
        Only versions for which this holds: 'val_loss<1.3', 'step>=1000'. Repeatable.
    tag
        Only versions that have this tag.

    Examples
    --------
    ckptstore ls gpt --sort val_loss --limit 5
    ckptstore ls --where 'val_loss<1.3' --tag release
    """
    output = options.output("ls")
    with opened(options) as opening:
        catalog = opening.repo.refresh()
        runs = catalog.runs() if run is None else [catalog.run(run)]
        found: Iterable[Version] = catalog.versions(run, newest_first=True)
        total = catalog.versions_count if run is None else runs[0].versions_count
        if where or tag or sort:
            found = chosen(catalog, runs, found, where or (), tag=tag, sort=sort)
            total = len(found)
        wanted = (total if options.json else _ROWS) if limit is None else limit or total
        versions = list(islice(found, min(wanted, total)))
        metrics = metric or _usual_metrics(runs, versions, sort)
        heads, best = {info.head for info in runs}, best_marks(catalog, runs)
        one_run = run is not None
        listing = _Listing(catalog, runs, versions, total, heads, best, metrics, one_run, utc)
        output.show(listing.document(opening.url) if options.json else {}, listing.draw)
    if total or not (where or tag):
        output.note_rest(len(versions), total, "version")
    else:
        output.note("no version fits")


def _usual_metrics(runs: Sequence[RunInfo], rows: Sequence[Version], sort: str | None) -> list[str]:
    """Return the metrics worth a column: declared ones first, then those most versions have."""
    used = Counter(name for version in rows for name in version.metrics)
    declared = {name for info in runs for name in info.metrics}
    order = sorted(used, key=lambda n: (n != sort, n not in declared, -used[n], n))
    return order[:_METRIC_COLUMNS_MAX]


@dataclass(frozen=True, slots=True)
class _Listing:
    """Prints the listing of runs and versions."""

    catalog: Catalog
    runs: Sequence[RunInfo]
    versions: Sequence[Version]
    total: int
    """Versions that there are, listed or not."""
    heads: AbstractSet[str]
    """Ids of the heads of the runs listed."""
    best: Mapping[str, set[str]]
    metrics: Sequence[str]
    one_run: bool
    utc: bool

    def document(self, url: str) -> dict[str, Any]:
        """Return everything as one document."""

        def described(version: Version) -> dict[str, Any]:
            best = self.best.get(version.id, ())
            return version_document(version, head=version.id in self.heads, best=best)

        return {
            "store": url,
            "runs": [run_document(info) for info in self.runs],
            "versions_count": self.total,
            "versions": [described(version) for version in self.versions],
        }

    def draw(self, screen: Screen) -> None:
        """Draw the versions, and the runs unless one was named."""
        if not self.one_run and self.runs:
            self._draw_runs(screen)
            screen.line()
        if self.versions:
            self._draw_versions(screen)

    def _draw_runs(self, screen: Screen) -> None:
        bests: dict[str, list[str]] = {}
        for version_id, metrics in self.best.items():
            version = self.catalog.version(version_id)
            for name in sorted(metrics):
                value = metric_text(version.metrics[name])
                bests.setdefault(version.run, []).append(f"{name} {value} @{version.step}")

        def of_head(text: Callable[[Version], str]) -> Callable[[RunInfo], str]:
            return lambda info: text(self.catalog.version(info.head)) if info.head else "-"

        screen.listing(
            self.runs,
            Column("RUN", lambda info: info.name),
            Column("VERSIONS", lambda info: count_text(info.versions_count), right=True),
            Column("LATEST", of_head(lambda version: str(version.step)), right=True),
            Column("AGE", of_head(version_age), right=True),
            Column("BEST", lambda info: ", ".join(bests.get(info.name, [])) or "-"),
        )

    def _draw_versions(self, screen: Screen) -> None:
        last = 3 + len(self.metrics)  # the first metric is the last to go
        metrics = [
            Column(name.upper(), partial(self._metric, name), right=True, wrap=False, drop=drop)
            for drop, name in zip(range(last, 3, -1), self.metrics, strict=True)
        ]

        def size(of: Callable[[RoleBytes], int]) -> Callable[[Version], str]:
            return lambda version: bytes_text(of(sum_roles(version.roles.values())))

        screen.listing(
            self.versions,
            Column("RUN", lambda version: version.run, shown=not self.one_run),
            Column("STEP", lambda version: str(version.step), right=True, wrap=False),
            Column("ID", lambda version: version.id[:8], wrap=False),
            Column("SAVED", lambda v: time_text(v.created_at, utc=self.utc), wrap=False, drop=1),
            Column("AGE", version_age, right=True, wrap=False),
            *metrics,
            Column("SIZE", size(lambda total: total.logical), right=True, wrap=False, drop=2),
            Column("STORED", size(lambda total: total.stored), right=True, wrap=False, drop=3),
            Column("TAGS", self._tags),
        )

    def _metric(self, name: str, version: Version) -> str | Text:
        from rich.text import Text

        value = version.metrics.get(name)
        text = "-" if value is None else metric_text(value)
        return Text(text + "*", "bold green") if name in self.best.get(version.id, ()) else text

    def _tags(self, version: Version) -> str:
        latest = ["latest"] if version.id in self.heads else []
        marks = (f"({mark})" for mark in state_marks(version, self.catalog.replicas))
        return " ".join([*latest, *version.tags, *marks])


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
        and all(name in _OWN or name in version.metrics for name, _, _ in tests)
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
