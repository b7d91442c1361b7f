"""``ckptstore log``: the commits, newest first; the audit trail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer

from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.history import history
from ckptstore.cli.documents import metrics_document, time_document
from ckptstore.cli.metric_history import draw_history, history_document
from ckptstore.cli.options import CommonOptions, Utc
from ckptstore.cli.output import Column, Output, Screen
from ckptstore.cli.session import opened
from ckptstore.cli.text import bytes_text, count_text, counted, metric_text, time_text, version_text
from ckptstore.errors import InvalidInputError
from ckptstore.format.commit import Annotate, Commit, CreateRun, Declare, Op, Save, Tag, Untag
from ckptstore.format.keys import PACKS_PREFIX
from ckptstore.format.lifecycle import (
    Condemn,
    Delete,
    Fork,
    Pin,
    Quarantine,
    Relocate,
    Rollback,
    SetPolicy,
    Swept,
    Undelete,
    Unpin,
    Verified,
)
from ckptstore.format.tiers import NameReplica, UnnameReplica
from ckptstore.store import Store

__all__ = ["log"]

_NAMED: Final = 5
"""Versions that one operation names."""
_ROWS: Final = 20
"""Commits shown unless ``--limit`` says otherwise."""


def log(
    run: Annotated[
        str | None, typer.Argument(metavar="RUN", help="Only commits that touch this run.")
    ] = None,
    *,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=0, metavar="N", help="The newest N; 0 for all.")
    ] = _ROWS,
    metric: Annotated[
        str | None,
        typer.Option("--metric", metavar="NAME", help="The history of this metric, not commits."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot", metavar="PATH", help="With --metric: draw it to a .svg, .png or .pdf file."
        ),
    ] = None,
    graph: Annotated[
        bool,
        typer.Option("--graph", help="The tree of versions, not commits: runs, forks, rollbacks."),
    ] = False,
    utc: Utc = False,
    options: CommonOptions,
) -> None:
    """Show who committed what and when, newest first; or a metric, or the tree of versions."""
    output = options.output("log")
    if metric and graph:
        msg = "--metric and --graph are two views: choose one"
        raise InvalidInputError(msg)
    if (metric and not run) or (plot and not metric):
        msg = "--metric wants a RUN, and --plot wants --metric"
        raise InvalidInputError(msg, hint="ckptstore log RUN --metric val_loss --plot val_loss.svg")
    with opened(options) as opening:
        if run is not None and metric is not None:
            _metric(output, opening, run, metric, limit=limit, plot=plot, utc=utc)
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
        if run is None and len(commits) < catalog.number and not options.json:
            shown = f"{count_text(len(commits))} of {counted(catalog.number, 'commit')}"
            output.note(f"{shown}; --limit 0 shows all")


def _metric(
    output: Output,
    store: Store,
    run: str,
    metric: str,
    *,
    limit: int,
    plot: Path | None,
    utc: bool,
) -> None:
    """Show the history of a metric, and draw it to a file if that is wanted."""
    found = history(store.repo.refresh(), run, metric)
    if plot is not None:
        from ckptstore.integrations.plots import plot_history

        plot_history(store, run, metric, plot)
    document = {**history_document(found), "plot": str(plot) if plot else None}
    output.show(document, lambda screen: draw_history(screen, found, limit=limit, utc=utc))
    if plot is not None:
        output.note(f"drawn to {plot}")


def _show_graph(store: Store, output: Output, run: str | None, limit: int, *, utc: bool) -> None:
    from ckptstore.cli.log_graph import graph_of

    tree = graph_of(store, run, limit, utc=utc)
    document = {"store": store.url, "graph": tree.document() if output.as_json else {}}
    output.show(document, tree.draw)
    total = tree.catalog.versions_count
    if run is None and len(tree.versions) < total and not output.as_json:
        shown = f"{count_text(len(tree.versions))} of {counted(total, 'version')}"
        output.note(f"{shown}; --limit 0 shows all")


def _newest(store: Store, catalog: Catalog, run: str | None, limit: int) -> list[Commit]:
    """Return commits, newest first; reads no more of the log's end than it needs."""
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
    """Return the runs that an operation names, itself or through versions."""
    ids = [getattr(op, "version", ""), *getattr(op, "versions", ())]
    runs = {catalog.version(version).run for version in ids if catalog.has_version(version)}
    return runs | {getattr(op, "run", "")}


def _name(op: Op) -> str:
    return str(op.__struct_config__.tag)


def _op_document(op: Op) -> dict[str, Any]:
    """Return an operation as the log holds it, its metrics as in every document."""
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
        "at": time_document(_moment(commit)),
        "by": commit.body.by,
        "digest": commit.digest,
        "previous": commit.body.previous or None,
        "ops": [_op_document(op) for op in commit.ops],
    }


