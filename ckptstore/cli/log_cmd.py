"""``ckptstore log``: the commits, newest first, as an audit trail."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Final

import msgspec
import typer

from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.commits import Commit
from ckptstore.catalog.history import history
from ckptstore.catalog.run_ops import Annotate, Save
from ckptstore.catalog.state import Op
from ckptstore.cli.log_text import describe
from ckptstore.cli.metric_history import draw_history, history_document
from ckptstore.cli.output import Column, Output, Screen
from ckptstore.cli.session import opened
from ckptstore.cli.store_options import CommonOptions, Utc
from ckptstore.cli.text import committed_at, time_text
from ckptstore.errors import InvalidInputError
from ckptstore.maintenance.reports.documents import metrics_document, time_document
from ckptstore.store import Store

_ROWS: Final = 20
"""Commits shown unless ``--limit`` says otherwise."""


def log(
    run: Annotated[str | None, typer.Argument(metavar="RUN")] = None,
    *,
    limit: Annotated[int, typer.Option("--limit", "-n", min=0, metavar="N")] = _ROWS,
    metric: Annotated[str | None, typer.Option(metavar="NAME")] = None,
    graph: bool = False,
    utc: Utc = False,
    options: CommonOptions,
) -> None:
    """Show the commits, newest first; or the history of a metric, or the tree of versions.

    Parameters
    ----------
    run
        Only commits that touch this run.
    limit
        Show the newest N; 0 for all.
    metric
        Show the history of this metric instead of commits.
    graph
        Show the tree of versions instead of commits: runs, forks, rollbacks.

    Examples
    --------
    ckptstore log gpt --graph
    ckptstore log gpt --metric val_loss
    """
    output = options.output("log")
    if metric and graph:
        raise InvalidInputError("--metric and --graph are two views: choose one")
    if metric and not run:
        raise InvalidInputError("--metric wants a RUN", hint="ckptstore log RUN --metric val_loss")
    with opened(options) as opening:
        if run is not None and metric is not None:
            found = history(opening.repo.refresh(), run, metric)
            drawn = partial(draw_history, found=found, limit=limit, utc=utc)
            output.show(history_document(found), drawn)
            return
        if graph:
            _show_graph(opening, output, run, limit, utc=utc)
            return
        catalog = opening.repo.refresh()
        if run is not None:
            catalog.run(run)
        commits = _newest(opening, catalog, run, limit)
        document = {
            "store": opening.url,
            "commits_count": catalog.number,
            "commits": [_commit_document(commit) for commit in commits],
        }
        output.show(document, lambda screen: _draw(screen, catalog, commits, utc=utc))
        shown = len(commits) if run is None else catalog.number
        output.note_rest(shown, catalog.number, "commit", lists="shows")


def _show_graph(store: Store, output: Output, run: str | None, limit: int, *, utc: bool) -> None:
    from ckptstore.cli.log_graph import graph_of

    tree = graph_of(store, run, limit, utc=utc)
    document = {"store": store.url, "graph": tree.document() if output.as_json else {}}
    output.show(document, tree.draw)
    total = tree.catalog.versions_count
    shown = len(tree.versions) if run is None else total
    output.note_rest(shown, total, "version", lists="shows")


def _newest(store: Store, catalog: Catalog, run: str | None, limit: int) -> list[Commit]:
    """Return commits, newest first; reads only the needed part of the log's end."""
    window = limit or catalog.number
    while True:
        first = max(1, catalog.number - window + 1)
        found = [c for c in store.log(first=first) if run is None or _touches(c, catalog, run)]
        if first == 1 or (limit and len(found) >= limit):
            return found[::-1][: limit or None]
        window *= 4


def _touches(commit: Commit, catalog: Catalog, run: str) -> bool:
    return any(run in _runs_of(op, catalog) for op in commit.ops)


def _runs_of(op: Op, catalog: Catalog) -> set[str]:
    """Return the runs that an operation names, directly or through versions."""
    ids = [getattr(op, "version", ""), *getattr(op, "versions", ())]
    runs = {catalog.version(version).run for version in ids if catalog.has_version(version)}
    return runs | {getattr(op, "run", "")}


def _name(op: Op) -> str:
    return str(op.__struct_config__.tag)


def _op_document(op: Op) -> dict[str, Any]:
    """Return an operation as in the log, with metrics formatted as in other documents."""
    document: dict[str, Any] = {"op": _name(op)}
    for name in op.__struct_fields__:
        value = getattr(op, name)
        if isinstance(value, msgspec.Raw):
            value = msgspec.json.decode(value)
        elif name == "metrics" and isinstance(op, Save | Annotate):
            value = metrics_document(value)
        document[name] = value
    return document


def _commit_document(commit: Commit) -> dict[str, Any]:
    return {
        "number": commit.number,
        "at": time_document(committed_at(commit)),
        "by": commit.body.by,
        "digest": commit.digest,
        "previous": commit.body.previous or None,
        "ops": [_op_document(op) for op in commit.ops],
    }


def _draw(screen: Screen, catalog: Catalog, commits: Sequence[Commit], *, utc: bool) -> None:
    rows = []
    for commit in commits:
        for place, op in enumerate(commit.ops):
            head = (str(commit.number), time_text(committed_at(commit), utc=utc), commit.body.by)
            cells = (_name(op), describe(op, catalog))
            rows.append((*(head if place == 0 else ("", "", "")), *cells))
    columns = (
        Column("COMMIT", right=True, wrap=False),
        Column("TIME", wrap=False),
        Column("BY", drop=1),
        Column("OPERATION", wrap=False),
        Column("WHAT"),
    )
    screen.table(columns, rows)
