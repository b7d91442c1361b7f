"""``ckptstore verify`` and ``ckptstore repair``: find damage, and recover data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec
import typer

from ckptstore.cli import session, store_options
from ckptstore.cli.output import Column, Output, Screen
from ckptstore.cli.text import bytes_text, count_text, counted, seconds_text
from ckptstore.errors import IntegrityError, InvalidInputError
from ckptstore.replicas.options import PREFIX
from ckptstore.store import Store, mend_superblock

if TYPE_CHECKING:
    from ckptstore.maintenance.check.verify import VerifyReport
    from ckptstore.maintenance.repair.fix_opening import SuperblockFinding
    from ckptstore.maintenance.repair.repair import RepairReport

VerifyLevel = Literal["full", "records"]
"""Depth of a check."""


def verify(
    refs: Annotated[list[str] | None, typer.Argument(metavar="REF")] = None,
    *,
    level: VerifyLevel = "full",
    sample: Annotated[str, typer.Option(metavar="SHARE")] = "100%",
    part: Annotated[int | None, typer.Option(min=0, metavar="N")] = None,
    record: bool = False,
    unverified: bool = False,
    resume: Annotated[Path | None, typer.Option(metavar="FILE")] = None,
    heal_from: Annotated[list[str] | None, typer.Option(metavar="URL")] = None,
    heal_option: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE")] = None,
    heal_key: Annotated[str | None, typer.Option(metavar="SPEC")] = None,
    engine: store_options.EngineOptions,
    options: store_options.WriterOptions,
) -> None:
    """Check versions without changing them; exits with 5 if anything is damaged.

    With --heal-from, damage is recovered as by ckptstore repair; exits with 5 if something stays
    lost.

    Parameters
    ----------
    refs
        Versions or runs. Default: the whole store with its log.
    level
        full reads every byte; records reads only records and sizes of packs.
    sample
        Read only this share of the chunks, for example 5%: a different part each day, all in turn.
    part
        Part of the sample to read. Default: the part of the day.
    record
        Record intact versions in the log.
    unverified
        Only versions that are not recorded as intact.
    resume
        Keep the progress in FILE, and continue from there.
    heal_from
        Recover damaged data from this store: replica:NAME, a copy, or any store with the same
        tensors. Repeatable: later stores are asked for data that stays lost.
    heal_option
        Like --option, for the stores of --heal-from. Repeatable.
    heal_key
        Like --key, for the stores of --heal-from.

    Examples
    --------
    ckptstore verify gpt
    ckptstore verify --sample 5% --record --resume verify.state
    """
    output, share = options.output("verify"), _share(sample)
    if part is not None and share == 1:
        msg = "--part says which part of a sample"
        raise InvalidInputError(msg, hint=f"--sample 5% --part {part}")
    urls = heal_from or ()
    given = store_options.open_options(heal_option, heal_key)
    if given and not urls:
        msg = "--heal-option and --heal-key are for the stores of --heal-from, and none is named"
        raise InvalidInputError(msg, hint="--heal-from URL")
    with session.opened(options, writing=record or bool(urls)) as opening:
        named = (session.versions_named(opening, ref) for ref in refs or ())
        ids = [f"#{version.id}" for versions in named for version in versions]
        with output.progress() as progress:
            report = opening.verify(
                ids or None, level=level, sample=share, part=part, record=record, resume=resume,
                unverified=unverified, executor=engine.engine, workers=engine.workers,
                progress=progress,
            )  # fmt: skip
        document = _document(report, opening.url)
        healed = [] if report.ok else _heal(opening, urls, given, output)
        if urls:
            document["healed"] = [
                {"from": url, **_repair_document(found, opening.url, None)} for url, found in healed
            ]
        output.show(document, lambda screen: _draw(screen, report, healed, quiet=options.quiet))
    if not (healed[-1][1].ok if healed else report.ok):
        raise typer.Exit(IntegrityError.exit_code)


def _document(report: VerifyReport, url: str) -> dict[str, Any]:
    document = msgspec.to_builtins(report)
    for problem in document["problems"]:
        problem["tensor"] = problem["tensor"] or None
        if not problem["version"]:
            problem.update(version=None, run=None, step=None)
    return {"store": url, "ok": report.ok, **document, "damaged_versions": report.damaged_versions}


def _heal(
    store: Store, urls: Sequence[str], given: Mapping[str, Any], output: Output
) -> list[tuple[str, RepairReport]]:
    """Recover damaged data from one store after another, until nothing is lost."""
    done: list[tuple[str, RepairReport]] = []
    for url in urls:
        with session.opened_for(store, url, given) as other, output.progress() as progress:
            done.append((url, store.repair(other, progress=progress)))
        if done[-1][1].ok:
            break
    return done


def _share(text: str) -> float:
    """Return a share given as 5% or 0.05; the caller checks its range."""
    digits, percent = text.removesuffix("%"), text.endswith("%")
    try:
        return float(digits) / (100 if percent else 1)
    except ValueError:
        msg = f"--sample wants a share such as 5% or 0.05, not {text!r}"
        raise InvalidInputError(msg) from None


def _draw(
    screen: Screen, report: VerifyReport, healed: Sequence[tuple[str, RepairReport]], *, quiet: bool
) -> None:
    if report.problems:
        _draw_problems(screen, report)
    elif not quiet:
        packs = counted(report.packs_count, "pack")
        what = f"{counted(report.versions_count, 'version')} in {packs}"
        if report.sample is not None:
            what = f"part {report.sample.part} of {report.sample.parts} of {what}"
        read = f", {bytes_text(report.read_bytes)} read" if report.level == "full" else ""
        screen.line(f"no damage: {what}{read}, {seconds_text(report.seconds)}", "green")
    if not quiet:
        _draw_notices(screen, report)
    for url, found in healed:
        screen.line()
        screen.line(f"from {url}:")
        _draw_repair(screen, found, None)


def _draw_problems(screen: Screen, report: VerifyReport) -> None:
    screen.listing(
        report.problems,
        Column("VERSION", lambda p: f"{p.run}@{p.step}" if p.version else "-"),
        Column("ID", lambda p: p.version[:8] or "-"),
        Column("TENSOR", lambda p: p.tensor or "-"),
        Column("PROBLEM", lambda p: p.message),
    )
    screen.line()
    damaged = len(report.damaged_versions)
    screen.line(
        f"{counted(len(report.problems), 'problem')}; {count_text(damaged)} of "
        f"{counted(report.versions_count, 'version')} damaged",
        "bold red",
    )
    screen.line("ckptstore repair mends what a copy proves: --from STORE has one")


def _draw_notices(screen: Screen, report: VerifyReport) -> None:
    if report.cold_packs_count:
        packs = counted(report.cold_packs_count, "pack")
        versions = counted(len(report.cold_versions), "version")
        screen.line(f"{packs} of {versions} not read: cold; ckptstore thaw makes them readable")
    if report.recorded:
        screen.line(f"{counted(len(report.recorded), 'version')} recorded as sound")
    for kind, (one, many) in _NOTICES.items():
        sizes = [notice.size_bytes for notice in report.notices if notice.kind == kind]
        if sizes:
            meaning = one if len(sizes) == 1 else many
            screen.line(f"{counted(len(sizes), 'object')} {meaning}, {bytes_text(sum(sizes))}")


_NOTICES: Final = {
    "condemned": ("waits to be swept: ckptstore gc", "wait to be swept: ckptstore gc"),
    "orphan": (
        "is named by no version: an upload at work, or left over for ckptstore gc",
        "are named by no version: uploads at work, or left over for ckptstore gc",
    ),
    "unknown": ("is not ckptstore's", "are not ckptstore's"),
}
"""Kind of object that no version needs to its text, for one and for several; none is damage."""


def repair(
    *,
    url: Annotated[list[str] | None, typer.Option("--from", metavar="URL")] = None,
    source: store_options.SourceOptions,
    level: VerifyLevel = "full",
    dry_run: store_options.DryRun = False,
    options: store_options.WriterOptions,
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
    output, urls = options.output("repair"), url or []
    source.check(urls[0] if urls else None, "URL")
    with ExitStack() as stack:
        others: dict[str, Store] = {}
        for place in urls:
            if not place.startswith(PREFIX):
                others[place] = stack.enter_context(session.opened_place(place, source.given()))
        superblock = _mend_superblock(options, next(iter(others.values()), None), dry_run=dry_run)
        if superblock is not None and (dry_run or not superblock.mended):
            # There is nothing to open yet: what else is wrong is found by the next call.
            document = {"store": options.store, "ok": False, "superblock": asdict(superblock)}
            output.show(document, lambda screen: _draw_superblock(screen, superblock))
            raise typer.Exit(IntegrityError.exit_code)
        opening = stack.enter_context(session.opened(options, writing=not dry_run))
        for place in urls:
            if place not in others:
                other = session.opened_for(opening, place, source.given())
                others[place] = stack.enter_context(other)
        with output.progress() as progress:
            stores = [others[place] for place in urls]
            report = opening.repair(stores, level=level, dry_run=dry_run, progress=progress)
        document = _repair_document(report, opening.url, superblock)
        output.show(document, lambda screen: _draw_repair(screen, report, superblock))
    if not report.ok:
        raise typer.Exit(IntegrityError.exit_code)


def _mend_superblock(
    options: store_options.WriterOptions, source: Store | None, *, dry_run: bool
) -> SuperblockFinding | None:
    """Recover the superblock that opens the store; None if it is intact."""
    url, given = session.location(options.store), options.unopened()
    with session.vouching():
        return mend_superblock(url, source=source, dry_run=dry_run, **given)


def _repair_document(
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


def _draw_repair(screen: Screen, report: RepairReport, found: SuperblockFinding | None) -> None:
    """Print the mended and the lost parts."""
    if found is not None:
        _draw_origin(screen, found)
    if rows := _rows(report):
        screen.table([*map(Column, ("WHAT", "ID", "STATE", "TENSORS", "WHY"))], rows)
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
        screen.line("--from STORE, with a copy, mends them; RUN@latest-valid is whole; or rm them")
        for cold in report.cold:
            what = f"{counted(cold.pieces_count, 'chunk')} of {cold.run}@{cold.step}"
            screen.line(f"{cold.url} has {what} in an archive class; then repair again:", "yellow")
            screen.line(f"  {cold.command}", "yellow")
    elif report.commits_lost:
        return
    elif found or report.problems or report.commits or report.snapshots:
        if any(commit.set_aside and not commit.mended for commit in report.commits):
            screen.line("the log goes on past a damaged record; what it held is lost", "yellow")
        screen.line(f"everything {'can be' if report.dry_run else 'is'} mended", "green")
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
