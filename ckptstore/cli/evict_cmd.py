"""``ckptstore evict``: keep only the record of versions that a replica holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from ckptstore.cli.output import Screen
from ckptstore.cli.session import find_versions, opened
from ckptstore.cli.store_options import DryRun, Runs, TargetOptions, WriterOptions
from ckptstore.cli.text import bytes_text, counted, version_text
from ckptstore.errors import IntegrityError
from ckptstore.maintenance.reports.documents import name_document
from ckptstore.model import Version
from ckptstore.store import Store
from ckptstore.store.opening import open_target_of

if TYPE_CHECKING:
    from ckptstore.maintenance.replicas.evict import EvictReport

_Stays = list[tuple[Version, str]]


def evict(
    refs: Annotated[list[str] | None, typer.Argument(metavar="[REF]...")] = None,
    *,
    to: Annotated[str, typer.Option("--replica", metavar="NAME")],
    run: Runs = None,
    keep: Annotated[list[str] | None, typer.Option(metavar="RULES")] = None,
    dry_run: DryRun = False,
    no_pin: bool = False,
    target: TargetOptions,
    options: WriterOptions,
) -> None:
    """Reduce versions to their record if a replica holds them; loads then read the replica.

    Evicts only versions that the replica holds now, read back and checked; never tagged or pinned
    versions, nor the head of a run. An evicted version is pinned in the replica until it comes back
    or is deleted here. The next ckptstore gc frees the space. Exits with 5 if the replica dropped a
    version at the same moment and it could not be taken back.

    Parameters
    ----------
    refs
        Versions to evict; or use --run and --keep.
    to
        The replica that must hold them.
    dry_run
        Print what would be evicted; change nothing.
    no_pin
        Do not pin evicted versions in the replica: its own retention rules decide how long they
        stay.
    keep
        Of the selected runs, keep here the versions that these retention rules keep: 'last 5, best
        2 val_loss'. Repeatable.

    Examples
    --------
    ckptstore evict --replica cold --run gpt --keep 'last 3' --dry-run
    ckptstore evict gpt@1000 --replica cold
    """
    output = options.output("evict")
    with (
        opened(options, writing=not dry_run) as here,
        open_target_of(here, f"replica:{to}", dry_run=dry_run, **target.given()),
    ):
        named = find_versions(here, refs or ())
        report = here.evict(
            [f"#{version.id}" for version in named] or None,
            replica=to,
            runs=run or None,
            keep=keep or None,
            pin=not no_pin,
            dry_run=dry_run,
        )
        stays = _stays(here, named, report, to)
        document = {
            "store": here.url,
            "replica": to,
            "dry_run": dry_run,
            "evicted": [name_document(one) for one in report.evicted],
            "missed": report.missed,
            "returned": report.returned,
            "stays": [{**name_document(one), "why": why} for one, why in stays],
            "pinned": report.pinned,
            "unpinned": report.unpinned,
            "lost": [one.version for one in report.lost],
            "reclaimable_bytes": report.reclaimable_bytes,
        }
        output.show(document, lambda screen: _draw(screen, report, stays, to, dry_run=dry_run))
    if report.lost:
        raise typer.Exit(IntegrityError.exit_code)


def _stays(here: Store, named: Sequence[Version], report: EvictReport, name: str) -> _Stays:
    """Return the reasons why versions named by a REF stay, unless the report already has them."""
    told = {*report.missed, *report.returned, *(one.version for one in report.lost)}
    told |= {one.id for one in report.evicted}
    heads = {info.head for info in here.runs()}
    found = []
    for version in named:
        why = {
            "only its record is here already": version.level == "record",
            "the head of its run": version.id in heads,
            "pinned": version.pinned,
            f"tagged {', '.join(version.tags)}": bool(version.tags),
        }
        reasons = [text for text, holds in why.items() if holds]
        if version.id not in told:
            missing = f"not in {name}, read back: ckptstore replicate --to replica:{name}"
            found.append((version, next(iter(reasons), missing)))
    return found


def _draw(screen: Screen, report: EvictReport, stays: _Stays, name: str, *, dry_run: bool) -> None:
    count = counted(len(report.evicted), "version")
    freed = bytes_text(report.reclaimable_bytes)
    would = "would keep" if dry_run else "kept"
    screen.line(f"{would} only the record of {count}: {freed} for the next ckptstore gc")
    screen.lines(map(version_text, report.evicted))
    if report.pinned or report.unpinned:
        gone = f", {counted(len(report.unpinned), 'pin')} taken away" if report.unpinned else ""
        screen.line(f"{counted(len(report.pinned), 'version')} pinned in {name}{gone}")
    elif report.evicted and not dry_run:
        screen.line(f"none pinned in {name}: its own rules say how long it keeps them")
    for version, why in stays:
        screen.line(f"{version_text(version)} stays as it is: {why}")
    if report.missed:
        screen.line(f"{counted(len(report.missed), 'version')} not whole in {name}: stay here")
    if report.returned:
        screen.line(f"{counted(len(report.returned), 'version')} let go by {name} meanwhile: stay")
    for failure in report.lost:
        screen.line(f"{failure.run}@{failure.step}: {failure.message}", style="red")
