"""Garbage collection: condemn what no live version reaches, and after a grace delete it.

Any number of collections may run at once, beside savers, forks, rollbacks and retention, and may
die at any point: everything that they agreed on stands in the log. What is to be deleted stands
there too, so any client may begin a sweep and any other finish it. Deleting twice is harmless:
names are never used again. Why no live version ever names what was deleted:
docs/design/0008-collection.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from ckptstore import errors, limits
from ckptstore.argument_checks import check_between
from ckptstore.backends.base import Backend, ObjectInfo
from ckptstore.backends.transfers import operation
from ckptstore.catalog import content_ops
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.log import Build
from ckptstore.catalog.state import Op
from ckptstore.chunking import batches
from ckptstore.committing import on_reserve
from ckptstore.engine.engine import EngineSpec
from ckptstore.events import Progress, ProgressCallback
from ckptstore.format import keys
from ckptstore.format.manifest import outline
from ckptstore.format.references import References
from ckptstore.maintenance.check.verify import check_log_is_whole
from ckptstore.maintenance.collect.inline_deltas import Rebased, rebase
from ckptstore.maintenance.collect.reference_cache import ReferenceCache, gathered
from ckptstore.maintenance.collect.repack import Repacked, choose, is_sparse, repack
from ckptstore.maintenance.core.live_set import Reach, Tally, list_objects
from ckptstore.maintenance.core.storage_times import storage_now
from ckptstore.maintenance.core.task_pool import Tasks, open_tasks
from ckptstore.repo import Repo
from ckptstore.shown import HtmlTable, Shown, bytes_text

_HINT_NO_ROOM = (
    "dead objects are condemned, and those whose grace is over are deleted; only the rewriting of "
    "packs needs more room: skip it (--no-repack, repack_below=None), or collect again later"
)

Kinds = Mapping[str, Tally]
"""``packs`` and ``manifests`` to what there is of them."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class GcReport(Shown):
    """Result of a collection; of a dry run, the result that it would have."""

    dry_run: bool
    commit: int
    """Number of the catalog that the figures describe: before anything was done."""
    versions_count: int
    """Live versions: not deleted, and more than a record."""
    logical_bytes: int
    """Size of their tensors in memory."""
    stored: Kinds
    """All packs and manifests, as listed."""
    live: Kinds
    """Those that live versions need."""
    live_chunk_bytes: int
    """Size of live chunks; the rest of `live` packs is dead, for a repack to free. At least so
    much, where there was nothing to condemn and versions of different collections share a pack."""
    reclaimable_now: Kinds
    """Condemned earlier, and the grace is over; with no grace, those condemned now too."""
    reclaimable_later: Kinds
    """Condemned earlier or now, and the grace is not over."""
    orphans: Kinds
    """Of those condemned now: named by no commit, and old enough."""
    orphan_age_s_max: float
    """Age of the oldest object that no commit has named, by the storage's clock."""
    young: Kinds
    """Named by no live version, and too young to judge: uploads in flight, most likely."""
    repacked: Repacked
    rebased: Rebased
    """Deltas that were stored by themselves, since nothing else needed their bases."""
    condemned: Kinds
    """Condemned by this collection, packs that were rewritten included; in a dry run, what it
    would condemn, those packs apart."""
    swept: Kinds
    """Deleted by this collection; in a dry run, what it would delete."""
    leftovers: Tally
    """Temporary files of writers that died, removed (a dry run: found)."""
    seconds: float
    again_s: float = 0.0
    """Seconds until a second collection deletes what this one left condemned; of a dry run, from
    the collection on that it stands for. 0 if nothing is left."""

    def _summary(self) -> HtmlTable:
        columns = ("stored", "live", "condemned", "swept", "young")
        sizes = {one: {k: t.size_bytes for k, t in getattr(self, one).items()} for one in columns}
        text = {one: bytes_text(sum(sizes[one].values())) for one in columns}
        dry = "dry run: " if self.dry_run else ""
        title = f"{dry}{text['condemned']} condemned, {text['swept']} deleted, {text['live']} live"
        rows = [(k, *(bytes_text(sizes[x].get(k, 0)) for x in columns)) for k in self.stored]
        return HtmlTable(title=title, columns=("OBJECTS", *map(str.upper, columns)), rows=rows)


