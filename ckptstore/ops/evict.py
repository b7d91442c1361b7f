"""Eviction: of versions that another store is seen to hold, only the record stays here.

No lock spans two stores: between the last look at the other one and the commit that lets go here,
somebody there may delete what was seen. So the other store is looked at once more after the commit.
What it no longer holds then is brought back, from the chunks that are still here: nothing is swept
before its grace. Who is killed between the two looks no second time; that is all that is left open.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from ckptstore import limits
from ckptstore.catalog import replica_changes
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.lifecycle import LEVELS
from ckptstore.catalog.lifecycle_changes import Move
from ckptstore.catalog.replica_changes import Arrival
from ckptstore.checkpoint.manifests import Manifests
from ckptstore.errors import CkptStoreError
from ckptstore.format import manifest as manifests
from ckptstore.format.commit import Op
from ckptstore.format.fields import ManifestPointer
from ckptstore.format.keys import manifest_key, pack_key
from ckptstore.format.lifecycle import Quarantine
from ckptstore.hashing import blake3_hex
from ckptstore.model import Version
from ckptstore.ops.ageing import relocating
from ckptstore.ops.replicate_report import Failure
from ckptstore.ops.replicate_sides import read_back
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

    @property
    def reclaimable_bytes(self) -> int:
        """Bytes that the evicted versions stored; a collection frees what no other one needs."""
        return sum(part.stored for one in self.evicted for part in one.roles.values())


def evict(
    here: Repo,
    cache: Manifests,
    there: Repo,
    versions: Sequence[Version],
    *,
    missing: Missing,
    coming: Collection[str] = (),
    dry_run: bool = False,
) -> EvictReport:
    """Keep but the record of versions that another store has, now, and read back.

    Never of tagged or pinned ones, or the head of a run: that is decided in the commit.

    Parameters
    ----------
    cache
        Manifests of this store.
    there
        The other store.
    versions
        Which may go, if it has them.
    missing
        Looks for the objects of versions there.
    coming
        With `dry_run`: ids of versions that it does not have, and would have before the eviction.

    Raises
    ------
    StorageError
        One of the storages failed. What was evicted before stays so.
    """
    work = _Evicting(here=here, cache=cache, there=there)
    chosen = work.evictable(here.refresh(), versions, coming if dry_run else ())
    if dry_run or not chosen:
        return EvictReport(evicted=tuple(chosen))
    seen = there.refresh()
    missed = set(missing([seen.version(one.id) for one in chosen]))
    if missed:
        what = "%d versions stay in %s: %s does not have all that they need"
        _log.warning(what, len(missed), here.url, there.url)
    there.refresh()
    chosen = [one for one in chosen if one.id not in missed]
    for start in range(0, len(chosen), limits.RELOCATES_PER_COMMIT):
        work.let_go(chosen[start : start + limits.RELOCATES_PER_COMMIT])
    return EvictReport(
        evicted=tuple(work.evicted),
        missed=tuple(sorted(missed)),
        returned=tuple(work.returned),
        lost=tuple(work.lost),
    )


@dataclass(slots=True, kw_only=True)
class _Evicting:
    """One eviction; owned by the calling thread."""

    here: Repo
    cache: Manifests
    there: Repo
    evicted: list[Version] = field(default_factory=list)
    returned: list[str] = field(default_factory=list)
    lost: list[Failure] = field(default_factory=list)

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

        Raises
        ------
        StorageError
            The other store does not answer to the second look: what was let go was taken back.
        """
        gone: list[Version] = []

        def build(now: Catalog) -> list[Op]:
            gone[:] = self.evictable(now, batch)
            return relocating(now, [_to_record(version) for version in gone])

        self.here.log.append_any(build)
        try:
            self.there.refresh()
        except CkptStoreError:
            for version in gone:
                self._return(version, f"{self.there.url} could not be looked at again")
            raise
        for version in gone:
            if self._holds(version):
                self.evicted.append(version)
            else:
                self._return(version, f"it was deleted in {self.there.url} at the same moment")

    def _return(self, version: Version, why: str) -> None:
        """Take a version back, and note what became of that."""
        named = f"{version.run}@{version.step} (#{version.id[:8]})"
        try:
            self._take_back(version)
        except CkptStoreError as error:
            _log.warning("%s is evicted, though %s: %s", named, why, error)
            self.lost.append(_failure(version, error, self.there.url))
        else:
            _log.warning("%s is not evicted: %s", named, why)
            self.returned.append(version.id)

    def _take_back(self, version: Version) -> None:
        """Make a version that was let go be here as it was: its chunks still are.

        Raises
        ------
        CorruptObjectError, CondemnedError
            They are not: a collection without patience was faster.
        StorageError
            The storage failed.
        """
        manifest = self.cache.load(version)
        data = manifests.encode(manifest)
        key = manifest_key(self.here.environment.random_hex(16))
        self.here.backend.put(key, data)
        arrival = Arrival(
            manifest=ManifestPointer(key=key, stored_bytes=len(data), digest=blake3_hex(data)),
            roles=version.roles,
            receipt=version.receipt,
            relies_on=(key, *map(pack_key, manifest.pieces.packs)),
        )
        store = self.here.superblock.store_id

        def build(now: Catalog) -> list[Op]:
            ops = replica_changes.arrive(
                now, now, [version], store=store, arrivals={version.id: arrival}
            )
            if ops and version.damaged:  # what is lost of it is lost still: none may share with it
                ops.append(Quarantine(versions=[version.id]))
            return ops

        self.here.log.append_any(build)


def _to_record(version: Version) -> Move:
    return Move(
        version=version.id,
        based_on=version.manifest_digest,
        level="record",
        manifest=None,
        content=version.content,
    )


def _failure(version: Version, error: CkptStoreError, url: str) -> Failure:
    message = f"it was evicted while {url} let it go; undelete it there: {error}"
    return Failure(version=version.id, run=version.run, step=version.step, message=message)