def _moment(commit: Commit) -> datetime:
    return datetime.fromtimestamp(commit.body.at_ms / 1000, UTC)


def _draw(screen: Screen, catalog: Catalog, commits: Sequence[Commit], *, utc: bool) -> None:
    rows = []
    for commit in commits:
        for place, op in enumerate(commit.ops):
            head = (str(commit.number), time_text(_moment(commit), utc=utc), commit.body.by)
            what = _DESCRIBE[type(op)](op, catalog) if type(op) in _DESCRIBE else ""
            rows.append((*(head if place == 0 else ("", "", "")), _name(op), what))
    columns = (
        Column(title="COMMIT", right=True, wrap=False),
        Column(title="TIME", wrap=False),
        Column(title="BY", drop=1),
        Column(title="OPERATION", wrap=False),
        Column(title="WHAT"),
    )
    screen.table(columns, rows)


def _metrics(metrics: Any) -> str:  # noqa: ANN401 - a mapping of names to floats
    return ", ".join(f"{name} {metric_text(value)}" for name, value in metrics.items())


def _save(op: Save, _: Catalog) -> str:
    new = bytes_text(sum(part.stored for part in op.roles.values()))
    tags = "".join(f" +{tag}" for tag in op.tags)
    metrics = f", {_metrics(op.metrics)}" if op.metrics else ""
    return f"{op.run}@{op.step} {op.version[:8]}{tags}, {new} stored{metrics}"


def _annotate(op: Annotate, catalog: Catalog) -> str:
    return f"{_named(op.version, catalog)}: {_metrics(op.metrics)}"


def _directions(op: CreateRun | Declare, _: Catalog) -> str:
    known = ", ".join(f"{name}: {direction}" for name, direction in op.metrics.items())
    return f"{op.run} ({known})" if known else op.run


def _replica(op: NameReplica | UnnameReplica, _: Catalog) -> str:
    return (
        f"{op.name} is {op.url}, store {op.store[:8]}" if isinstance(op, NameReplica) else op.name
    )


def _because(reason: str) -> str:
    return f": {reason}" if reason else ""


def _one(op: Pin | Unpin | Relocate, catalog: Catalog) -> str:
    return _named(op.version, catalog)


def _relocate(op: Relocate, catalog: Catalog) -> str:
    kept = {"full": "lies elsewhere", "weights": "keeps its weights", "record": "keeps its record"}
    return f"{_one(op, catalog)} {kept[op.level]}" + (f" as {op.encoding}" if op.encoding else "")


def _versions(op: Verified | Quarantine | Delete | Undelete, catalog: Catalog) -> str:
    """Name the first few of the versions that an operation is about."""
    found = [catalog.version(v) for v in op.versions[:_NAMED] if catalog.has_version(v)]
    named = ", ".join(map(version_text, found))
    more = f" and {count_text(len(op.versions) - _NAMED)} more" if op.versions[_NAMED:] else ""
    return named + more


def _named(version_id: str, catalog: Catalog) -> str:
    if not catalog.has_version(version_id):
        return version_id[:8]
    return version_text(catalog.version(version_id))


def _objects(op: Condemn | Swept, _: Catalog) -> str:
    packs = sum(key.startswith(PACKS_PREFIX) for key in op.keys)
    counts = {"pack": packs, "manifest": len(op.keys) - packs}
    return ", ".join(counted(count, kind) for kind, count in counts.items() if count)


def _rollback(op: Rollback, catalog: Catalog) -> str:
    why = f": {op.reason}" if op.reason else ""
    return f"{op.run} to {_named(op.version, catalog)}{why}"


_DESCRIBE: Final[dict[type, Callable[[Any, Catalog], str]]] = {
    CreateRun: _directions,
    Declare: _directions,
    Save: _save,
    Annotate: _annotate,
    Tag: lambda op, _: f"{op.run}@{op.tag} is {op.version[:8]}",
    Untag: lambda op, _: f"{op.run}@{op.tag}",
    Fork: lambda op, catalog: f"{op.run} from {_named(op.source, catalog)}",
    Rollback: _rollback,
    Delete: lambda op, catalog: _versions(op, catalog) + _because(op.reason),
    Undelete: _versions,
    Pin: _one,
    Unpin: _one,
    SetPolicy: lambda op, _: f"{op.run or 'all runs'}: {bytes(op.policy).decode()}",
    Relocate: _relocate,
    Condemn: _objects,
    Swept: _objects,
    Verified: _versions,
    Quarantine: _versions,
    NameReplica: _replica,
    UnnameReplica: _replica,
}
"""What each operation did, in words; one that is missing here shows its name alone."""
