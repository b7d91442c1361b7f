"""A web page about a published store: one file without scripts; all names in it are escaped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from html import escape
from itertools import islice
from pathlib import Path
from string import Template
from typing import Final

from ckptstore import limits
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.metrics import best
from ckptstore.maintenance.reports.usage import sum_roles
from ckptstore.model import RunInfo, Version
from ckptstore.shown import HtmlTable

_PAGE: Final = Path(__file__).with_name("store_page.html")


def store_page(catalog: Catalog | None, *, now_ms: int) -> str:
    """Return the page of a store.

    Parameters
    ----------
    catalog
        None for an encrypted store, of which the page tells nothing.
    now_ms
        The time, in milliseconds since 1970.
    """
    fields = {"title": "An encrypted store", "ref": "RUN@latest", "tables": ""}
    fields["key"] = ', encryption_key="file:PATH"' if catalog is None else ""
    fields["time"] = _time(datetime.fromtimestamp(now_ms / 1000, UTC))
    if catalog is not None:
        runs = catalog.runs()
        newest = list(islice(catalog.versions(newest_first=True), limits.PAGE_VERSIONS_MAX))
        fields["title"] = (
            f"{_count(catalog.versions_count, 'version')} in {_count(len(runs), 'run')}"
        )
        if newest:
            fields["ref"] = escape(f"{newest[0].run}@latest")
        heads = _table("Run|Versions|Best|Tags", (_run(catalog, info) for info in runs))
        rows = _table("Version|Id|Saved (UTC)|Metrics|Size|Stored", map(_version, newest))
        fields["tables"] = f"<h2>Runs</h2>\n{heads}\n<h2>Versions</h2>\n{rows}"
        if len(newest) < catalog.versions_count:
            fields["tables"] += f"\n<p>The newest {len(newest)}; ckptstore ls lists all.</p>"
    return Template(_PAGE.read_text(encoding="utf-8")).substitute(fields)


def _table(titles: str, rows: Iterable[Iterable[str]]) -> str:
    found = HtmlTable(columns=titles.split("|"), rows=[list(row) for row in rows])
    return found.html(most=len(found.rows))


def _run(catalog: Catalog, info: RunInfo) -> Iterator[str]:
    yield info.name
    yield str(info.versions_count)
    values = []
    for metric, direction in info.metrics.items():
        winner = best(catalog.metric_values(info.name, metric), direction)
        if winner is not None:
            version = catalog.version(winner)
            values.append(f"{metric} {version.metrics[metric]:.6g} @{version.step}")
    yield ", ".join(values)
    yield ", ".join(info.tags)


def _version(version: Version) -> Iterator[str]:
    total = sum_roles(version.roles.values())
    yield f"{version.run}@{version.step}"
    yield version.id[:8]
    yield _time(version.created_at)
    yield ", ".join(f"{name} {value:.6g}" for name, value in version.metrics.items())
    yield _size(total.logical) if version.level != "record" else "record only"
    yield _size(total.stored)


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _time(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%d %H:%M")


def _size(size: int) -> str:
    return f"{size / limits.MIB:,.2f} MiB"
