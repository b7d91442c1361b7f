"""``ckptstore stats``: key figures of a store."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from ckptstore.backends.transfers import Transfers
from ckptstore.cli.du_cmd import draw_shares, shares_document
from ckptstore.cli.output import Column, Output, Screen
from ckptstore.cli.session import opened
from ckptstore.cli.store_options import CommonOptions
from ckptstore.cli.text import bytes_text, count_text, counted, receipt_text
from ckptstore.errors import InvalidInputError
from ckptstore.maintenance.reports.documents import name_document, objects_document, role_document
from ckptstore.maintenance.reports.usage import StoreStats
from ckptstore.store import Store

if TYPE_CHECKING:
    from ckptstore.maintenance.reports.sharing import SharedUsage


def stats(
    *,
    prometheus: bool = False,
    transfers: bool = False,
    run: Annotated[str | None, typer.Option(metavar="RUN")] = None,
    options: CommonOptions,
) -> None:
    """Show key figures of a store: versions, distinct chunks, sharing, objects and space.

    Reads the manifest of every version and lists every object; with --prometheus or --transfers it
    reads only the catalog.

    Parameters
    ----------
    prometheus
        Print metrics of runs and their last saves for Prometheus.
    transfers
        Show what the last saves wrote: bytes, throughput, requests at once and retries.
    run
        With --transfers: only this run.

    Examples
    --------
    ckptstore stats
    ckptstore stats --transfers --run gpt
    """
    output = options.output("stats")
    if (prometheus and transfers) or (run is not None and not transfers):
        msg = "only one of --prometheus and --transfers; --run needs --transfers"
        raise InvalidInputError(msg, hint="ckptstore stats --transfers --run gpt")
    with opened(options) as opening:
        if prometheus:
            _show_exposition(opening, output)
            return
        if transfers:
            _show_transfers(opening, output, run)
            return
        with output.progress() as progress:
            shared = opening.sharing(progress=progress)
        totals = opening.stats()
        url = opening.url
        catalog = opening.repo.catalog
        deleted = sum(1 for _ in catalog.versions(deleted=True))
        condemned = len(catalog.condemned)
    document = {"store": url, **_document(totals, shared, deleted, condemned)}
    output.show(document, lambda screen: _draw(screen, totals, shared, deleted, condemned))
    for reason in shared.skipped:
        output.note(f"left out of what is live: {reason}")


def _show_exposition(store: Store, output: Output) -> None:
    from ckptstore.maintenance.reports.prometheus_text import exposition

    text = exposition(store.repo.refresh())
    document = {"store": store.url, "prometheus": text}
    output.show(document, lambda screen: screen.lines(text.splitlines()))


def _show_transfers(store: Store, output: Output, run: str | None) -> None:
    """Print what the last saves wrote, as their receipts say."""
    saves = store.versions(run)[-_SAVES_MAX:]
    rows = [{**name_document(save), **Transfers.of(save.receipt).document()} for save in saves]
    version = Column("VERSION", lambda row: f"{row['run']}@{row['step']}")
    columns = [Column(title, partial(_cell, name), right=True) for title, name in _COLUMNS.items()]
    document = {"store": store.url, "saves": rows}
    output.show(document, lambda screen: screen.listing(rows, version, *columns))


def _cell(name: str, row: Mapping[str, Any]) -> str:
    """Return a figure in the unit of its name; a dash for saves whose receipt has none."""
    return receipt_text(name, row[name]) if row["requests_count"] else "-"


_SAVES_MAX: Final = 20
"""Saves that --transfers shows."""
_COLUMNS: Final = {
    "WROTE": "requests_bytes",
    "TIME": "requests_s",
    "SPEED": "bytes_per_s",
    "REQUESTS": "requests_count",
    "AT ONCE": "at_once_count",
    "LIMIT": "limit_count",
    "RETRIES": "retries_count",
    "REFUSED": "refused_count",
}
"""Columns of --transfers."""


def _document(
    totals: StoreStats, shared: SharedUsage, deleted: int, condemned: int
) -> dict[str, Any]:
    packs = totals.objects.get("packs")
    return {
        "runs_count": totals.runs_count,
        "versions_count": totals.versions_count,
        "deleted_count": deleted,
        "commits_count": totals.commits_count,
        **role_document(totals.total),
        "chunks_count": shared.chunks_count,
        "live_bytes": shared.stored_bytes,
        "live_raw_bytes": shared.raw_bytes,
        "dead_bytes": None if packs is None else max(0, packs.size_bytes - shared.stored_bytes),
        "condemned_count": condemned,
        "size_bytes": totals.size_bytes if totals.objects else None,
        "roles": {
            role: {**role_document(part), "live_bytes": shared.roles.get(role, 0)}
            for role, part in totals.roles.items()
        },
        "shares": shares_document(shared.shares),
        "skipped": shared.skipped,
        "objects": objects_document(totals.objects),
    }


def _draw(
    screen: Screen, totals: StoreStats, shared: SharedUsage, deleted: int, condemned: int
) -> None:
    live, packs, size = shared.stored_bytes, totals.objects.get("packs"), "not listed here"
    dead = size if packs is None else f"{bytes_text(max(0, packs.size_bytes - live))} in packs"
    ratio = f"{totals.total.logical / live:.2f} bytes of state for each byte" if live else "-"
    versions = count_text(totals.versions_count)
    chunks = counted(shared.chunks_count, "chunk")
    screen.fields(
        {
            "runs": count_text(totals.runs_count),
            "versions": f"{versions} ({count_text(deleted)} deleted)" if deleted else versions,
            "commits": count_text(totals.commits_count),
            "state": f"{bytes_text(totals.total.logical)} if every version were loaded",
            "distinct": f"{bytes_text(shared.raw_bytes)} in {chunks}",
            "live": f"{bytes_text(live)} stored: {ratio}",
            "dead": f"{dead}, {counted(condemned, 'object')} condemned",
            "objects": bytes_text(totals.size_bytes) if totals.objects else size,
        }
    )
    screen.line()
    screen.listing(
        sorted(totals.roles.items()),
        Column("ROLE", lambda item: item[0]),
        Column("STATE", lambda item: bytes_text(item[1].logical), right=True),
        Column("LIVE", lambda item: bytes_text(shared.roles.get(item[0], 0)), right=True),
    )
    draw_shares(screen, shared.shares)
