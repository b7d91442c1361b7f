"""Options for the replica from which evicted versions are read.

Loads find replicas through the log. ``--from`` passes options that the log does not hold, such as a
key or an endpoint, for one of them.
"""

from __future__ import annotations

from typing import Annotated

import typer

from ckptstore.catalog.replica_ops import find_replica
from ckptstore.cli.store_options import SourceOptions
from ckptstore.errors import InvalidInputError
from ckptstore.replicas.options import PREFIX
from ckptstore.store import Store

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
    """Set the options with which a store opens one of its replicas, if a load needs it.

    Raises
    ------
    InvalidInputError
        Options are given without a replica, or the named store is not a replica.
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
