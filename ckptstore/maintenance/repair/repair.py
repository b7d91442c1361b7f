"""Repair: brings back damaged objects, from the store itself or from other ones.

Nothing is deleted, and no object is changed (catalog snapshots, which are caches, are written
again). Pieces that are brought back go into new packs and new manifests under new names, and a
commit ``relocate`` makes the versions lie there; objects that nothing needs any more are left to
the collector. Versions that stay incomplete are recorded (``quarantine``), so that no save shares
with them. A repair may be stopped at any point, run again, and run twice at once: the log decides.

Objects in an archive class of another store are not read, and do not end the repair: others may
have them, and the rest is reported with the command that thaws it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import get_args

import numpy as np

from ckptstore import limits
from ckptstore.argument_checks import check_among
from ckptstore.backends.transfers import operation
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.content_ops import Move, quarantine, verified
from ckptstore.catalog.state import Op
from ckptstore.checkpoint.cold_reads import thaw_command
from ckptstore.checkpoint.content import Content, content_digest, read_content
from ckptstore.chunking import batches
from ckptstore.committing import commit_retrying
from ckptstore.errors import FormatError, IntegrityError
from ckptstore.events import ProgressCallback
from ckptstore.format.keys import pack_id
from ckptstore.format.manifest import Manifest
from ckptstore.maintenance.check.integrity_scan import Problem, Survey, piece_key
from ckptstore.maintenance.check.verify import Level, find_leftovers, report_lost_commits
from ckptstore.maintenance.check.verify_tasks import check_all, check_content
from ckptstore.maintenance.core.live_set import changed, live_versions
from ckptstore.maintenance.core.relocate import relocate, still, write_move
from ckptstore.maintenance.repair.fix_log import CommitFinding, mend_log, mend_snapshots
from ckptstore.maintenance.repair.recover_pieces import Rescue, replaced, rows_of
from ckptstore.model import NamedVersion, Version, naming
from ckptstore.objects.index import location_of
from ckptstore.repo import Repo
from ckptstore.shown import Shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Mended(NamedVersion):
    """A version that was brought back, wholly or in part; in a dry run, one that can be."""

    manifest: bool
    """Its manifest was lost, too, and was rebuilt."""
    tensors: tuple[str, ...]
    """Paths of tensors that were damaged and are whole again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost(NamedVersion):
    """A version that lost some of its tensors, or all."""

    tensors: tuple[str, ...]
    """Paths of the tensors that are lost; empty if the whole version is."""
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdSource(NamedVersion):
    """A version of another store that holds missing pieces in an archive class."""

    url: str
    """Where the other store is, without credentials."""
    command: str
    """Command that makes it readable there; the repair is then to be run again."""
    pieces_count: int


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RepairReport(Shown):
    """Findings of a repair, and its results."""

    dry_run: bool
    commits: tuple[CommitFinding, ...] = ()
    """Commits that are missing or damaged, oldest first."""
    commits_readable: int
    """Number of the last commit up to which the log can be read now."""
    versions_readable: int
    """Number of versions that the log has up to there."""
    commits_lost: str = ""
    """Evidence that the log lost its last commits, or all, and the way out; empty without any.
    Nothing can bring them back from within the store, or from a store with another log."""
    snapshots: tuple[str, ...] = ()
    """Keys of catalog snapshots that were damaged; a new one was folded."""
    problems: tuple[Problem, ...] = ()
    """Findings of a verification before the repair."""
    mended: tuple[Mended, ...] = ()
    lost: tuple[Lost, ...] = ()
    quarantined: tuple[str, ...] = ()
    """Ids of versions that this repair recorded as damaged."""
    relocated: tuple[str, ...] = ()
    """Ids of versions that lie elsewhere now, some only to leave a pack with a damaged index."""
    pieces: dict[str, int] = field(default_factory=dict)
    """Number of pieces by origin: ``elsewhere``, ``moved``, ``salvaged``, ``scanned``,
    ``source``."""
    written_bytes: int = 0
    """Bytes of new packs."""
    cold: tuple[ColdSource, ...] = ()
    """Other stores that have lost pieces, once they are thawed there."""

    @property
    def ok(self) -> bool:
        """Return whether nothing is lost."""
        log_goes_on = all(commit.mended or commit.set_aside for commit in self.commits)
        return log_goes_on and not self.lost and not self.commits_lost


