"""What a collection may condemn: every listed pack and manifest, and what is known of each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ckptstore import limits
from ckptstore.backends.base import Backend, ObjectInfo
from ckptstore.catalog.catalog import Catalog
from ckptstore.errors import FormatError, IntegrityError, NotFoundError
from ckptstore.events import Progress, ProgressCallback
from ckptstore.format.keys import (
    MANIFESTS_PREFIX,
    PACKS_PREFIX,
    pack_id,
    pack_key,
    version_id_of,
)
from ckptstore.format.manifest import outline
from ckptstore.maintenance.core.live_set import Reach, list_objects
from ckptstore.maintenance.core.task_pool import Tasks
from ckptstore.repo import Repo


@dataclass(slots=True, kw_only=True)
class Candidates:
    """The objects of one listing; owned by one collection.

    Which of them may be condemned is decided anew for each catalog that a commit would follow.
    """

    now_s: float
    """By the storage's clock, before the listing."""
    orphan_age_s: float
    objects: dict[str, ObjectInfo]
    """Packs and manifests by key."""
    named: frozenset[str]
    """Keys of all manifests that the catalog named before the listing, of deleted versions too."""
    back: frozenset[str]
    """Listed, though condemned and deleted before: a request that arrived late."""
    settled: frozenset[str]
    """Deleted versions whose manifest was gone by the time of the listing: nothing is left to do,
    and in an old store that is nearly all of them."""
    dead: set[str] = field(default_factory=set)
    """Needed no more, whatever their age: a manifest that is not live any more named them."""

    def first(self, now: Catalog) -> list[str]:
        """Return the manifests of deleted versions that are still there.

        They are condemned no later than any pack that they name. So whoever can still read the
        manifest of a deleted version, wherever it began to read the log, knows of every
        condemnation that concerns that version: what ``undelete`` rests on.
        """
        # One that was named before the listing, but not listed, has been swept long ago.
        dead = now.deleted_manifests(without=self.settled)
        there = [key for _, key in dead if key in self.objects or key not in self.named]
        return sorted(set(there) - self._condemned(now, there))

    def rest(self, now: Catalog, reached: set[str]) -> list[str]:
        """Return what no version that is live in `now` reaches, and what is no upload in flight."""
        found = (key for key in self.objects if key not in reached)
        ripe = [key for key in found if key in self.dead or self.is_old(key)]
        return sorted(set(ripe) - self._condemned(now, ripe))

    def is_old(self, key: str) -> bool:
        """Say whether an object is too old to be an upload in flight."""
        return self.age_s(key) >= self.orphan_age_s

    def age_s(self, key: str) -> float:
        """Return the age of a listed object by the storage's clock, in seconds; 0 if negative."""
        return max(0.0, self.now_s - self.objects[key].modified_at)

    def _condemned(self, now: Catalog, keys: Iterable[str]) -> set[str]:
        """Return those that were condemned and not deleted, or condemned since the listing."""
        gone = now.gone(keys)
        return {key for key in gone if key not in self.back or key in now.condemned}


def find_candidates(
    repo: Repo,
    catalog: Catalog,
    *,
    now_s: float | None,
    orphan_age_s: float,
    progress: ProgressCallback,
    tasks: Tasks,
) -> Candidates:
    """List packs and manifests, and find out which are dead beyond doubt.

    Parameters
    ----------
    catalog
        The newest: folded before the listing.
    now_s
        The storage's clock; None takes the time of the newest object, which is never too late.

    Raises
    ------
    StorageError
        The storage failed.
    """
    objects: dict[str, ObjectInfo] = {}
    for prefix in (MANIFESTS_PREFIX, PACKS_PREFIX):
        for info in list_objects(tasks, prefix, environment=repo.environment):
            if version_id_of(info.key) or pack_id(info.key):
                objects[info.key] = info
                progress(Progress(stage="list", done=len(objects), total=0, unit="objects"))
    if now_s is None:
        now_s = max((info.modified_at for info in objects.values()), default=0.0)
    live = [details.manifest_key for _, details in catalog.contents(known={})]
    dead = catalog.deleted_manifests()
    found = Candidates(
        now_s=now_s,
        orphan_age_s=orphan_age_s,
        objects=objects,
        named=frozenset([*live, *(key for _, key in dead)]),
        settled=frozenset(version for version, key in dead if key not in objects),
        back=frozenset(key for key in catalog.gone(objects) if key not in catalog.condemned),
    )
    pending = [key for key in objects if key in catalog.condemned and version_id_of(key)]
    found.dead.update(found.first(catalog))
    for packs in tasks.map(
        _packs_in,
        [(key, objects[key].size_bytes) for key in (*pending, *found.dead) if key in objects],
        count=limits.GC_TASK_MANIFESTS,
        bytes_of=lambda manifest: manifest[1],
        bytes_max=limits.GC_TASK_MANIFEST_BYTES,
    ):
        found.dead.update(map(pack_key, packs))
    return found


def condemnable(found: Candidates, now: Catalog, reach: Reach) -> list[str]:
    """Return what may be condemned by a commit that follows `now`, manifests first.

    Raises
    ------
    CorruptObjectError, UnsupportedFeatureError, StorageError
        As :meth:`ckptstore.maintenance.core.live_set.Reach.of`.
    """
    first = found.first(now)
    before = set(first)
    return [*first, *(key for key in found.rest(now, reach.keys(now)) if key not in before)]


def storage_now(repo: Repo) -> float:
    """Return the storage's clock: that of an object made for the purpose, and removed again.

    Raises
    ------
    StorageError
        It could not be written.
    """
    key = f"probe/{repo.environment.random_hex(8)}-clock"
    try:
        repo.backend.put(key, b"clock")
        return repo.backend.stat(key).modified_at
    finally:
        repo.backend.delete(key)


def _packs_in(backend: Backend, manifest: tuple[str, int]) -> tuple[str, ...]:
    """Return the packs that a manifest of some size names; one that cannot be read tells none."""
    key, size = manifest
    if size > limits.MANIFEST_STORED_BYTES_MAX:
        return ()
    try:
        return outline(backend.get(key, bytes_max=size), where=key)[1]
    except (IntegrityError, FormatError, NotFoundError):
        return ()
