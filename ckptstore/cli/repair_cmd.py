"""``ckptstore repair``: recover damaged data, and report lost data."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from ckptstore.cli.session import location, opened, opened_for, opened_place, vouching
from ckptstore.cli.store_options import DryRun, SourceOptions, WriterOptions
from ckptstore.cli.verify_cmd import VerifyLevel, draw_repair, draw_superblock, repair_document
from ckptstore.errors import IntegrityError
from ckptstore.replicas.options import PREFIX
from ckptstore.store import Store, mend_superblock

if TYPE_CHECKING:
    from ckptstore.maintenance.repair.fix_superblock import SuperblockFinding


def repair(
    *,
    url: Annotated[list[str] | None, typer.Option("--from", metavar="URL")] = None,
    source: SourceOptions,
    level: VerifyLevel = "full",
    dry_run: DryRun = False,
    options: WriterOptions,
) -> None:
    """Recover damaged data; exits with 5 and lists the lost tensors if something is lost.

    Nothing is deleted and no object is changed: recovered data is written to new objects, and a
    commit points the versions to them. Safe beside savers and readers; can be interrupted and run
    again.

    Parameters
    ----------
    level
        How to look for damage: full reads every byte; records reads only records and sizes.
    dry_run
        Print what would be done; write nothing.
    url
        A second store to recover from: a copy, any store with the same tensors, or replica:NAME. It
        is only read. Repeatable: later stores are asked for data that earlier ones lack or hold
        only in an archive class.

    Examples
    --------
    ckptstore repair --dry-run
    ckptstore repair --from s3://archive/ckpts
    """
    output = options.output("repair")
    urls = url or []
    source.check(urls[0] if urls else None, "URL")
    with ExitStack() as stack:
        others: dict[str, Store] = {}
        for place in urls:
            if not place.startswith(PREFIX):
                others[place] = stack.enter_context(opened_place(place, source.given()))
        first = next(iter(others.values()), None)
        superblock = _mend_superblock(options, first, dry_run=dry_run)
        if superblock is not None and (dry_run or not superblock.mended):
            # There is nothing to open yet: what else is wrong is found by the next call.
            document = {"store": options.store, "ok": False, "superblock": asdict(superblock)}
            output.show(document, lambda screen: draw_superblock(screen, superblock))
            raise typer.Exit(IntegrityError.exit_code)
        opening = stack.enter_context(opened(options, writing=not dry_run))
        for place in urls:
            if place not in others:
                others[place] = stack.enter_context(opened_for(opening, place, source.given()))
        with output.progress() as progress:
            stores = [others[place] for place in urls]
            report = opening.repair(stores, level=level, dry_run=dry_run, progress=progress)
        output.show(
            repair_document(report, opening.url, superblock),
            lambda screen: draw_repair(screen, report, superblock),
        )
    if not report.ok:
        raise typer.Exit(IntegrityError.exit_code)


def _mend_superblock(
    options: WriterOptions, source: Store | None, *, dry_run: bool
) -> SuperblockFinding | None:
    """Recover the superblock that opens the store; None if it is intact."""
    with vouching():
        return mend_superblock(
            location(options.store),
            source=source,
            single_writer=options.single_writer,
            dry_run=dry_run,
            encryption_key=options.key,
            **options.storage_options(),
        )
