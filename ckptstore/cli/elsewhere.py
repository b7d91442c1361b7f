"""Reading on a replica what is not here any more: which one an option is for, and how it is opened.

Loads find the replicas by their names alone. What the log does not hold, a key or an endpoint, is
given for one of them by ``--from``.
"""

from __future__ import annotations

from typing import Annotated

import typer

from ckptstore.catalog.tier_changes import find_replica
from ckptstore.cli.options import SourceOptions
from ckptstore.errors import InvalidInputError
from ckptstore.replicas.places import PREFIX
from ckptstore.store import Store

__all__ = ["FromReplica", "give"]

FromReplica = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="replica:NAME",
        help="Of a version of which only the record is here: open this replica, if it has the "
        "content, with --from-option and --from-key.",
    ),
]


def give(store: Store, named: str | None, source: SourceOptions) -> None:
    """Have a store open one of its replicas with these options, should it turn to it.

    Raises
    ------
    InvalidInputError
        No replica is named, but options are; or what is named is none.
    NotFoundError
        The store has no replica of this name.
    """
    source.check(named, "replica:NAME")
    if named is None:
        return
    if not named.startswith(PREFIX):
        msg = f"--from wants a replica, not {named!r}"
        raise InvalidInputError(msg, hint="--from replica:NAME; --store URL reads another store")
    name = named.removeprefix(PREFIX)
    find_replica(store.repo.refresh(), name)
    if given := source.given():
        store.give_options(name, given)
