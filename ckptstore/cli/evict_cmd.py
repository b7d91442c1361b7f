"""``ckptstore evict``: keep only the record of versions that a replica has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ckptstore.cli.options import Runs, TargetOptions, WriterOptions, dry_run
from ckptstore.cli.output import Screen
from ckptstore.cli.session import full_ref, opened_to_write
from ckptstore.cli.text import bytes_text, counted
from ckptstore.errors import IntegrityError
from ckptstore.store.replicating import open_target_of

if TYPE_CHECKING:
    from ckptstore.ops.evict import EvictReport

__all__ = ["evict"]


def evict(
    refs: Annotated[
        list[str] | None,
        typer.Argument(metavar="[REF]...", help="Versions; or give --run, --keep."),
    ] = None,
    *,
    to: Annotated[
        str,
        typer.Option("--replica", metavar="NAME", help="The replica that must have them."),
    ],
    run: Runs = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(
            "--keep",
            metavar="RULES",
            help="Of the runs, what a retention policy of these rules would keep stays: "
            "'last 5, best 2 val_loss'. Repeatable.",
        ),
    ] = None,
    dry_run: Annotated[bool, dry_run("Say what would go; change nothing.")] = False,
    no_pin: Annotated[
        bool,
        typer.Option(
            "--no-pin", help="Do not pin there what goes: the rules there say how long it is kept."
        ),
    ] = False,
    target: TargetOptions,
    options: WriterOptions,
) -> None:
    """Keep but the record of versions that a replica has; loads then read them there.

    Only of what the replica has now, read back, and is seen to hold; never of what is tagged or
    pinned, nor the head of a run. What goes is pinned there, until it comes back or is deleted
    here. The next ckptstore gc frees the space. Exits with 5 if the replica let a version go at the
    same moment and it could not be taken back.
    """
    output = options.output("evict")
    with (
        opened_to_write(options, writing=not dry_run) as here,
        open_target_of(here, f"replica:{to}", dry_run=dry_run, **target.given()),
    ):
        report = here.evict(
            [full_ref(here, ref) for ref in refs] if refs else None,
            replica=to,
            runs=run or None,
            keep=keep or None,
            pin=not no_pin,
            dry_run=dry_run,
        )
        document = {
            "store": here.url,
            "replica": to,
            "dry_run": dry_run,
            "evicted": [{"id": one.id, "run": one.run, "step": one.step} for one in report.evicted],
            "missed": list(report.missed),
            "returned": list(report.returned),
            "pinned": list(report.pinned),
            "unpinned": list(report.unpinned),
            "lost": [one.version for one in report.lost],
            "reclaimable_bytes": report.reclaimable_bytes,
        }
        output.show(document, lambda screen: _draw(screen, report, to, dry_run=dry_run))
    if report.lost:
        raise typer.Exit(IntegrityError.exit_code)


def _draw(screen: Screen, report: EvictReport, name: str, *, dry_run: bool) -> None:
    count = counted(len(report.evicted), "version")
    freed = bytes_text(report.reclaimable_bytes)
    would = "would keep" if dry_run else "kept"
    screen.line(f"{would} only the record of {count}: {freed} for the next ckptstore gc")
    for one in report.evicted:
        screen.line(f"{one.run}@{one.step} {one.id[:8]}")
    if report.pinned or report.unpinned:
        gone = f", {counted(len(report.unpinned), 'pin')} taken away" if report.unpinned else ""
        screen.line(f"{counted(len(report.pinned), 'version')} pinned in {name}{gone}")
    elif report.evicted and not dry_run:
        screen.line(f"none pinned in {name}: its own rules say how long it keeps them")
    if report.missed:
        screen.line(f"{counted(len(report.missed), 'version')} not whole in {name}: stay here")
    if report.returned:
        screen.line(f"{counted(len(report.returned), 'version')} let go by {name} meanwhile: stay")
    for failure in report.lost:
        screen.line(f"{failure.run}@{failure.step}: {failure.message}", style="red")
