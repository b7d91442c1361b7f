"""``ckptstore tag``, ``annotate`` and ``pin``: names, metrics, notes and pins of a version."""

from __future__ import annotations

from typing import Annotated

import typer

from ckptstore.catalog.lifecycle_ops import pinned_text
from ckptstore.cli.session import find_version, opened
from ckptstore.cli.store_options import WriterOptions, parse_metrics
from ckptstore.cli.text import metric_text, version_text
from ckptstore.errors import InvalidInputError
from ckptstore.maintenance.reports.documents import metrics_document, name_document
from ckptstore.model import naming


def tag(
    ref: Annotated[str, typer.Argument(metavar="REF")],
    name: Annotated[str, typer.Argument(metavar="TAG")],
    *,
    delete: Annotated[bool, typer.Option("--delete", "-d")] = False,
    options: WriterOptions,
) -> None:
    """Tag a version, so that RUN@TAG names it; or delete a tag of a run.

    Parameters
    ----------
    ref
        The version; with --delete the run's name.
    name
        The tag; it moves if it exists.
    delete
        Remove the tag from the run.

    Examples
    --------
    ckptstore tag gpt@1200 release
    ckptstore tag gpt release --delete
    """
    with opened(options, writing=True) as opening:
        if delete:
            if "@" in ref or ref.startswith("#"):
                msg = f"--delete wants the name of a run, not {ref!r}"
                raise InvalidInputError(msg, hint=f"ckptstore tag RUN {name} --delete")
            run = opening.run(ref)
            was = run.info.tags.get(name)
            run.untag(name)
            document = {"run": ref, "tag": name, "version": None, "previous": was}
            text = f"{ref}@{name} is gone"
        else:
            found = find_version(opening, ref)
            was = opening.repo.catalog.run(found.run).tags.get(name)
            opening.tag(f"#{found.id}", name)
            document = {"run": found.run, "tag": name, "version": found.id, "previous": was}
            text = f"{found.run}@{name} is step {found.step}, {found.id[:8]}"
            if was and was != found.id:
                text += f"; it was {was[:8]}"
        options.output("tag").tell(document, text)


def annotate(
    ref: Annotated[str, typer.Argument(metavar="REF")],
    metrics: Annotated[list[str] | None, typer.Argument(metavar="NAME=VALUE")] = None,
    *,
    note: Annotated[str, typer.Option("--note", metavar="TEXT")] = "",
    options: WriterOptions,
) -> None:
    """Add metrics and a note to a version, or replace them.

    Parameters
    ----------
    ref
        The version.
    metrics
        Metrics, for example bleu=31.0.
    note
        A text about the version; show and log print it.

    Examples
    --------
    ckptstore annotate gpt@1200 bleu=31.0
    ckptstore annotate gpt@best:val_loss --note 'the one in the paper'
    """
    values = parse_metrics(metrics or [])
    with opened(options, writing=True) as opening:
        found = find_version(opening, ref)
        metadata = {"note": note} if note else None
        version = opening.annotate(f"#{found.id}", values, metadata=metadata)
        document = {**naming(version), "metrics": metrics_document(version.metrics)}
        known = ", ".join(f"{n} {metric_text(x)}" for n, x in sorted(version.metrics.items()))
        known = f"{known}, {note}".removeprefix(", ") if note else known
        options.output("annotate").tell(document, f"{version.run}@{version.step}: {known}")


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
        options.output("pin").tell(document, *lines)
