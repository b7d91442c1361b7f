"""``ckptstore fork``: start a run from a version of another run, here or in another store."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Annotated

import typer

from ckptstore.cli import store_options
from ckptstore.cli.session import find_version, give_replica, opened, opened_for
from ckptstore.cli.text import saved_text, version_is, version_text
from ckptstore.errors import InvalidInputError
from ckptstore.format.paths import Pattern
from ckptstore.maintenance.reports.documents import version_document


def fork(
    ref: Annotated[str, typer.Argument(metavar="REF")],
    new_run: Annotated[str, typer.Argument(metavar="NEW_RUN")],
    *,
    paths: store_options.PathOptions,
    role: Annotated[list[str] | None, typer.Option(metavar="ROLE")] = None,
    rename: Annotated[list[str] | None, typer.Option(metavar="OLD=NEW")] = None,
    to: Annotated[str | None, typer.Option(metavar="URL")] = None,
    target: store_options.TargetOptions,
    replica: store_options.FromReplica = None,
    source: store_options.SourceOptions,
    options: store_options.WriterOptions,
) -> None:
    """Start a run from a version; the new run shares its chunks, and no tensor is copied.

    With --to, only chunks that the other store lacks are copied.

    Parameters
    ----------
    ref
        The version to start from.
    new_run
        Name of the new run; it must be free.
    role
        Only leaves of this role, for example weights. Repeatable.
    rename
        Move leaves at or below the path OLD to NEW. Repeatable.
    to
        Create the run in this store, a location or replica:NAME.

    Examples
    --------
    ckptstore fork gpt@best:val_loss gpt-ft --role weights
    ckptstore fork gpt@1200 gpt --to s3://archive/ckpts
    """
    output = options.output("fork")
    example = "model.backbone=model.encoder"
    pairs = store_options.parse_pairs(rename or (), "OLD=NEW", example, unnamed=True)
    renames = dict[Pattern, Pattern](pairs.items())
    if to is None and (target.to_option or target.to_key):
        msg = "--to-option and --to-key are for the store of --to, and none is named"
        raise InvalidInputError(msg, hint="--to URL")
    # A run that begins elsewhere changes nothing here.
    with ExitStack() as stack:
        opening = stack.enter_context(opened(options, writing=to is None))
        give_replica(opening, replica, source)
        begun = find_version(opening, ref)
        other = None
        if to is not None:
            single, given = options.single_writer, target.given()
            there = opened_for(opening, to, given, writing=True, single_writer=single)
            other = stack.enter_context(there)
        with output.progress() as progress:
            run = opening.fork(
                f"#{begun.id}",
                new_run,
                include=paths.include or None,
                exclude=paths.exclude or None,
                roles=role or None,
                rename=renames or None,
                store=other,
                progress=progress,
            )
            version = run.head
        assert version is not None  # noqa: S101  # a fork has a first version
        document = {"source": begun.id, "to": to, "version": version_document(version, head=True)}
        text = f"{version_is(version)}, from {version_text(begun)}: {saved_text(version, 'copied')}"
        output.tell(document, text, brief=version.id)
