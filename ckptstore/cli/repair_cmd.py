"""``ckptstore repair``: bring back what is damaged, and say what is lost."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from typing import Annotated

import typer

from ckptstore.cli.options import (
    AsJson,
    Key,
    Quiet,
    SingleWriter,
    StorageOptions,
    StoreUrl,
    parse_storage_options,
)
from ckptstore.cli.output import Output
from ckptstore.cli.progress import progress_bars
from ckptstore.cli.repair_text import draw_repair, draw_superblock, repair_document
from ckptstore.cli.session import location, opened, opened_for, vouching
from ckptstore.cli.verify_cmd import VerifyLevel
from ckptstore.errors import IntegrityError
from ckptstore.store import Store, mend_superblock
from ckptstore.store.tiers import PREFIX

__all__ = ["repair"]


def repair(
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="URL",
            help="A second store that may have what is damaged here: a copy, or any store that "
            "holds the same tensors; or replica:NAME. It is only read.",
        ),
    ] = None,
    from_option: Annotated[
        list[str] | None,
        typer.Option(
            "--from-option",
            metavar="KEY=VALUE",
            help="As --option, for the store of --from. Repeatable.",
        ),
    ] = None,
    from_key: Annotated[
        str | None,
        typer.Option("--from-key", metavar="SPEC", help="As --key, for the store of --from."),
    ] = None,
    level: Annotated[
        VerifyLevel,
        typer.Option(
            "--level",
            help="How damage is looked for: full reads every byte; records only records and sizes.",
        ),
    ] = VerifyLevel.FULL,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "-n", help="Say what would be done; write nothing.")
    ] = False,
    single_writer: SingleWriter = False,
    store: StoreUrl = None,
    option: StorageOptions = None,
    key: Key = None,
    json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Bring back what is damaged; exits with 5 if something is lost, and says exactly what.

    Nothing is deleted and no object is changed: what is brought back is written anew, and a commit
    makes the versions lie there. Safe beside savers and readers; may be stopped and run again.
    """
    output = Output("repair", as_json=json, quiet=quiet)
    named = source is not None and source.startswith(PREFIX)
    with ExitStack() as stack:
        other: Store | None = None
        if source and not named:
            other = stack.enter_context(opened(source, from_option, key=from_key))
        with vouching():
            superblock = mend_superblock(
                location(store),
                source=other,
                single_writer=single_writer,
                dry_run=dry_run,
                encryption_key=key,
                **parse_storage_options(option or ()),
            )
        if superblock is not None and (dry_run or not superblock.mended):
            # There is nothing to open yet: what else is wrong is found by the next call.
            document = {"store": location(store), "ok": False, "superblock": asdict(superblock)}
            output.show(document, lambda screen: draw_superblock(screen, superblock))
            raise typer.Exit(IntegrityError.exit_code)
        with opened(
            store, option, key=key, writing=not dry_run, single_writer=single_writer
        ) as opening:
            if source and named:
                other = stack.enter_context(opened_for(opening, source, from_option, from_key))
            with progress_bars(output) as progress:
                report = opening.repair(
                    other, level=level.value, dry_run=dry_run, progress=progress
                )
            output.show(
                repair_document(report, opening.url, superblock),
                lambda screen: draw_repair(screen, report, superblock),
            )
    if not report.ok:
        raise typer.Exit(IntegrityError.exit_code)
