"""Eviction: of versions that another store is seen to hold, only the record stays here.

No lock spans two stores: between the last look at the other one and the commit that lets go here,
somebody there may delete what was seen. So the other store is looked at once more after the commit.
What it no longer holds then is brought back, from the chunks that are still here: nothing is swept
before its grace. Who is killed between the two looks no second time.

Afterwards the other store may have the only copy, and does not know it by itself. So it is told:
each version is pinned there, for this store, before it is let go here. No retention there takes it
then, and no removal, unless somebody takes the pin away. Without pins its own rules decide.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from ckptstore import limits
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.content_ops import Move
from ckptstore.catalog.levels import LEVELS
from ckptstore.maintenance.core.relocate import record_move, relocate
from ckptstore.maintenance.replicas.recheck import SecondLook
from ckptstore.maintenance.replicas.remote_pins import Pins
from ckptstore.maintenance.replicas.replicate_report import Failure
from ckptstore.maintenance.replicas.replication_context import read_back
from ckptstore.model import Version
from ckptstore.repo import Repo

__all__ = ["EvictReport", "evict"]

_log = logging.getLogger("ckptstore")

Missing = Callable[[Sequence[Version]], Collection[str]]
"""Given versions of the other store, gives the ids of those whose objects are not all there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictReport:
    """What an eviction did, or would do."""

    evicted: tuple[Version, ...] = ()
    """As they were: of these only the record is here now."""
    missed: tuple[str, ...] = ()
    """Ids of versions that stay, since objects that they need are not in the other store."""
    returned: tuple[str, ...] = ()
    """Ids of versions that the other store let go at the same moment: they are here as before."""
    lost: tuple[Failure, ...] = ()
    """The same where that failed, since a collection was faster, say: undelete them there."""

    pinned: tuple[str, ...] = ()
    """Ids of versions that the other store keeps for this one from now on."""
    unpinned: tuple[str, ...] = ()
    """Ids of versions that it need not keep for this one any more, as they were deleted here."""

    @property
    def reclaimable_bytes(self) -> int:
        """Bytes that the evicted versions stored; a collection frees what no other one needs."""
        return sum(part.stored for one in self.evicted for part in one.roles.values())


def evict(
    here: Repo,
    there: Repo,
    versions: Sequence[Version],
    *,
    missing: Missing,
    coming: Collection[str] = (),
    pin: bool = False,
    dry_run: bool = False,
) -> EvictReport:
    """Keep but the record of versions that another store has, now, and read back.

    Never of tagged or pinned ones, or the head of a run: that is decided in the commit. Versions of
    which only the record is here already are pinned there, if they are among `versions`.

    Parameters
    ----------
    there
        The other store.
    versions
        Which may go, if it has them.
    missing
        Looks for the objects of versions there.
    coming
        With `dry_run`: ids of versions that it does not have, and would have before the eviction.
    pin
        Pin there what is let go here, and take the pins away of what was deleted here since.

    Raises
    ------
    ReadOnlyError, UnsafeBackendError
        With `pin`: the other store cannot be written to. Nothing was evicted.
    StorageError
        One of the storages failed. What was evicted before stays so.
    """
    pins = Pins(here=here, there=there) if pin else None
    work = _Evicting(here=here, there=there, pins=pins)
    chosen = work.evictable(here.refresh(), versions, coming if dry_run else ())
    if dry_run:
        return work.foreseen(versions, chosen)
    work.settle(versions, chosen)
    if not chosen:
        return work.report()
    seen = there.refresh()
    missed = set(missing([seen.version(one.id) for one in chosen]))
    if missed:
        what = "%d versions stay in %s: %s does not have all that they need"
        _log.warning(what, len(missed), here.url, there.url)
    there.refresh()
    chosen = [one for one in chosen if one.id not in missed]
    for start in range(0, len(chosen), limits.RELOCATES_PER_COMMIT):
        work.let_go(chosen[start : start + limits.RELOCATES_PER_COMMIT])
    return work.report(missed)


