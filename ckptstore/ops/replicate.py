"""Replication: versions of one store become versions of another, under the same ids.

Chunks that the other store has are shared with it (see :mod:`ckptstore.ops.transplant`), the others
travel as they are stored, each checked on the way and read back there. Then the manifest is
written, then one commit makes the version visible: at any moment the target shows whole versions
and no others, and a run that was interrupted is finished by the next. Ancestors that are not
copied come along as records, so that lineage and the history of metrics are whole.

Nothing is ever taken away from the target: what is deleted in the source, or aged, stays there as
long as the target's own policy keeps it; and what the target itself deleted is not brought back.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from ckptstore import limits
from ckptstore.backends.throttled import ThrottledBackend
from ckptstore.catalog import replica_changes
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.lifecycle import LEVELS
from ckptstore.catalog.replica_changes import CHECKED_KEY, Arrival
from ckptstore.checkpoint.content import content_digest, read_content
from ckptstore.checkpoint.manifests import Manifests
from ckptstore.errors import (
    CkptStoreError,
    CondemnedError,
    ConflictError,
    CorruptObjectError,
    IntegrityError,
)
from ckptstore.events import Progress, ProgressCallback, silent
from ckptstore.format import manifest as manifests
from ckptstore.format.commit import Op
from ckptstore.format.fields import ManifestPointer
from ckptstore.format.keys import manifest_key, pack_key
from ckptstore.hashing import blake3_hex
from ckptstore.model import Version
from ckptstore.objects.reader import Want, read_pieces
from ckptstore.ops.transplant import Landed, foresee, transplant
from ckptstore.repo import Repo

__all__ = ["Failure", "ReplicateReport", "ReplicateRequest", "read_back", "replicate"]

_log = logging.getLogger("ckptstore")

# Records whose operations are made at once: a commit takes no more of them.
_RECORDS_AT_ONCE = 256
# Versions before and after one in its run that are asked for chunks that it shares, beside its
# parent and the heads. Source: retention and eviction leave gaps; what is missed costs its bytes.
_NEIGHBOURS = 8
# Heads of other runs of the target that are asked too. Source: each is one manifest in memory.
_HEADS = 4
# Manifests of the target that are kept meanwhile: heads, neighbours, and the last that came.
_KEPT = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicateRequest:
    """What the user asks for, besides the versions."""

    dry_run: bool = False
    check: bool = True
    """Read back what was written, before the version becomes visible in the target."""
    bytes_per_s: float = 0.0
    """Bandwidth to the target, both directions together; 0 for no limit."""
    progress: ProgressCallback = silent
    """Told the bytes in memory of the versions that are done, of those that are to be copied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A version that could not be copied, while others were."""

    version: str
    run: str
    step: int
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicateReport:
    """What a replication did, or would do."""

    dry_run: bool
    source: str
    """Location, as that of the target without credentials."""
    target: str
    target_id: str
    """Id of the target store."""
    copied: tuple[str, ...] = ()
    """Ids of versions whose content came, oldest first; with `dry_run`, that would come."""
    present: tuple[str, ...] = ()
    """Ids of versions that were there already."""
    left: tuple[str, ...] = ()
    """Ids of versions that the target itself has deleted, which stay so, and of those that the
    source deleted meanwhile."""
    records_count: int = 0
    """Ancestors of which the record came."""
    chunk_bytes: int = 0
    """Stored bytes that travelled, or would."""
    chunks_count: int = 0
    logical_bytes: int = 0
    """What the copied versions take in memory."""
    checked: bool = False
    """Every chunk that travelled was read back from the target."""
    noted: bool = False
    """The source's catalog says that the target has these versions."""
    note_failure: str = ""
    """Why it does not, if it could not be written."""
    failures: tuple[Failure, ...] = ()
    seconds: float = 0.0


