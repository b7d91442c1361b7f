"""``ckptstore annotate``: add metrics to a saved version."""

from __future__ import annotations

from typing import Annotated

import typer

from ckptstore.cli.documents import metrics_document
from ckptstore.cli.session import find_version, opened_to_write
from ckptstore.cli.store_options import WriterOptions, parse_metrics
from ckptstore.cli.text import metric_text


def annotate(
    ref: Annotated[str, typer.Argument(metavar="REF")],
    metrics: Annotated[list[str], typer.Argument(metavar="NAME=VALUE")],
    *,
    options: WriterOptions,
) -> None:
    """Add metrics to a version, or replace their values.

    Parameters
    ----------
    ref
        The version.
    metrics
        Metrics, for example bleu=31.0.
    """
    output = options.output("annotate")
    values = parse_metrics(metrics)
    with opened_to_write(options) as opening:
        found = find_version(opening, ref)
        version = opening.annotate(f"#{found.id}", values)
        names = {"version": version.id, "run": version.run, "step": version.step}
        document = {**names, "metrics": metrics_document(version.metrics)}
        known = ", ".join(f"{n} {metric_text(x)}" for n, x in sorted(version.metrics.items()))
        text = f"{version.run}@{version.step}: {known}"
        output.tell(document, text)
