"""Eviction: of versions that another store is seen to hold, only the record stays here.

No lock spans two stores: between the last look at the other one and the commit that lets go here,
somebody there may delete what was seen. So the other store is looked at once more after the commit.
What it no longer holds then is brought back, from the chunks that are still here: nothing is swept
before its grace. A process killed between the two leaves the second look undone. Why so:
docs/design/0021-replication.md.

Afterwards the other store may have the only copy, and does not know it by itself. So it is told:
each version is pinned there, for this store, before it is let go here. No retention there takes it
then, and no removal, unless somebody takes the pin away. Without pins its own rules decide.

No commit spans two logs either: a client that changes the one looks at the other afterwards. An
eviction pins there, lets go here, and looks whether the pins are still there; who takes pins away
looks whether this store needs them again. Whichever of two at once comes last sees what the other
did. A kill in between can only leave a pin that nobody needs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from ckptstore import limits
from ckptstore.catalog import replica_ops
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.content_ops import Move, Quarantine
from ckptstore.catalog.lifecycle_ops import Pin, pin_for, unpin_for
from ckptstore.catalog.state import Op
from ckptstore.chunking import batches
from ckptstore.errors import CkptStoreError, ReadOnlyError, UnsafeBackendError
from ckptstore.maintenance.core.relocate import record_move, relocate
from ckptstore.maintenance.replicas.replicate_version import Failure, put_arriving, read_back
from ckptstore.maintenance.retention.by_hand import undelete
from ckptstore.model import Version, naming
from ckptstore.repo import Repo
from ckptstore.shown import Shown

_log = logging.getLogger("ckptstore")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class EvictReport(Shown):
    """Result of an eviction, or of its dry run."""

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
    coming
        With `dry_run`: ids of versions that it does not have, and would have before the eviction.
    pin
        Pin versions there that are let go here; unpin those that were deleted here since.

    Raises
    ------
    ReadOnlyError, UnsafeBackendError
        With `pin`: the other store cannot be written to. Nothing was evicted.
    StorageError
        One of the storages failed. What was evicted before stays so.
    """
    from ckptstore.maintenance.check.verify import missing

    work = _Evicting(here=here, there=there, pins=Pins(here=here, there=there) if pin else None)
    chosen = work.evictable(here.refresh(), versions, coming if dry_run else ())
    if not dry_run:
        work.settle(versions, chosen)
    known = [one for one in chosen if not dry_run or one.id not in coming]
    missed = missing(there, known) if known else set()
    left = [one for one in chosen if one.id not in missed]
    if dry_run:
        return work.foreseen(versions, left, missed)
    if missed:
        what = "%d versions stay in %s: %s does not have all that they need"
        _log.warning(what, len(missed), here.url, there.url)
    if left:
        there.refresh()
    for batch in batches(left, limits.RELOCATES_PER_COMMIT):
        work.let_go(batch)
    return work.report(missed)


