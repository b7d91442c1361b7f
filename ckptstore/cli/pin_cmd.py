"""``ckptstore pin``: protect versions from deletion."""

from __future__ import annotations

from typing import Annotated

import typer

from ckptstore.catalog.lifecycle_ops import pinned_text
from ckptstore.cli.session import find_version, opened
from ckptstore.cli.store_options import WriterOptions
from ckptstore.cli.text import version_text
from ckptstore.errors import InvalidInputError
from ckptstore.maintenance.reports.documents import name_document


def pin(
    refs: Annotated[list[str] | None, typer.Argument(metavar="[REF]...")] = None,
    *,
    delete: Annotated[bool, typer.Option("--delete", "-d")] = False,
    for_store: Annotated[str | None, typer.Option("--for", metavar="STORE")] = None,
    options: WriterOptions,
) -> None:
    """Pin versions, so that rm and retain neither delete nor reduce them; or unpin them.

    Parameters
    ----------
    refs
        The versions.
    delete
        Remove all pins of these versions, from any store.
    for_store
        With --delete, instead of versions: remove the pins that evictions from this store left
        here. Its id, or a prefix of it.

    Examples
    --------
    ckptstore pin gpt@best:val_loss
    ckptstore pin gpt@1200 --delete
    """
    output = options.output("pin")
    if (for_store is not None) == bool(refs) or (for_store is not None and not delete):
        msg = "name versions; or a store, with --delete --for STORE"
        raise InvalidInputError(msg, hint="ckptstore pin [--delete] REF...")
    with opened(options, writing=True) as opening:
        if for_store is not None:
            found = opening.unpin_for(for_store)
        else:
            change = opening.unpin if delete else opening.pin
            found = [find_version(opening, ref) for ref in refs or ()]
            found = [change(f"#{version.id}") for version in found]
        document = {"versions": [{**name_document(v), "pinned": v.pinned} for v in found]}
        said = [f"is {pinned_text(v)}" if v.pinned else "is not pinned any more" for v in found]
        lines = [f"{version_text(v)} {word}" for v, word in zip(found, said, strict=True)]
        output.tell(document, *lines)
