"""The clients of the protocol, each as short as its rules; and rules to leave out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from protocol_explorer import Client, Commit, Log, Objects, fold, gone_since

__all__ = ["Collector", "Deleter", "Relocator", "Undeleter", "Writer"]

Steps = Iterator[tuple[Log, Objects, Client]]
NONE: Objects = frozenset()
TRIES = 2
"""Times that a writer rewrites condemned objects: a bound of the exploration."""


class Writer(NamedTuple):
    """Saves one version that shares a pack with existing ones."""

    name: str
    at: str = "look"
    tries: int = 0
    packs: Objects = NONE
    manifest: str = ""
    number: int = 0
    checks: bool = True
    """Rule: before its commit it looks whether anything it names was condemned."""
    at_once: bool = False
    """Pack and manifest appear in one step: fewer states, where clients are many."""

    def steps(self, log: Log, store: Objects) -> Steps:
        """Look, write a pack, write the manifest, then read the log and commit, until it works."""
        if self.at == "look":
            shared = sorted(pack for _, packs in fold(log).live.values() for pack in packs)[:1]
            yield log, store, self._replace(at="pack", packs=frozenset(shared))
        elif self.at == "pack":
            own = f"{self.name}{self.tries}"
            moved = self._replace(at="manifest", packs=self.packs | {own})
            if self.at_once:
                yield from moved.steps(log, store | {own})
            else:
                yield log, store | {own}, moved
        elif self.at == "manifest":
            own = f"m-{self.name}{self.tries}"
            yield log, store | {own}, self._replace(at="read", manifest=own)
        elif self.at == "read":
            gone = gone_since(log, 0)
            if self.checks and gone & (self.packs | {self.manifest}):
                at = "pack" if self.tries < TRIES else "done"
                packs = self.packs - gone
                yield log, store, self._replace(at=at, packs=packs, tries=self.tries + 1)
            else:
                yield log, store, self._replace(at="put", number=len(log))
        elif self.at == "put":
            if len(log) == self.number:
                commit = Commit("save", self.name, self.manifest, self.packs)
                yield (*log, commit), store, self._replace(at="done")
            else:
                yield log, store, self._replace(at="read")


class Deleter(NamedTuple):
    """Deletes a version if it exists."""

    version: str
    at: str = "read"
    number: int = 0

    def steps(self, log: Log, store: Objects) -> Steps:
        """Read the log, commit."""
        if self.at == "read":
            at = "put" if self.version in fold(log).live else "done"
            yield log, store, self._replace(at=at, number=len(log))
        elif self.at == "put":
            if len(log) == self.number:
                yield (*log, Commit("delete", self.version)), store, self._replace(at="done")
            else:
                yield log, store, self._replace(at="read")


class Undeleter(NamedTuple):
    """Opens the store at some moment, and undeletes a deleted version."""

    version: str
    at: str = "open"
    opened: int = 0
    needs: Objects = NONE
    number: int = 0
    checks: bool = True
    """Rule: before its commit it looks whether anything the version needs was condemned."""
    looks: bool = False
    """Further rule, not needed: it looks whether each pack is there."""

    def steps(self, log: Log, store: Objects) -> Steps:
        """Open, read the manifest, look for packs, then read the log and commit."""
        if self.at == "open":
            # Before the version is deleted it has to wait.
            if self.version in fold(log).deleted:
                yield log, store, self._replace(at="manifest", opened=len(log))
        elif self.at == "manifest":
            found = fold(log[: self.opened]).deleted[self.version]
            needs = found[1] | {found[0]}
            at = "done" if found[0] not in store else "packs" if self.looks else "read"
            yield log, store, self._replace(at=at, needs=needs)
        elif self.at == "packs":
            at = "read" if self.needs <= store else "done"
            yield log, store, self._replace(at=at)
        elif self.at == "read":
            late = self.checks and gone_since(log, self.opened) & self.needs
            there = self.version in fold(log).deleted
            at = "put" if there and not late else "done"
            yield log, store, self._replace(at=at, number=len(log))
        elif self.at == "put":
            if len(log) == self.number:
                yield (*log, Commit("undelete", self.version)), store, self._replace(at="done")
            else:
                yield log, store, self._replace(at="read")


class Relocator(NamedTuple):
    """Rewrites the packs of a version, and relocates it to them."""

    version: str
    at: str = "look"
    based_on: str = ""
    number: int = 0
    checks: bool = True
    """Rule: its commit holds only if the version still has the manifest that it was made from."""

    def steps(self, log: Log, store: Objects) -> Steps:
        """Look, write a pack and a manifest, then read the log and commit."""
        pack, manifest = f"r-{self.version}", f"m-r-{self.version}"
        if self.at == "look":
            found = fold(log).live.get(self.version)
            at = "pack" if found else "done"
            yield log, store, self._replace(at=at, based_on=found[0] if found else "")
        elif self.at == "pack":
            yield log, store | {pack}, self._replace(at="manifest")
        elif self.at == "manifest":
            yield log, store | {manifest}, self._replace(at="read")
        elif self.at == "read":
            now = fold(log).live.get(self.version, ("", NONE))[0]
            lost = gone_since(log, 0) & {pack, manifest}
            good = (now == self.based_on and not lost) or not self.checks
            yield log, store, self._replace(at="put" if good else "done", number=len(log))
        elif self.at == "put":
            if len(log) == self.number:
                old = frozenset({self.based_on})
                commit = Commit("relocate", self.version, manifest, frozenset({pack}), old)
                yield (*log, commit), store, self._replace(at="done")
            else:
                yield log, store, self._replace(at="read")


class Collector(NamedTuple):
    """Condemns objects that no live version reaches, in one or more commits, and deletes them."""

    at: str = "read"
    listed: Objects = NONE
    named: Objects = NONE
    """Manifests that the log named before the listing."""
    number: int = 0
    keys: Objects = NONE
    split: bool = False
    """Manifests and packs in commits of their own, as when there are very many."""
    ages: bool = False
    """Any one of the objects may be too young to be condemned, unless it is known to be dead."""
    young: str = ""
    brief: bool = False
    """It is done when it has deleted, without saying so: fewer states, where clients are many."""
    looks_again: bool = True
    """Rule: an object that became live since the listing is not condemned."""
    manifests_first: bool = True
    """Rule: manifests of deleted versions are condemned no later than packs, whatever their age."""
    commits_first: bool = True
    """Rule: nothing is deleted before it was condemned."""
    records: bool = False
    """A record, right or wrong, may tell it that there is nothing to condemn."""
    reads_afresh: bool = True
    """Rule: what is live is read from manifests before anything is condemned. Left out, it takes
    a record for that: of the versions of the log one commit ago."""

    def steps(self, log: Log, store: Objects) -> Steps:
        """Read the log, list, condemn part by part, delete one by one, commit that."""
        if self.at == "read":
            catalog = fold(log)
            entries = (*catalog.live.values(), *catalog.deleted.values())
            named = frozenset(manifest for manifest, _ in entries)
            yield log, store, self._replace(at="list", named=named, number=len(log))
        elif self.at == "list":
            for young in ("", *sorted(store)) if self.ages else ("",):
                yield log, store, self._replace(at="decide", listed=store, young=young)
            if self.records:
                yield log, store, self._replace(at="sweep", keys=fold(log).pending)
        elif self.at == "decide":
            keys = self._condemnable(log)
            if not keys:
                yield log, store, self._replace(at="sweep", keys=fold(log).pending)
            elif self.commits_first:
                yield log, store, self._replace(at="put", keys=keys, number=len(log))
            else:
                yield log, store, self._replace(at="sweep", keys=keys)
        elif self.at == "put":
            done = (*log, Commit("condemn", keys=self.keys)) if len(log) == self.number else log
            yield done, store, self._replace(at="decide", keys=NONE)
        elif self.at == "sweep":
            if self.keys & store:
                name = min(self.keys & store)
                yield log, store - {name}, self
            else:
                yield log, store, self._replace(at="done" if self.brief else "say")
        elif self.at == "say":
            keys = self.keys & fold(log).pending
            at = "swept" if keys else "done"
            yield log, store, self._replace(at=at, keys=keys, number=len(log))
        elif self.at == "swept":
            if len(log) == self.number:
                yield (*log, Commit("swept", keys=self.keys)), store, self._replace(at="done")
            else:
                yield log, store, self._replace(at="say")

    def _condemnable(self, log: Log) -> Objects:
        """Return the objects of the next commit, on exactly this log."""
        now = fold(log)
        reach = now.reach if self.looks_again else fold(log[: self.number]).reach
        if not self.reads_afresh:
            reach = fold(log[:-1]).reach
        dead = {manifest for manifest, _ in now.deleted.values()}
        gone = gone_since(log, 0)
        there = frozenset(name for name in dead if name in self.listed or name not in self.named)
        first = there - gone if self.manifests_first else NONE
        rest = self.listed - reach - gone - first - {self.young}
        return first or rest if self.split else first | rest
