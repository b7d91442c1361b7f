"""``ckptstore fork``: begin a run at a version of another, here or in another store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Annotated

import typer

from ckptstore.cli.documents import total_bytes, version_document
from ckptstore.cli.options import (
    AsJson,
    Exclude,
    Include,
    Key,
    Quiet,
    SingleWriter,
    StorageOptions,
    StoreUrl,
    ToKey,
    ToOptions,
    parse_storage_options,
)
from ckptstore.cli.output import Output, Screen
from ckptstore.cli.progress import progress_bars
from ckptstore.cli.session import find_version, opened, vouching
from ckptstore.cli.text import bytes_text
from ckptstore.errors import InvalidInputError
from ckptstore.format.paths import Pattern
from ckptstore.store.tiers import PREFIX

if TYPE_CHECKING:
    from ckptstore.store import Store

__all__ = ["fork"]


def fork(
    ref: Annotated[str, typer.Argument(metavar="REF", help="The version to begin at.")],
    new_run: Annotated[
        str, typer.Argument(metavar="NEW_RUN", help="Name of the run; no run may have it.")
    ],
    include: Include = None,
    exclude: Exclude = None,
    role: Annotated[
        list[str] | None,
        typer.Option(
            "--role", metavar="ROLE", help="Only leaves of this role: weights, say. Repeatable."
        ),
    ] = None,
    rename: Annotated[
        list[str] | None,
        typer.Option(
            "--rename",
            metavar="OLD=NEW",
            help="What lies at or below the path OLD goes to NEW. Repeatable.",
        ),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="URL", help="Another store for the run; or replica:NAME."),
    ] = None,
    to_option: ToOptions = None,
    to_key: ToKey = None,
    single_writer: SingleWriter = False,
    store: StoreUrl = None,
    option: StorageOptions = None,
    key: Key = None,
    json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Begin a run at a version; the new run shares its chunks, and no tensor is copied.

    With --to, only chunks that the other store does not have travel.
    """
    output = Output("fork", as_json=json, quiet=quiet)
    renames = parse_renames(rename or ())
    with opened(
        store, option, key=key, writing=to is None, single_writer=single_writer and to is None
    ) as opening:
        source = find_version(opening, ref)
        target = (
            nullcontext()
            if to is None
            else _target(opening, to, to_option, to_key, single_writer=single_writer)
        )
        with target as other, progress_bars(output) as progress:
            run = opening.fork(
                f"#{source.id}",
                new_run,
                include=include or None,
                exclude=exclude or None,
                roles=role or None,
                rename=renames or None,
                store=other,
                progress=progress,
            )
            version = run.head
        assert version is not None  # noqa: S101  # a fork has a first version

        def draw(screen: Screen) -> None:
            if quiet:
                screen.line(version.id)
                return
            total = total_bytes(version.roles.values())
            sizes = f"{bytes_text(total.logical)}, {bytes_text(total.stored)} copied"
            where = f"{version.run}@{version.step} is {version.id[:8]}"
            screen.line(f"{where}, from {source.run}@{source.step} {source.id[:8]}: {sizes}")

        document = {
            "source": source.id,
            "to": to,
            "version": version_document(version, head=True),
        }
        output.show(document, draw)


@contextmanager
def _target(
    here: Store,
    url: str,
    options: Sequence[str] | None,
    key: str | None,
    *,
    single_writer: bool,
) -> Iterator[Store]:
    """Open the other store to write to: a place, or ``replica:NAME``."""
    if not url.startswith(PREFIX):
        with opened(url, options, key=key, writing=True, single_writer=single_writer) as other:
            yield other
        return
    name = url.removeprefix(PREFIX)
    secret = {} if key is None else {"encryption_key": key}
    own = {**parse_storage_options(options or ()), **secret}
    here.give_options(name, {**own, "read_only": False, "single_writer": single_writer})
    with vouching():
        yield here.replica(name)


def parse_renames(texts: Sequence[str]) -> dict[Pattern, Pattern]:
    """Return renamings given as ``OLD=NEW``; either may be empty.

    Raises
    ------
    InvalidInputError
        A text has no ``=``, or OLD occurs twice.
    """
    renames: dict[Pattern, Pattern] = {}
    for text in texts:
        old, equals, new = text.partition("=")
        if not equals:
            msg = f"{text!r} is not OLD=NEW"
            raise InvalidInputError(msg, hint="such as model.backbone=model.encoder")
        if old in renames:
            msg = f"{old!r} is renamed twice"
            raise InvalidInputError(msg)
        renames[old] = new
    return renames
