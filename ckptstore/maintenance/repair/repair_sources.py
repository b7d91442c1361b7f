"""Where a repair finds what is damaged: elsewhere in the store itself, or in other stores.

What another store has in an archive class is not read, and does not end the repair: others may have
it, and what is left is reported with the command that thaws it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from ckptstore.checkpoint.cold_reads import thaw_command
from ckptstore.checkpoint.content import Content, content_digest, read_content
from ckptstore.errors import FormatError, IntegrityError
from ckptstore.format.keys import pack_id
from ckptstore.format.manifest import Manifest
from ckptstore.maintenance.check.integrity_scan import Survey, piece_key
from ckptstore.maintenance.repair.recover_pieces import Rescue, replaced, rows_of
from ckptstore.maintenance.repair.repair_items import Item
from ckptstore.maintenance.repair.repair_report import ColdSource
from ckptstore.model import Version
from ckptstore.objects.index import location_of
from ckptstore.repo import Repo


@dataclass(slots=True, kw_only=True)
class Sources:
    """Finds manifests and pieces; owned by one thread."""

    repo: Repo
    """The store that is mended."""
    others: Sequence[Repo]
    """Other stores, in the order in which they are asked."""
    survey: Survey
    rescue: Rescue
    _cold: list[tuple[Repo, Version, set[bytes]]] = field(default_factory=list)

    def rebuilt(self, version: Version) -> Content | None:
        """Return what a version holds, from one that holds the same, here or elsewhere."""
        for repo in (self.repo, *self.others):
            catalog = repo.catalog if repo is self.repo else repo.refresh()
            for other in catalog.versions(newest_first=True):
                if other.level == "record" or other.content != version.content:
                    continue
                if repo is self.repo and other.id in self.survey.unread:
                    continue
                try:
                    manifest = repo.manifests.load(other)
                    if content_digest(manifest) != version.content:
                        continue
                    return read_content(replace(manifest, version=version.id))
                except (IntegrityError, FormatError):
                    continue  # damaged too: another may be sound
        return None

    def obtain(self, items: Sequence[Item]) -> None:
        """Find the missing pieces of some versions, nearest first."""
        rescue = self.rescue
        if not rescue.missing:
            return
        self._from_here(items)
        rescue.salvage()
        rescue.scan({p: i.size_bytes for k, i in self.survey.sizes.items() if (p := pack_id(k))})
        for other in self.others:
            if not rescue.missing:
                break
            self._from_other(items, other)
        rescue.flush()
        if rescue.missing:
            self._rebase(items)

    def cold(self) -> list[ColdSource]:
        """Return the versions of other stores that hold what is missing still, and are cold."""
        missing = self.rescue.missing
        return [
            ColdSource(
                version=version.id,
                run=version.run,
                step=version.step,
                url=repo.url,
                command=thaw_command(version.id, repo.url),
                pieces_count=len(pieces & missing),
            )
            for repo, version, pieces in self._cold
            if pieces & missing
        ]

    def _from_here(self, items: Sequence[Item]) -> None:
        """Take what other versions of this store have, or packs whose index alone is damaged."""
        rescue, survey = self.rescue, self.survey
        contents = [item.content.manifest for item in items]
        others = (manifest for _, manifest in _manifests(self.repo))
        for manifest in chain(contents, others):
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

    def _from_other(self, items: Sequence[Item], other: Repo) -> None:
        """Take what versions of another store have: first those that hold the same."""
        rescue = self.rescue
        ids = {item.version.id for item in items}
        contents = {item.version.content for item in items}
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

    def _rebase(self, items: Sequence[Item]) -> None:
        """Take deltas as they are whose bases are back, now that they can be checked."""
        rescue = self.rescue
        for item in items:
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


def _manifests(repo: Repo, first: Sequence[Version] = ()) -> Iterator[tuple[Version, Manifest]]:
    """Yield the versions of a store whose manifest can be read, newest first."""
    done = {version.id for version in first}
    rest = (v for v in repo.catalog.versions(newest_first=True) if v.id not in done)
    for version in chain(first, rest):
        if version.level != "record":
            try:
                manifest = repo.manifests.load(version)
            except (IntegrityError, FormatError):
                continue  # nothing can be had from it; of this store it is reported already
            yield version, manifest