@operation("repair")
def repair(
    repo: Repo, *, sources: list[Repo], level: Level, dry_run: bool, progress: ProgressCallback
) -> RepairReport:
    """Bring back damaged objects as far as possible, and report exactly the lost tensors.

    Parameters
    ----------
    sources
        Other stores: copies of this one, replicas, or any that hold the same tensors. They are
        asked in turn. Objects that one has in an archive class are left to the next; see
        :attr:`RepairReport.cold`.
    level
        ``full`` reads every byte of this store to find the damage; ``records`` finds objects that
        are missing, short, or damaged records.
    dry_run
        Find out the result of a repair; write nothing.

    Raises
    ------
    ReadOnlyError, UnsafeBackendError
        The store cannot be written to.
    CorruptObjectError
        The log of one of the other stores is damaged.
    StorageError
        One of the storages failed; earlier commits stand.
    """
    check_among("level", level, get_args(Level))
    if not dry_run:
        repo.check_writable()
    commits = mend_log(repo, sources, dry_run=dry_run)
    if not _log_is_whole(repo, commits, dry_run=dry_run):
        catalog = repo.log.catalog  # as far as the log can be read
        return RepairReport(
            dry_run=dry_run,
            commits=commits,
            commits_readable=catalog.number,
            versions_readable=catalog.versions_count,
        )
    snapshots = mend_snapshots(repo, dry_run=dry_run)
    survey = Survey(repo=repo, full=level == "full", progress=progress)
    rescue = Rescue(repo=repo, dry_run=dry_run, progress=progress)
    work = _Repair(repo=repo, others=sources, survey=survey, rescue=rescue)
    work.look()
    cut = report_lost_commits(survey, find_leftovers(survey))
    work.mend()
    quarantined = () if dry_run else work.quarantine()
    return RepairReport(
        dry_run=dry_run,
        commits=commits,
        commits_readable=repo.catalog.number,
        versions_readable=repo.catalog.versions_count,
        commits_lost="" if cut is None else f"{cut.message}; {cut.hint}",
        snapshots=snapshots,
        problems=tuple(survey.problems),
        mended=tuple(work.mended),
        lost=tuple(work.lost),
        quarantined=quarantined,
        relocated=tuple(work.relocated),
        pieces=dict(rescue.origins),
        written_bytes=rescue.written_bytes,
        cold=tuple(work.cold()),
    )


def _log_is_whole(repo: Repo, commits: tuple[CommitFinding, ...], *, dry_run: bool) -> bool:
    """Return whether the log can be read to its end: lost commits at the end are no gap."""
    try:
        repo.refresh(writing=True)
    except (IntegrityError, FormatError):
        if not commits:
            raise
        return False
    return not (dry_run and any(commit.mended for commit in commits))


@dataclass(slots=True, kw_only=True)
class _Item:
    """One version to be mended."""

    version: Version
    content: Content
    rebuilt: bool
    """Its own manifest is lost: this is that of another version with the same content."""


