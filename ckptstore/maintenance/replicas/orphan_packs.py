"""Chunks in packs of a store that no commit names: an interrupted copy left them there.

A copy that goes on shares them instead of sending them again. They are chunks like any others: the
commit checks that a collection has not condemned their packs, and they are read back before it. The
listing and the indexes cost a small part of the copy that they may save; a chunk that is missed
costs its bytes, nothing else. Why this is safe beside collections: docs/design/0021-replication.md.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from ckptstore import limits
from ckptstore.backends.base import Backend, ObjectInfo
from ckptstore.errors import ColdObjectError, FormatError, IntegrityError, NotFoundError
from ckptstore.format.keys import PACKS_PREFIX, pack_id, pack_key
from ckptstore.format.manifest import PieceTable
from ckptstore.format.pack import IndexRow
from ckptstore.maintenance.core.live_set import list_objects
from ckptstore.maintenance.core.task_pool import Tasks, at_once
from ckptstore.objects.packs import Placed, read_index
from ckptstore.repo import Repo

Alike = tuple[bytes, int, int]
"""Id, stored and raw bytes of a chunk: a copy has the same."""


@dataclass(slots=True)
class Orphans:
    """Finds chunks in packs of a store that no manifest at hand names. Owned by one copy.

    The store is listed once, by the first search that is worth it.
    """

    target: Repo
    _places: dict[Alike, Placed] | None = field(default=None, init=False)

    def forget(self) -> None:
        """Have the next search list the store again: packs came, or were condemned."""
        self._places = None

    def find(
        self,
        source: Backend,
        table: PieceTable,
        rows: Sequence[int],
        *,
        named: Collection[str],
        without: Collection[str],
    ) -> dict[tuple[str, int], Placed]:
        """Return where chunks of `source` lie in the target, by their pack and offset there.

        Nothing below ``RESUME_BYTES_MIN``. The content of what is returned was not read.

        Parameters
        ----------
        rows
            Pieces of `table` whose chunks are looked for.
        named
            Packs of the target in which they were looked for already.
        without
            Packs of the target that may not be shared.

        Raises
        ------
        StorageError
            One of the storages failed.
        """
        wanted = {
            (table.packs[int(table.pack[row])], int(table.offset[row])): int(table.stored[row])
            for row in rows
        }
        total = sum(wanted.values())
        if total < limits.RESUME_BYTES_MIN:
            return {}
        if self._places is None:
            self._places = self._look({*named, *without}, total)
        if not self._places:
            return {}
        found: dict[tuple[str, int], Placed] = {}
        for pack, index in _indexes(source, [(pack, 0) for pack in {pack for pack, _ in wanted}]):
            for row in index:
                place = self._places.get(_alike(row))
                if place is not None and (pack, row.offset) in wanted:
                    found[pack, row.offset] = place
        packs = {place.pack for place in found.values()}
        gone = self.target.catalog.gone(map(pack_key, packs))
        bad = {pack for pack in packs if pack_key(pack) in gone}.union(without)
        return {key: place for key, place in found.items() if place.pack not in bad}

    def _look(self, known: Collection[str], total: int) -> dict[Alike, Placed]:
        """Read the indexes of the newest packs that are not known, so many as `total` may fill."""
        target = self.target
        listed: list[ObjectInfo] = []
        tasks = Tasks.of(target)
        for info in list_objects(tasks, PACKS_PREFIX, environment=target.environment):
            pack = pack_id(info.key)
            if pack and pack not in known and info.key not in target.catalog.gone([info.key]):
                listed.append(info)
        listed.sort(key=lambda info: info.modified_at, reverse=True)
        most = limits.RESUME_PACKS_MIN + limits.RESUME_PACKS_SHARE * (
            total // target.backend.capabilities.pack_bytes
        )
        newest = [(pack_id(info.key) or "", info.size_bytes) for info in listed[:most]]
        places: dict[Alike, Placed] = {}
        for pack, index in _indexes(target.backend, newest):
            for row in index:
                place = Placed(pack=pack, offset=row.offset, stored_bytes=row.stored_bytes)
                places.setdefault(_alike(row), place)
        return places


def _indexes(
    backend: Backend, packs: Sequence[tuple[str, int]]
) -> Iterator[tuple[str, list[IndexRow]]]:
    """Yield packs with their indexes, given their sizes or 0; empty where one cannot be read."""

    def one(item: tuple[str, int]) -> tuple[str, list[IndexRow]]:
        """Read one index."""
        pack, size = item
        try:
            size = size or backend.stat(pack_key(pack)).size_bytes
            return pack, read_index(backend, pack, size)
        except (IntegrityError, FormatError, NotFoundError, ColdObjectError):
            return pack, []  # its chunks are copied

    return at_once(backend, one, packs)


def _alike(row: IndexRow) -> Alike:
    return row.chunk_id, row.stored_bytes, row.raw_bytes
