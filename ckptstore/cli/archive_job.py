"""The run of an archival job: what ``ckptstore archive --job`` does."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptstore import limits
from ckptstore.cli.output import Column, Output, Screen, encode_document
from ckptstore.cli.session import vouching
from ckptstore.cli.text import age_text, bytes_text, counted, seconds_text
from ckptstore.config import SYSTEM
from ckptstore.errors import CkptStoreError, InvalidInputError, StorageError

if TYPE_CHECKING:
    from ckptstore.jobs.report import JobReport, StepReport


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
    from ckptstore.jobs.report import exposition

    wanted = read_job(job)
    files = _Files() if dry_run else _Files(report=options.report_file, metrics=options.metrics)
    files.check()
    before = _last_success(options.report_file)
    since_last = options.since == "last"
    moment = before.covered_until if since_last else options.since
    # What was saved shortly before may have shown shortly after, and clocks differ.
    slack_s = limits.SINCE_SLACK_S if since_last else 0.0
    since_s = _seconds(moment) - slack_s if moment else None
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
        try:
            files.write_failure(wanted.name, error, before)
        except StorageError as unwritten:  # what stopped the job says more
            output.note(str(unwritten))
        raise
    if done.ok and not dry_run:
        before = _Success(
            last_success=done.began_at, covered_until=done.covered_until, target_id=done.target_id
        )
    document = {**asdict(done), "ok": done.ok, "exit_code": done.exit_code}
    document |= {"last_success": before.last_success, "last": asdict(before)}
    files.write(document, exposition(done.name, done, now_s=SYSTEM.now_ms() / 1000))
    output.show(document, lambda screen: _draw(screen, done))
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Files:
    """Files that a run leaves for other programs; None where none is wanted."""

    report: Path | None = None
    metrics: Path | None = None

    def check(self) -> None:
        """Refuse files that could not be written, before anything is done."""
        from ckptstore.jobs.job_outputs import check_file

        for path in (self.report, self.metrics):
            if path is not None:
                check_file(path)

    def write(self, document: Mapping[str, Any], figures: str) -> None:
        """Replace both."""
        from ckptstore.jobs.job_outputs import replace_file

        if self.report is not None:
            replace_file(self.report, (encode_document(document) + "\n").encode())
        if self.metrics is not None:
            replace_file(self.metrics, figures.encode())

    def write_failure(self, name: str, error: CkptStoreError, before: _Success) -> None:
        """Say that nothing could be done, and keep when the last run was that did all."""
        from ckptstore.jobs.report import exposition

        document = {
            "name": name,
            "ok": False,
            "exit_code": error.exit_code,
            "error": error.message,
            "hint": error.hint,
            "kind": error.kind,
            "last_success": before.last_success,
            "last": asdict(before),
        }
        self.write(document, exposition(name, None, now_s=SYSTEM.now_ms() / 1000))


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


def _draw(screen: Screen, report: JobReport) -> None:
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
