"""``ckptstore publish``: prepare a store, or a copy of some versions, for a web server."""

from __future__ import annotations

import shlex
from contextlib import ExitStack
from typing import Annotated, Final

import msgspec
import typer

from ckptstore.cli.output import Screen
from ckptstore.cli.session import opened, versions_named, vouching
from ckptstore.cli.store_options import TargetOptions, WriterOptions
from ckptstore.cli.text import bytes_text, counted
from ckptstore.errors import InvalidInputError
from ckptstore.maintenance.reports.publish import PublishReport, check_page
from ckptstore.store.opening import open_target_of

_NAMED: Final = 100
"""Deleted versions that one note names; the next publication names the others."""


def publish(
    refs: Annotated[list[str] | None, typer.Argument(metavar="[REF or RUN]...")] = None,
    *,
    to: Annotated[str | None, typer.Option(metavar="URL")] = None,
    add: bool = False,
    target: TargetOptions,
    options: WriterOptions,
) -> None:
    """Prepare a store for reading through a web server: ckptstore.open("https://...").

    Writes an index and a web page into the store, or into a copy. Run it again after new saves:
    readers also find later commits, with more requests. Exits with 5 or 8 if versions could not be
    copied.

    Parameters
    ----------
    refs
        With --to: publish these versions, or all of these runs, and nothing of others. Default: the
        whole store.
    to
        Publish a copy at this location, created if missing, or in replica:NAME. Run it again to
        add new versions.
    add
        With --to: keep versions that an earlier publication left there.

    Examples
    --------
    ckptstore publish
    ckptstore publish gpt@release --to /srv/www/ckpts
    """
    output = options.output("publish")
    if to is None and (refs or add or target.given()):
        msg = "REF, --add and options for another store go with --to: a store is published whole"
        raise InvalidInputError(msg, hint="--to URL publishes a copy of some versions")
    with ExitStack() as stack:
        source = stack.enter_context(opened(options, writing=to is None))
        ids = [f"#{one.id}" for ref in refs or () for one in versions_named(source, ref)]
        other = None
        if to is not None:
            stack.enter_context(vouching())
            given = {"single_writer": options.single_writer, **target.given()}
            opening = open_target_of(source, to, check_page, dry_run=False, **given)
            other = stack.enter_context(opening)
        with output.progress() as progress:
            report = source.publish(other, ids or None, add=add, progress=progress)
        document = msgspec.to_builtins(report)
        output.show(document, lambda screen: _draw(screen, report, quiet=options.quiet))
        if report.deleted:
            output.note(_still_shown(report))
    if report.copy is not None and report.copy.exit_code:
        raise typer.Exit(report.copy.exit_code)


def _still_shown(report: PublishReport) -> str:
    """Return a note on deleted versions that the copy shows, with the command that removes them."""
    count = counted(len(report.deleted), "version")
    named = report.deleted[:_NAMED]
    command = shlex.join(["ckptstore", "rm", *named, "--store", report.store])
    which = "them" if len(named) == len(report.deleted) else f"the first {len(named)}"
    return (
        f"the copy still shows {count} that the store has deleted; {command} removes {which} there,"
        " and its log keeps their names"
    )


def _draw(screen: Screen, report: PublishReport, *, quiet: bool) -> None:
    copy = report.copy
    for failure in () if copy is None else copy.failures:
        name = f"{failure.run}@{failure.step} {failure.version[:8]}"
        screen.line(f"not copied: {name}: {failure.message}", style="red")
    if quiet:
        return
    if copy is not None:
        copied = counted(len(copy.copied), "version")
        screen.line(f"copied {copied}, {bytes_text(copy.chunk_bytes)}")
    what = f"{counted(report.versions_count, 'version')} in {counted(report.runs_count, 'run')}"
    screen.line(f"published {what} at {report.store}")
