"""``ckptstore replica``: name other stores, so that loads, jobs and commands find them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, Literal

import msgspec
import typer

from ckptstore.cli.output import Column, Output, Screen
from ckptstore.cli.session import opened
from ckptstore.cli.store_options import TargetOptions, WriterOptions
from ckptstore.cli.text import count_text
from ckptstore.errors import InvalidInputError
from ckptstore.maintenance.reports.documents import lag_document
from ckptstore.maintenance.reports.usage import ReplicaLag, replica_lags
from ckptstore.model import ReplicaInfo
from ckptstore.store import Store

Action = Literal["add", "ls", "rm"]
"""Action of ``ckptstore replica``."""
_USAGES: Final[dict[Action, str]] = {"add": "add NAME URL", "rm": "rm NAME", "ls": "ls"}


def replica(
    action: Annotated[Action, typer.Argument(metavar="ACTION")],
    name: Annotated[str | None, typer.Argument(metavar="[NAME]")] = None,
    url: Annotated[str | None, typer.Argument(metavar="[URL]")] = None,
    *,
    create: bool = False,
    target: TargetOptions,
    options: WriterOptions,
) -> None:
    """List, add or remove names of other stores that hold versions of this one.

    Loads read data that is missing here from these stores, and commands and jobs accept
    replica:NAME for a second store. The log holds name, location and store id; never options, keys
    or credentials. If another store is found at the location, it is refused. Nothing is copied and
    nothing is deleted.

    Parameters
    ----------
    action
        add NAME URL, ls, or rm NAME.
    name
        Name of the replica.
    url
        With add: location of the store.
    create
        With add: create the store if it is missing.

    Examples
    --------
    ckptstore replica add cold s3://archive/ckpts --create
    ckptstore replica ls
    """
    output = options.output("replica")
    _check(action, name, url)
    with opened(options, writing=action != "ls") as found:
        if action == "add":
            given = target.given(placed=False)
            added = found.add_replica(str(name), str(url), create=create, **given)
            _show_one(output, found, added, f"{added.name} is {added.url}, store {added.store[:8]}")
        elif action == "rm":
            gone = found.repo.refresh().replicas.get(str(name))
            found.remove_replica(str(name))
            if gone is not None:
                _show_one(output, found, gone, f"{gone.name} is forgotten, not deleted: {gone.url}")
        else:
            _list(output, found)


def _check(action: Action, name: str | None, url: str | None) -> None:
    usage = _USAGES[action]
    if (name is not None, url is not None) != ("NAME" in usage, "URL" in usage):
        msg = f"replica {action} is given the wrong number of arguments"
        raise InvalidInputError(msg, hint=f"ckptstore replica {usage}")


def _show_one(output: Output, store: Store, one: ReplicaInfo, text: str) -> None:
    document = {"store": store.url, "replica": msgspec.to_builtins(one)}
    output.show(document, lambda screen: screen.line(text))


def _list(output: Output, store: Store) -> None:
    lags = replica_lags(store.repo.refresh())
    document = {"store": store.url, "replicas": [lag_document(lag) for lag in lags]}
    output.show(document, lambda screen: _draw(screen, lags))


def _draw(screen: Screen, lags: Sequence[ReplicaLag]) -> None:
    if not lags:
        screen.line("no replica has a name; ckptstore replica add NAME URL")
        return
    screen.listing(
        lags,
        Column("NAME", lambda lag: lag.replica.name, wrap=False),
        Column("URL", lambda lag: lag.replica.url),
        Column("STORE", lambda lag: lag.replica.store[:8], wrap=False),
        Column("VERSIONS", lambda lag: count_text(lag.versions_count), right=True),
        Column("MISSING", lambda lag: count_text(lag.missing_count), right=True),
    )