def replicate(
    source: Repo,
    cache: Manifests,
    target: Repo,
    versions: Sequence[Version],
    request: ReplicateRequest,
) -> ReplicateReport:
    """Make versions of a store versions of another; return what was done.

    Two replications at once, and savers or collections on either side, do each other no harm.

    Raises
    ------
    ConflictError
        Source and target are one store; or the target has a run of a name that has nothing in
        common with the source's. Nothing was written.
    ReadOnlyError, UnsafeBackendError, StorageError
        The target cannot be written to, or a storage failed. What was committed stays, and a
        repetition goes on.
    CondemnedError
        Collections condemned what a copy needs, again and again.
    """
    began = target.environment.monotonic()
    if source.superblock.store_id == target.superblock.store_id:
        msg = f"{source.url} and {target.url} are one store, or copies of one"
        raise ConflictError(msg, hint="replicate to a store of its own: ckptstore init URL")
    if not request.dry_run:
        target.check_writable()
    work = _Replication(
        source=source,
        cache=cache,
        target=target,
        target_cache=Manifests(target, kept=_KEPT),
        request=request,
        wanted=[version for version in versions if version.level != "record"],
    )
    work.look()
    if request.dry_run:
        work.foresee()
    else:
        work.copy()
        work.follow()
        work.note()
    return work.report(target.environment.monotonic() - began)


