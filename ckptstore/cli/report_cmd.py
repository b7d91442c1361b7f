"""``ckptstore report``: the page of a store as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ckptstore.cli.session import opened
from ckptstore.cli.store_options import CommonOptions
from ckptstore.cli.text import bytes_text
from ckptstore.errors import InvalidInputError


def report(
    file: Annotated[Path, typer.Argument(metavar="FILE")],
    *,
    run: Annotated[str | None, typer.Option(metavar="RUN")] = None,
    options: CommonOptions,
) -> None:
    """Write a web page about the store: one file, to keep, mail or open without a server.

    It shows runs and their metrics, lineage, versions, bytes and health. Reads the catalog and a
    few manifests. An existing file is replaced.

    Parameters
    ----------
    file
        The file to write: NAME.html.
    run
        Only the curves of this run.

    Examples
    --------
    ckptstore report store.html
    ckptstore report gpt.html --run gpt
    """
    from ckptstore.pages.report_file import write_report

    if file.suffix.lower() not in {".html", ".htm"}:
        msg = f"{file.name!r} does not end in .html"
        raise InvalidInputError(msg, hint="ckptstore report store.html")
    with opened(options) as opening:
        size = write_report(opening, file, run=run)
        document = {"store": opening.url, "path": str(file), "bytes": size}
    options.output("report").tell(document, f"{file}: {bytes_text(size)}")
