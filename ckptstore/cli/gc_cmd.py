"""``ckptstore gc``: free the space of data that no version needs."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import typer

from ckptstore import limits
from ckptstore.catalog.retention_rules import duration_text
from ckptstore.cli.output import Column, Screen
from ckptstore.cli.session import opened
from ckptstore.cli.store_options import DryRun, EngineOptions, WriterOptions
from ckptstore.cli.text import age_text, counted, parse_wait, seconds_text, time_text
from ckptstore.config import SYSTEM
from ckptstore.shown import bytes_text, count_text

if TYPE_CHECKING:
    from ckptstore.maintenance.collect.gc import GcReport, Kinds

_GRACE: Final = duration_text(int(limits.GC_GRACE_S))
_ORPHAN_AGE: Final = duration_text(int(limits.GC_ORPHAN_AGE_S))
_REPACK_BELOW: Final = limits.GC_REPACK_BELOW
_DROPPED: Final = {"YOUNG": 1, "NEEDED": 2, "LATER": 3}


def gc(
    *,
    dry_run: DryRun = False,
    grace: Annotated[str, typer.Option(metavar="TIME")] = _GRACE,
    orphan_age: Annotated[str, typer.Option(metavar="TIME")] = _ORPHAN_AGE,
    repack_below: Annotated[float, typer.Option(min=0.0, max=1.0, metavar="SHARE")] = _REPACK_BELOW,
    no_repack: bool = False,
    force: bool = False,
    engine: EngineOptions,
    options: WriterOptions,
) -> None:
    """Free the space of data that no version needs: condemn it now, delete it after a grace period.

    Safe while others save, read or collect; the next run continues an interrupted one. NOW is the
    space that this run frees, LATER the space that a run after the grace period frees, and YOUNG
    the space of unreferenced objects that may belong to a running upload.

    Parameters
    ----------
    dry_run
        Print what would be freed; change nothing.
    grace
        Grace period: how long condemned objects stay for running readers; 0 for none.
    orphan_age
        Minimum age at which unreferenced objects are deleted; younger ones may be running uploads.
    repack_below
        Rewrite packs whose live share is smaller than this.
    no_repack
        Rewrite no packs.
    force
        Collect even if commits seem to be missing from the log.

    Examples
    --------
    ckptstore gc --dry-run
    ckptstore gc --grace 0 --no-repack
    """
    output = options.output("gc")
    grace_s, orphan_age_s = parse_wait(grace), parse_wait(orphan_age)
    with opened(options, writing=True) as opening, output.progress() as progress:
        report = opening.gc(
            grace_s=grace_s,
            orphan_age_s=orphan_age_s,
            repack_below=None if no_repack else repack_below,
            dry_run=dry_run,
            force=force,
            executor=engine.engine,
            workers=engine.workers,
            progress=progress,
        )
    document = {"store": opening.url, **msgspec.to_builtins(report)}
    output.show(document, lambda screen: _draw(screen, report))


def _draw(screen: Screen, report: GcReport) -> None:
    columns = {
        "STORED": report.stored,
        "NEEDED": report.live,
        "NOW": report.reclaimable_now,
        "LATER": report.reclaimable_later,
        "YOUNG": report.young,
    }
    rows = [(kind, *(_cell(kinds, kind) for kinds in columns.values())) for kind in report.stored]
    titles = [Column(name, right=True, wrap=False, drop=_DROPPED.get(name, 0)) for name in columns]
    screen.table([Column("OBJECTS", wrap=False), *titles], rows)
    screen.line()
    needed = f"{counted(report.versions_count, 'version')}, {bytes_text(report.logical_bytes)}"
    screen.line(f"{needed} in memory, {bytes_text(report.live_chunk_bytes)} of chunks")
    screen.lines(_done(report))
    if report.orphan_age_s_max:
        screen.line(f"oldest object without a version: {age_text(report.orphan_age_s_max)}")
    for skipped in report.repacked.skipped:
        screen.line(skipped, "yellow")
    if not report.dry_run:
        screen.line(f"done in {seconds_text(report.seconds)}", "green")


def _done(report: GcReport) -> list[str]:
    would = "would be " if report.dry_run else ""
    lines = [f"{_all(report.condemned)} {would}condemned", f"{_all(report.swept)} {would}deleted"]
    packs = report.repacked
    if packs.packs_count:
        lines.append(
            f"{counted(packs.packs_count, 'pack')} {would}written anew: "
            f"{bytes_text(packs.copied_bytes)} copied, {bytes_text(packs.freed_bytes)} of "
            "dead chunks freed with them"
        )
    merged = report.rebased
    if merged.pieces_count:
        lines.append(
            f"{counted(merged.pieces_count, 'delta')} {would}stored whole, since nothing else "
            f"needs their bases: {bytes_text(merged.written_bytes)} in place of "
            f"{bytes_text(merged.dead_bytes)}"
        )
    if report.dry_run:
        lines.append("nothing was changed: ckptstore gc without --dry-run does this")
    if report.again_s:
        when = f"{seconds_text(report.again_s)} later"
        due = datetime.fromtimestamp(SYSTEM.now_ms() / 1000 + report.again_s, UTC)
        when += "" if report.dry_run else f", at {time_text(due, utc=False)} or after"
        lines.append(f"run ckptstore gc again {when}: it deletes what is condemned by then")
    elif not report.dry_run:
        lines.append("nothing is left for a second run")
    left = report.leftovers
    if left.count:
        what = f"{counted(left.count, 'temporary file')}, {bytes_text(left.size_bytes)},"
        lines.append(f"{what} {would}removed")
    return lines


def _cell(kinds: Kinds, kind: str) -> str:
    tally = kinds[kind]
    return f"{bytes_text(tally.size_bytes)} ({count_text(tally.count)})" if tally.count else "-"


def _all(kinds: Kinds) -> str:
    count = sum(tally.count for tally in kinds.values())
    size = sum(tally.size_bytes for tally in kinds.values())
    return f"{counted(count, 'object')}, {bytes_text(size)},"
