"""``ckptstore import``: save a file or folder of weights as a version."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ckptstore.cli.documents import version_document
from ckptstore.cli.progress import progress_bars
from ckptstore.cli.session import opened_to_write
from ckptstore.cli.store_options import WriterOptions, parse_metrics
from ckptstore.cli.text import saved_text, version_is
from ckptstore.errors import InvalidInputError


def import_(
    path: Annotated[Path, typer.Argument(metavar="PATH")],
    run: Annotated[str, typer.Argument(metavar="RUN")],
    *,
    step: Annotated[int | None, typer.Option(min=0, metavar="N")] = None,
    metric: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE")] = None,
    lower: Annotated[list[str] | None, typer.Option("--min", metavar="NAME")] = None,
    higher: Annotated[list[str] | None, typer.Option("--max", metavar="NAME")] = None,
    tag: Annotated[list[str] | None, typer.Option(metavar="TAG")] = None,
    under: Annotated[str | None, typer.Option(metavar="KEY")] = None,
    options: WriterOptions,
) -> None:
    """Save the content of a file or folder as a version; nothing in it is executed.

    From a folder with config.json or adapter_config.json, the configuration, tokenizer and other
    files are stored with the weights. Forks keep them, and export_pretrained writes them again.

    Files of torch.save are read with weights_only=True; a file that needs more is refused.

    Parameters
    ----------
    path
        A .safetensors, .pt, .pth, .bin or .ckpt file, a folder of shards, of Transformers or of
        PEFT, or a directory of torch.distributed.checkpoint.
    run
        The run; created if missing.
    step
        Step of the version; required, except for a folder of Transformers (0).
    metric
        A metric of the version. Repeatable.
    lower
        A lower value of this metric is better. Repeatable.
    higher
        A higher value of this metric is better. Repeatable.
    tag
        A tag. Repeatable.
    under
        Store the content below this key of the state. Default for a folder of Transformers:
        'model'.
    """
    output = options.output("import")
    metrics = parse_metrics(metric or ())
    directions = _directions(lower or (), higher or ())
    with opened_to_write(options) as opening:
        from ckptstore.integrations.file_import import import_file

        with progress_bars(output) as progress:
            version = import_file(
                opening,
                path,
                run=run,
                step=step,
                metrics=metrics,
                directions=directions,
                tags=tag or (),
                under=under,
                progress=progress,
            )
        document = {"version": version_document(version, head=True)}
        text = f"{version_is(version)}: {saved_text(version, 'stored')}"
        output.tell(document, text, brief=version.id)


def _directions(lower: Sequence[str], higher: Sequence[str]) -> dict[str, str]:
    """Return the direction in which each metric is better."""
    both = sorted({*lower} & {*higher})
    if both:
        msg = f"the metric {both[0]!r} is given to both --min and --max"
        raise InvalidInputError(msg)
    return {**dict.fromkeys(lower, "min"), **dict.fromkeys(higher, "max")}
