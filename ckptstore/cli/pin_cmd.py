"""``ckptstore pin``: nothing deletes a pinned version, or a part of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from ckptstore.cli.options import AsJson, Key, Quiet, SingleWriter, StorageOptions, StoreUrl
from ckptstore.cli.output import Output, Screen
from ckptstore.cli.session import find_version, opened

__all__ = ["pin"]


def pin(
    refs: Annotated[list[str], typer.Argument(metavar="REF...", help="The versions.")],
    delete: Annotated[bool, typer.Option("--delete", "-d", help="Take the pins away.")] = False,
    single_writer: SingleWriter = False,
    store: StoreUrl = None,
    option: StorageOptions = None,
    key: Key = None,
    json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Pin versions, so that no rm and no retain takes them or a part of them; or unpin them."""
    output = Output("pin", as_json=json, quiet=quiet)
    with opened(store, option, key=key, writing=True, single_writer=single_writer) as opening:
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
        output.show(document, lambda screen: None if quiet else _draw(screen, lines))


def _draw(screen: Screen, lines: Sequence[str]) -> None:
    for line in lines:
        screen.line(line)
