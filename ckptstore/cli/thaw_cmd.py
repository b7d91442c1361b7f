"""``ckptstore thaw``: make a version in an archive class readable."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from ckptstore import limits
from ckptstore.cli.output import Screen
from ckptstore.cli.session import find_version, opened
from ckptstore.cli.store_options import CommonOptions, DryRun, PathOptions
from ckptstore.cli.text import packs_text, seconds_text, time_text, version_text
from ckptstore.model import Version

if TYPE_CHECKING:
    from ckptstore.maintenance.cold.thaw import ThawReport


def thaw(
    ref: Annotated[str, typer.Argument(metavar="REF")],
    *,
    role: Annotated[list[str] | None, typer.Option(metavar="ROLE")] = None,
    paths: PathOptions,
    wait: bool = False,
    days: Annotated[int, typer.Option(metavar="N")] = limits.THAW_DAYS,
    tier: Annotated[str, typer.Option(metavar="NAME")] = "Standard",
    poll: Annotated[str | None, typer.Option(metavar="TIME")] = None,
    dry_run: DryRun = False,
    options: CommonOptions,
) -> None:
    """Request the restore of a version from an archive class, and show its progress.

    Restores only packs that hold the selected tensors. Nothing is requested twice: run it again to
    see the progress, or, with --wait, to continue waiting. Exits with 0 whether or not the version
    can be read yet.

    Parameters
    ----------
    ref
        The version.
    role
        Only tensors of this role, for example weights. Repeatable.
    wait
        Wait until everything can be read: minutes to days.
    days
        How long the version stays readable. Azure moves it back for good.
    tier
        Speed and price of the restore: Expedited, Standard or Bulk, if the storage class offers it;
        Standard or High on Azure.
    poll
        With --wait: time between checks. Default: chosen by the expected duration.
    dry_run
        Print what is cold; request nothing.

    Examples
    --------
    ckptstore thaw gpt@1200 --role weights
    ckptstore thaw gpt@1200 --wait --tier Bulk
    """
    from ckptstore.catalog.retention_rules import parse_duration

    output = options.output("thaw")
    poll_s = None if poll is None else float(parse_duration(poll))
    with opened(options) as opening, output.progress() as progress:
        version = find_version(opening, ref)
        report = opening.thaw(
            f"#{version.id}",
            roles=role or None,
            include=paths.include or None,
            exclude=paths.exclude or None,
            wait=wait,
            days=days,
            tier=tier,
            poll_s=poll_s,
            dry_run=dry_run,
            progress=progress,
        )
    document = {"store": opening.url, "ready": report.ready, **msgspec.to_builtins(report)}
    output.show(document, lambda screen: _draw(screen, version, report))


def _draw(screen: Screen, version: Version, report: ThawReport) -> None:
    name = version_text(version)
    if report.requested.count:
        asked = "would ask" if report.dry_run else "asked"
        readable = "good" if report.for_good else f"{report.days} days"
        screen.line(f"{asked} for {packs_text(report.requested)}, readable for {readable}")
    if report.ready:
        until = ""
        if report.restored_until is not None:
            moment = datetime.fromtimestamp(report.restored_until, UTC)
            until = f" until {time_text(moment, utc=False)}"
        screen.line(f"{name} can be loaded{until}: {packs_text(report.packs)}", "green")
        return
    if report.readable.count:
        screen.line(f"{packs_text(report.readable)} can be read")
    if report.restoring.count:
        screen.line(f"{packs_text(report.restoring)} on the way")
    if report.expected_s is not None:
        low, high = map(seconds_text, report.expected_s)
        screen.line(f"tier {report.tier} usually takes {low} to {high}")
    if not report.dry_run:
        screen.line(f"{name} cannot be loaded yet; look again, or add --wait")
