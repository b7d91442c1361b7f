"""``ckptstore log``: the commits, newest first, as an audit trail."""

from __future__ import annotations

import json as jsonlib
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Final

import msgspec
import typer

from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.commits import Commit
from ckptstore.catalog.content_ops import Condemn, Quarantine, Relocate, SetAside, Swept, Verified
from ckptstore.catalog.lifecycle_ops import Delete, Fork, Pin, Rollback, SetPolicy, Undelete, Unpin
from ckptstore.catalog.metrics import History, Point, history
from ckptstore.catalog.replica_ops import NameReplica, Replicate, Replicated, UnnameReplica
from ckptstore.catalog.run_ops import Annotate, CreateRun, Declare, Measured, Save, Tag, Untag
from ckptstore.catalog.state import Op
from ckptstore.cli.output import Column, Output, Screen
from ckptstore.cli.session import opened
from ckptstore.cli.store_options import CommonOptions, Utc
from ckptstore.cli.text import committed_at, counted, listed, metric_text, time_text, version_text
from ckptstore.errors import CkptStoreError, InvalidInputError
from ckptstore.format.keys import PACKS_PREFIX
from ckptstore.maintenance.reports.documents import metrics_document, time_document
from ckptstore.shown import bytes_text, parts_text
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
        listing = [_commit_document(commit) for commit in commits]
        document = {"store": opening.url, "commits_count": catalog.number, "commits": listing}
        output.show(document, lambda screen: _draw(screen, catalog, commits, utc=utc))
        shown = len(commits) if run is None else catalog.number
        output.note_rest(shown, catalog.number, "commit", lists="shows")


def _show_graph(store: Store, output: Output, run: str | None, limit: int, *, utc: bool) -> None:
    from ckptstore.cli.log_graph import graph_of

    tree = graph_of(store, run, limit, utc=utc)
    output.show({"store": store.url, "graph": tree.document() if output.as_json else {}}, tree.draw)
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
    """Return whether an operation of a commit names a run, directly or through versions."""
    ids = [v for x in commit.ops for v in (getattr(x, "version", ""), *getattr(x, "versions", ()))]
    runs = {catalog.version(version).run for version in ids if catalog.has_version(version)}
    return run in runs or any(getattr(op, "run", "") == run for op in commit.ops)


def _name(op: Op) -> str:
    return str(op.__struct_config__.tag)


def _op_document(op: Op) -> dict[str, Any]:
    """Return an operation as in the log, with metrics formatted as in other documents."""
    document: dict[str, Any] = {"op": _name(op)}
    for name in op.__struct_fields__:
        value = getattr(op, name)
        if isinstance(value, msgspec.Raw):
            value = msgspec.json.decode(value)
        elif name == "metrics" and isinstance(op, Measured):
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


_NAMED: Final = 5
"""Versions that one operation names."""


def describe(op: Op, catalog: Catalog) -> str:
    """Return what an operation did; its name is shown beside it."""
    return _DESCRIBE[type(op)](op, catalog)


def _metrics(metrics: Any) -> str:  # noqa: ANN401 - a mapping of names to floats
    return ", ".join(f"{name} {metric_text(value)}" for name, value in metrics.items())


def _save(op: Save, _: Catalog) -> str:
    new = bytes_text(sum(part.stored for part in op.roles.values()))
    tags = "".join(f" +{tag}" for tag in op.tags)
    metrics = f", {_metrics(op.metrics)}" if op.metrics else ""
    return f"{op.run}@{op.step} {op.version[:8]}{tags}, {new} stored{metrics}"


def _annotate(op: Annotate, catalog: Catalog) -> str:
    told = [_metrics(op.metrics)] if op.metrics else []
    for name, value in jsonlib.loads(bytes(op.metadata)).items():
        if name == "resumed" and isinstance(value, dict):
            names = f": {listed(value.get('names', []), most=_NAMED)}" if value.get("names") else ""
            steps = value.get("steps")
            after = "after 1 step" if steps == 1 else f"after {steps} steps"
            at = after if steps else "in what was restored"
            told.append(f"resumed, {value.get('verdict')} {at}{names}")
        else:
            told.append(f"{name}: {value}" if name == "note" else name)
    return f"{_named(op.version, catalog)}: {', '.join(told)}"


def _directions(op: CreateRun | Declare, _: Catalog) -> str:
    known = ", ".join(f"{name}: {direction}" for name, direction in op.metrics.items())
    return f"{op.run} ({known})" if known else op.run


