"""``ckptstore repair``: recover damaged data, and report lost data."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ckptstore.cli.output import Column, Screen
from ckptstore.cli.session import location, opened, opened_for, opened_place, vouching
from ckptstore.cli.store_options import DryRun, SourceOptions, WriterOptions
from ckptstore.cli.text import bytes_text, count_text, counted
from ckptstore.errors import IntegrityError
from ckptstore.replicas.options import PREFIX
from ckptstore.store import Store, mend_superblock

if TYPE_CHECKING:
    from ckptstore.maintenance.repair.fix_superblock import SuperblockFinding
    from ckptstore.maintenance.repair.repair import RepairReport

VerifyLevel = Literal["full", "records"]
"""Depth of a check."""


def repair(
    *,
    url: Annotated[list[str] | None, typer.Option("--from", metavar="URL")] = None,
    source: SourceOptions,
    level: VerifyLevel = "full",
    dry_run: DryRun = False,
    options: WriterOptions,
) -> None:
    """Recover damaged data; exits with 5 and lists the lost tensors if something is lost.

    Nothing is deleted and no object is changed: recovered data is written to new objects, and a
    commit points the versions to them. Safe beside savers and readers; can be interrupted and run
    again.

    Parameters
    ----------
    level
        How to look for damage: full reads every byte; records reads only records and sizes.
    dry_run
        Print what would be done; write nothing.
    url
        A second store to recover from: a copy, any store with the same tensors, or replica:NAME. It
        is only read. Repeatable: later stores are asked for data that earlier ones lack or hold
        only in an archive class.

    Examples
    --------
    ckptstore repair --dry-run
    ckptstore repair --from s3://archive/ckpts
    """
    output = options.output("repair")
    urls = url or []
    source.check(urls[0] if urls else None, "URL")
    with ExitStack() as stack:
        others: dict[str, Store] = {}
        for place in urls:
            if not place.startswith(PREFIX):
                others[place] = stack.enter_context(opened_place(place, source.given()))
        first = next(iter(others.values()), None)
        superblock = _mend_superblock(options, first, dry_run=dry_run)
        if superblock is not None and (dry_run or not superblock.mended):
            # There is nothing to open yet: what else is wrong is found by the next call.
            document = {"store": options.store, "ok": False, "superblock": asdict(superblock)}
            output.show(document, lambda screen: _draw_superblock(screen, superblock))
            raise typer.Exit(IntegrityError.exit_code)
        opening = stack.enter_context(opened(options, writing=not dry_run))
        for place in urls:
            if place not in others:
                others[place] = stack.enter_context(opened_for(opening, place, source.given()))
        with output.progress() as progress:
            stores = [others[place] for place in urls]
            report = opening.repair(stores, level=level, dry_run=dry_run, progress=progress)
        output.show(
            repair_document(report, opening.url, superblock),
            lambda screen: draw_repair(screen, report, superblock),
        )
    if not report.ok:
        raise typer.Exit(IntegrityError.exit_code)


def _mend_superblock(
    options: WriterOptions, source: Store | None, *, dry_run: bool
) -> SuperblockFinding | None:
    """Recover the superblock that opens the store; None if it is intact."""
    with vouching():
        return mend_superblock(
            location(options.store),
            source=source,
            single_writer=options.single_writer,
            dry_run=dry_run,
            encryption_key=options.key,
            **options.storage_options(),
        )


def repair_document(
    report: RepairReport, url: str, superblock: SuperblockFinding | None
) -> dict[str, Any]:
    """Return the JSON document of a repair."""
    document = asdict(report)
    document["superblock"] = None if superblock is None else asdict(superblock)
    for problem in document["problems"]:
        if not problem["version"]:
            problem.update(version=None, step=None)
    return {"store": url, "ok": report.ok, **document}


def _draw_superblock(screen: Screen, found: SuperblockFinding) -> None:
    """Print the damage of the superblock, the record that opens a store."""
    screen.line(found.why)
    if not found.mended:
        screen.line(f"{found.key} is {found.what}: nothing else can be done before", "bold red")
        return
    screen.line(f"{found.key} can be mended; what else is wrong is found once it is")
    _draw_origin(screen, found)


def _draw_origin(screen: Screen, found: SuperblockFinding) -> None:
    if found.source == "copy":
        screen.line(f"{found.key}: as in the second store, which has the same log")
    elif found.source == "keys":
        screen.line(f"{found.key}: from the record of the store's keys, which its key opened")
    else:
        screen.line(f"{found.key}: from the log and a new probe; new are {', '.join(found.new)}")


def draw_repair(screen: Screen, report: RepairReport, superblock: SuperblockFinding | None) -> None:
    """Print the mended and the lost parts."""
    if superblock is not None:
        _draw_origin(screen, superblock)
    if rows := _rows(report):
        titles = ("WHAT", "ID", "STATE", "TENSORS", "WHY")
        screen.table([Column(title) for title in titles], rows)
        screen.line()
    screen.lines(_notes(report))
    if not all(commit.mended or commit.set_aside for commit in report.commits):
        screen.line(
            f"the log can be read up to commit {count_text(report.commits_readable)}, with "
            f"{counted(report.versions_readable, 'version')}; mend it before anything else",
            "bold red",
        )
        return
    if report.commits_lost:
        screen.line(report.commits_lost, "bold red")
    if report.lost:
        screen.line(f"something is lost of {counted(len(report.lost), 'version')}", "bold red")
        for cold in report.cold:
            what = f"{counted(cold.pieces_count, 'chunk')} of {cold.run}@{cold.step}"
            screen.line(f"{cold.url} has {what} in an archive class; then repair again:", "yellow")
            screen.line(f"  {cold.command}", "yellow")
    elif report.commits_lost:
        return
    elif superblock or report.problems or report.commits or report.snapshots:
        if any(commit.set_aside and not commit.mended for commit in report.commits):
            screen.line("the log goes on past a damaged record; what it held is lost", "yellow")
        screen.line(
            "everything can be mended" if report.dry_run else "everything is mended", "green"
        )
    else:
        screen.line("no damage", "green")


def _rows(report: RepairReport) -> list[tuple[str, ...]]:
    done = "can be mended" if report.dry_run else "mended"
    rows: list[tuple[str, ...]] = []
    for commit in report.commits:
        state = done if commit.mended else "set aside" if commit.set_aside else "lost"
        rows.append((f"commit {commit.number}", "-", state, "-", commit.why))
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
