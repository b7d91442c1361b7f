"""``ckptstore rollback``: the head of a run moves to one of its versions."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from ckptstore.cli.options import WriterOptions
from ckptstore.cli.output import Screen
from ckptstore.cli.session import find_version, opened_to_write
from ckptstore.cli.text import count_text
from ckptstore.model import Version

__all__ = ["rollback"]

_NAMED: Final = 10
"""Abandoned versions that the text lists."""


def rollback(
    ref: Annotated[
        str, typer.Argument(metavar="REF", help="The version to go back to, or forward again.")
    ],
    *,
    reason: Annotated[
        str, typer.Option("--reason", metavar="TEXT", help="Why; kept in the log.")
    ] = "",
    options: WriterOptions,
) -> None:
    """Make a version the head of its run again; what came after is abandoned, not deleted.

    The next save continues it, and RUN@latest names it.
    """
    from ckptstore.ops.rollback import rollback as roll

    output = options.output("rollback")
    with opened_to_write(options) as opening:
        found = find_version(opening, ref)
        done = roll(opening.repo, found.run, found.id, reason=reason)

    def draw(screen: Screen) -> None:
        if options.quiet:
            return
        if done.head_before == done.target.id:
            screen.line(f"{_named(done.target)} is the head of its run already")
            return
        screen.line(f"{found.run} continues {_named(done.target)}")
        for title, versions in (("abandoned", done.abandoned), ("back", done.returned)):
            if versions:
                shown = ", ".join(_named(version) for version in versions[:_NAMED])
                more = len(versions) - _NAMED
                tail = f" and {count_text(more)} more" if more > 0 else ""
                screen.line(f"{title}: {shown}{tail}")
        if done.head_before:
            screen.line(f"to undo: ckptstore rollback {done.head_before[:12]}")

    document = {
        "run": found.run,
        "version": done.target.id,
        "step": done.target.step,
        "previous": done.head_before or None,
        "abandoned": [version.id for version in done.abandoned],
        "returned": [version.id for version in done.returned],
        "reason": reason,
    }
    output.show(document, draw)


def _named(version: Version) -> str:
    return f"{version.run}@{version.step} {version.id[:8]}"
