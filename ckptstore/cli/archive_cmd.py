"""``ckptstore archive``: move packs to colder storage classes; or run an archival job."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from ckptstore.cli.archive_job import run_file
from ckptstore.cli.options import WriterOptions, dry_run
from ckptstore.cli.output import Output, Screen
from ckptstore.cli.progress import progress_bars
from ckptstore.cli.session import full_ref, opened_to_write
from ckptstore.cli.text import bytes_text, counted, seconds_text
from ckptstore.errors import InvalidInputError, PolicyError

if TYPE_CHECKING:
    from ckptstore.maintenance.cold.archive import ArchiveReport
    from ckptstore.maintenance.core.listing import Tally
    from ckptstore.store import Store

__all__ = ["archive"]

_LISTED = 10
"""Packs shown that stay or could not be moved; the document has all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _MoveOptions:
    """What is moved where."""

    storage_class: Annotated[
        str | None,
        typer.Option(
            "--class",
            metavar="NAME",
            help="The storage class: STANDARD_IA, GLACIER_IR, GLACIER, DEEP_ARCHIVE; of GCS "
            "NEARLINE, COLDLINE, ARCHIVE; STANDARD brings packs back.",
        ),
    ] = None
    run: Annotated[
        list[str] | None,
        typer.Option(
            "--run", metavar="RUN", help="All versions of this run, but its head. Repeatable."
        ),
    ] = None
    keep_hot: Annotated[
        list[str] | None,
        typer.Option(
            "--keep-hot",
            metavar="RULES",
            help="All versions but heads and those that these rules of a retention policy keep: "
            "'last 5, tagged'. Repeatable.",
        ),
    ] = None
    min_age: Annotated[
        str | None,
        typer.Option(
            "--min-age", metavar="TIME", help="Only what was saved so long ago, such as 30d."
        ),
    ] = None
    lifecycle: Annotated[
        bool,
        typer.Option(
            "--lifecycle",
            help="Move nothing: print a rule by which the bucket itself moves packs of --min-age.",
        ),
    ] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _JobOptions:
    """What a job goes by, and what becomes of its report."""

    since: Annotated[
        str | None,
        typer.Option(
            "--since",
            metavar="TIME",
            help="Of a job: only versions saved since then: 2026-03-01T12:00:00Z; or `last`: the "
            "last run that did all it should, as the file of --report says.",
        ),
    ] = None
    report_file: Annotated[
        Path | None,
        typer.Option(
            "--report", metavar="FILE", help="Of a job: also write the JSON document to this file."
        ),
    ] = None
    metrics: Annotated[
        Path | None,
        typer.Option(
            "--metrics",
            metavar="FILE",
            help="Of a job: write figures for Prometheus's node exporter to this .prom file.",
        ),
    ] = None


def archive(
    refs: Annotated[
        list[str] | None, typer.Argument(metavar="[REF]...", help="Versions to move.")
    ] = None,
    *,
    move: _MoveOptions,
    job: Annotated[
        Path | None,
        typer.Option("--job", metavar="FILE", help="Run the archival job of this TOML file."),
    ] = None,
    dry_run: Annotated[bool, dry_run("Say what would be done; change nothing.")] = False,
    reporting: _JobOptions,
    options: WriterOptions,
) -> None:
    """Move what only these versions need to a colder storage class; or run an archival job.

    Packs that another version needs stay where they are. Run it again to finish what was
    interrupted. A version in GLACIER or DEEP_ARCHIVE is listed as before, and loads after ckptstore
    thaw. Exits with 7 if a pack could not be moved.

    With --job: replicate, keep on either side what the file says, tell what is late. For cron,
    Slurm and Kubernetes; a run that was killed is finished by the next, and two at once do each
    other no harm. Exits with 0 if all was done, with the code of the first step that failed, or
    with 7 if a version is not replicated that should be by now.
    """
    output = options.output("archive")
    _check(refs, move, job, reporting)
    if job is not None:
        run_file(
            output,
            job,
            dry_run=dry_run,
            since=reporting.since,
            report_file=reporting.report_file,
            metrics=reporting.metrics,
        )
        return
    age_s = _seconds(move.min_age)
    with opened_to_write(options, writing=not (dry_run or move.lifecycle)) as opening:
        if move.lifecycle:
            _show_rule(output, opening, str(move.storage_class), age_s)
            return
        with progress_bars(output) as progress:
            report = opening.archive(
                [full_ref(opening, ref) for ref in refs] if refs else None,
                storage_class=str(move.storage_class),
                runs=move.run or None,
                keep_hot=move.keep_hot or None,
                min_age_s=age_s,
                dry_run=dry_run,
                progress=progress,
            )
        document = {"store": opening.url, "ok": report.ok, **msgspec.to_builtins(report)}
        names = {version.id: f"{version.run}@{version.step}" for version in opening.versions()}
        output.show(document, lambda screen: _draw(screen, report, names))
    if not report.ok:
        raise typer.Exit(PolicyError.exit_code)


