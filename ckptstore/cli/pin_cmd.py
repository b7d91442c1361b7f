"""``ckptstore pin``: nothing deletes a pinned version, or a part of it."""

from __future__ import annotations

from typing import Annotated

import typer

from ckptstore.cli.options import WriterOptions
from ckptstore.cli.session import find_version, opened_to_write

__all__ = ["pin"]


def pin(
    refs: Annotated[list[str], typer.Argument(metavar="REF...", help="The versions.")],
    *,
    delete: Annotated[bool, typer.Option("--delete", "-d", help="Take the pins away.")] = False,
    options: WriterOptions,
) -> None:
    """Pin versions, so that no rm and no retain takes them or a part of them; or unpin them."""
    output = options.output("pin")
    with opened_to_write(options) as opening:
        change = opening.unpin if delete else opening.pin
        found = [find_version(opening, ref) for ref in refs]
        found = [change(f"#{version.id}") for version in found]
        document = {
            "versions": [
                {"id": v.id, "run": v.run, "step": v.step, "pinned": v.pinned} for v in found
            ],
        }
        word = "is not pinned any more" if delete else "is pinned"
        lines = [f"{v.run}@{v.step} {v.id[:8]} {word}" for v in found]
        output.tell(document, *lines)
