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
from ckptstore.catalog.replica_changes import Arrival
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
from ckptstore.format.names import encode_metadata
from ckptstore.hashing import blake3_hex
from ckptstore.model import Version
from ckptstore.objects.reader import Want, read_pieces
from ckptstore.ops.transplant import Landed, foresee, transplant
from ckptstore.repo import Repo

__all__ = ["Failure", "ReplicateReport", "ReplicateRequest", "replicate"]

_log = logging.getLogger("ckptstore")

# Operations of one commit that brings records, or metrics and tags. Source: with names and metrics
# of ordinary length 256 of them stay below a quarter of COMMIT_BYTES_MAX.
_OPS_PER_COMMIT = 256
# Bytes of metadata in one such commit: half of COMMIT_BYTES_MAX, the rest is for everything else.
_METADATA_PER_COMMIT = limits.COMMIT_BYTES_MAX // 2
_CHECKED = "read_back_s"
"""In the receipt of a version that came: how long it took to read it back, before it was shown."""


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
    target_cache: Manifests,
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
        target_cache=target_cache,
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
    present: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    copied: list[str] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    records_count: int = 0
    chunk_bytes: int = 0
    chunks_count: int = 0
    done_bytes: int = 0
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
                near=self._near(version),
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
        for batch in _batches(records):

            def build(now: Catalog, batch: Sequence[Version] = batch) -> list[Op]:
                return self._arrive(now, batch, {})

            self.target.log.append_any(build)
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
                self._commit(version, landed)
            except CondemnedError as error:
                if tries == limits.CONDEMNED_TRIES_MAX:
                    raise
                packs = {pack_key(pack): pack for pack in landed.manifest.pieces.packs}
                without.update(packs[name] for name in error.keys if name in packs)
            else:
                self.copied.append(version.id)
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
        return replace(landed, receipt={**landed.receipt, _CHECKED: seconds})

    def _commit(self, version: Version, landed: Landed) -> None:
        """Write the manifest of a version whose chunks are there, and make it visible."""
        data = manifests.encode(landed.manifest)
        key = manifest_key(self.target.environment.random_hex(16))
        self.target.backend.put(key, data)
        arrival = Arrival(
            manifest=ManifestPointer(key=key, stored_bytes=len(data), digest=blake3_hex(data)),
            roles=landed.roles,
            receipt=landed.receipt,
            relies_on=(key, *map(pack_key, landed.manifest.pieces.packs)),
        )
        self.target.log.append_any(lambda now: self._arrive(now, [version], {version.id: arrival}))

    def _transplant(self, version: Version, without: set[str]) -> Landed:
        manifest = self.cache.load(version)
        if content_digest(manifest) != version.content:
            msg = f"the manifest of #{version.id[:8]} is not of the state that the log names"
            raise CorruptObjectError(msg, hint="run ckptstore verify")
        before, size = self.done_bytes, _logical(version)
        total = self.done_bytes + sum(map(_logical, self.missing[len(self.copied) :]))

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
                near=self._near(version),
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
        """Return the versions that share most with one: what it continues, and what continues."""
        return [self.source.catalog.head_id(version.run), version.parent, *self.copied[-1:]][::-1]

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
            return replica_changes.follow(now, before, runs)[:_OPS_PER_COMMIT]

        while self.target.log.append_any(build) is not None:
            pass

    def note(self) -> None:
        """Say in the source's catalog what the target has, if that can be written.

        Of what was there already only what is known to have been read back there, or was first
        saved there.
        """
        if not self.request.check:
            return
        here = self.target.catalog
        store = self.target.superblock.store_id
        there = [here.version(version_id) for version_id in self.present]
        sound = [v.id for v in there if not v.origin or _CHECKED in v.receipt]
        ids = [*self.copied, *sound]
        self.noted = True
        if not replica_changes.replicated(self.source.catalog, ids, store):
            return
        try:
            self.source.check_writable()
            self.source.log.append_any(lambda now: replica_changes.replicated(now, ids, store))
        except CkptStoreError as error:
            self.noted = False
            self.note_failure = str(error)
            _log.warning("%s does not say who has its versions: %s", self.source.url, error)

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


def _batches(versions: Sequence[Version]) -> list[list[Version]]:
    """Return versions in the order given, in parts that fit into one commit each."""
    parts: list[list[Version]] = [[]]
    size = 0
    for version in versions:
        own = len(encode_metadata(version.metadata))
        if len(parts[-1]) == _OPS_PER_COMMIT or (parts[-1] and size + own > _METADATA_PER_COMMIT):
            parts.append([])
            size = 0
        parts[-1].append(version)
        size += own
    return [part for part in parts if part]
