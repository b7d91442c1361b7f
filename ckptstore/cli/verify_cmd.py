"""``ckptstore verify``: whether everything is there, and is what was written."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from ckptstore.cli.options import AsJson, Quiet, StorageOptions, StoreUrl
from ckptstore.cli.output import Column, Output, Screen
from ckptstore.cli.progress import progress_bars
from ckptstore.cli.session import find_version, opened
from ckptstore.cli.text import bytes_text, count_text, seconds_text
from ckptstore.errors import IntegrityError

if TYPE_CHECKING:
    from ckptstore.ops.verify import Problem, VerifyReport

__all__ = ["VerifyLevel", "verify"]


class VerifyLevel(StrEnum):
    """How deep to look."""

    FULL = "full"
    RECORDS = "records"


def verify(
    refs: Annotated[
        list[str] | None,
        typer.Argument(metavar="REF", help="Versions; without any, all and the log itself."),
    ] = None,
    level: Annotated[
        VerifyLevel,
        typer.Option(
            "--level", help="full reads every byte; records only records and sizes of packs."
        ),
    ] = VerifyLevel.FULL,
    store: StoreUrl = None,
    option: StorageOptions = None,
    json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Check versions without changing anything; exits with 5 if anything is damaged."""
    output = Output("verify", as_json=json, quiet=quiet)
    with opened(store, option) as opening:
        ids = [f"#{find_version(opening, ref).id}" for ref in refs or ()]
        with progress_bars(output) as progress:
            report = opening.verify(ids or None, level=level.value, progress=progress)
        document = {
            "store": opening.url,
            "ok": report.ok,
            "level": report.level,
            "versions_count": report.versions_count,
            "packs_count": report.packs_count,
            "chunks_count": report.chunks_count,
            "read_bytes": report.read_bytes,
            "seconds": report.seconds,
            "damaged_versions": list(report.damaged_versions),
            "problems": [_problem_document(problem) for problem in report.problems],
        }
        output.show(document, lambda screen: _draw(screen, report, quiet=quiet))
    if not report.ok:
        raise typer.Exit(IntegrityError.exit_code)


def _problem_document(problem: Problem) -> dict[str, object]:
    document = asdict(problem)
    if not problem.version:
        document.update(version=None, run=None, step=None)
    return {**document, "tensor": problem.tensor or None}


def _draw(screen: Screen, report: VerifyReport, *, quiet: bool) -> None:
    if report.problems:
        rows = [
            (
                f"{p.run}@{p.step}" if p.version else "-",
                p.version[:8] or "-",
                p.tensor or "-",
                p.message,
            )
            for p in report.problems
        ]
        titles = ("VERSION", "ID", "TENSOR", "PROBLEM")
        screen.table([Column(title=title) for title in titles], rows)
        screen.line()
        damaged = len(report.damaged_versions)
        screen.line(
            f"{count_text(len(report.problems))} problems; {count_text(damaged)} of "
            f"{count_text(report.versions_count)} versions are damaged",
            "bold red",
        )
    elif not quiet:
        what = f"{count_text(report.versions_count)} versions in {count_text(report.packs_count)}"
        read = f", {bytes_text(report.read_bytes)} read" if report.level == "full" else ""
        screen.line(f"no damage: {what} packs{read}, {seconds_text(report.seconds)}", "green")
