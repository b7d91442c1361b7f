"""A record torn at the end of the log, explored: writers that had read it, a repair, readers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
from protocol_explorer import Client, Commit, Log, Objects, World, explore

Steps = Iterator[tuple[Log, Objects, Client]]
"""A record is a commit: `version` is what it saves, `manifest` the record that it follows, `op`
``save``, ``torn``, or ``aside``. What a client was told to be saved is an object of the store."""


def read(log: Log) -> tuple[tuple[str, ...], int] | None:
    """Return the versions that a reader sees, and the next free place; None where it stops."""
    seen: list[str] = []
    for place, record in enumerate(log):
        later = log[place + 1 :]
        if record.op == "torn":
            if any(one.op != "torn" for one in later) and not _passes(later, seen):
                return None
        elif _passes(later[:1], seen) and record.op != "aside":
            continue  # whole, and set aside all the same
        elif record.manifest != (seen[-1] if seen else ""):
            return None
        else:
            seen.append(record.version)
    return tuple(seen), len(log)


def _passes(later: Log, seen: list[str]) -> bool:
    """Return whether the next record that is not torn sets aside what follows the last seen."""
    first = next((one for one in later if one.op != "torn"), None)
    return first is not None and first.op == "aside" and first.manifest == (seen or [""])[-1]


class Saver(NamedTuple):
    """Reads the log, and saves once."""

    name: str
    at: str = "read"
    follows: str = ""
    place: int = 0

    def steps(self, log: Log, store: Objects) -> Steps:
        """Read, then put."""
        if self.at == "read":
            found = read(log)
            if found is None or any(one.op == "torn" for one in log[-1:]):
                yield log, store, self._replace(at="done")
            else:
                last = found[0][-1] if found[0] else ""
                yield log, store, self._replace(at="put", follows=last, place=found[1])
        elif self.at == "put":
            if len(log) == self.place:
                made = Commit("save", self.name, self.follows)
                yield (*log, made), store | {self.name}, self._replace(at="done")
            else:
                yield log, store, self._replace(at="read")


class Tear(NamedTuple):
    """Damages the newest record, once, at any moment; and mends it, where `heals`."""

    at: str = ""
    whole: Commit | None = None
    heals: bool = False

    def steps(self, log: Log, store: Objects) -> Steps:
        """Tear what is last."""
        if not self.at and log and log[-1].op == "save":
            torn = log[-1]._replace(op="torn")
            yield (*log[:-1], torn), store - {torn.version}, self._replace(at="torn", whole=log[-1])
        elif self.at == "torn" and self.heals and self.whole is not None:
            back = tuple(
                self.whole if one.version == self.whole.version and one.op == "torn" else one
                for one in log
            )
            yield back, store, self._replace(at="done")


class Repair(NamedTuple):
    """Sets aside the torn records at the end of the log."""

    at: str = "read"
    follows: str = ""
    place: int = 0
    again: bool = False
    """Rule left out: it moves the record away, and uses its number for the next."""
    looks: bool = True
    """Rule: nothing sound comes after what it sets aside."""

    def steps(self, log: Log, store: Objects) -> Steps:
        """Read, then put past the end."""
        torn = [place for place, one in enumerate(log) if one.op == "torn"]
        if self.at == "read" and torn:
            sound = read(log[: torn[0]])
            if sound is not None and (log[-1].op == "torn" or not self.looks):
                last = sound[0][-1] if sound[0] else ""
                yield log, store, self._replace(at="put", follows=last, place=len(log))
        elif self.at == "put" and self.again:
            if torn and torn[-1] == len(log) - 1:
                yield log[:-1], store, self._replace(at="done")
        elif self.at == "put":
            if len(log) == self.place or not self.looks:
                aside = Commit("aside", "aside", self.follows)
                yield (*log, aside), store, self._replace(at="done")
            else:
                yield log, store, self._replace(at="read")


def _lost(world: World) -> bool:
    """Return whether a save that was told, and whose record is whole, is not read as it should be.

    A log at which readers stop loses nothing, but only a record that was torn may be the reason.
    """
    found = read(world.log)
    if found is None:
        sound = [one for one in world.log if one.op != "torn"]
        return len(sound) == len(world.log) or any(one.op == "aside" for one in world.log)
    return not world.store <= set(found[0])


def explored(*clients: Client) -> tuple[int, bool]:
    """Return the number of worlds, and whether one has lost something."""
    start = (Commit("save", "v", ""),)
    found = explore(World(start, frozenset({"v"}), clients), bad=_lost)
    return found.states, found.violation is not None


@pytest.mark.parametrize("heals", [False, True])
def test_no_save_that_was_told_is_lost_but_the_torn_one(heals: bool) -> None:
    """Whatever the order of two writers, one of which may have read it, damage and two repairs."""
    states, lost = explored(
        Saver("a"), Saver("b"), Saver("c"), Tear(heals=heals), Repair(), Repair()
    )

    assert states > 500
    assert not lost


@pytest.mark.parametrize("repair", [Repair(again=True), Repair(looks=False)])
def test_each_rule_of_the_repair_is_needed(repair: Repair) -> None:
    """Its number used again, or a sound record after it passed over: a save that was told goes."""
    _, lost = explored(Saver("a"), Saver("b"), Saver("c"), Tear(), repair)

    assert lost
