"""``ckptstore replica``: name other stores, so that loads, jobs and commands find them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from ckptstore.cli.output import Column, Output, Screen
from ckptstore.cli.session import opened_to_write
from ckptstore.cli.store_options import TargetOptions, WriterOptions
from ckptstore.cli.text import count_text
from ckptstore.errors import InvalidInputError

if TYPE_CHECKING:
    from ckptstore.model import ReplicaInfo
    from ckptstore.store import Store


class Action(StrEnum):
    """Action of ``ckptstore replica``."""

    ADD = "add"
    LS = "ls"
    RM = "rm"


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
    """
    output = options.output("replica")
    _check(action, name, url)
    writing = action is not Action.LS
    with opened_to_write(options, writing=writing) as found:
        if action is Action.ADD:
            added = found.add_replica(
                str(name), str(url), create=create, **target.given(placed=False)
            )
            _show_one(output, found, added, f"{added.name} is {added.url}, store {added.store[:8]}")
        elif action is Action.RM:
            gone = found.repo.refresh().replicas.get(str(name))
            found.remove_replica(str(name))
            if gone is not None:
                _show_one(output, found, gone, f"{gone.name} is forgotten, not deleted: {gone.url}")
        else:
            _list(output, found)


def _check(action: Action, name: str | None, url: str | None) -> None:
    wanted = {Action.ADD: (True, True), Action.RM: (True, False), Action.LS: (False, False)}
    if (name is not None, url is not None) != wanted[action]:
        usage = {"add": "add NAME URL", "rm": "rm NAME", "ls": "ls"}[action.value]
        msg = f"replica {action.value} is given the wrong number of arguments"
        raise InvalidInputError(msg, hint=f"ckptstore replica {usage}")


def _show_one(output: Output, store: Store, one: ReplicaInfo, text: str) -> None:
    document = {"store": store.url, "replica": msgspec.to_builtins(one)}
    output.show(document, lambda screen: screen.line(text))


def _list(output: Output, store: Store) -> None:
    catalog = store.repo.refresh()
    rows = list(catalog.replicas.values())
    counts = dict.fromkeys((one.store for one in rows), 0)
    lacking = dict.fromkeys(counts, 0)
    for version in catalog.versions():
        for one in counts:
            counts[one] += one in version.replicas
            lacking[one] += one not in version.replicas and version.level != "record"
    document = {
        "store": store.url,
        "replicas": [
            {
                **msgspec.to_builtins(one),
                "versions": counts[one.store],
                "missing": lacking[one.store],
            }
            for one in rows
        ],
    }
    output.show(document, lambda screen: _draw(screen, rows, counts, lacking))


def _draw(
    screen: Screen,
    rows: Sequence[ReplicaInfo],
    counts: Mapping[str, int],
    lacking: Mapping[str, int],
) -> None:
    if not rows:
        screen.line("no replica has a name; ckptstore replica add NAME URL")
        return
    screen.listing(
        rows,
        Column("NAME", lambda one: one.name, wrap=False),
        Column("URL", lambda one: one.url),
        Column("STORE", lambda one: one.store[:8], wrap=False),
        Column("VERSIONS", lambda one: count_text(counts[one.store]), right=True),
        Column("MISSING", lambda one: count_text(lacking[one.store]), right=True),
    )
