"""Visits every state that some clients of one store can reach, whatever the order of their calls.

A world is the log, the objects that are stored, and where each client stands. One step is one call
of one client to the storage: reading the log, listing, creating, deleting. Grace and age of
orphans are zero. A client that dies is one that is never stepped again, so crashes are included.

What must hold in every world: what a live version names is stored. And from every world, if all
clients die there, one last collection leaves exactly what live versions need.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, Protocol

__all__ = [
    "Catalog",
    "Client",
    "Commit",
    "Found",
    "Log",
    "World",
    "count",
    "explore",
    "fold",
    "gone_since",
]

Objects = frozenset[str]


class Commit(NamedTuple):
    """One commit; which fields count is said by `op`."""

    op: str
    """``save``, ``delete``, ``undelete``, ``relocate``, ``condemn`` or ``swept``."""
    version: str = ""
    manifest: str = ""
    packs: Objects = frozenset()
    keys: Objects = frozenset()
    """Condemned (by a relocation too) or swept."""


Log = tuple[Commit, ...]


@dataclass(frozen=True, slots=True)
class Catalog:
    """What a log amounts to."""

    live: dict[str, tuple[str, Objects]]
    """Version to its manifest and the packs that this names."""
    deleted: dict[str, tuple[str, Objects]]
    pending: Objects
    """Condemned, and not swept."""
    reach: Objects
    """What live versions need."""


@cache
def fold(log: Log) -> Catalog:
    """Return the catalog after a log."""
    live: dict[str, tuple[str, Objects]] = {}
    deleted: dict[str, tuple[str, Objects]] = {}
    pending: set[str] = set()
    for commit in log:
        if commit.op in {"save", "relocate"}:
            live[commit.version] = (commit.manifest, commit.packs)
        elif commit.op == "delete":
            deleted[commit.version] = live.pop(commit.version)
        elif commit.op == "undelete":
            live[commit.version] = deleted.pop(commit.version)
        if commit.op == "swept":
            pending -= commit.keys
        else:
            pending |= commit.keys
    reach = {name for manifest, packs in live.values() for name in (manifest, *packs)}
    return Catalog(live, deleted, frozenset(pending), frozenset(reach))


@cache
def gone_since(log: Log, opened: int) -> Objects:
    """Return what a client knows to be condemned that began to read at commit `opened`.

    It starts from a snapshot, which names what is pending, but not what was swept before.
    """
    later = (commit.keys for commit in log[opened:] if commit.op != "swept")
    return fold(log[:opened]).pending.union(*later)


class World(NamedTuple):
    """Everything at one moment."""

    log: Log
    store: Objects
    clients: tuple[Client, ...]


class Client(Protocol):
    """One client, where it stands; a hashable value."""

    def steps(self, log: Log, store: Objects) -> Iterator[tuple[Log, Objects, Client]]:
        """Yield what its next call may lead to; nothing if it is done."""


class Found(NamedTuple):
    """The result of an exploration."""

    states: int
    violation: World | None
    trace: tuple[World, ...]
    """How the violation came about, from the start."""


def explore(start: World, last: Client | None = None) -> Found:
    """Visit every world that can be reached; stop at the first in which something is lost.

    Parameters
    ----------
    last
        The collection that is run to its end, alone, on each log and store that was met: it must
        leave exactly what live versions need. None leaves this out.
    """
    before: dict[World, World | None] = {start: None}
    todo = [start]
    settled: set[tuple[Log, Objects]] = set()
    while todo:
        world = todo.pop()
        bad = not fold(world.log).reach <= world.store
        if not bad and last is not None and world[:2] not in settled:
            settled.add(world[:2])
            bad = not _cleans(world.log, world.store, last)
        if bad:
            return Found(len(before), world, _trace(before, world))
        for after in _after(world):
            if after not in before:
                before[after] = world
                todo.append(after)
    return Found(len(before), None, ())


def count(start: World) -> Found:
    """Visit every world as :func:`explore` does, in a twentieth of the memory, without a trace.

    Of a world that was seen only a 64-bit hash is kept: that two of some 10^7 worlds have the same
    one, so that a world is missed, has a chance of about one in 10^5.
    """
    seen = {hash(start)}
    todo = [start]
    while todo:
        world = todo.pop()
        if not fold(world.log).reach <= world.store:
            return Found(len(seen), world, ())
        for after in _after(world):
            if (known := hash(after)) not in seen:
                seen.add(known)
                todo.append(after)
    return Found(len(seen), None, ())


def _after(world: World) -> Iterator[World]:
    """Yield the worlds that are one step away."""
    for place, client in enumerate(world.clients):
        for log, store, moved in client.steps(world.log, world.store):
            clients = (*world.clients[:place], moved, *world.clients[place + 1 :])
            yield World(log, store, clients)


def _cleans(log: Log, store: Objects, client: Client) -> bool:
    """Say whether a collection that is alone leaves what live versions need, and no more."""
    while True:
        after = next(client.steps(log, store), None)
        if after is None:
            return store == fold(log).reach
        log, store, client = after


def _trace(before: dict[World, World | None], world: World) -> tuple[World, ...]:
    found = [world]
    while (earlier := before[found[-1]]) is not None:
        found.append(earlier)
    return tuple(reversed(found))