def _check(
    refs: Sequence[str] | None, move: _MoveOptions, job: Path | None, reporting: _JobOptions
) -> None:
    """Refuse a command line that asks for nothing, or for two things."""
    msg = hint = ""
    chosen = any((refs, move.run, move.keep_hot, move.min_age))
    if job is not None:
        if chosen or move.storage_class or move.lifecycle:
            msg = "--job takes everything from its file"
            hint = "its table [archive] is for storage classes"
    elif reporting.since or reporting.report_file or reporting.metrics:
        msg, hint = "--since, --report and --metrics are of jobs", "give --job FILE"
    elif move.storage_class is None:
        msg, hint = "neither a storage class nor a job is given", "--class GLACIER, or --job FILE"
    elif not (chosen or move.lifecycle):
        msg, hint = "no version is named", "name REFs; or --run, --keep-hot, --min-age"
    if msg:
        raise InvalidInputError(msg, hint=hint)


def _seconds(text: str | None) -> float:
    from ckptstore.catalog.retention_rules import parse_duration

    return 0.0 if text is None else float(parse_duration(text))


def _show_rule(output: Output, store: Store, storage_class: str, age_s: float) -> None:
    """Print the rule alone, as the provider's own tool takes it."""
    from ckptstore.backends.storage_classes import check_class
    from ckptstore.maintenance.cold.archive import cold_storage_of

    cold = cold_storage_of(store.repo)
    rule = cold.lifecycle(check_class(storage_class), max(1, round(age_s / 86_400)))
    text = jsonlib.dumps(rule, indent=2)
    document = {"store": store.url, "lifecycle": rule}
    output.show(document, lambda screen: screen.lines(text.splitlines()))
    output.note(
        "the rule goes by the age of packs alone: it also moves those that versions need which"
        " should stay hot"
    )


def _draw(screen: Screen, report: ArchiveReport, names: dict[str, str]) -> None:
    moved = "would move" if report.dry_run else "moved"
    took = "" if report.dry_run else f"; {seconds_text(report.seconds)}"
    count = counted(len(report.versions), "version")
    what = _amount(report.moved) if report.moved.count else "nothing"
    screen.line(f"{moved} {what} to {report.storage_class}, of {count}{took}")
    if report.there.count:
        screen.line(f"{_amount(report.there)} there already")
    if report.left:
        size = sum(one.size_bytes for one in report.left)
        packs = counted(len(report.left), "pack")
        keepers = {version for one in report.left for version in one.versions}
        shown = sorted(names.get(version, version[:8]) for version in keepers)
        more = ", ..." if len(shown) > _LISTED else ""
        screen.line(
            f"{packs} of {bytes_text(size)} stay, since others need them:"
            f" {', '.join(shown[:_LISTED])}{more}"
        )
    for one in report.skipped[:_LISTED]:
        screen.line(f"not moved: pack {one.pack}: {one.why}", style="red")
    if len(report.skipped) > _LISTED:
        screen.line(f"... and {len(report.skipped) - _LISTED} more", style="red")
    for version in report.cooled:
        name = names.get(version, version[:8])
        screen.line(f"{name} appeared meanwhile, and needs a pack that was moved", style="red")
    for text in report.warnings:
        screen.line(f"note: {text}")


def _amount(tally: Tally) -> str:
    return f"{counted(tally.count, 'pack')} of {bytes_text(tally.size_bytes)}"
