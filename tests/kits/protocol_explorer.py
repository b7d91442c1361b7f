"""Visits every state that some clients of one store can reach, in every order of their calls.

A world is the log, the stored objects, and the position of each client. One step is one call
of one client to the storage: reading the log, listing, creating, deleting. Grace and minimum age
of orphans are zero. A client that dies is one that is never stepped again: crashes are included.

The invariant of every world: the objects that a live version names are stored. And from every
world, if all clients die there, one last collection leaves exactly the objects of live versions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, Protocol

__all__ = [
    "Catalog", "Client", "Commit", "Found", "Log", "World", "count", "explore", "fold",
    "gone_since",
]  # fmt: skip

Objects = frozenset[str]


class Commit(NamedTuple):
    """One commit; `op` decides which fields count."""

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
    """State of the store after a log."""

    live: dict[str, tuple[str, Objects]]
    """Version to its manifest and the packs that this names."""
    deleted: dict[str, tuple[str, Objects]]
    pending: Objects
    """Condemned, and not swept."""
    reach: Objects
    """Objects that live versions need."""


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
    """Return the objects that a client which began at commit `opened` knows to be condemned.

    It starts from a snapshot, which names pending objects, but not those swept earlier.
    """
    later = (commit.keys for commit in log[opened:] if commit.op != "swept")
    return fold(log[:opened]).pending.union(*later)


class World(NamedTuple):
    """The state of everything at one moment."""

    log: Log
    store: Objects
    clients: tuple[Client, ...]


class Client(Protocol):
    """One client at one position; a hashable value."""

    def steps(self, log: Log, store: Objects) -> Iterator[tuple[Log, Objects, Client]]:
        """Yield the possible results of its next call; nothing if it is done."""


class Found(NamedTuple):
    """The result of an exploration."""

    states: int
    violation: World | None
    trace: tuple[World, ...]
    """Worlds from the start to the violation."""


def explore(
    start: World, last: Client | None = None, bad: Callable[[World], bool] | None = None
) -> Found:
    """Visit every reachable world; stop at the first that has lost something.

    Parameters
    ----------
    last
        The collection that is run to its end, alone, on each log and store found: it must
        leave exactly the objects of live versions. None leaves this out.
    bad
        Tells a world that has lost something, in place of the invariant of collection.
    """
    before: dict[World, World | None] = {start: None}
    todo = [start]
    settled: set[tuple[Log, Objects]] = set()
    while todo:
        world = todo.pop()
        lost = bad(world) if bad is not None else not fold(world.log).reach <= world.store
        if not lost and last is not None and world[:2] not in settled:
            settled.add(world[:2])
            lost = not _cleans(world.log, world.store, last)
        if lost:
            return Found(len(before), world, _trace(before, world))
        for after in _after(world):
            if after not in before:
                before[after] = world
                todo.append(after)
    return Found(len(before), None, ())


def count(start: World) -> Found:
    """Visit every world as :func:`explore` does, in a twentieth of the memory, without a trace.

    Only a 64-bit hash of each world is kept: the chance that two of some 10^7 worlds have the same
    one, so that a world is missed, is about one in 10^5.
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
    """Return whether a lone collection leaves exactly the objects of live versions."""
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
