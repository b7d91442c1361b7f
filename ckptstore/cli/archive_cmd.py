"""``ckptstore archive``: move packs to a colder storage class, or run an archival job."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from ckptstore import limits
from ckptstore.catalog.retention_rules import parse_duration
from ckptstore.cli.output import Column, Output, Screen, encode_document
from ckptstore.cli.session import full_ref, opened, vouching
from ckptstore.cli.store_options import DryRun, WriterOptions
from ckptstore.cli.text import age_text, bytes_text, counted, listed, packs_text, seconds_text
from ckptstore.config import SYSTEM
from ckptstore.errors import CkptStoreError, InvalidInputError, PolicyError, StorageError

if TYPE_CHECKING:
    from ckptstore.jobs.work import JobReport, StepReport
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
    _check(storage_class, job, reporting, chosen=any((refs, run, keep_hot, min_age)))
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


def _check(storage_class: str | None, job: Path | None, files: JobOptions, *, chosen: bool) -> None:
    """Refuse a command line with no selection, or with contradicting ones."""
    msg = hint = ""
    if job is not None:
        if chosen or storage_class:
            msg = "--job takes everything from its file"
            hint = "its table [archive] is for storage classes"
    elif files.since or files.report_file or files.metrics:
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
        shown = sorted({names.get(each, each[:8]) for one in report.left for each in one.versions})
        named = listed(shown, most=_LISTED)
        screen.line(f"{packs} of {bytes_text(size)} stay, since others need them: {named}")
    for one in report.skipped[:_LISTED]:
        screen.line(f"not moved: pack {one.pack}: {one.why}", style="red")
    if len(report.skipped) > _LISTED:
        screen.line(f"... and {len(report.skipped) - _LISTED} more", style="red")
    for version in report.cooled:
        name = names.get(version, version[:8])
        screen.line(f"{name} appeared meanwhile, and needs a pack that was moved", style="red")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """Options of an archival job and its report.

    Parameters
    ----------
    since
        With --job: only versions saved since this time, for example 2026-03-01T12:00:00Z; `last` is
        the time of the last fully successful run, read from the file of --report.
    report_file
        With --job: also write the JSON document to this file.
    metrics
        With --job: write metrics for the Prometheus node exporter to this .prom file.
    """

    since: Annotated[str | None, typer.Option(metavar="TIME")] = None
    report_file: Annotated[Path | None, typer.Option("--report", metavar="FILE")] = None
    metrics: Annotated[Path | None, typer.Option(metavar="FILE")] = None


def run_file(output: Output, job: Path, options: JobOptions, *, dry_run: bool) -> None:
    """Run the job in a file once, and show what it did.

    Raises
    ------
    typer.Exit
        Something failed, or is overdue; with the job's code.
    CkptStoreError
        Nothing was done.
    """
    from ckptstore.jobs import read_job, run_job
    from ckptstore.jobs.job_outputs import check_file

    wanted = read_job(job)
    files = JobOptions() if dry_run else options
    for path in filter(None, (files.report_file, files.metrics)):
        check_file(path)
    before = _last_success(options.report_file)
    since_last = options.since == "last"
    moment = before.covered_until if since_last else options.since
    # What was saved shortly before may have shown shortly after, and clocks differ.
    since_s = _seconds(moment) - (limits.SINCE_SLACK_S if since_last else 0.0) if moment else None
    try:
        with output.progress() as progress, vouching():
            done = run_job(
                wanted,
                dry_run=dry_run,
                since_s=since_s,
                since_target=before.target_id if since_last else "",
                progress=progress,
            )
    except CkptStoreError as error:
        document = {
            "name": wanted.name,
            "ok": False,
            "exit_code": error.exit_code,
            "error": error.message,
            "hint": error.hint,
            "kind": error.kind,
            "last_success": before.last_success,
            "last": asdict(before),
        }
        try:
            _leave(files, wanted.name, None, document)
        except StorageError as unwritten:  # what stopped the job says more
            output.note(str(unwritten))
        raise
    if done.ok and not dry_run:
        before = _Success(
            last_success=done.began_at, covered_until=done.covered_until, target_id=done.target_id
        )
    document = {**asdict(done), "ok": done.ok, "exit_code": done.exit_code}
    document |= {"last_success": before.last_success, "last": asdict(before)}
    _leave(files, done.name, done, document)
    output.show(document, lambda screen: _draw_job(screen, done))
    if done.exit_code:
        raise typer.Exit(done.exit_code)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Success:
    """The last run that did all it should, as far as it is known."""

    last_success: str = ""
    """When it began."""
    covered_until: str = ""
    """Time before which every saved version was old enough for that run."""
    target_id: str = ""


def _leave(files: JobOptions, name: str, done: JobReport | None, report: Mapping[str, Any]) -> None:
    """Replace the files that a run leaves for other programs; `done` is None if it failed."""
    from ckptstore.jobs.job_outputs import replace_file
    from ckptstore.jobs.work import exposition

    if files.report_file is not None:
        replace_file(files.report_file, (encode_document(report) + "\n").encode())
    if files.metrics is not None:
        now_s = SYSTEM.now_ms() / 1000
        replace_file(files.metrics, exposition(name, done, now_s=now_s).encode())


def _last_success(path: Path | None) -> _Success:
    if path is None or not path.exists():
        return _Success()
    try:
        found: Any = jsonlib.loads(path.read_bytes())["last"]
        return _Success(**{name: str(value) for name, value in found.items()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        msg = f"{path} is no report of a job: {error}"
        raise InvalidInputError(msg, hint="name another file, or remove this one") from error


def _seconds(text: str) -> float:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        msg = f"{text!r} is not a time"
        raise InvalidInputError(msg, hint="write 2026-03-01T12:00:00Z, or last") from error
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _draw_job(screen: Screen, report: JobReport) -> None:
    screen.line(f"{report.name}: {report.source} to {report.target}")
    screen.listing(
        report.steps,
        Column("STEP", lambda step: step.name),
        Column("OUTCOME", _outcome),
        Column("TOOK", lambda step: seconds_text(step.seconds), right=True),
    )
    for late in report.overdue:
        name = f"{late.run}@{late.step} {late.version[:8]}"
        screen.line(f"not replicated: {name}, saved {age_text(late.age_s)} ago", style="red")


def _outcome(step: StepReport) -> str:
    if step.error:
        return f"failed: {step.error}"
    result = step.result
    if step.name == "replicate":
        size = bytes_text(result["chunk_bytes"])
        there = f", {result['present']} there already" if result["present"] else ""
        return f"{counted(result['copied'], 'version')}, {size} travelled{there}"
    if step.name.startswith("scrub"):
        mended = f"; {counted(result['mended'], 'version')} mended" if "mended" in result else ""
        problems = counted(result["problems"], "problem")
        return f"{counted(result['chunks'], 'chunk')} read, {problems}{mended}"
    if step.name == "archive-target":
        packs = f"{counted(result['moved'], 'pack')} of {bytes_text(result['moved_bytes'])}"
        left = f"; {counted(result['left'], 'pack')} stay for others" if result["left"] else ""
        return f"{packs} to {result['class']}{left}"
    if step.name == "evict":
        count = counted(result["evicted"], "version")
        freed = bytes_text(result["reclaimable_bytes"])
        return f"{count} kept as records; {freed} to reclaim{_stays(result)}"
    if step.name.startswith("retain"):
        count = counted(result["changes"], "version")
        freed = bytes_text(result["reclaimable_bytes"])
        return f"{count} changed; {freed} to reclaim{_stays(result)}"
    return f"{bytes_text(result['reclaimable_now_bytes'])} freed"


def _stays(result: Mapping[str, Any]) -> str:
    """Return how many versions stay since the target is not seen to hold them."""
    stays = result.get("missed", 0) + result.get("returned", 0)
    return f"; {counted(stays, 'version')} not whole in the target: here as before" if stays else ""