@dataclass(slots=True, kw_only=True)
class _Evicting:
    """One eviction; owned by the calling thread."""

    here: Repo
    there: Repo
    pins: Pins | None = None
    evicted: list[Version] = field(default_factory=list)
    pinned: list[str] = field(default_factory=list)
    unpinned: list[str] = field(default_factory=list)
    second: SecondLook = field(init=False)

    def __post_init__(self) -> None:
        self.second = SecondLook(
            here=self.here,
            there=self.there,
            holds=self._still_holds,
            done="evicted",
        )

    def report(self, missed: Collection[str] = ()) -> EvictReport:
        """Return what was done."""
        return EvictReport(
            evicted=tuple(self.evicted),
            missed=tuple(sorted(missed)),
            returned=tuple(self.second.returned),
            lost=tuple(self.second.lost),
            pinned=tuple(self.pinned),
            unpinned=tuple(self.unpinned),
        )

    def settle(self, versions: Sequence[Version], chosen: Sequence[Version]) -> None:
        """Pin what was let go before, as far as it is named; unpin what was deleted here since.

        Raises
        ------
        ReadOnlyError, UnsafeBackendError
            Something is to be pinned, and the other store cannot be written to.
        """
        if self.pins is None:
            return
        records, gone = self._let_go_before(versions, self.pins), self.pins.forgotten()
        if chosen or records or gone:
            self.pins.check_writable()
        for start in range(0, len(records), limits.RELOCATES_PER_COMMIT):
            part = records[start : start + limits.RELOCATES_PER_COMMIT]
            self.pinned += sorted(self.pins.leave(part))
        self.unpinned += self.pins.take_away(gone)

    def foreseen(self, versions: Sequence[Version], chosen: Sequence[Version]) -> EvictReport:
        """Return what would be done, by both logs as they are."""
        if self.pins is None:
            return EvictReport(evicted=tuple(chosen))
        free = [one for one in chosen if not self.pins.has(one.id)]
        records = self._let_go_before(versions, self.pins)
        return EvictReport(
            evicted=tuple(chosen),
            pinned=tuple(one.id for one in (*records, *free)),
            unpinned=tuple(self.pins.forgotten()),
        )

    def _let_go_before(self, versions: Sequence[Version], pins: Pins) -> list[Version]:
        """Return those of which only the record is here, and which are there, not pinned."""
        now = self.here.catalog
        records = [now.version(one.id) for one in versions]
        records = [one for one in records if one.level == "record" and not one.deleted]
        return [one for one in records if self._holds(one) and not pins.has(one.id)]

    def evictable(
        self, now: Catalog, versions: Sequence[Version], coming: Collection[str] = ()
    ) -> list[Version]:
        """Return those that may go, as they are now."""
        heads = {info.head for info in now.runs()}
        store = self.there.superblock.store_id
        found = []
        for version in (now.version(one.id) for one in versions):
            if version.pinned or version.tags or version.deleted or version.id in heads:
                continue
            noted = store in version.replicas and self._holds(version)
            if version.level != "record" and (noted or version.id in coming):
                found.append(version)
        return found

    def _still_holds(self, version: Version) -> bool:
        """Say after the commit whether the other store has a version; pin it if that was undone."""
        if not self._holds(version):
            return False
        if self.pins is not None and not self.pins.has(version.id):
            self.pins.leave([version])
            return self._holds(version)
        return True

    def _holds(self, version: Version) -> bool:
        """Say whether the other store has as much of a version, by its log as it was last read."""
        there = self.there.catalog
        if not there.has_version(version.id):
            return False
        found = there.version(version.id)
        if LEVELS.index(found.level) < LEVELS.index(version.level):
            return False
        # This log can vouch for the state that is here, and for that which was saved. What was
        # rounded there, or by other bounds, is neither: a load here would refuse it.
        whole = found.level == "full" and version.level != "full"
        same = whole or found.content == version.content
        return same and read_back(found) and not (found.deleted or found.damaged)

    def let_go(self, batch: Sequence[Version]) -> None:
        """Commit that only the records stay; then look once more, and take back what has to be.

        What is to be pinned there is before, and still is afterwards.

        Raises
        ------
        StorageError
            The other store does not answer to the second look: what was let go was taken back.
        """
        gone: list[Version] = []
        fresh = self.pins.leave(batch) if self.pins is not None else set()

        def choose(now: Catalog) -> list[Move]:
            gone[:] = self.evictable(now, batch)
            return [record_move(version) for version in gone]

        relocate(self.here, choose)
        kept = self.second.look(gone)
        self.evicted += kept
        if self.pins is not None:
            self.pinned += sorted(fresh.intersection(one.id for one in kept))
            self.pins.take_away(fresh.difference(one.id for one in kept))
