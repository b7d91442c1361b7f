"""Repair: bring back what is damaged, from the store itself or from a second one.

Nothing is deleted, and no object is changed (catalog snapshots, which are caches, are written
anew). What is brought back goes into new packs and new manifests under new names, and a commit
``relocate`` makes the versions lie there; whatever nobody needs any more is left to the collector.
Versions of which something stays lost are recorded (``quarantine``), so that no save shares with
them. A repair may be stopped at any point, run again, and run twice at once: the log decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ckptstore import limits
from ckptstore.catalog import lifecycle_changes
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.lifecycle_changes import Move
from ckptstore.checkpoint.content import Content, content_digest, read_content
from ckptstore.checkpoint.manifests import Manifests
from ckptstore.errors import CondemnedError, FormatError, IntegrityError
from ckptstore.events import ProgressCallback, silent
from ckptstore.format import manifest as manifests
from ckptstore.format.commit import ManifestPointer, Op
from ckptstore.format.keys import manifest_key, pack_id, pack_key
from ckptstore.format.manifest import Manifest
from ckptstore.hashing import blake3_hex
from ckptstore.model import Version
from ckptstore.objects.index import location_of
from ckptstore.ops.mend_log import mend_log, mend_snapshots
from ckptstore.ops.rebuild import Rescue, replaced, rows_of
from ckptstore.ops.repair_report import CommitFinding, Lost, Mended, RepairReport
from ckptstore.ops.survey import Survey, piece_key
from ckptstore.ops.verify import Level
from ckptstore.repo import Repo

__all__ = ["repair"]


def repair(
    repo: Repo,
    cache: Manifests,
    *,
    source: Repo | None = None,
    level: Level = "full",
    dry_run: bool = False,
    progress: ProgressCallback = silent,
) -> RepairReport:
    """Bring back what is damaged as far as it can be had, and say exactly what is lost.

    Parameters
    ----------
    source
        A second store: a copy of this one, a replica, or any store that holds the same tensors.
    level
        ``full`` reads every byte of this store to find the damage; ``records`` finds objects that
        are missing, short, or damaged records.
    dry_run
        Find out what would be done; write nothing.

    Raises
    ------
    ReadOnlyError, UnsafeBackendError
        The store cannot be written to.
    CorruptObjectError
        The log of the second store is damaged.
    StorageError
        One of the storages failed; what was committed before stands.
    """
    if not dry_run:
        repo.check_writable()
    commits = mend_log(repo, source, dry_run=dry_run)
    if not _log_is_whole(repo, commits, dry_run=dry_run):
        return _unreadable(repo, commits, dry_run=dry_run)
    snapshots = mend_snapshots(repo, dry_run=dry_run)
    work = _Repair(
        repo=repo,
        cache=cache,
        source=source,
        survey=Survey(repo=repo, cache=cache, full=level == "full", progress=progress),
        rescue=Rescue(repo=repo, dry_run=dry_run, progress=progress),
    )
    work.look()
    work.mend()
    quarantined = () if dry_run else work.quarantine()
    catalog = repo.catalog
    return RepairReport(
        dry_run=dry_run,
        commits=commits,
        commits_readable=catalog.number,
        versions_readable=catalog.versions_count,
        snapshots=snapshots,
        problems=tuple(work.survey.problems),
        mended=tuple(work.mended),
        lost=tuple(work.lost),
        quarantined=quarantined,
        relocated=tuple(work.relocated),
        pieces=dict(work.rescue.origins),
        written_bytes=work.rescue.written_bytes,
    )


def _log_is_whole(repo: Repo, commits: tuple[CommitFinding, ...], *, dry_run: bool) -> bool:
    """Say whether the log can be read to its end: that its last commits are gone is no gap."""
    if not commits:
        repo.refresh()
        return True
    if dry_run and any(commit.mended for commit in commits):
        return False
    try:
        repo.refresh()
    except (IntegrityError, FormatError):
        return False
    return True


def _unreadable(repo: Repo, commits: tuple[CommitFinding, ...], *, dry_run: bool) -> RepairReport:
    """Report a log that stays damaged: nothing can be committed after that."""
    try:
        catalog = repo.refresh()
    except (IntegrityError, FormatError):
        catalog = repo.log.catalog
    return RepairReport(
        dry_run=dry_run,
        commits=commits,
        commits_readable=catalog.number,
        versions_readable=catalog.versions_count,
    )


@dataclass(slots=True, kw_only=True)
class _Item:
    """One version to be mended."""

    version: Version
    content: Content
    rebuilt: bool
    """Its own manifest is lost: this is what another version says that holds the same."""


@dataclass(slots=True, kw_only=True)
class _Repair:
    """One repair while it runs."""

    repo: Repo
    cache: Manifests
    source: Repo | None
    survey: Survey
    rescue: Rescue
    items: list[_Item] = field(default_factory=list)
    mended: list[Mended] = field(default_factory=list)
    lost: list[Lost] = field(default_factory=list)
    relocated: list[str] = field(default_factory=list)
    _source_cache: Manifests | None = None

    # --- what is damaged ------------------------------------------------------------------------

    def look(self) -> None:
        """Survey every version, and collect those that are damaged."""
        versions = [v for v in self.repo.catalog.versions() if v.level != "record"]
        self.survey.total_bytes = sum(r.logical for v in versions for r in v.roles.values())
        unread: list[Version] = []
        for version, content in self.survey.check_all(versions):
            if content is None:
                unread.append(version)
            elif self._needs(content) or self._is_unlike(content):
                self.items.append(_Item(version=version, content=content, rebuilt=False))
        for version in unread:
            found = self._rebuilt(version)
            if found is None:
                self.lost.append(_lost(version, (), self.survey.unread[version.id].message))
            else:
                problems = len(self.survey.problems)
                self.survey.check_content(version, found)
                del self.survey.problems[problems:]  # its problem is its manifest, told already
                self.items.append(_Item(version=version, content=found, rebuilt=True))

    def _is_unlike(self, content: Content) -> bool:
        """Return whether a tensor does not follow from others as it should; nothing mends that."""
        records = content.manifest.tensors
        made = [place for place, record in enumerate(records) if record.recipe is not None]
        return any(self.survey.wrong(content, place) for place in made)

    def _needs(self, content: Content) -> list[int]:
        """Return the rows that must lie elsewhere."""
        table = content.manifest.pieces
        if not self.survey.bad and not self.survey.broken_packs:
            return []
        places = [place for place, p in enumerate(table.packs) if p in self.survey.broken_packs]
        rows = set(np.nonzero(np.isin(table.pack, places))[0].tolist())
        if self.survey.bad:
            rows.update(r for r in range(len(table)) if self.survey.why(table, r))
        return sorted(rows)

    def _rebuilt(self, version: Version) -> Content | None:
        """Return what a version holds, from one that holds the same, here or in the source."""
        for repo, cache in self._stores():
            catalog = repo.catalog if repo is self.repo else repo.refresh()
            for other in catalog.versions(newest_first=True):
                if other.level == "record" or other.content != version.content:
                    continue
                if repo is self.repo and other.id in self.survey.unread:
                    continue
                try:
                    manifest = cache.load(other)
                    if content_digest(manifest) != version.content:
                        continue
                    return read_content(_as(manifest, version))
                except (IntegrityError, FormatError):
                    continue  # damaged too: another may be sound
        return None

    def _stores(self) -> Iterator[tuple[Repo, Manifests]]:
        yield self.repo, self.cache
        if self.source is not None:
            if self._source_cache is None:
                self._source_cache = Manifests(self.source)
            yield self.source, self._source_cache

    # --- where it may be had --------------------------------------------------------------------

    def mend(self) -> None:
        """Bring back what is needed and relocate the versions.

        What a collection condemns meanwhile is written again, as a save does.
        """
        for item in self.items:
            dtypes = _RowDtype(item.content.manifest)
            for row in self._needs(item.content):
                self.rescue.need(item.content.manifest.pieces, row, dtypes(row))
        left = list(self.items)
        for attempt in range(limits.CONDEMNED_TRIES_MAX):
            self._obtain()
            try:
                left = self._relocate(left)
                break
            except CondemnedError as error:
                if attempt + 1 == limits.CONDEMNED_TRIES_MAX:
                    raise
                self._avoid({pack for key in error.keys if (pack := pack_id(key))})
                left = [item for item in left if item.version.id not in self.relocated]
        for item in self.items:
            self._account(item)

    def _avoid(self, packs: set[str]) -> None:
        """Need again what was to lie in packs that were condemned meanwhile."""
        self.rescue.forget(packs)
        for pack in packs:
            self.survey.broken_packs.setdefault(pack, "it was condemned")
        for item in self.items:
            dtypes = _RowDtype(item.content.manifest)
            for row in self._needs(item.content):
                self.rescue.need(item.content.manifest.pieces, row, dtypes(row))

    def _obtain(self) -> None:
        """Find the missing pieces, nearest first."""
        rescue = self.rescue
        if not rescue.missing:
            return
        self._from_here()
        rescue.salvage()
        rescue.scan({p: i.size_bytes for k, i in self.survey.sizes.items() if (p := pack_id(k))})
        if self.source is not None and rescue.missing:
            self._from_source()
        rescue.flush()
        if rescue.missing:
            self._rebase()

    def _rebase(self) -> None:
        """Take deltas as they are whose bases are back, now that they can be checked."""
        rescue = self.rescue
        for item in self.items:
            manifest = item.content.manifest
            table, own = manifest.pieces, manifest.first[-1]
            left = [row for row in rows_of(table, rescue.missing) if table.base_of(row) is not None]
            if (
                rescue.dry_run
            ):  # nothing was put back: whether they can be had is not known for sure
                ids = [table.ids[int(table.base[row])].tobytes() for row in left]  # type: ignore[index]
                rescue.rescued.update(
                    table.ids[row].tobytes()
                    for row, base in zip(left, ids, strict=True)
                    if base in rescue.rescued
                )
                continue
            places = {
                row: place
                for row in range(own, len(table))
                if (place := rescue.placed.get(table.ids[row].tobytes())) and place.base is None
            }
            if left and places:
                moved = replaced(table, own, places)
                rescue.rebase(moved, [row for row in left if table.base_of(row) in places])

    def _from_here(self) -> None:
        """Take what other versions of this store have, or packs whose index alone is damaged."""
        rescue, survey = self.rescue, self.survey
        contents = [item.content.manifest for item in self.items]
        for manifest in (*contents, *self._manifests(self.repo, self.cache)):
            table = manifest.pieces
            copies = []
            for row in rows_of(table, rescue.missing):
                key = piece_key(table, row)
                if key in survey.bad:
                    continue
                if key in survey.read and key[0] not in survey.broken_packs:
                    rescue.point(key[3], location_of(table, row))
                else:
                    copies.append(row)
            rescue.fetch(table, copies, self.repo, "moved")
            if not rescue.missing:
                return

    def _from_source(self) -> None:
        """Take what versions of the second store have: first those that hold the same."""
        assert self.source is not None  # noqa: S101  # for the type checker
        cache = [each for _, each in self._stores()][-1]
        self.source.refresh()
        ids = {item.version.id for item in self.items}
        contents = {item.version.content for item in self.items}
        near = [v for v in self.source.catalog.versions() if v.id in ids or v.content in contents]
        for manifest in self._manifests(self.source, cache, first=near):
            rows = rows_of(manifest.pieces, self.rescue.missing)
            self.rescue.fetch(manifest.pieces, rows, self.source, "source")
            if not self.rescue.missing:
                return

    def _manifests(
        self, repo: Repo, cache: Manifests, first: Sequence[Version] = ()
    ) -> Iterator[Manifest]:
        """Yield the manifests of a store that can be read, newest first."""
        done = {version.id for version in first}
        rest = (v for v in repo.catalog.versions(newest_first=True) if v.id not in done)
        for version in (*first, *rest):
            if version.level != "record":
                try:
                    yield cache.load(version)
                except (IntegrityError, FormatError):
                    continue  # nothing can be had from it; of this store it is reported already

    # --- what is done ---------------------------------------------------------------------------

    def _relocate(self, items: list[_Item]) -> list[_Item]:
        """Write new manifests and commit them, some versions at a time; return what is left."""
        if self.rescue.dry_run:
            return []
        for start in range(0, len(items), limits.MOVES_PER_COMMIT):
            part = items[start : start + limits.MOVES_PER_COMMIT]
            moves = [move for item in part if (move := self._move(item)) is not None]
            if not moves:
                continue
            self.repo.log.append_any(lambda now, moves=moves: _ops(now, moves))  # type: ignore[misc]
            catalog = self.repo.catalog
            for move in moves:
                found = catalog.has_version(move.version) and catalog.version(move.version)
                if found and move.manifest and found.manifest_key == move.manifest.key:
                    self.relocated.append(move.version)
        return []

    def _move(self, item: _Item) -> Move | None:
        """Write the new manifest of a version; None where nothing changes."""
        table = item.content.manifest.pieces
        rows = self._needs(item.content)
        placed = self.rescue.placed
        places = {
            row: placed[piece_id]
            for row in rows
            if (piece_id := table.ids[row].tobytes()) in placed
        }
        if not places and not item.rebuilt:
            return None
        old = item.content.manifest
        manifest = Manifest(
            version=old.version,
            chunk_bytes=old.chunk_bytes,
            skeleton=old.skeleton,
            tensors=old.tensors,
            first=old.first,
            pieces=replaced(table, old.first[-1], places),
        )
        data = manifests.encode(manifest)
        # A name of its own: that of the manifest that is lost may be taken by what is left of it.
        key = manifest_key(self.repo.environment.random_hex(16))
        self.repo.backend.put(key, data)
        version = item.version
        return Move(
            version=version.id,
            based_on=version.manifest_digest,
            level=version.level,
            manifest=ManifestPointer(key=key, stored_bytes=len(data), digest=blake3_hex(data)),
            content=version.content,
            roles=version.roles,
            relies_on=(key, *map(pack_key, manifest.pieces.packs)),
        )

    def _account(self, item: _Item) -> None:
        """Say which tensors of a version are whole again, and which are lost."""
        content, table = item.content, item.content.manifest.pieces
        whole: list[str] = []
        lost: dict[str, str] = {}
        for index, label in enumerate(content.labels):
            if index in content.hidden:  # whatever follows from it is named
                continue
            wrong = [(n, why) for n in content.rows(index) if (why := self.survey.why(table, n))]
            back = self.rescue.rescued
            gone = [why for row, why in wrong if table.ids[row].tobytes() not in back]
            if not wrong:  # its pieces are sound, but what follows from them may be wrong
                gone = self.survey.wrong(content, index)
            if gone:
                lost[label] = gone[0]
            elif wrong:
                whole.append(label)
        version = item.version
        if whole or item.rebuilt:
            self.mended.append(
                Mended(
                    version=version.id,
                    run=version.run,
                    step=version.step,
                    manifest=item.rebuilt,
                    tensors=tuple(whole),
                )
            )
        if lost:
            self.lost.append(_lost(version, tuple(lost), next(iter(lost.values()))))

    def quarantine(self) -> tuple[str, ...]:
        """Record the versions of which something is lost; return those that were not yet."""
        catalog = self.repo.refresh()
        digests = {}
        for lost in self.lost:
            version = catalog.version(lost.version)
            if not version.deleted and not version.damaged:
                digests[version.id] = version.manifest_digest
        # Damage that a person mended, by putting the right object back, is no damage any more.
        sound = {
            version.id: digest
            for version in catalog.versions()
            if version.damaged and (digest := self.survey.sound.get(version.id))
        }
        if digests or sound:
            self.repo.log.append_any(
                lambda now: [
                    *lifecycle_changes.quarantine(now, digests),
                    *lifecycle_changes.verified(now, sound),
                ]
            )
        return tuple(digests)


def _ops(now: Catalog, moves: Sequence[Move]) -> list[Op]:
    """Return what relocates those versions that are still as they were when this looked."""
    live: list[Move] = []
    superseded: list[str] = []
    for move in moves:
        version = now.version(move.version)
        if not version.deleted and version.manifest_digest == move.based_on:
            live.append(move)
            superseded.append(version.manifest_key)
    ops = lifecycle_changes.relocate(now, live)
    return [*ops, *lifecycle_changes.condemn(now, superseded)]


def _as(manifest: Manifest, version: Version) -> Manifest:
    """Return a manifest as that of another version with the same content."""
    return Manifest(
        version=version.id,
        chunk_bytes=manifest.chunk_bytes,
        skeleton=manifest.skeleton,
        tensors=manifest.tensors,
        first=manifest.first,
        pieces=manifest.pieces,
    )


class _RowDtype:
    """Tells the dtype of the tensor that a row belongs to, or the first delta to what is in it."""

    def __init__(self, manifest: Manifest) -> None:
        self._records = manifest.tensors
        self._first = np.asarray(manifest.first)
        self._base = manifest.pieces.base

    def __call__(self, row: int) -> str:
        if row >= self._first[-1] and self._base is not None:
            row = int(np.flatnonzero(self._base == row)[0])
        return self._records[int(np.searchsorted(self._first, row, "right")) - 1].dtype


def _lost(version: Version, tensors: tuple[str, ...], why: str) -> Lost:
    return Lost(version=version.id, run=version.run, step=version.step, tensors=tensors, why=why)
