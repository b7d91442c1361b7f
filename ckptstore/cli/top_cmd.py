"""``ckptstore top``: runs that save, throughput and replication lag, in a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from itertools import islice, pairwise
from operator import itemgetter
from statistics import median
from typing import Annotated, Any, Final

import typer

from ckptstore.backends.transfers import Transfers
from ckptstore.catalog.catalog import Catalog
from ckptstore.cli.output import Column, Screen
from ckptstore.cli.session import opened
from ckptstore.cli.store_options import CommonOptions
from ckptstore.cli.text import age_text, bytes_text, count_text, counted, seconds_text
from ckptstore.maintenance.reports.documents import name_document, role_document
from ckptstore.maintenance.reports.usage import replica_lags, sum_roles
from ckptstore.store import Store

_RUNS: Final = 10
_VERSIONS: Final = 10
_RHYTHM: Final = 17
"""Newest versions of a run whose intervals tell when the next one is due."""
_LATE: Final = 3
"""Intervals without a save after which a run is taken for over; a minute at least."""
_LATE_S: Final = 60.0


def top(
    *,
    once: bool = False,
    interval: Annotated[float, typer.Option(metavar="SECONDS", min=0.5)] = 2.0,
    options: CommonOptions,
) -> None:
    """Show runs that save, the last versions with throughput, and replicas; refresh until Ctrl-C.

    A save under way is in no catalog before its commit: runs are judged by their intervals.

    Parameters
    ----------
    once
        Print one frame and exit, as with --json, or where stdout is no terminal.
    interval
        Seconds between two frames.

    Examples
    --------
    ckptstore top
    ckptstore top --once
    """
    output = options.output("top")
    with opened(options) as opening:
        if once or options.json or not sys.stdout.isatty():
            frame = _frame(opening)
            output.show(frame, partial(_draw, frame=frame))
            return
        from rich.live import Live
        from rich.text import Text

        screen = Screen()
        with Live(console=screen.console, screen=True, auto_refresh=False) as live:
            try:
                while True:
                    with screen.console.capture() as drawn:
                        _draw(screen, _frame(opening))
                    live.update(Text.from_ansi(drawn.get()), refresh=True)
                    opening.repo.environment.sleep(interval)
            except KeyboardInterrupt:
                pass
    output.note("stopped; nothing was changed")


def _frame(store: Store) -> dict[str, Any]:
    """Return what is shown, as the document."""
    catalog = store.repo.refresh()
    now_s = store.repo.environment.now_ms() / 1000
    return {
        "store": store.url,
        "commits_count": catalog.number,
        "versions_count": catalog.versions_count,
        "runs": _runs(catalog, now_s),
        "versions": [
            {
                **name_document(version),
                "state": version.state,
                **role_document(sum_roles(version.roles.values())),
                "blocked_s": version.receipt.get("blocked_s", 0.0),
                "bytes_per_s": Transfers.of(version.receipt).bytes_per_s,
            }
            for version in islice(catalog.versions(newest_first=True), _VERSIONS)
        ],
        "replicas": [
            {
                "name": lag.replica.name,
                "missing": lag.missing_count,
                "missing_bytes": lag.missing_bytes,
                "behind_s": lag.oldest and now_s - lag.oldest.created_at.timestamp(),
            }
            for lag in replica_lags(catalog)
        ],
    }


def _runs(catalog: Catalog, now_s: float) -> list[dict[str, Any]]:
    """Return the runs that were saved last, with the usual time between two saves."""
    rows = []
    for info in catalog.runs():
        newest = list(islice(catalog.versions(info.name, newest_first=True), _RHYTHM))
        times = [version.created_at.timestamp() for version in newest]
        gaps = [after - before for after, before in pairwise(times)]
        if newest:
            age_s, interval_s = now_s - times[0], median(gaps) if gaps else None
            ages = {"age_s": age_s, "interval_s": interval_s, "state": _state(age_s, interval_s)}
            rows.append({**name_document(newest[0]), **ages})
    return sorted(rows, key=itemgetter("age_s"))[:_RUNS]


def _state(age_s: float, interval_s: float | None) -> str:
    """Return whether a run saves, by its own rhythm."""
    if interval_s is None:
        return "one version"
    if age_s > max(_LATE * interval_s, _LATE_S):
        return "no save for long"
    due = interval_s - age_s
    return f"saving, next in {age_text(due)}" if due > 0 else "saving, next is due"


def _draw(screen: Screen, frame: Mapping[str, Any]) -> None:
    counts = [counted(frame[f"{noun}s_count"], noun) for noun in ("version", "commit")]
    screen.heading(f"{frame['store']}: {', '.join(counts)}")
    screen.line()
    screen.listing(
        frame["runs"],
        Column("RUN", itemgetter("run")),
        _column("STEP", "step", count_text),
        _column("LAST SAVE", "age_s", lambda age: f"{age_text(age)} ago"),
        _column("EVERY", "interval_s", age_text),
        Column("STATE", itemgetter("state")),
    )
    screen.line()
    screen.listing(
        frame["versions"],
        Column("VERSION", lambda row: f"{row['run']}@{row['step']}"),
        Column("ID", lambda row: str(row["id"][:8]), wrap=False, drop=1),
        _column("SIZE", "logical_bytes", bytes_text),
        _column("STORED", "stored_bytes", bytes_text),
        _column("BLOCKED", "blocked_s", seconds_text),
        _column("WRITTEN AT", "bytes_per_s", lambda speed: f"{bytes_text(speed)}/s"),
        Column("STATE", itemgetter("state"), drop=2),
    )
    if frame["replicas"]:
        screen.line()
        screen.listing(
            frame["replicas"],
            Column("REPLICA", itemgetter("name")),
            _column("MISSING", "missing", count_text),
            _column("BYTES", "missing_bytes", bytes_text),
            _column("BEHIND", "behind_s", age_text),
        )


def _column(title: str, name: str, text: Callable[[Any], str]) -> Column:
    """Return a column of numbers; what is not known is a dash."""
    return Column(
        title, lambda row: "-" if row[name] is None else text(row[name]), right=True, wrap=False
    )
