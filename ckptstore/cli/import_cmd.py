"""``ckptstore import``: save a file or folder of weights as a version."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ckptstore.cli.session import opened
from ckptstore.cli.store_options import WriterOptions, parse_metrics
from ckptstore.cli.text import saved_text, version_is
from ckptstore.errors import InvalidInputError
from ckptstore.maintenance.reports.documents import version_document


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
    """Save files of weights as versions: one, or a folder of checkpoints; nothing is executed.

    A folder of checkpoint-N, step_N, epoch=N or iter_N is imported whole, by steps; metrics come
    from names and from the Trainer's log. The same command continues after an interruption.

    From a folder with config.json or adapter_config.json, the configuration, tokenizer and other
    files are stored with the weights. Forks keep them, and export_pretrained writes them again.

    Files of torch.save are read with weights_only=True; a file that needs more is refused.

    Parameters
    ----------
    path
        A safetensors file or one of torch.save, of any suffix; a folder of shards, of Transformers
        or of PEFT, a directory of torch.distributed.checkpoint, a checkpoint of Orbax, a universal
        checkpoint of DeepSpeed, or a folder of checkpoints.
    run
        The run; created if missing.
    step
        Step of the version; required for a file or folder that does not say it. Selects a step of
        Orbax's CheckpointManager; default: the newest.
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

    Examples
    --------
    ckptstore import outputs/ gpt --min eval_loss
    ckptstore import model.safetensors gpt --step 1200 --tag pretrained
    """
    output = options.output("import")
    metrics = parse_metrics(metric or ())
    directions = _directions(lower or (), higher or ())
    with opened(options, writing=True) as opening:
        from ckptstore.integrations.file_import import import_file
        from ckptstore.integrations.folder_import import find_checkpoints, import_folder

        several = step is None and path.is_dir() and bool(find_checkpoints(path))
        if several and (metric or tag):
            msg = f"{path} is a folder of checkpoints, and --metric and --tag are for one"
            raise InvalidInputError(msg, hint="leave them out, or import one with --step N")
        with output.progress() as progress:
            words: Any = {"run": run, "directions": directions, "under": under}
            words["progress"] = progress
            if several:
                versions = import_folder(opening, path, **words)
            else:
                words |= {"step": step, "metrics": metrics, "tags": tag or ()}
                versions = [import_file(opening, path, **words)]
    documents = [version_document(one, head=one is versions[-1]) for one in versions]
    lines = [f"{version_is(one)}: {saved_text(one, 'stored')}" for one in versions]
    document = {"versions": documents} if several else {"version": documents[0]}
    output.tell(document, *lines, brief="\n".join(one.id for one in versions))


def _directions(lower: Sequence[str], higher: Sequence[str]) -> dict[str, str]:
    """Return the direction in which each metric is better."""
    both = sorted({*lower} & {*higher})
    if both:
        raise InvalidInputError(f"the metric {both[0]!r} is given to both --min and --max")
    return {**dict.fromkeys(lower, "min"), **dict.fromkeys(higher, "max")}
