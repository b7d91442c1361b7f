"""``ckptstore rollback``: move the head of a run to one of its versions."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated, Final

import typer

from ckptstore.cli.session import find_version, opened
from ckptstore.cli.store_options import WriterOptions
from ckptstore.cli.text import listed, version_text
from ckptstore.config import variable

if TYPE_CHECKING:
    from ckptstore.maintenance.retention.by_hand import Rolled

_NAMED: Final = 10
"""Abandoned versions that the text lists."""


def rollback(
    ref: Annotated[str, typer.Argument(metavar="REF")],
    *,
    reason: Annotated[str, typer.Option(metavar="TEXT")] = "",
    options: WriterOptions,
) -> None:
    """Move the head of a run to a version; later versions are abandoned, not deleted.

    The next save continues this version, and RUN@latest names it.

    Parameters
    ----------
    ref
        The version to move to, back or forward.
    reason
        Reason, recorded in the log.

    Examples
    --------
    ckptstore rollback gpt@best:val_loss
    ckptstore rollback gpt@~1 --reason 'loss spike'
    """
    from ckptstore.maintenance.retention.by_hand import rollback as roll

    with opened(options, writing=True) as opening:
        found = find_version(opening, ref)
        done = roll(opening.repo, found.run, found.id, reason=reason)
    document = {
        "run": found.run,
        "version": done.target.id,
        "step": done.target.step,
        "previous": done.head_before or None,
        "abandoned": [version.id for version in done.abandoned],
        "returned": [version.id for version in done.returned],
        "reason": reason,
    }
    undo = ["ckptstore", "rollback", done.head_before[:12]]
    if options.store and options.store != variable("CKPTSTORE_URL"):
        undo += ["--store", options.store]
    options.output("rollback").tell(document, *_lines(done, shlex.join(undo)))


def _lines(done: Rolled, undo: str) -> list[str]:
    from ckptstore.maintenance.retention.by_hand import REDUCED

    if done.head_before == done.target.id:
        return [f"{version_text(done.target)} is the head of its run already"]
    lines = [f"{done.target.run} continues {version_text(done.target)}"]
    if done.target.level != "full":
        lines.append(REDUCED)
    for title, versions in (("abandoned", done.abandoned), ("back", done.returned)):
        if versions:
            named = listed([version_text(version) for version in versions], most=_NAMED)
            lines.append(f"{title}: {named}")
    if done.head_before:
        lines.append(f"to undo: {undo}")
    return lines
