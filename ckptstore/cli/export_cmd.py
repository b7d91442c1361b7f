"""``ckptstore export``: write the tensors of a version to a safetensors file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ckptstore.cli.elsewhere import FromReplica, give
from ckptstore.cli.progress import progress_bars
from ckptstore.cli.session import find_version, opened
from ckptstore.cli.store_options import CommonOptions, PathOptions, SourceOptions
from ckptstore.cli.text import bytes_text, counted, listed

_NAMED = 5
"""Paths that the note about what was left out names."""


def export(
    ref: Annotated[str, typer.Argument(metavar="REF")],
    path: Annotated[Path, typer.Argument(metavar="PATH")],
    *,
    paths: PathOptions,
    strip_prefix: Annotated[str, typer.Option(metavar="TEXT")] = "",
    force: Annotated[bool, typer.Option("--force", "-f")] = False,
    replica: FromReplica = None,
    source: SourceOptions,
    options: CommonOptions,
) -> None:
    """Write tensors to a safetensors file; every byte is checked.

    The file appears only when it is complete and on disk. Values that are not tensors are skipped,
    with a note. Evicted data is read from a replica.

    Parameters
    ----------
    ref
        The version.
    path
        The file to write: NAME.safetensors.
    strip_prefix
        Prefix to remove from tensor names: 'model.' for weights saved under model.
    force
        Replace an existing file.
    """
    from ckptstore.integrations.safetensors_export import export_safetensors

    output = options.output("export")
    with opened(options) as opening:
        give(opening, replica, source)
        with progress_bars(output) as progress:
            done = export_safetensors(
                opening,
                f"#{find_version(opening, ref).id}",
                path,
                include=paths.include or None,
                exclude=paths.exclude or None,
                strip_prefix=strip_prefix,
                overwrite=force,
                progress=progress,
            )
    document = {
        "path": done.path,
        "version": done.version.id,
        "run": done.version.run,
        "step": done.version.step,
        "tensors_count": done.tensors_count,
        "file_bytes": done.file_bytes,
        "left_out": done.left_out,
    }
    count, size = counted(done.tensors_count, "tensor"), bytes_text(done.file_bytes)
    text = f"{done.path}: {count} of {done.version.run}@{done.version.step}, {size}"
    output.tell(document, text)
    if done.left_out and not options.json:
        output.note(f"left out, since they are no tensors: {listed(done.left_out, most=_NAMED)}")