@dataclass(slots=True, kw_only=True)
class Candidates:
    """The objects of one listing; owned by one collection.

    Which of them may be condemned is decided again for each catalog that a commit would follow.
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
    absent: frozenset[str]
    """Condemned before the listing, and not listed: a collection that died has deleted them."""
    settled: frozenset[str]
    """Deleted versions whose manifest was gone by the time of the listing: nothing is left to do,
    and in an old store that is nearly all of them."""
    dead: set[str] = field(default_factory=set)
    """Needed no more, whatever their age: a manifest that is not live any more named them."""
    dead_known: bool = False
    """Those manifests have been read."""

    def condemnable(self, now: Catalog, reach: Reach) -> list[str]:
        """Return what may be condemned by a commit that follows `now`, manifests first.

        Raises
        ------
        CorruptObjectError, UnsupportedFeatureError, StorageError
            As :meth:`ckptstore.maintenance.core.live_set.Reach.of`.
        """
        first = self.first(now)
        before = set(first)
        return [*first, *(key for key in self.rest(now, reach.keys(now)) if key not in before)]

    def first(self, now: Catalog) -> list[str]:
        """Return the manifests of deleted versions that are still there.

        They are condemned no later than any pack that they name. So a client that can still read
        the manifest of a deleted version, wherever it began to read the log, knows of every
        condemnation that concerns that version: ``undelete`` rests on that.
        """
        # One that was named before the listing, but not listed, has been swept long ago.
        dead = now.deleted_manifests(without=self.settled)
        there = [key for _, key in dead if key in self.objects or key not in self.named]
        return sorted(set(there) - self._condemned(now, there))

    def rest(self, now: Catalog, reached: set[str]) -> list[str]:
        """Return objects that no version live in `now` reaches, without uploads in flight."""
        found = (key for key in self.objects if key not in reached)
        # Younger ones may be uploads in flight.
        ripe = [key for key in found if key in self.dead or self.age_s(key) >= self.orphan_age_s]
        return sorted(set(ripe) - self._condemned(now, ripe))

    def age_s(self, key: str) -> float:
        """Return the age of a listed object by the storage's clock, in seconds; 0 if negative."""
        return max(0.0, self.now_s - self.objects[key].modified_at)

    def _condemned(self, now: Catalog, names: Iterable[str]) -> set[str]:
        """Return those that were condemned and not deleted, or condemned since the listing."""
        return {key for key in now.gone(names) if key not in self.back or key in now.condemned}


