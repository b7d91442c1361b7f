"""``ckptstore stats``: key figures of a store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptstore.cli.documents import objects_document, role_document
from ckptstore.cli.du_shared import draw_shares, shares_document
from ckptstore.cli.output import Column, Output, Screen
from ckptstore.cli.progress import progress_bars
from ckptstore.cli.session import opened
from ckptstore.cli.store_options import CommonOptions
from ckptstore.cli.text import bytes_text, count_text, counted
from ckptstore.errors import InvalidInputError
from ckptstore.store import Store

if TYPE_CHECKING:
    from ckptstore.maintenance.reports.sharing import SharedUsage
    from ckptstore.maintenance.reports.usage import StoreStats


def stats(
    *,
    prometheus: bool = False,
    plot: Annotated[Path | None, typer.Option(metavar="PATH")] = None,
    run: Annotated[str | None, typer.Option(metavar="RUN")] = None,
    options: CommonOptions,
) -> None:
    """Show key figures of a store: versions, distinct chunks, sharing, objects and space.

    Reads the manifest of every version and lists every object; with --prometheus or --plot it reads
    only the catalog.

    Parameters
    ----------
    prometheus
        Print metrics of runs and their last saves for Prometheus.
    plot
        Plot times and sizes of the last saves to a .svg, .png or .pdf file.
    run
        With --plot: only this run.
    """
    output = options.output("stats")
    if (prometheus and plot is not None) or (run is not None and plot is None):
        msg = "--prometheus and --plot are two views, and --run wants --plot"
        raise InvalidInputError(msg, hint="ckptstore stats --plot saves.svg --run gpt")
    with opened(options) as opening:
        if prometheus:
            _show_exposition(opening, output)
            return
        if plot is not None:
            from ckptstore.integrations.receipt_plots import plot_receipts

            plot_receipts(opening, plot, run=run)
            document = {"store": opening.url, "plot": str(plot)}
            output.show(document, lambda screen: screen.line(f"drawn to {plot}"))
            return
        with progress_bars(output) as progress:
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


def _document(
    totals: StoreStats, shared: SharedUsage, deleted: int, condemned: int
) -> dict[str, Any]:
    packs = totals.objects["packs"].size_bytes
    return {
        "runs_count": totals.runs_count,
        "versions_count": totals.versions_count,
        "deleted_count": deleted,
        "commits_count": totals.commits_count,
        **role_document(totals.total),
        "chunks_count": shared.chunks_count,
        "live_bytes": shared.stored_bytes,
        "live_raw_bytes": shared.raw_bytes,
        "dead_bytes": max(0, packs - shared.stored_bytes),
        "condemned_count": condemned,
        "size_bytes": totals.size_bytes,
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
    packs = totals.objects["packs"].size_bytes
    dead = max(0, packs - shared.stored_bytes)
    live = shared.stored_bytes
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
            "dead": f"{bytes_text(dead)} in packs, {counted(condemned, 'object')} condemned",
            "objects": bytes_text(totals.size_bytes),
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
