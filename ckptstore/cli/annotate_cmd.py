"""``ckptstore annotate``: add metrics and a note to a saved version."""

from __future__ import annotations

from typing import Annotated

import typer

from ckptstore.cli.session import find_version, opened
from ckptstore.cli.store_options import WriterOptions, parse_metrics
from ckptstore.cli.text import metric_text
from ckptstore.maintenance.reports.documents import metrics_document
from ckptstore.model import naming


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
    output = options.output("annotate")
    values = parse_metrics(metrics or [])
    with opened(options, writing=True) as opening:
        found = find_version(opening, ref)
        version = opening.annotate(
            f"#{found.id}", values, metadata={"note": note} if note else None
        )
        document = {**naming(version), "metrics": metrics_document(version.metrics)}
        known = ", ".join(f"{n} {metric_text(x)}" for n, x in sorted(version.metrics.items()))
        known = f"{known}, {note}".removeprefix(", ") if note else known
        output.tell(document, f"{version.run}@{version.step}: {known}")
