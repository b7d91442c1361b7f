"""``ckptstore gc``: free the space of data that no version needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import typer

from ckptstore import limits
from ckptstore.catalog.retention_rules import duration_text
from ckptstore.cli.output import Column, Screen
from ckptstore.cli.progress import progress_bars
from ckptstore.cli.session import opened_to_write
from ckptstore.cli.store_options import DryRun, EngineOptions, WriterOptions
from ckptstore.cli.text import age_text, bytes_text, count_text, counted, parse_wait, seconds_text

if TYPE_CHECKING:
    from ckptstore.maintenance.collect.gc import GcReport, Kinds

_GRACE: Final = duration_text(int(limits.GC_GRACE_S))
_ORPHAN_AGE: Final = duration_text(int(limits.GC_ORPHAN_AGE_S))
_DROPPED: Final = {"YOUNG": 1, "NEEDED": 2, "LATER": 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class _SparingOptions:
    """Options that limit what a collection deletes.

    Parameters
    ----------
    grace
        Grace period: how long condemned objects stay for running readers; 0 for none.
    orphan_age
        Minimum age at which unreferenced objects are deleted; younger ones may be running uploads.
    repack_below
        Rewrite packs whose live share is smaller than this.
    no_repack
        Rewrite no packs.
    """

    grace: Annotated[str, typer.Option(metavar="TIME")] = _GRACE
    orphan_age: Annotated[str, typer.Option(metavar="TIME")] = _ORPHAN_AGE
    repack_below: Annotated[float, typer.Option(min=0.0, max=1.0, metavar="SHARE")] = (
        limits.GC_REPACK_BELOW
    )
    no_repack: bool = False


def gc(
    *,
    dry_run: DryRun = False,
    spared: _SparingOptions,
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
    force
        Collect even if commits seem to be missing from the log.
    """
    output = options.output("gc")
    grace_s, orphan_age_s = parse_wait(spared.grace), parse_wait(spared.orphan_age)
    with opened_to_write(options) as opening:
        with progress_bars(output) as progress:
            report = opening.gc(
                grace_s=grace_s,
                orphan_age_s=orphan_age_s,
                repack_below=None if spared.no_repack else spared.repack_below,
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
    titles = [
        Column(title, right=True, wrap=False, drop=_DROPPED.get(title, 0)) for title in columns
    ]
    screen.table([Column("OBJECTS", wrap=False), *titles], rows)
    screen.line()
    needed = f"{counted(report.versions_count, 'version')}, {bytes_text(report.logical_bytes)}"
    screen.line(f"{needed} in memory, {bytes_text(report.live_chunk_bytes)} of chunks")
    for line in _done(report):
        screen.line(line)
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
    if report.again_s:
        wait = seconds_text(report.again_s)
        lines.append(f"run ckptstore gc again {wait} later: it deletes what is condemned by then")
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