def _because(reason: str) -> str:
    return f": {reason}" if reason else ""


def _pin(op: Pin | Unpin, catalog: Catalog) -> str:
    whose = f" for {_store(op.store, catalog)}" if op.store else ""
    return _named(op.version, catalog) + whose


def _store(store: str, catalog: Catalog) -> str:
    """Return what another store is called here."""
    names = [name for name, one in catalog.replicas.items() if one.store == store]
    return names[0] if names else f"store {store[:8]}"


def _replicate(op: Replicate, catalog: Catalog) -> str:
    what = "" if op.level == "full" else f", its {op.level} alone"
    return f"{op.run}@{op.step} {op.version[:8]} from {_store(op.store, catalog)}{what}"


def _policy(op: SetPolicy, _: Catalog) -> str:
    found = msgspec.json.decode(op.policy, type=dict[str, Any])
    return f"{op.run or 'all runs'}: {_rules(found) if found else 'no policy'}"


def _rules(policy: dict[str, Any]) -> str:
    from ckptstore.catalog.policy import Policy  # reads forms, and needs NumPy

    try:
        return str(Policy.from_json(policy))
    except CkptStoreError:  # of a later version: shown as it is, since nothing is done by it here
        return jsonlib.dumps(policy)


def _relocate(op: Relocate, catalog: Catalog) -> str:
    kept = {"full": "lies elsewhere", "weights": "keeps its weights", "record": "keeps its record"}
    text = f"{_named(op.version, catalog)} {kept[op.level]}"
    text += f" as {op.encoding}" if op.encoding else ""
    return f"{text}; dropped {parts_text(op.dropped)}" if op.dropped else text


def _versions(op: Verified | Quarantine | Delete | Undelete | Replicated, catalog: Catalog) -> str:
    """Name the first few of the versions that an operation is about."""
    found = [catalog.version(v) for v in op.versions[:_NAMED] if catalog.has_version(v)]
    return listed([version_text(v) for v in found], most=_NAMED, count=len(op.versions))


def _named(version_id: str, catalog: Catalog) -> str:
    found = catalog.find(version_id)
    return version_id[:8] if found is None else version_text(found)


def _objects(op: Condemn | Swept, _: Catalog) -> str:
    packs = sum(key.startswith(PACKS_PREFIX) for key in op.keys)
    counts = {"pack": packs, "manifest": len(op.keys) - packs}
    return ", ".join(counted(count, kind) for kind, count in counts.items() if count)


_DESCRIBE: Final[dict[type, Callable[[Any, Catalog], str]]] = {
    CreateRun: _directions,
    Declare: _directions,
    Save: _save,
    Annotate: _annotate,
    Tag: lambda op, _: f"{op.run}@{op.tag} is {op.version[:8]}",
    Untag: lambda op, _: f"{op.run}@{op.tag}",
    Replicate: _replicate,
    Replicated: lambda op, catalog: f"{_store(op.store, catalog)} has {_versions(op, catalog)}",
    Fork: lambda op, catalog: f"{op.run} from {_named(op.source, catalog)}",
    Rollback: lambda op, catalog: f"{op.run} to {_named(op.version, catalog)}{_because(op.reason)}",
    Delete: lambda op, catalog: _versions(op, catalog) + _because(op.reason),
    Undelete: _versions,
    Pin: _pin,
    Unpin: _pin,
    SetPolicy: _policy,
    Relocate: _relocate,
    SetAside: lambda op, _: f"the records after commit {op.follows}{_because(op.reason)}",
    Condemn: _objects,
    Swept: _objects,
    Verified: _versions,
    Quarantine: _versions,
    NameReplica: lambda op, _: f"{op.name} is {op.url}, store {op.store[:8]}",
    UnnameReplica: lambda op, _: op.name,
}
"""Type of an operation to the function that describes it."""


_BLOCKS: Final = "▁▂▃▄▅▆▇█"
_ASCII: Final = "_.-=+*#"
_WIDTH_MAX: Final = 72
_OF_VERSION: Final = ("id", "step", "level", "abandoned", "deleted", "tags")


def sparkline(values: Sequence[float], *, width: int = _WIDTH_MAX, blocks: str = _BLOCKS) -> str:
    """Return values as a line of blocks from the least to the greatest, at most `width` long.

    Where there are more values than blocks, a block stands for the mean of a few that follow each
    other. What has no number among them is ``!``.
    """
    from ckptstore.pages.run_documents import means  # takes NumPy with it

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
    return " ".join([*["latest"] * (point.version.id == found.head), *point.version.tags])
