"""``ckptstore annotate``: metrics that arrive after the save."""

from __future__ import annotations

from typing import Annotated

import typer

from ckptstore.cli.documents import metrics_document
from ckptstore.cli.options import (
    AsJson,
    Key,
    Quiet,
    SingleWriter,
    StorageOptions,
    StoreUrl,
    parse_metrics,
)
from ckptstore.cli.output import Output
from ckptstore.cli.session import find_version, opened
from ckptstore.cli.text import metric_text

__all__ = ["annotate"]


def annotate(
    ref: Annotated[str, typer.Argument(metavar="REF", help="The version.")],
    metrics: Annotated[
        list[str], typer.Argument(metavar="NAME=VALUE", help="Metrics, such as bleu=31.0.")
    ],
    single_writer: SingleWriter = False,
    store: StoreUrl = None,
    option: StorageOptions = None,
    key: Key = None,
    json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Add metrics to a version, or replace their values."""
    output = Output("annotate", as_json=json, quiet=quiet)
    values = parse_metrics(metrics)
    with opened(store, option, key=key, writing=True, single_writer=single_writer) as opening:
        found = find_version(opening, ref)
        version = opening.annotate(f"#{found.id}", values)
        document = {
            "version": version.id,
            "run": version.run,
            "step": version.step,
            "metrics": metrics_document(version.metrics),
        }
        known = ", ".join(f"{n} {metric_text(x)}" for n, x in sorted(version.metrics.items()))
        text = f"{version.run}@{version.step}: {known}"
        output.show(document, lambda screen: None if quiet else screen.line(text))
