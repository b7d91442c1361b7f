"""``ckptstore init``: create a store, after a check that the storage is safe for one."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from ckptstore.cli.doctor_cmd import draw_findings
from ckptstore.cli.output import Screen
from ckptstore.cli.session import location, vouching
from ckptstore.cli.store_options import WriterOptions
from ckptstore.cli.text import bytes_text, parse_bytes
from ckptstore.config import Options
from ckptstore.format.superblock import Superblock
from ckptstore.repo import open_repo

_SHOWN: Final = ("store_id", "format", "chunk_bytes", "backend", "put_if_absent", "single_writer")
"""Fields of the superblock in the document."""


def init(
    url: Annotated[str | None, typer.Argument(metavar="URL")] = None,
    *,
    chunk_size: Annotated[str, typer.Option(metavar="BYTES")] = "4MiB",
    options: WriterOptions,
) -> None:
    """Create a store; refuses storage on which two writers could lose commits.

    Parameters
    ----------
    url
        Location; default: --store or CKPTSTORE_URL.
    chunk_size
        Size of chunks before compression: 64KiB-64MiB.

    Examples
    --------
    ckptstore init /data/ckpts
    ckptstore init s3://bucket/ckpts -o endpoint_url=http://10.0.0.5:9000
    """
    output = options.output("init")
    chunk_bytes = parse_bytes(chunk_size)
    with (
        vouching(),
        open_repo(
            location(url or options.store),
            create=True,
            exist_ok=False,
            options=Options(single_writer=options.single_writer),
            chunk_bytes=chunk_bytes,
            key=options.key,
            storage_options=options.storage_options(),
        ) as repo,
    ):
        made = repo.superblock
        document = {
            "store": repo.url,
            **{name: getattr(made, name) for name in _SHOWN},
            "encrypted": made.encryption is not None,
            "probe": made.probe,
        }
        output.show(document, lambda screen: _draw(screen, repo.url, made, quiet=options.quiet))


def _draw(screen: Screen, url: str, made: Superblock, *, quiet: bool) -> None:
    if quiet:
        return
    size = bytes_text(made.chunk_bytes)
    what = "an encrypted store" if made.encryption else "a store"
    screen.line(f"created {what} at {url} (format {made.format}, chunks of {size})")
    screen.line()
    draw_findings(screen, made.probe)