@dataclass(slots=True, kw_only=True)
class _Replication:
    """One replication; owned by the calling thread."""

    source: Repo
    cache: Manifests
    target: Repo
    target_cache: Manifests
    request: ReplicateRequest
    wanted: Sequence[Version]
    missing: list[Version] = field(default_factory=list)
    heads: Sequence[str] = ()
    """Of runs of the target, as they were before."""
    places: dict[str, int] = field(default_factory=dict)
    """Of versions in their runs of the source."""
    present: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    copied: list[str] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    records_count: int = 0
    chunk_bytes: int = 0
    chunks_count: int = 0
    done_bytes: int = 0
    total_bytes: int = 0
    noted: bool = False
    note_failure: str = ""

    def look(self) -> None:
        """Find out what the target has."""
        before = self.source.refresh()
        here = self.target.refresh()
        replica_changes.check_line(here, before, {version.run for version in self.wanted})
        for version in sorted(self.wanted, key=lambda version: version.commit):
            known = here.version(version.id) if here.has_version(version.id) else None
            if known is not None and known.deleted:
                self.left.append(version.id)
            elif known is not None and known.level != "record":
                self.present.append(version.id)
            else:
                self.missing.append(version)

    def foresee(self) -> None:
        """Count what would travel; reads manifests, no chunks."""
        planned: set[bytes] = set()
        self.heads = self._newest_heads()
        for version in self.missing:
            try:
                manifest = self.cache.load(version)
            except IntegrityError as error:
                self._failed(version, error)
                continue
            found = foresee(
                manifest,
                target=self.target,
                target_cache=self.target_cache,
                source_id=version.id,
                only=self._near(version),
                planned=planned,
            )
            self.chunk_bytes += found.chunk_bytes
            self.chunks_count += found.chunks_count
            self.copied.append(version.id)

    def copy(self) -> None:
        """Bring versions in the order of their commits, each after the records it descends from."""
        before = self.source.catalog
        roots = [version.id for version in self.missing]
        roots += [before.run(version.run).origin for version in self.missing]
        coming = {version.id for version in self.missing}
        self.total_bytes = sum(map(_logical, self.missing))
        self.heads = self._newest_heads()
        records: list[Version] = []
        for version in replica_changes.lineage(before, [root for root in roots if root]):
            if version.id in coming:
                self._bring_records(records)
                if not self._bring(version):
                    self._bring_records([version])
                self.done_bytes += _logical(version)
            elif not self.target.catalog.has_version(version.id):
                records.append(version)
        self._bring_records(records)

    def _bring_records(self, records: list[Version]) -> None:
        """Bring versions as records; empties the list."""
        for start in range(0, len(records), _RECORDS_AT_ONCE):
            batch = records[start : start + _RECORDS_AT_ONCE]

            def build(now: Catalog, batch: Sequence[Version] = batch) -> list[Op]:
                return replica_changes.fitting(self._arrive(now, batch, {}))

            while self.target.log.append_any(build) is not None:
                pass
            self.records_count += len(batch)
        records.clear()

    def _arrive(
        self, now: Catalog, versions: Sequence[Version], arrivals: Mapping[str, Arrival]
    ) -> list[Op]:
        return replica_changes.arrive(
            now,
            self.source.catalog,
            versions,
            store=self.source.superblock.store_id,
            arrivals=arrivals,
        )

    def _bring(self, version: Version) -> bool:
        """Copy a version and commit it; return whether its content is there.

        One that is damaged does not keep the others back. One that was moved meanwhile is copied
        from where it is now, and one that was deleted is left out.
        """
        without: set[str] = set()
        for tries in count(1):
            try:
                landed = self._land(version, without)
            except IntegrityError as error:
                now = self.source.refresh().version(version.id)
                if now.deleted or now.level == "record":
                    self.left.append(version.id)
                    return False
                moved = now.manifest_digest != version.manifest_digest
                if not moved or tries == limits.CONDEMNED_TRIES_MAX:
                    self._failed(version, error)
                    return False
                version = now
                continue
            try:
                came = self._commit(version, landed)
            except CondemnedError as error:
                if tries == limits.CONDEMNED_TRIES_MAX:
                    raise
                packs = {pack_key(pack): pack for pack in landed.manifest.pieces.packs}
                without.update(packs[name] for name in error.keys if name in packs)
            else:
                deleted = self.target.catalog.version(version.id).deleted
                part = self.copied if came else self.left if deleted else self.present
                part.append(version.id)
                self.chunk_bytes += landed.chunk_bytes
                self.chunks_count += landed.chunks_count
                return True
        raise AssertionError  # pragma: no cover - the loop has no other end

    def _failed(self, version: Version, error: IntegrityError) -> None:
        _log.warning("%s@%s was not replicated: %s", version.run, version.step, error)
        self.failures.append(
            Failure(version=version.id, run=version.run, step=version.step, message=str(error))
        )

    def _land(self, version: Version, without: set[str]) -> Landed:
        """Bring the chunks of a version, and read them back."""
        if version.damaged:
            msg = f"parts of {version.run}@{version.step} (#{version.id[:8]}) are lost"
            raise CorruptObjectError(msg, hint="mend it first: ckptstore repair")
        landed = self._transplant(version, without)
        if not self.request.check:
            return landed
        began = self.target.environment.monotonic()
        self._check(landed)
        seconds = self.target.environment.monotonic() - began
        return replace(landed, receipt={**landed.receipt, CHECKED_KEY: seconds})

    def _commit(self, version: Version, landed: Landed) -> bool:
        """Write the manifest of a version whose chunks are there, and make it visible.

        Return whether it was; not if another brought it, or the target deleted it, meanwhile.
        """
        data = manifests.encode(landed.manifest)
        key = manifest_key(self.target.environment.random_hex(16))
        self.target.backend.put(key, data)
        arrival = Arrival(
            manifest=ManifestPointer(key=key, stored_bytes=len(data), digest=blake3_hex(data)),
            roles=landed.roles,
            receipt=landed.receipt,
            relies_on=(key, *map(pack_key, landed.manifest.pieces.packs)),
        )
        commit = self.target.log.append_any(
            lambda now: self._arrive(now, [version], {version.id: arrival})
        )
        if commit is not None:
            self.target_cache.keep(arrival.manifest.digest, landed.manifest)
        return commit is not None

    def _transplant(self, version: Version, without: set[str]) -> Landed:
        manifest = self.cache.load(version)
        if content_digest(manifest) != version.content:
            msg = f"the manifest of #{version.id[:8]} is not of the state that the log names"
            raise CorruptObjectError(msg, hint="run ckptstore verify")
        before, size, total = self.done_bytes, _logical(version), self.total_bytes

        def progress(step: Progress) -> None:
            share = step.done / max(step.total, 1)
            done = before + int(size * share)
            self.request.progress(Progress(stage="copy", done=min(done, total), total=total))

        limited = self._limited()
        try:
            return transplant(
                manifest,
                source=self.source,
                target=self.target,
                target_backend=limited,
                target_cache=self.target_cache,
                source_id=version.id,
                only=self._near(version),
                without=without,
                progress=progress,
            )
        finally:
            progress(Progress(stage="copy", done=1, total=1))

    def _limited(self) -> ThrottledBackend | None:
        if not self.request.bytes_per_s:
            return None
        return ThrottledBackend(
            self.target.backend,
            bytes_per_s=self.request.bytes_per_s,
            environment=self.target.environment,
        )

    def _near(self, version: Version) -> list[str]:
        """Return the versions of the target that are likely to have chunks of one.

        With what is to be checked, none that was not: what they hold may be anything.
        """
        ids = self.source.catalog.ids(version.run)
        if version.id not in self.places:
            self.places.update((one, place) for place, one in enumerate(ids))
        place = self.places[version.id]
        before = [*ids[max(0, place - _NEIGHBOURS) : place]][::-1]
        after = ids[place + 1 : place + 1 + _NEIGHBOURS]
        here = self.target.catalog

        def shares(version_id: str) -> bool:
            if not here.has_version(version_id):
                return False
            found = here.version(version_id)
            if found.deleted or found.damaged or found.level == "record":
                return False
            return read_back(found) or not self.request.check

        near = (next(filter(shares, part), "") for part in (before, after))
        others = (version.parent, *self.copied[-1:], here.head_id(version.run), *self.heads)
        return [one for one in dict.fromkeys((*near, *filter(shares, others))) if one]

    def _newest_heads(self) -> list[str]:
        here = self.target.catalog
        heads = [here.version(info.head) for info in here.runs() if info.head]
        return [v.id for v in sorted(heads, key=lambda v: v.commit)[-_HEADS:]]

    def _check(self, landed: Landed) -> None:
        """Read back from the target what was written there."""
        table = landed.manifest.pieces
        labels = read_content(landed.manifest).labels
        wants = [
            Want(row=row, out=None, label=labels[owner])
            for row, owner in zip(landed.rows, landed.owners, strict=True)
        ]
        try:
            read_pieces(
                table,
                wants,
                backend=self._limited() or self.target.backend,
                options=self.target.options,
                progress=silent,
            )
        except IntegrityError as error:
            msg = f"{self.target.url} does not hold what was written there: {error.message}"
            raise CorruptObjectError(msg, hint="examine the target: ckptstore doctor") from error

    def follow(self) -> None:
        """Bring metrics, tags and heads to where the source has them."""
        before = self.source.catalog
        runs = sorted({version.run for version in self.wanted})

        def build(now: Catalog) -> list[Op]:
            return replica_changes.fitting(replica_changes.follow(now, before, runs))

        while self.target.log.append_any(build) is not None:
            pass

    def note(self) -> None:
        """Say in the source's catalog what the target has, if that can be written.

        Of what was there already only what is known to have been read back there, or was first
        saved there, is not damaged, and of which the target keeps as much.
        """
        if not self.request.check:
            return
        here = self.target.catalog
        store = self.target.superblock.store_id
        ids = [*self.copied, *filter(lambda one: self._is_sound(here.version(one)), self.present)]
        self.noted = True
        if not replica_changes.replicated(self.source.catalog, ids, store):
            return
        try:
            self.source.check_writable()
            while self.source.log.append_any(
                lambda now: replica_changes.replicated(now, ids, store)
            ):
                pass
        except CkptStoreError as error:
            self.noted = False
            self.note_failure = str(error)
            _log.warning("%s does not say who has its versions: %s", self.source.url, error)

    def _is_sound(self, there: Version) -> bool:
        here = self.source.catalog.version(there.id)
        as_much = LEVELS.index(there.level) >= LEVELS.index(here.level)
        return as_much and read_back(there) and not there.damaged

    def report(self, seconds: float) -> ReplicateReport:
        """Return what was done."""
        copied = set(self.copied)
        return ReplicateReport(
            dry_run=self.request.dry_run,
            source=self.source.url,
            target=self.target.url,
            target_id=self.target.superblock.store_id,
            copied=tuple(self.copied),
            present=tuple(self.present),
            left=tuple(self.left),
            records_count=self.records_count,
            chunk_bytes=self.chunk_bytes,
            chunks_count=self.chunks_count,
            logical_bytes=sum(_logical(v) for v in self.missing if v.id in copied),
            checked=self.request.check and not self.request.dry_run,
            noted=self.noted,
            note_failure=self.note_failure,
            failures=tuple(self.failures),
            seconds=seconds,
        )


def _logical(version: Version) -> int:
    return sum(part.logical for part in version.roles.values())


def read_back(version: Version) -> bool:
    """Return whether a store has saved a version itself, or has read back all that came of it."""
    return not version.origin or CHECKED_KEY in version.receipt
