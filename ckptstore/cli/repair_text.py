"""Report of a repair, as a document and for people."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ckptstore.cli.output import Column, Screen
from ckptstore.cli.text import bytes_text, count_text, counted

if TYPE_CHECKING:
    from ckptstore.maintenance.repair.fix_superblock import SuperblockFinding
    from ckptstore.maintenance.repair.repair_report import RepairReport


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


def draw_superblock(screen: Screen, found: SuperblockFinding) -> None:
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
