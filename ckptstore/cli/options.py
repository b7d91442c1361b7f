"""Options that several commands share, declared once, and what their texts mean."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from ckptstore.errors import InvalidInputError

__all__ = [
    "AsJson",
    "EngineName",
    "EngineWorkers",
    "Exclude",
    "Include",
    "Key",
    "MetricValues",
    "Quiet",
    "SingleWriter",
    "StorageOptions",
    "StoreUrl",
    "ToKey",
    "ToOptions",
    "Utc",
    "parse_metrics",
    "parse_storage_options",
]

_PANEL = "Common options"

StoreUrl = Annotated[
    str | None,
    typer.Option(
        "--store",
        "-s",
        metavar="URL",
        envvar="CKPTSTORE_URL",
        show_envvar=True,
        help="The store: a path, s3://bucket/prefix, gs://bucket/prefix or any fsspec URL.",
        rich_help_panel=_PANEL,
    ),
]
StorageOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        "-o",
        metavar="KEY=VALUE",
        help="An option for the storage library, such as endpoint_url=http://host:9000; "
        "KEY:=JSON for numbers and objects. Repeatable.",
        rich_help_panel=_PANEL,
    ),
]
ToOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--to-option",
        metavar="KEY=VALUE",
        help="As --option, for the storage of the other store. Repeatable.",
    ),
]
Key = Annotated[
    str | None,
    typer.Option(
        "--key",
        metavar="SPEC",
        envvar="CKPTSTORE_KEY",
        show_envvar=True,
        help="The key of an encrypted store: file:PATH, env:NAME or command:CMD.",
        rich_help_panel=_PANEL,
    ),
]
ToKey = Annotated[
    str | None,
    typer.Option(
        "--to-key",
        metavar="SPEC",
        help="As --key, for the other store; one that is made then is encrypted.",
    ),
]
AsJson = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON document instead of text.", rich_help_panel=_PANEL),
]
Quiet = Annotated[
    bool,
    typer.Option(
        "--quiet", "-q", help="No progress, no notes; only the result.", rich_help_panel=_PANEL
    ),
]
Utc = Annotated[
    bool, typer.Option("--utc", help="Times in UTC instead of local time.", rich_help_panel=_PANEL)
]
SingleWriter = Annotated[
    bool,
    typer.Option(
        "--single-writer",
        help="You vouch that no one else writes meanwhile: allows storage that cannot create an "
        "object only if it is absent.",
    ),
]
EngineName = Annotated[
    str | None,
    typer.Option(
        "--engine",
        metavar="ENGINE",
        help="Who does the work: threads of this process (the default), processes, dask:local, or "
        "the workers of a Dask scheduler, dask://HOST:PORT.",
    ),
]
EngineWorkers = Annotated[
    int | None,
    typer.Option(
        "--workers", min=1, metavar="N", help="How many tasks run at once; as --engine has it."
    ),
]
Include = Annotated[
    list[str] | None,
    typer.Option(
        "--include",
        metavar="PATTERN",
        help="Only tensors whose path matches, such as 'model.*'. Repeatable.",
    ),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option(
        "--exclude", metavar="PATTERN", help="Leave out tensors whose path matches. Repeatable."
    ),
]
MetricValues = Annotated[
    list[str] | None,
    typer.Option("--metric", metavar="NAME=VALUE", help="A metric of the version. Repeatable."),
]


def parse_storage_options(texts: Sequence[str]) -> dict[str, Any]:
    """Return what ``--option`` asks for.

    ``key=value`` is text, but ``true`` and ``false`` are booleans; ``key:=value`` is JSON. Values
    may be secrets and never appear in an error.

    Raises
    ------
    InvalidInputError
        A text is neither, or its JSON is not valid; the key is named.
    """
    options: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        as_json = key.endswith(":")
        key = key.removesuffix(":")
        if not equals or not key.isidentifier():
            shown = key if key.isidentifier() else "..."
            msg = f"--option wants KEY=VALUE or KEY:=JSON, not {shown!r}"
            raise InvalidInputError(msg, hint="such as --option endpoint_url=http://host:9000")
        if as_json:
            try:
                options[key] = json.loads(value)
            except ValueError:
                msg = f"--option {key}:= is not followed by JSON"
                raise InvalidInputError(msg, hint=f"write {key}=TEXT for text") from None
        else:
            options[key] = {"true": True, "false": False}.get(value, value)
    return options


def parse_metrics(texts: Sequence[str]) -> dict[str, float]:
    """Return metrics given as ``name=value``; ``nan`` and ``inf`` are numbers.

    Raises
    ------
    InvalidInputError
        A text is not of this form, or a name occurs twice.
    """
    metrics: dict[str, float] = {}
    for text in texts:
        name, equals, value = text.rpartition("=")
        try:
            number = float(value)
        except ValueError:
            number = math.nan
            equals = ""
        if not equals or not name:
            msg = f"{text!r} is not NAME=NUMBER"
            raise InvalidInputError(msg, hint="such as val_loss=2.31")
        if name in metrics:
            msg = f"the metric {name!r} is given twice"
            raise InvalidInputError(msg)
        metrics[name] = number
    return metrics
