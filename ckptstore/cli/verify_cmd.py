"""``ckptstore verify``: check that stored data is complete and unchanged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import typer

from ckptstore.cli.output import Column, Output, Screen
from ckptstore.cli.repair_cmd import VerifyLevel, draw_repair, repair_document
from ckptstore.cli.session import opened, opened_for, versions_named
from ckptstore.cli.store_options import EngineOptions, WriterOptions, open_options
from ckptstore.cli.text import bytes_text, count_text, counted, seconds_text
from ckptstore.errors import IntegrityError, InvalidInputError
from ckptstore.store import Store

if TYPE_CHECKING:
    from ckptstore.maintenance.check.verify import VerifyReport
    from ckptstore.maintenance.repair.repair import RepairReport


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
    engine: EngineOptions,
    options: WriterOptions,
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
    output = options.output("verify")
    share = _share(sample)
    if part is not None and share == 1:
        msg = "--part says which part of a sample"
        raise InvalidInputError(msg, hint=f"--sample 5% --part {part}")
    urls = heal_from or ()
    given = open_options(heal_option, heal_key)
    if given and not urls:
        msg = "--heal-option and --heal-key are for the stores of --heal-from, and none is named"
        raise InvalidInputError(msg, hint="--heal-from URL")
    with opened(options, writing=record or bool(urls)) as opening:
        ids = [f"#{version.id}" for ref in refs or () for version in versions_named(opening, ref)]
        with output.progress() as progress:
            report = opening.verify(
                ids or None,
                level=level,
                sample=share,
                part=part,
                record=record,
                resume=resume,
                unverified=unverified,
                executor=engine.engine,
                workers=engine.workers,
                progress=progress,
            )
        document = _document(report, opening.url)
        healed = [] if report.ok else _heal(opening, urls, given, output)
        if urls:
            document["healed"] = [
                {"from": url, **repair_document(found, opening.url, None)} for url, found in healed
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
    damaged = report.damaged_versions
    return {"store": url, "ok": report.ok, **document, "damaged_versions": damaged}


def _heal(
    store: Store, urls: Sequence[str], given: Mapping[str, Any], output: Output
) -> list[tuple[str, RepairReport]]:
    """Recover damaged data from one store after another, until nothing is lost."""
    done: list[tuple[str, RepairReport]] = []
    for url in urls:
        with opened_for(store, url, given) as other, output.progress() as progress:
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
        draw_repair(screen, found, None)


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
            objects = counted(len(sizes), "object")
            screen.line(f"{objects} {meaning}, {bytes_text(sum(sizes))}")


_NOTICES: Final = {
    "condemned": ("waits to be swept: ckptstore gc", "wait to be swept: ckptstore gc"),
    "orphan": (
        "is named by no version: an upload at work, or left over for ckptstore gc",
        "are named by no version: uploads at work, or left over for ckptstore gc",
    ),
    "unknown": ("is not ckptstore's", "are not ckptstore's"),
}
"""Kind of object that no version needs to its text, for one and for several; none is damage."""
