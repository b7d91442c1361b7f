"""``ckptstore replicate`` and ``ckptstore evict``: copy versions, and rely on the copies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from ckptstore.cli.output import Screen
from ckptstore.cli.session import find_versions, opened, vouching
from ckptstore.cli.store_options import DryRun, EngineOptions, Runs, TargetOptions, WriterOptions
from ckptstore.cli.text import bytes_text, counted, parse_bytes, seconds_text, version_text
from ckptstore.errors import IntegrityError
from ckptstore.maintenance.core.select_versions import select_versions
from ckptstore.maintenance.reports.documents import name_document
from ckptstore.model import Version
from ckptstore.store import Store
from ckptstore.store.opening import open_target_of

if TYPE_CHECKING:
    from ckptstore.maintenance.replicas.evict import EvictReport
    from ckptstore.maintenance.replicas.replicate import ReplicateReport


def replicate(
    refs: Annotated[list[str] | None, typer.Argument(metavar="[REF]...")] = None,
    *,
    to: Annotated[str, typer.Option(metavar="URL")],
    run: Runs = None,
    keep: Annotated[list[str] | None, typer.Option(metavar="RULES")] = None,
    dry_run: DryRun = False,
    no_check: bool = False,
    limit_rate: Annotated[str | None, typer.Option(metavar="SIZE")] = None,
    again: bool = False,
    engine: EngineOptions,
    target: TargetOptions,
    options: WriterOptions,
) -> None:
    """Copy versions to another store, with the same ids, metrics, tags and lineage.

    Copies only chunks that the other store lacks, and reads each one back there. Run it again to
    finish an interrupted run or to copy new versions. Nothing is deleted in either store. Exits
    with 5 if a version is damaged and was not copied, or with 8 if a version must be thawed first;
    all other versions are copied.

    Parameters
    ----------
    refs
        Versions to copy. Default: the whole store.
    dry_run
        Print what would be copied; change nothing.
    to
        The other store, created if missing; or replica:NAME.
    keep
        Of the selected runs, only versions that these retention rules keep: 'tagged, best 2
        val_loss'. Repeatable.
    no_check
        Do not read copies back; the versions then do not count as replicated.
    limit_rate
        Limit of the transfer, in bytes per second for both directions together: 50MiB.
    again
        Also copy versions that the other store has deleted or reduced; versions named by a REF are
        always copied.

    Examples
    --------
    ckptstore replicate --to s3://archive/ckpts --run gpt
    ckptstore replicate gpt@best:val_loss --to replica:cold
    """
    output = options.output("replicate")
    rate = 0.0 if limit_rate is None else float(parse_bytes(limit_rate))
    # What is noted in the source is worth less than the copy: a source may be read-only.
    with ExitStack() as stack:
        source = stack.enter_context(opened(options, writing=not dry_run))
        named = find_versions(source, refs or ())
        # Runs and rules that name nothing are refused before a store is made for them.
        select_versions(source.repo, runs=run or (), rules=keep or None)
        stack.enter_context(vouching())
        given = {"single_writer": options.single_writer, **target.given()}
        other = stack.enter_context(open_target_of(source, to, dry_run=dry_run, **given))
        with output.progress() as progress:
            report = source.replicate(
                other,
                [f"#{version.id}" for version in named] or None,
                runs=run or None,
                keep=keep or None,
                check=not no_check,
                bytes_per_s=rate,
                again=True if again else None,
                dry_run=dry_run,
                executor=engine.engine,
                workers=engine.workers,
                progress=progress,
            )
        document = {"store": source.url, **msgspec.to_builtins(report), "target": to}
        output.show(document, lambda screen: _draw(screen, report, named, to))
    if report.exit_code:
        raise typer.Exit(report.exit_code)


def _draw(screen: Screen, report: ReplicateReport, named: Sequence[Version], to: str) -> None:
    count = counted(len(report.copied), "version")
    sizes = f"{bytes_text(report.logical_bytes)} in memory, {bytes_text(report.chunk_bytes)}"
    chunks = counted(report.chunks_count, "chunk")
    if report.dry_run:
        screen.line(f"would copy {count} to {to}: {sizes} in {chunks} would travel")
    else:
        took = seconds_text(report.seconds)
        read_back = ", read back" if report.checked and report.copied else ""
        screen.line(f"copied {count} to {to}: {sizes} in {chunks}{read_back}; {took}")
    if report.resumed_bytes:
        screen.line(f"{bytes_text(report.resumed_bytes)} were there from an interrupted copy")
    if report.present:
        screen.line(f"{counted(len(report.present), 'version')} there already")
    if report.records_count:
        screen.line(f"{counted(report.records_count, 'ancestor')} came as a record")
    for version in named:
        if version.level == "record":
            screen.line(f"{version_text(version)} stays: only its record is here")
    for why, many in Counter(one.why for one in report.left).items():
        hint = "" if why == "deleted in the source" else "; --again brings it back"
        screen.line(f"{counted(many, 'version')} left out: {why}{hint}")
    for run in report.heads_kept:
        screen.line(f"the head of {run} stays where {to} has put it: it went on, or rolled back")
    if report.metrics_left_count:
        left = counted(report.metrics_left_count, "value")
        screen.line(f"{left} of metrics left out: as many as a version may have are there")
    for failure in report.failures:
        name = f"{failure.run}@{failure.step} {failure.version[:8]}"
        screen.line(f"not copied: {name}: {failure.message}", style="red")
    if report.note_failure:
        screen.line(f"not noted in {report.source}: {report.note_failure}")


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
        output.show(
            document, lambda screen: _draw_eviction(screen, report, stays, to, dry_run=dry_run)
        )
    if report.lost or report.missed:
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


def _draw_eviction(
    screen: Screen, report: EvictReport, stays: _Stays, name: str, *, dry_run: bool
) -> None:
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