@dataclass(slots=True)
class Collection:
    """One collection, with its options; owned by the calling thread.

    May be interrupted at any point and done again; may run in several processes at once.
    """

    repo: Repo
    progress: ProgressCallback
    """Told of the stages ``list``, ``manifests``, ``rebase``, ``repack`` and ``sweep``."""
    grace_s: float
    """Grace of condemned objects, for their readers; in seconds by the storage's clock. 0 deletes
    at once: right only where no one reads what was deleted or relocated."""
    orphan_age_s: float
    """Objects that no commit names are left alone for so long; in seconds by the storage's clock.
    0 may make savers at work write again what they had written; nothing is lost."""
    repack_below: float | None
    """Packs of which a smaller share than this is live are rewritten, and deltas whose bases
    nothing else needs are stored by themselves, where that takes less; None leaves packs as they
    are, 1.0 leaves nothing dead in any."""
    dry_run: bool
    """Say what would be done, and change nothing. Unless the store was opened read-only, one empty
    object is made and removed to read the storage's clock."""
    tasks: Tasks = field(init=False)
    reach: Reach = field(init=False)
    found: Candidates = field(init=False)
    condemned: list[str] = field(default_factory=list)
    swept: list[str] = field(default_factory=list)
    settled: frozenset[bytes] | None = None
    """Digests of manifests with no delta to store by itself, as long as all of them are live."""

    @operation("gc")
    def run(self, executor: EngineSpec | None, workers: int | None, *, force: bool) -> GcReport:
        """Condemn objects that no live version needs, rewrite packs, delete what is due.

        Parameters
        ----------
        executor
            Where a long listing, the manifests, the copying of a repack and the deleting are done,
            in tasks: an engine or an executor (:func:`ckptstore.engine.engine.open_engine`); None
            for the threads of this process. Whatever is committed is decided and committed here.
        workers
            Tasks at once.
        force
            Collect even if what lies in the store says that commits were lost.

        Raises
        ------
        InvalidInputError
            An option is out of its range.
        CorruptObjectError, UnsupportedFeatureError
            The manifest of a live version cannot be read, so that nothing is condemned; it is
            named. Or commits seem to be lost, and it is not forced: see
            :mod:`ckptstore.maintenance.check.verify`.
        ReadOnlyError, UnsafeBackendError
            The store cannot be written to.
        StorageError
            The storage failed. Whatever was done is in the log; the next collection goes on.
        """
        check_between("grace_s", self.grace_s, 0)
        check_between("orphan_age_s", self.orphan_age_s, 0)
        check_between("repack_below", self.repack_below or 0, 0, 1)
        if not self.dry_run:
            self.repo.check_writable()
        with open_tasks(self.repo, executor, workers) as self.tasks:
            self.reach = Reach(self.repo, progress=self.progress, tasks=self.tasks)
            return self._collect(force=force)

    def _collect(self, *, force: bool) -> GcReport:
        """Look at everything first; the figures are those of before anything is done."""
        repo, began = self.repo, self.repo.environment.monotonic()
        catalog = repo.refresh(writing=True)
        self.found = self._look(catalog)
        cache = ReferenceCache(repo)
        idle = self._if_idle(catalog, cache)
        condemnable: list[str] = []
        if idle is None:
            self._find_dead(catalog)
            condemnable = self.found.condemnable(catalog, self.reach)
        before = self._kinds(catalog, condemnable, idle)
        if not force:
            strays = [key for key in before["orphans"] if keys.version_id_of(key) is not None]
            in_flight = self.orphan_age_s <= 0
            check_log_is_whole(repo, catalog, strays, collecting=True, in_flight=in_flight)
        before_s = self.found.now_s - max(self.orphan_age_s, limits.GC_LEFTOVER_AGE_MIN_S)
        left = repo.backend.remove_leftovers(modified_before=before_s, dry_run=self.dry_run)
        if self.dry_run:
            self.condemned, self.swept = condemnable, [*before["reclaimable_now"]]
        elif idle is None:
            self._free(catalog)
        elif self._due(catalog, self.found.now_s):
            self._sweep()  # what any collection has condemned: the log says what
        rebased, repacked = Rebased(), Repacked()
        if idle is not None:
            live_bytes = sum(idle.packs.values())
        else:
            try:
                rebased, repacked, live_bytes = self._rewrite(catalog)
            except errors.StorageFullError as error:
                raise errors.StorageFullError(error.message, hint=_HINT_NO_ROOM) from error
        if not self.dry_run:
            repo.backend.keep_reserve()
            needs = idle or gathered(repo.catalog, self.reach, settled=self.settled)
            cache.write(needs, repo.catalog.number)
        more = condemnable or repacked.packs_count or rebased.pieces_count
        live = [details.roles.values() for _, details in self.reach.contents(catalog)]
        kinds = {**before, "condemned": self.condemned, "swept": self.swept}
        return GcReport(
            dry_run=self.dry_run,
            commit=catalog.number,
            versions_count=len(live),
            logical_bytes=sum(logical for roles in live for logical, _, _ in roles),
            live_chunk_bytes=live_bytes,
            orphan_age_s_max=max(
                map(self.found.age_s, [*before["orphans"], *before["young"]]), default=0.0
            ),
            repacked=repacked,
            rebased=rebased,
            leftovers=Tally(count=left.count, size_bytes=left.size_bytes),
            seconds=repo.environment.monotonic() - began,
            again_s=self.grace_s if self.dry_run and more else self._wait_s(),
            **{name: self._tally(found) for name, found in kinds.items()},
        )

    def _look(self, catalog: Catalog) -> Candidates:
        """List packs and manifests.

        By the storage's clock; a dry run where nothing may be written takes the time of the newest
        object, which is never too late.

        Parameters
        ----------
        catalog
            The newest: folded before the listing.
        """
        repo = self.repo
        now_s = None
        if not (self.dry_run and repo.options.read_only):
            refused = errors.ReadOnlyError, errors.StoragePermissionError
            with suppress(*(refused if self.dry_run else ())):
                now_s = storage_now(repo)
        objects: dict[str, ObjectInfo] = {}
        for prefix in (keys.MANIFESTS_PREFIX, keys.PACKS_PREFIX):
            for info in list_objects(self.tasks, prefix, environment=repo.environment):
                if keys.version_id_of(info.key) or keys.pack_id(info.key):
                    objects[info.key] = info
                    step = Progress(stage="list", done=len(objects), total=0, unit="objects")
                    self.progress(step)
        if now_s is None:
            now_s = max((info.modified_at for info in objects.values()), default=0.0)
        live = [details.manifest_key for _, details in self.reach.contents(catalog)]
        dead = catalog.deleted_manifests()
        return Candidates(
            now_s=now_s,
            orphan_age_s=self.orphan_age_s,
            objects=objects,
            named=frozenset([*live, *(key for _, key in dead)]),
            settled=frozenset(version for version, key in dead if key not in objects),
            back=frozenset(key for key in catalog.gone(objects) if key not in catalog.condemned),
            absent=frozenset(catalog.condemned.keys() - objects.keys()),
        )

    def _find_dead(self, catalog: Catalog) -> None:
        """Find out, once, what manifests name that are dead or condemned: that needs no age."""
        found, objects = self.found, self.found.objects
        if found.dead_known:
            return
        found.dead_known = True
        pending = [key for key in objects if key in catalog.condemned and keys.version_id_of(key)]
        found.dead.update(found.first(catalog))
        for packs in self.tasks.map(
            _packs_in,
            [(key, objects[key].size_bytes) for key in (*pending, *found.dead) if key in objects],
            count=limits.GC_TASK_MANIFESTS,
            bytes_of=lambda manifest: manifest[1],
            bytes_max=limits.GC_TASK_MANIFEST_BYTES,
        ):
            found.dead.update(map(keys.pack_key, packs))

    def _if_idle(self, catalog: Catalog, cache: ReferenceCache) -> References | None:
        """Return what live versions need if there is nothing to condemn or to rewrite.

        By the newest reference record; None if there may be something to do. Then manifests alone
        say what is needed: a record that is wrong costs time, or leaves what could be freed.
        """
        found, objects = self.found, self.found.objects
        if found.first(catalog) or (needs := cache.read(catalog, self.reach)) is None:
            return None
        for _, details in self.reach.contents(catalog):
            info = objects.get(details.manifest_key)
            if info is None or info.size_bytes != details.manifest_bytes:
                return None
        needed = self.reach.keys(catalog, needs.packs)
        if any(key not in needed and key not in catalog.condemned for key in objects):
            self._find_dead(catalog)
            if found.rest(catalog, needed):
                return None
        if self.repack_below is None:
            return needs
        sparse = any(
            keys.pack_key(pack) in objects
            and is_sparse(size, objects[keys.pack_key(pack)], below=self.repack_below)
            for pack, size in needs.packs.items()
        )
        return needs if needs.deltas_settled and not sparse else None

    def _kinds(
        self, catalog: Catalog, condemnable: Sequence[str], idle: References | None
    ) -> dict[str, Sequence[str]]:
        """Return keys by the field of the report that counts them, before anything is done."""
        found, no_grace = self.found, self.grace_s <= 0
        live = self.reach.keys(catalog, None if idle is None else idle.packs)
        over = self._due(catalog, found.now_s)
        waiting = sorted(catalog.condemned.keys() - set(over))
        chosen = set(condemnable)
        # Named by a manifest that is dead now, or by none at all?
        nameless = [
            key
            for key in found.objects
            if key not in live and key not in found.dead and key not in catalog.condemned
        ]
        return {
            "stored": list(found.objects),
            "live": sorted(live),
            "reclaimable_now": [*over, *condemnable] if no_grace else over,
            "reclaimable_later": waiting if no_grace else [*waiting, *condemnable],
            "orphans": [key for key in nameless if key in chosen],
            "young": [key for key in nameless if key not in chosen],
        }

    def _rebase(self) -> Rebased:
        """Store deltas by themselves whose bases nothing else needs."""
        if self.repack_below is None:
            return Rebased()
        now = self.repo.refresh()
        rebased = rebase(self.repo, self.reach, now, dry_run=self.dry_run, progress=self.progress)
        if not rebased.packs:
            live = self.reach.contents(now)
            self.settled = frozenset(details.manifest_digest for _, details in live)
        if not self.dry_run:
            self.found.dead.update(self.found.objects.keys() & map(keys.pack_key, rebased.packs))
        return rebased

    def _free(self, catalog: Catalog) -> None:
        """Delete what is due, condemn dead objects: on a full disk, what makes room comes first."""
        if self.grace_s > 0 and self._due(catalog, self.found.now_s):
            self._sweep()
        self._condemn()
        if self.grace_s <= 0:
            self._sweep()

    def _rewrite(self, catalog: Catalog) -> tuple[Rebased, Repacked, int]:
        """Rewrite deltas and packs, which needs room; free what is dead then.

        Returns
        -------
        tuple
            Results for deltas and for packs, and the size of live chunks, in bytes.
        """
        rebased = self._rebase()
        chunks = self.reach.chunks(self.repo.catalog if rebased.versions_count else catalog)
        victims, live_bytes = choose(chunks, self.found.objects, below=self.repack_below or 0.0)
        packs, now = {victim.pack for victim in victims}, self.repo.catalog
        for one, need in self.reach.of(now).items():
            if not packs.isdisjoint(need.packs) and now.version(one).damaged:  # never relocated
                packs.difference_update(need.packs)
        victims = [victim for victim in victims if victim.pack in packs]
        if self.dry_run:
            return rebased, Repacked.of(victims), live_bytes
        repacked = repack(self.repo, self.reach, victims, progress=self.progress, tasks=self.tasks)
        self.found.dead.update(keys.pack_key(victim.pack) for victim in victims)
        if rebased.versions_count or repacked.versions_count:
            self._condemn()
            self._sweep()
        return rebased, repacked, live_bytes

    def _condemn(self) -> None:
        """Condemn objects, part by part; each part is decided on the catalog that it follows."""
        part: list[str] = []

        def build(now: Catalog) -> Sequence[Op]:
            part[:] = self.found.condemnable(now, self.reach)[: limits.KEYS_PER_OP_MAX]
            return content_ops.condemn(now, part)

        while self._append(build):
            self.condemned += part

    def _append(self, build: Build) -> bool:
        """Commit, on a full storage too; return False if there is nothing to commit."""
        return on_reserve(self.repo.backend, partial(self.repo.log.append_any, build)) is not None

    def _sweep(self) -> None:
        """Delete objects that any collection condemned long enough ago, then commit that."""
        catalog = self.repo.refresh()
        clock = catalog.condemned and self.grace_s > 0
        due = self._due(catalog, storage_now(self.repo) if clock else self.found.now_s)
        for part in batches(due, limits.KEYS_PER_OP_MAX):
            left = [key for key in part if key not in self.found.absent]
            deleted = self.tasks.map(_delete, left, count=limits.GC_TASK_DELETES)
            for done, _ in enumerate(deleted, len(self.swept) + 1):
                self.progress(Progress(stage="sweep", done=done, total=len(due), unit="objects"))
            self._append(partial(content_ops.swept, keys=part))
            self.swept += part

    def _due(self, catalog: Catalog, now_s: float) -> list[str]:
        """Return the condemned objects whose grace is over, by the storage's clock.

        Parameters
        ----------
        now_s
            The storage's clock now; an object was condemned when its commit was stored.
        """
        pending = catalog.condemned
        over = {
            number
            for number in set(pending.values())
            if self.grace_s <= 0 or now_s - self._stored_at(number) >= self.grace_s
        }
        return sorted(key for key, number in pending.items() if number in over)

    def _wait_s(self) -> float:
        """Return the seconds until the grace of all condemned objects is over; 0 if none are."""
        condemned = self.repo.catalog.condemned
        if not condemned:
            return 0.0
        age_s = self.found.now_s - self._stored_at(max(condemned.values()))
        return min(self.grace_s, max(0.0, self.grace_s - age_s))

    def _stored_at(self, number: int) -> float:
        """Return when a commit was stored, by the storage's clock."""
        return self.repo.backend.stat(keys.commit_key(number)).modified_at

    def _tally(self, names: Iterable[str]) -> Kinds:
        """Return count and bytes by kind of those of `names` that were listed."""
        kinds: dict[str, list[int]] = {"packs": [], "manifests": []}
        for key in names:
            info = self.found.objects.get(key)
            if info is not None:
                kinds[key.partition("/")[0]].append(info.size_bytes)
        return {kind: Tally(count=len(part), size_bytes=sum(part)) for kind, part in kinds.items()}


def _packs_in(backend: Backend, manifest: tuple[str, int]) -> tuple[str, ...]:
    """Return the packs that a manifest of some size names; one that cannot be read tells none."""
    key, size = manifest
    if size > limits.MANIFEST_STORED_BYTES_MAX:
        return ()
    try:
        return outline(backend.get(key, bytes_max=size), where=key)[1]
    except (errors.IntegrityError, errors.FormatError, errors.NotFoundError):
        return ()


def _delete(backend: Backend, key: str) -> None:
    backend.delete(key)
