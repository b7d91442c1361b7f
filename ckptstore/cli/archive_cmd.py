"""``ckptstore archive``: move packs to a colder storage class, or run an archival job."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from ckptstore.catalog.retention_rules import parse_duration
from ckptstore.cli.archive_job import JobOptions, run_file
from ckptstore.cli.output import Screen
from ckptstore.cli.session import full_ref, opened
from ckptstore.cli.store_options import DryRun, WriterOptions
from ckptstore.cli.text import bytes_text, counted, packs_text, seconds_text
from ckptstore.errors import InvalidInputError, PolicyError

if TYPE_CHECKING:
    from ckptstore.maintenance.cold.archive import ArchiveReport

_LISTED = 10
"""Packs shown that stay or could not be moved; the document has all."""


def archive(
    refs: Annotated[list[str] | None, typer.Argument(metavar="[REF]...")] = None,
    *,
    storage_class: Annotated[str | None, typer.Option("--class", metavar="NAME")] = None,
    run: Annotated[list[str] | None, typer.Option(metavar="RUN")] = None,
    keep_hot: Annotated[list[str] | None, typer.Option(metavar="RULES")] = None,
    min_age: Annotated[str | None, typer.Option(metavar="TIME")] = None,
    job: Annotated[Path | None, typer.Option(metavar="FILE")] = None,
    dry_run: DryRun = False,
    reporting: JobOptions,
    options: WriterOptions,
) -> None:
    """Move data that only these versions need to a colder storage class, or run an archival job.

    Packs that another version needs stay in place. To finish an interrupted run, run the command
    again. A version in GLACIER or DEEP_ARCHIVE stays listed, and loads after ckptstore thaw.
    Exits with 7 if a pack could not be moved.

    With --job: replicate versions, apply the retention of both stores and report late versions, as
    the job file says. For cron, Slurm and Kubernetes: the next run finishes a killed one, and two
    runs at once do no harm. Exits with 0 if everything was done, with the exit code of the first
    step that failed, or with 7 if a version is late.

    Parameters
    ----------
    refs
        Versions to move.
    storage_class
        The storage class: STANDARD_IA, GLACIER_IR, GLACIER, DEEP_ARCHIVE; of GCS NEARLINE,
        COLDLINE, ARCHIVE; of Azure Cool, Cold, Archive; STANDARD brings packs back.
    run
        All versions of this run except its head. Repeatable.
    keep_hot
        All versions except heads and those that these retention rules keep: 'last 5, tagged'.
        Repeatable.
    min_age
        Only versions saved at least this long ago, for example 30d.
    job
        Run the archival job of this TOML file.
    dry_run
        Print what would be done; change nothing.

    Examples
    --------
    ckptstore archive --run gpt --keep-hot 'last 3' --class GLACIER --dry-run
    ckptstore archive --job archive.toml
    """
    output = options.output("archive")
    chosen = any((refs, run, keep_hot, min_age))
    _check(storage_class, job, reporting, chosen=chosen)
    if job is not None:
        run_file(output, job, reporting, dry_run=dry_run)
        return
    age_s = 0.0 if min_age is None else float(parse_duration(min_age))
    with opened(options, writing=not dry_run) as opening, output.progress() as progress:
        report = opening.archive(
            [full_ref(opening, ref) for ref in refs] if refs else None,
            storage_class=str(storage_class),
            runs=run or None,
            keep_hot=keep_hot or None,
            min_age_s=age_s,
            dry_run=dry_run,
            progress=progress,
        )
        names = {version.id: f"{version.run}@{version.step}" for version in opening.versions()}
    document = {"store": opening.url, "ok": report.ok, **msgspec.to_builtins(report)}
    output.show(document, lambda screen: _draw(screen, report, names))
    for text in () if output.as_json else report.warnings:
        output.note(f"note: {text}")
    if not report.ok:
        raise typer.Exit(PolicyError.exit_code)


def _check(
    storage_class: str | None, job: Path | None, reporting: JobOptions, *, chosen: bool
) -> None:
    """Refuse a command line with no selection, or with contradicting ones."""
    msg = hint = ""
    if job is not None:
        if chosen or storage_class:
            msg = "--job takes everything from its file"
            hint = "its table [archive] is for storage classes"
    elif reporting.since or reporting.report_file or reporting.metrics:
        msg, hint = "--since, --report and --metrics are of jobs", "give --job FILE"
    elif storage_class is None:
        msg, hint = "neither a storage class nor a job is given", "--class GLACIER, or --job FILE"
    elif not chosen:
        msg, hint = "no version is named", "name REFs; or --run, --keep-hot, --min-age"
    if msg:
        raise InvalidInputError(msg, hint=hint)


def _draw(screen: Screen, report: ArchiveReport, names: dict[str, str]) -> None:
    moved = "would move" if report.dry_run else "moved"
    took = "" if report.dry_run else f"; {seconds_text(report.seconds)}"
    count = counted(len(report.versions), "version")
    what = packs_text(report.moved) if report.moved.count else "nothing"
    screen.line(f"{moved} {what} to {report.storage_class}, of {count}{took}")
    if report.there.count:
        screen.line(f"{packs_text(report.there)} there already")
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
