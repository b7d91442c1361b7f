"""What a load that falls through needs: which pieces are here all the same, and how far it is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

from ckptstore.catalog.catalog import Catalog
from ckptstore.errors import IntegrityError
from ckptstore.events import Progress, ProgressCallback
from ckptstore.format.keys import pack_key
from ckptstore.format.manifest import PieceTable
from ckptstore.manifests import read_manifest
from ckptstore.model import Version
from ckptstore.objects.index import KnownPieces
from ckptstore.objects.plan import Want
from ckptstore.repo import Repo

# Versions before and after one in its run that are asked for chunks that it shares, beside its
# parent and the heads. Source: retention and eviction leave gaps; what is missed costs its bytes.
_NEIGHBOURS = 8
# Heads of other runs that are asked too. Source: each is one manifest in memory.
_HEADS = 4


class Meter:
    """Adds up what several readings tell; any thread."""

    def __init__(
        self, table: PieceTable, wants: Iterable[Want], progress: ProgressCallback
    ) -> None:
        self._table = table
        self._progress = progress
        self._lock = threading.Lock()
        self.total = self.size_of(wants)
        self.done = 0

    def size_of(self, wants: Iterable[Want]) -> int:
        """Return the bytes of some pieces."""
        return int(sum(int(self._table.raw[want.row]) for want in wants))

    def part(self) -> ProgressCallback:
        """Return what one reading tells; it counts from 0."""
        last = 0

        def tell(step: Progress) -> None:
            """Add what is new of this reading to what all have done."""
            nonlocal last
            with self._lock:
                self.done += step.done - last
                last = step.done
                done = min(max(self.done, 0), self.total)
                self._progress(Progress(stage=step.stage, done=done, total=self.total))

        return tell


def nearest(ids: Sequence[str], place: int, wanted: Callable[[str], bool]) -> Iterator[str]:
    """Yield the nearest wanted version of a run before a place, and the nearest after it."""
    before = ids[max(0, place - _NEIGHBOURS) : place][::-1]
    after = ids[place + 1 : place + 1 + _NEIGHBOURS]
    for part in (before, after):
        yield from islice(filter(wanted, part), 1)


def newest_heads(catalog: Catalog) -> list[str]:
    """Return the ids of the heads that were committed last, the newest at the end."""
    heads = [catalog.version(info.head) for info in catalog.runs() if info.head]
    return [head.id for head in sorted(heads, key=lambda head: head.commit)[-_HEADS:]]


def known_here(repo: Repo, version: Version) -> KnownPieces:
    """Return the pieces of versions of this store that are likely to share some with one."""
    catalog = repo.catalog
    ids = catalog.ids(version.run)
    place = ids.index(version.id) if version.id in ids else len(ids)

    def is_at_hand(version_id: str) -> bool:
        """Say whether a version is here with some of its content."""
        if not catalog.has_version(version_id):
            return False
        found = catalog.version(version_id)
        return not found.deleted and found.level != "record"

    own = [version.id] if version.level != "record" else []
    near = [*own, *nearest(ids, place, is_at_hand)]
    near += [version.parent, catalog.head_id(version.run), *newest_heads(catalog)]
    tables: list[PieceTable] = []
    for one in dict.fromkeys(filter(is_at_hand, near)):
        try:
            tables.append(read_manifest(repo.backend, catalog.version(one)).pieces)
        except IntegrityError:  # that one is damaged: nothing is known of it
            continue
    gone = {pack for table in tables for pack in table.packs if catalog.gone([pack_key(pack)])}
    return KnownPieces(tables, without=gone)
