"""Repair: bring back what is damaged, from the store itself or from other ones.

Nothing is deleted, and no object is changed (catalog snapshots, which are caches, are written
anew). What is brought back goes into new packs and new manifests under new names, and a commit
``relocate`` makes the versions lie there; whatever nobody needs any more is left to the collector.
Versions of which something stays lost are recorded (``quarantine``), so that no save shares with
them. A repair may be stopped at any point, run again, and run twice at once: the log decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from ckptstore import limits
from ckptstore.catalog import content_ops
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.content_ops import Move
from ckptstore.committing import commit_retrying
from ckptstore.errors import FormatError, IntegrityError
from ckptstore.events import ProgressCallback, silent
from ckptstore.maintenance.check.integrity_scan import Survey
from ckptstore.maintenance.check.leftovers import find_leftovers, report_lost_commits
from ckptstore.maintenance.check.verify import Level
from ckptstore.maintenance.check.verify_tasks import check_all, check_content
from ckptstore.maintenance.core.relocate import relocate, still, write_move
from ckptstore.maintenance.repair.fix_log import mend_log, mend_snapshots
from ckptstore.maintenance.repair.recover_pieces import Rescue, replaced
from ckptstore.maintenance.repair.repair_items import Item, RowDtype, is_unlike, lost_of, needed
from ckptstore.maintenance.repair.repair_report import CommitFinding, Lost, Mended, RepairReport
from ckptstore.maintenance.repair.repair_sources import Sources
from ckptstore.model import Version
from ckptstore.repo import Repo


def repair(
    repo: Repo,
    *,
    sources: Sequence[Repo] = (),
    level: Level = "full",
    dry_run: bool = False,
    progress: ProgressCallback = silent,
) -> RepairReport:
    """Bring back what is damaged as far as it can be had, and say exactly what is lost.

    Parameters
    ----------
    sources
        Other stores: copies of this one, replicas, or any that hold the same tensors. They are
        asked in turn. What one has in an archive class is left to the next; see
        :attr:`RepairReport.cold`.
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
        The log of one of the other stores is damaged.
    StorageError
        One of the storages failed; what was committed before stands.
    """
    if not dry_run:
        repo.check_writable()
    commits = _mend_log(repo, sources, dry_run=dry_run)
    if not _log_is_whole(repo, commits, dry_run=dry_run):
        return _unreadable(repo, commits, dry_run=dry_run)
    snapshots = mend_snapshots(repo, dry_run=dry_run)
    survey = Survey(repo=repo, full=level == "full", progress=progress)
    rescue = Rescue(repo=repo, dry_run=dry_run, progress=progress)
    found = Sources(repo=repo, others=sources, survey=survey, rescue=rescue)
    work = _Repair(repo=repo, sources=found, survey=survey, rescue=rescue)
    work.look()
    cut = report_lost_commits(survey, find_leftovers(survey))
    work.mend()
    quarantined = () if dry_run else work.quarantine()
    catalog = repo.catalog
    return RepairReport(
        dry_run=dry_run,
        commits=commits,
        commits_readable=catalog.number,
        versions_readable=catalog.versions_count,
        commits_lost="" if cut is None else f"{cut.message}; {cut.hint}",
        snapshots=snapshots,
        problems=tuple(work.survey.problems),
        mended=tuple(work.mended),
        lost=tuple(work.lost),
        quarantined=quarantined,
        relocated=tuple(work.relocated),
        pieces=dict(work.rescue.origins),
        written_bytes=work.rescue.written_bytes,
        cold=tuple(found.cold()),
    )


def _mend_log(repo: Repo, sources: Sequence[Repo], *, dry_run: bool) -> tuple[CommitFinding, ...]:
    """Mend the log from the first of the other stores that can, a part from each if need be."""
    found = {one.number: one for one in mend_log(repo, next(iter(sources), None), dry_run=dry_run)}
    for source in sources[1:]:
        if all(one.mended for one in found.values()):
            break
        again = {one.number: one for one in mend_log(repo, source, dry_run=dry_run)}
        found.update((n, one) for n, one in again.items() if n not in found or not found[n].mended)
    return tuple(found[number] for number in sorted(found))


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
class _Repair:
    """One repair while it runs."""

    repo: Repo
    sources: Sources
    survey: Survey
    rescue: Rescue
    items: list[Item] = field(default_factory=list)
    mended: list[Mended] = field(default_factory=list)
    lost: list[Lost] = field(default_factory=list)
    relocated: list[str] = field(default_factory=list)

    # --- what is damaged ------------------------------------------------------------------------

    def look(self) -> None:
        """Survey every version, and collect those that are damaged."""
        versions = [v for v in self.repo.catalog.versions() if v.level != "record"]
        unread: list[Version] = []
        for version, content in check_all(self.survey, versions):
            if content is None:
                unread.append(version)
            elif needed(self.survey, content) or is_unlike(self.survey, content):
                self.items.append(Item(version=version, content=content, rebuilt=False))
        for version in unread:
            found = self.sources.rebuilt(version)
            if found is None:
                self.lost.append(lost_of(version, (), self.survey.unread[version.id].message))
            else:
                problems = len(self.survey.problems)
                check_content(self.survey, version, found)
                del self.survey.problems[problems:]  # its problem is its manifest, told already
                self.items.append(Item(version=version, content=found, rebuilt=True))

    def mend(self) -> None:
        """Bring back what is needed and relocate the versions.

        What a collection condemns meanwhile is written again, as a save does.
        """
        commit_retrying(self._try)
        for item in self.items:
            self._account(item)

    def _try(self, condemned: set[str]) -> None:
        """Obtain what is needed, also what was to lie in condemned packs, and relocate."""
        self.rescue.forget(condemned)
        for pack in condemned:
            self.survey.broken_packs.setdefault(pack, "it was condemned")
        for item in self.items:
            dtypes = RowDtype(item.content.manifest)
            for row in needed(self.survey, item.content):
                self.rescue.need(item.content.manifest.pieces, row, dtypes(row))
        self.sources.obtain(self.items)
        self._relocate([item for item in self.items if item.version.id not in self.relocated])

    # --- what is done ---------------------------------------------------------------------------

    def _relocate(self, items: list[Item]) -> None:
        """Write new manifests and commit them, some versions at a time."""
        if self.rescue.dry_run:
            return
        for start in range(0, len(items), limits.MOVES_PER_COMMIT):
            part = items[start : start + limits.MOVES_PER_COMMIT]
            moves = [move for item in part if (move := self._move(item)) is not None]
            if not moves:
                continue
            # One that changed since this looked is left as it is now.
            done = relocate(self.repo, partial(_standing, moves))
            self.relocated += [move.version for move in done]

    def _move(self, item: Item) -> Move | None:
        """Write the new manifest of a version; None where nothing changes."""
        table = item.content.manifest.pieces
        rows = needed(self.survey, item.content)
        placed = self.rescue.placed
        places = {
            row: placed[piece_id]
            for row in rows
            if (piece_id := table.ids[row].tobytes()) in placed
        }
        if not places and not item.rebuilt:
            return None
        old = item.content.manifest
        manifest = replace(old, pieces=replaced(table, old.first[-1], places))
        # A name of its own: that of the manifest that is lost may be taken by what is left of it.
        return write_move(self.repo, item.version, manifest)

    def _account(self, item: Item) -> None:
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
            self.lost.append(lost_of(version, tuple(lost), next(iter(lost.values()))))

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
                    *content_ops.quarantine(now, digests),
                    *content_ops.verified(now, sound),
                ]
            )
        return tuple(digests)


def _standing(moves: Sequence[Move], now: Catalog) -> list[Move]:
    """Return the moves of versions that are still as they were when this looked."""
    return [move for move in moves if still(now, move)]