@dataclass(slots=True)
class SecondLook:
    """Looks at another store once more, and takes back what has to be; owned by one thread."""

    here: Repo
    there: Repo
    holds: Callable[[Version], bool]
    """Returns whether the other store holds a version, by its log as it was last read."""
    done: str
    """Past participle of the operation here, such as ``evicted``; for messages."""
    returned: list[str] = field(default_factory=list)
    """Ids of versions that were taken back."""
    lost: list[Failure] = field(default_factory=list)
    """Those for which that failed, since a collection was faster, say."""

    def look(self, gone: Sequence[Version], *, deleted: Container[str] = ()) -> list[Version]:
        """Return those that the other store still holds; the rest is here as before, or lost.

        Parameters
        ----------
        gone
            Versions that a commit has just let go of, or of a part of them, as they were.
        deleted
            Ids of those that it deleted; of what somebody else has deleted, nothing comes back.

        Raises
        ------
        StorageError
            The other store does not answer: everything was taken back.
        """
        try:
            self.there.refresh()
        except CkptStoreError:
            for version in gone:
                self._return(version, f"{self.there.url} could not be looked at again", deleted)
            raise
        kept = []
        for version in gone:
            if self.holds(version):
                kept.append(version)
            else:
                self._return(version, f"{self.there.url} let it go at the same moment", deleted)
        return kept

    def _return(self, version: Version, why: str, deleted: Container[str]) -> None:
        """Take a version back, and note what became of that."""
        try:
            if version.id in deleted:
                undelete(self.here, [version.id])
            else:
                self._take_back(version)
        except CkptStoreError as error:
            _log.warning("%s is %s, though %s: %s", version.label, self.done, why, error)
            message = f"it was {self.done}, though {why}; undelete it there: {error}"
            self.lost.append(Failure(**naming(version), message=message))
        else:
            _log.warning("%s is not %s: %s", version.label, self.done, why)
            self.returned.append(version.id)

    def _take_back(self, version: Version) -> None:
        """Restore a version that was reduced here: its chunks are still here.

        Raises
        ------
        CorruptObjectError, CondemnedError
            They are not: a collection without patience was faster.
        StorageError
            The storage failed.
        """
        manifest = self.here.manifests.load(version)
        arrival = put_arriving(self.here, manifest, version.roles, version.receipt)
        store = self.here.superblock.store_id

        def build(now: Catalog) -> list[Op]:
            """Let the version arrive here again, by what the catalog says of it now."""
            again = () if now.version(version.id).deleted else (version.id,)
            came = {version.id: arrival}
            ops = replica_ops.arrive(now, now, [version], store=store, arrivals=came, again=again)
            if ops and version.damaged:  # its lost parts stay lost: none may share with it
                ops.append(Quarantine(versions=[version.id]))
            return ops

        self.here.log.append_any(build)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pins:
    """The pins in one store for another."""

    here: Repo
    """The store that lets go."""
    there: Repo
    """The store that is to keep."""

    @property
    def store(self) -> str:
        """Id of the store that they are for."""
        return self.here.superblock.store_id

    def check_writable(self) -> None:
        """Return if pins can be left there.

        Raises
        ------
        ReadOnlyError, UnsafeBackendError
            They cannot; the hint says how to do without.
        """
        try:
            self.there.check_writable()
        except (ReadOnlyError, UnsafeBackendError) as error:
            msg = f"what is evicted is pinned in the other store, and {error.message}"
            hint = "if its own rules may delete what is evicted here: --no-pin, or pin=False"
            raise type(error)(msg, hint=hint) from error

    def has(self, version_id: str) -> bool:
        """Return whether a version is pinned there, by its log as it was last read."""
        found = self.there.catalog.find(version_id)
        return found is not None and self.store in found.pinned_for

    def leave(self, versions: Sequence[Version]) -> set[str]:
        """Pin versions there that are not deleted, in one commit; return ids of the new pins."""
        fresh: set[str] = set()

        def build(now: Catalog) -> list[Op]:
            """Pin versions that are not pinned yet, and note their ids."""
            ops = pin_for(now, [one.id for one in versions], self.store)
            fresh.clear()
            fresh.update(op.version for op in ops if isinstance(op, Pin))
            return ops

        self.there.log.append_any(build)
        return fresh

    def take_away(self, version_ids: Iterable[str]) -> list[str]:
        """Take pins away of versions whose record is not all that is here; return their ids."""
        gone: list[str] = []
        wanted = [one for one in version_ids if self.has(one)]
        for part in batches(wanted, limits.RELOCATES_PER_COMMIT):
            now = self.here.refresh()
            free = [one for one in part if not _rests_on_record(now, one)]
            self.there.log.append_any(partial(unpin_for, versions=free, store=self.store))
            now = self.here.refresh()
            again = [one for one in free if _rests_on_record(now, one)]
            self.there.log.append_any(partial(pin_for, versions=again, store=self.store))
            gone += [one for one in free if one not in again]
        return gone

    def forgotten(self) -> list[str]:
        """Return the ids of versions that are pinned there, and whose record is deleted here."""
        now = self.here.catalog
        ids = (one.id for one in self.there.catalog.pinned() if self.store in one.pinned_for)
        return [one for one in ids if now.has_version(one) and now.version(one).deleted]


def release(repo: Repo, store: str) -> list[str]:
    """Take all pins away that another store has in one; return the ids of the versions."""
    ids = [one.id for one in repo.refresh().pinned() if store in one.pinned_for]
    for part in batches(ids, limits.RELOCATES_PER_COMMIT):
        repo.log.append_any(partial(unpin_for, versions=part, store=store))
    return ids


def _rests_on_record(now: Catalog, version_id: str) -> bool:
    version = now.find(version_id)
    if version is None:
        return True  # this log was put back to an older state: it knows nothing about it
    return version.level == "record" and not version.deleted


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
        self.second = SecondLook(self.here, self.there, self._still_holds, "evicted")

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
        for part in batches(records, limits.RELOCATES_PER_COMMIT):
            self.pinned += sorted(self.pins.leave(part))
        self.unpinned += self.pins.take_away(gone)

    def foreseen(
        self, versions: Sequence[Version], chosen: Sequence[Version], missed: Collection[str]
    ) -> EvictReport:
        """Return what would be done, by both logs as they are."""
        self.evicted += chosen
        if self.pins is not None:
            free = [one for one in chosen if not self.pins.has(one.id)]
            before = self._let_go_before(versions, self.pins)
            self.pinned += [one.id for one in (*before, *free)]
            self.unpinned += self.pins.forgotten()
        return self.report(missed)

    def _let_go_before(self, versions: Sequence[Version], pins: Pins) -> list[Version]:
        """Return those whose record alone is here, and which are there, not pinned."""
        records = [self.here.catalog.version(one.id) for one in versions]
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
        """Return whether the other store still has a version; pin it if its pin is gone."""
        if not self._holds(version):
            return False
        if self.pins is not None and not self.pins.has(version.id):
            self.pins.leave([version])
            return self._holds(version)
        return True

    def _holds(self, version: Version) -> bool:
        """Return whether the other store has as much of a version, by its log as last read."""
        found = self.there.catalog.find(version.id)
        if found is None or replica_ops.has_less(found, version):
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