@dataclass(slots=True, kw_only=True)
class _Repair:
    """One repair while it runs; owned by one thread."""

    repo: Repo
    """The store that is mended."""
    others: Sequence[Repo]
    """Other stores, in the order in which they are asked."""
    survey: Survey
    rescue: Rescue
    items: list[_Item] = field(default_factory=list)
    mended: list[Mended] = field(default_factory=list)
    lost: list[Lost] = field(default_factory=list)
    relocated: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    """Ids of those of them whose parts stay lost."""
    read: dict[str, str] = field(default_factory=dict)
    """Id of each version that lost tensors to the digest of the manifest that was read."""
    _cold: list[tuple[Repo, Version, set[bytes]]] = field(default_factory=list)

    # --- the damage -----------------------------------------------------------------------------

    def look(self) -> None:
        """Survey every version, and collect those that are damaged."""
        survey, repo = self.survey, self.repo
        unread: list[Version] = []
        for version, content in check_all(survey, list(live_versions(repo.catalog))):
            if content is None:
                unread += [version] * (version.id in survey.unread)
            elif (self._needed(content) or self._differs(content)) and not changed(repo, version):
                self.items.append(_Item(version=version, content=content, rebuilt=False))
        for version in unread:
            found = self._rebuilt(version)
            if found is None:
                self._note_lost(version, (), survey.unread[version.id].message)
            else:
                problems = len(survey.problems)
                check_content(survey, version, found)
                del survey.problems[problems:]  # its problem is its manifest, reported already
                self.items.append(_Item(version=version, content=found, rebuilt=True))

    def _needed(self, content: Content) -> list[int]:
        """Return the rows that must lie elsewhere."""
        survey, table = self.survey, content.manifest.pieces
        broken = survey.broken_packs
        rows: set[int] = set()
        if broken:
            places = [place for place, pack in enumerate(table.packs) if pack in broken]
            rows.update(np.flatnonzero(np.isin(table.pack, places)).tolist())
        if survey.bad:
            rows.update(row for row in range(len(table)) if survey.why(table, row))
        return sorted(rows)

    def _differs(self, content: Content) -> bool:
        """Return whether a tensor does not follow from others as it should; nothing mends that."""
        records = enumerate(content.manifest.tensors)
        made = (place for place, record in records if record.recipe is not None)
        return any(self.survey.wrong(content, place) for place in made)

    def _rebuilt(self, version: Version) -> Content | None:
        """Return the content of a version from another with the same content, here or elsewhere."""
        for repo in (self.repo, *self.others):
            catalog = repo.catalog if repo is self.repo else repo.refresh()
            for other in catalog.versions(newest_first=True):
                if other.level == "record" or other.content != version.content:
                    continue
                if repo is self.repo and other.id in self.survey.unread:
                    continue
                try:
                    manifest = repo.manifests.load(other)
                    if content_digest(manifest) == version.content:
                        return read_content(replace(manifest, version=version.id))
                except (IntegrityError, FormatError):
                    continue  # damaged too: another may be sound
        return None

    # --- where pieces are found -----------------------------------------------------------------

    def _obtain(self) -> None:
        """Find the missing pieces, nearest first."""
        rescue = self.rescue
        if not rescue.missing:
            return
        self._from_here()
        rescue.salvage()
        sizes = ((pack_id(key), info.size_bytes) for key, info in self.survey.sizes.items())
        rescue.scan({pack: size for pack, size in sizes if pack})
        for other in self.others:
            if rescue.missing:
                self._from_other(other)
        rescue.flush()
        if rescue.missing:
            self._rebase()

    def _from_here(self) -> None:
        """Take pieces that other versions of this store have, or packs with a damaged index."""
        rescue, survey = self.rescue, self.survey
        contents = (item.content.manifest for item in self.items)
        for manifest in chain(contents, (manifest for _, manifest in _manifests(self.repo))):
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

    def _from_other(self, other: Repo) -> None:
        """Take pieces from versions of another store: first from those with the same content."""
        rescue = self.rescue
        ids = {item.version.id for item in self.items}
        contents = {item.version.content for item in self.items}
        versions = list(other.refresh().versions())
        near = [one for one in versions if one.id in ids or one.content in contents]
        refused: set[str] = set()
        noted: set[bytes] = set()
        for version, manifest in _manifests(other, first=near):
            table = manifest.pieces
            names = table.packs
            rows = rows_of(table, rescue.missing)
            warm = [row for row in rows if names[int(table.pack[row])] not in refused]
            cold = rescue.fetch(table, warm, other, "source")
            refused.update(names[int(table.pack[row])] for row in cold)
            left = {table.ids[row].tobytes() for row in set(rows).difference(warm).union(cold)}
            if fresh := left - noted:
                noted |= fresh
                self._cold.append((other, version, fresh))
            if not rescue.missing:
                return

    def _rebase(self) -> None:
        """Take deltas as they are whose bases are back, now that they can be checked."""
        rescue = self.rescue
        for item in self.items:
            manifest = item.content.manifest
            table, own = manifest.pieces, manifest.first[-1]
            bases = {row: table.base_of(row) for row in rows_of(table, rescue.missing)}
            left = {row: base for row, base in bases.items() if base is not None}
            if rescue.dry_run:  # no base was put back: the delta itself cannot be checked
                rescue.rescued.update(
                    table.ids[row].tobytes()
                    for row, base in left.items()
                    if table.ids[base].tobytes() in rescue.rescued
                )
                continue
            places = {
                row: place
                for row in range(own, len(table))
                if (place := rescue.placed.get(table.ids[row].tobytes())) and place.base is None
            }
            if left and places:
                moved = replaced(table, own, places)
                rescue.rebase(moved, [row for row, base in left.items() if base in places])

    def cold(self) -> list[ColdSource]:
        """Return the versions of other stores that hold missing pieces in an archive class."""
        missing = self.rescue.missing
        return [
            ColdSource(
                **naming(version),
                url=repo.url,
                command=thaw_command(version.id, repo.url),
                pieces_count=len(pieces & missing),
            )
            for repo, version, pieces in self._cold
            if pieces & missing
        ]

    # --- commits --------------------------------------------------------------------------------

    def mend(self) -> None:
        """Bring back the missing pieces and relocate the versions.

        Pieces in packs that a collection condemns are written again, as a save does.
        """
        commit_retrying(self._try)
        for item in self.items:
            self._account(item)

    def _try(self, condemned: set[str]) -> None:
        """Obtain missing pieces, also those that were to lie in condemned packs, and relocate."""
        self.rescue.forget(condemned)
        for pack in condemned:
            self.survey.broken_packs.setdefault(pack, "it was condemned")
        for item in self.items:
            for row in self._needed(item.content):
                self.rescue.need(item.content.manifest, row)
        self._obtain()
        left = [item for item in self.items if item.version.id not in self.relocated]
        for part in () if self.rescue.dry_run else batches(left, limits.RELOCATES_PER_COMMIT):
            self._relocate(part)

    def _relocate(self, items: Sequence[_Item]) -> None:
        """Write and commit new manifests; versions that changed since the survey stay as is."""
        moves = [move for item in items if (move := self._move(item)) is not None]
        done = relocate(self.repo, lambda now: [move for move in moves if still(now, move)])
        self.relocated += [move.version for move in done]
        self.damaged += [move.version for move in done if move.damaged]

    def _move(self, item: _Item) -> Move | None:
        """Write the new manifest of a version; None where nothing changes."""
        old, placed = item.content.manifest, self.rescue.placed
        ids = {row: old.pieces.ids[row].tobytes() for row in self._needed(item.content)}
        places = {row: placed[piece_id] for row, piece_id in ids.items() if piece_id in placed}
        if not places and not item.rebuilt:
            return None
        manifest = replace(old, pieces=replaced(old.pieces, old.first[-1], places))
        # A name of its own: that of the lost manifest may be taken by a damaged object.
        move = write_move(self.repo, item.version, manifest)
        unread = not self.survey.full or item.version.id in self.survey.cold_versions
        lost = bool(self._judged(item.content)[1])  # of what was not read, it is not known
        return replace(move, damaged=lost or (item.version.damaged and unread))

    def _account(self, item: _Item) -> None:
        """Note which tensors of a version are whole again, and which are lost."""
        whole, lost = self._judged(item.content)
        version = item.version
        if whole or item.rebuilt:
            found = Mended(**naming(version), manifest=item.rebuilt, tensors=tuple(whole))
            self.mended.append(found)
        if lost:
            self._note_lost(version, tuple(lost), next(iter(lost.values())))

    def _judged(self, content: Content) -> tuple[list[str], dict[str, str]]:
        """Return the tensors that are whole again, and those that are lost with the reason."""
        table = content.manifest.pieces
        whole: list[str] = []
        lost: dict[str, str] = {}
        for index, label in enumerate(content.labels):
            if index in content.hidden:  # the tensors that follow from it are named
                continue
            wrong = self.survey.lost(content, index)
            back = self.rescue.rescued
            gone = [why for row, why in wrong.items() if table.ids[row].tobytes() not in back]
            if not wrong:  # its pieces are sound, but the result of its recipe may be wrong
                gone = self.survey.wrong(content, index)
            if gone:
                lost[label] = gone[0]
            elif wrong:
                whole.append(label)
        return whole, lost

    def _note_lost(self, version: Version, tensors: tuple[str, ...], why: str) -> None:
        """Note that tensors of a version are lost; all of them, if none is named."""
        self.lost.append(Lost(**naming(version), tensors=tensors, why=why))
        self.read[version.id] = version.manifest_digest

    def quarantine(self) -> tuple[str, ...]:
        """Record the versions that lost tensors; return those that were not recorded yet."""
        fresh: list[str] = []

        def build(now: Catalog) -> list[Op]:
            """Record what was read: a version that another repair has moved since is its own."""
            lost = quarantine(now, self.read)
            fresh[:] = chain.from_iterable(op.versions for op in lost)
            # Damage that a person mended, by putting the right object back, is no damage any more.
            marked = {version.id for version in now.versions() if version.damaged}
            sound = {one: x for one, x in self.survey.sound.items() if one in marked}
            return [*lost, *verified(now, sound, marked)]

        self.repo.log.append_any(build)
        recorded = {*fresh, *self.damaged}
        return tuple(lost.version for lost in self.lost if lost.version in recorded)


def _manifests(repo: Repo, first: Sequence[Version] = ()) -> Iterator[tuple[Version, Manifest]]:
    """Yield the versions of a store whose manifest can be read, newest first."""
    done = {version.id for version in first}
    rest = (v for v in repo.catalog.versions(newest_first=True) if v.id not in done)
    for version in chain(first, rest):
        if version.level != "record":
            try:
                manifest = repo.manifests.load(version)
            except (IntegrityError, FormatError):
                continue  # it holds nothing; of this store it is reported already
            yield version, manifest
