"""``ckptstore repair``: bring back what is damaged, and say what is lost."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptstore.cli.options import (
    AsJson,
    Quiet,
    SingleWriter,
    StorageOptions,
    StoreUrl,
    parse_storage_options,
)
from ckptstore.cli.output import Column, Output, Screen
from ckptstore.cli.progress import progress_bars
from ckptstore.cli.session import location, opened, vouching
from ckptstore.cli.text import bytes_text, count_text, counted
from ckptstore.cli.verify_cmd import VerifyLevel
from ckptstore.errors import IntegrityError
from ckptstore.store import mend_superblock

if TYPE_CHECKING:
    from ckptstore.ops.mend_superblock import SuperblockFinding
    from ckptstore.ops.repair_report import RepairReport

__all__ = ["repair"]


def repair(
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="URL",
            help="A second store that may have what is damaged here: a copy, or any store that "
            "holds the same tensors. It is only read.",
        ),
    ] = None,
    from_option: Annotated[
        list[str] | None,
        typer.Option(
            "--from-option", metavar="KEY=VALUE", help="As --option, for the store of --from."
        ),
    ] = None,
    level: Annotated[
        VerifyLevel,
        typer.Option(
            "--level",
            help="How damage is looked for: full reads every byte; records only records and sizes.",
        ),
    ] = VerifyLevel.FULL,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "-n", help="Say what would be done; write nothing.")
    ] = False,
    single_writer: SingleWriter = False,
    store: StoreUrl = None,
    option: StorageOptions = None,
    json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Bring back what is damaged; exits with 5 if something is lost, and says exactly what.

    Nothing is deleted and no object is changed: what is brought back is written anew, and a commit
    makes the versions lie there. Safe beside savers and readers; may be stopped and run again.
    """
    output = Output("repair", as_json=json, quiet=quiet)
    with opened(source, from_option) if source else nullcontext() as other:
        with vouching():
            superblock = mend_superblock(
                location(store),
                source=other,
                single_writer=single_writer,
                dry_run=dry_run,
                **parse_storage_options(option or ()),
            )
        if superblock is not None and (dry_run or not superblock.mended):
            # There is nothing to open yet: what else is wrong is found by the next call.
            document = {"store": location(store), "ok": False, "superblock": asdict(superblock)}
            output.show(document, lambda screen: _draw_superblock(screen, superblock))
            raise typer.Exit(IntegrityError.exit_code)
        with opened(store, option, writing=not dry_run, single_writer=single_writer) as opening:
            with progress_bars(output) as progress:
                report = opening.repair(
                    other, level=level.value, dry_run=dry_run, progress=progress
                )
            output.show(
                _document(report, opening.url, superblock),
                lambda screen: _draw(screen, report, superblock),
            )
    if not report.ok:
        raise typer.Exit(IntegrityError.exit_code)


def _document(
    report: RepairReport, url: str, superblock: SuperblockFinding | None
) -> dict[str, Any]:
    document = asdict(report)
    document["superblock"] = None if superblock is None else asdict(superblock)
    document["problems"] = [
        {**asdict(problem), **({} if problem.version else {"version": None, "step": None})}
        for problem in report.problems
    ]
    return {"store": url, "ok": report.ok, **document}


def _draw_superblock(screen: Screen, found: SuperblockFinding) -> None:
    screen.line(found.why)
    if not found.mended:
        screen.line(f"{found.key} is {found.what}: nothing else can be done before", "bold red")
        return
    screen.line(f"{found.key} can be mended; what else is wrong is found once it is")
    _draw_origin(screen, found)


def _draw_origin(screen: Screen, found: SuperblockFinding) -> None:
    if found.source == "copy":
        screen.line(f"{found.key}: as in the second store, which has the same log")
    else:
        screen.line(f"{found.key}: from the log and a new probe; new are {', '.join(found.new)}")


def _draw(screen: Screen, report: RepairReport, superblock: SuperblockFinding | None) -> None:
    if superblock is not None:
        _draw_origin(screen, superblock)
    rows = [*_commit_rows(report), *_version_rows(report)]
    if rows:
        titles = ("WHAT", "ID", "STATE", "TENSORS", "WHY")
        screen.table([Column(title=title) for title in titles], rows)
        screen.line()
    for text in _notes(report):
        screen.line(text)
    if any(not commit.mended for commit in report.commits):
        screen.line(
            f"the log can be read up to commit {count_text(report.commits_readable)}, with "
            f"{counted(report.versions_readable, 'version')}; mend it before anything else",
            "bold red",
        )
    elif report.lost:
        screen.line(f"something is lost of {counted(len(report.lost), 'version')}", "bold red")
    elif superblock or report.problems or report.commits or report.snapshots:
        screen.line(
            "everything can be mended" if report.dry_run else "everything is mended", "green"
        )
    else:
        screen.line("no damage", "green")


def _commit_rows(report: RepairReport) -> list[tuple[str, ...]]:
    done = "can be mended" if report.dry_run else "mended"
    return [
        (f"commit {commit.number}", "-", done if commit.mended else "lost", "-", commit.why)
        for commit in report.commits
    ]


def _version_rows(report: RepairReport) -> list[tuple[str, ...]]:
    done = "can be mended" if report.dry_run else "mended"
    rows: list[tuple[str, ...]] = []
    for version in report.mended:
        what = "the manifest was lost, too" if version.manifest else ""
        named = f"{version.run}@{version.step}"
        rows.append((named, version.version[:8], done, " ".join(version.tensors) or "-", what))
    for lost in report.lost:
        named = f"{lost.run}@{lost.step}"
        rows.append((named, lost.version[:8], "lost", " ".join(lost.tensors) or "all", lost.why))
    return rows


def _notes(report: RepairReport) -> list[str]:
    notes = []
    if report.snapshots:
        done = "to be folded" if report.dry_run else "folded"
        notes.append(f"{counted(len(report.snapshots), 'damaged catalog snapshot')}, {done} anew")
    if report.pieces:
        parts = ", ".join(f"{count_text(n)} {name}" for name, n in sorted(report.pieces.items()))
        notes.append(f"chunks: {parts}; {bytes_text(report.written_bytes)} written")
    if report.quarantined:
        count = counted(len(report.quarantined), "version")
        notes.append(f"{count} recorded as damaged: no save shares with them")
    return notes
