"""``ckptstore roles``: the role of each part of a version, and why."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ckptstore.cli.output import Column, Screen
from ckptstore.cli.session import find_version, opened
from ckptstore.cli.store_options import CommonOptions
from ckptstore.cli.text import bytes_text, version_text
from ckptstore.format.paths import path_text
from ckptstore.maintenance.reports.documents import name_document
from ckptstore.maintenance.retention.reduce import roles_of


def roles(ref: Annotated[str, typer.Argument(metavar="REF")], *, options: CommonOptions) -> None:
    """Show the role of each part of a version, and why; a reduction to weights drops all others.

    Parameters
    ----------
    ref
        RUN for its newest version, RUN@STEP, RUN@TAG, ID ...

    Examples
    --------
    ckptstore roles gpt
    ckptstore roles gpt@1200 --json
    """
    with opened(options) as opening:
        version = find_version(opening, ref)
        parts: list[Any] = [
            {"name": path_text(part.place), "role": part.role, "why": part.why, "bytes": size}
            for part, size in roles_of(opening.repo, version).items()
        ]

    def draw(screen: Screen) -> None:
        """Print the parts of the version."""
        screen.heading(version_text(version))
        screen.listing(
            parts,
            Column("NAME", lambda part: part["name"] or "(all)"),
            Column("ROLE", lambda part: part["role"], wrap=False),
            Column("SIZE", lambda part: bytes_text(part["bytes"]), right=True, wrap=False),
            Column("WHY", lambda part: part["why"]),
        )

    options.output("roles").show({"version": name_document(version), "parts": parts}, draw)
