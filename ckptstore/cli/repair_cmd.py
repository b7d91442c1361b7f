"""``ckptstore repair``: bring back what is damaged, and say what is lost."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from ckptstore.cli.options import SourceOptions, WriterOptions, dry_run
from ckptstore.cli.progress import progress_bars
from ckptstore.cli.repair_text import draw_repair, draw_superblock, repair_document
from ckptstore.cli.session import location, opened_for, opened_place, opened_to_write, vouching
from ckptstore.cli.verify_cmd import VerifyLevel
from ckptstore.errors import IntegrityError
from ckptstore.replicas.places import PREFIX
from ckptstore.store import Store, mend_superblock

if TYPE_CHECKING:
    from ckptstore.maintenance.repair.fix_superblock import SuperblockFinding

__all__ = ["repair"]


_From = Annotated[
    list[str] | None,
    typer.Option(
        "--from",
        metavar="URL",
        help="A second store that may have what is damaged here: a copy, or any store that "
        "holds the same tensors; or replica:NAME. It is only read. Repeatable: the next is asked "
        "for what one has not, or only in an archive class.",
    ),
]


def repair(
    *,
    url: _From = None,
    source: SourceOptions,
    level: Annotated[
        VerifyLevel,
        typer.Option(
            "--level",
            help="How damage is looked for: full reads every byte; records only records and sizes.",
        ),
    ] = VerifyLevel.FULL,
    dry_run: Annotated[bool, dry_run("Say what would be done; write nothing.")] = False,
    options: WriterOptions,
) -> None:
    """Bring back what is damaged; exits with 5 if something is lost, and says exactly what.

    Nothing is deleted and no object is changed: what is brought back is written anew, and a commit
    makes the versions lie there. Safe beside savers and readers; may be stopped and run again.
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
        opening = stack.enter_context(opened_to_write(options, writing=not dry_run))
        for place in urls:
            if place not in others:
                others[place] = stack.enter_context(opened_for(opening, place, source.given()))
        with progress_bars(output) as progress:
            report = opening.repair(
                [others[place] for place in urls],
                level=level.value,
                dry_run=dry_run,
                progress=progress,
            )
        output.show(
            repair_document(report, opening.url, superblock),
            lambda screen: draw_repair(screen, report, superblock),
        )
    if not report.ok:
        raise typer.Exit(IntegrityError.exit_code)


def _mend_superblock(
    options: WriterOptions, source: Store | None, *, dry_run: bool
) -> SuperblockFinding | None:
    """Bring back the record that the store is opened by; None where it needs nothing."""
    with vouching():
        return mend_superblock(
            location(options.store),
            source=source,
            single_writer=options.single_writer,
            dry_run=dry_run,
            encryption_key=options.key,
            **options.storage_options(),
        )
