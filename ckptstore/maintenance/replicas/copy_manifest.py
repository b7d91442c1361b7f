"""A manifest of one store made into one of another: known chunks are shared, missing ones copied.

Which chunks the other store has is looked up in the manifests of its versions: first of those that
came from the same version or from its run, then of the heads of runs, then of all others, newest
first, until everything is found or ``TRANSPLANT_PIECES_MAX`` pieces have been looked at. A chunk
that is missed costs its bytes, nothing else.

An interrupted copy leaves chunks in packs that no commit names. A copy that goes on shares them
instead of sending them again. They are chunks like any others: the commit checks that a collection
has not condemned their packs, and they are read back before it. The listing and the indexes cost a
small part of the copy that they may save. Why this is safe beside collections:
docs/design/0021-replication.md.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Final

import numpy as np
import numpy.typing as npt

from ckptstore import limits
from ckptstore.backends.base import Backend, ObjectInfo
from ckptstore.catalog.catalog import Catalog
from ckptstore.checkpoint.content import logical_bytes, read_content
from ckptstore.engine.calls import Shared
from ckptstore.errors import ColdObjectError, FormatError, IntegrityError, NotFoundError
from ckptstore.events import ProgressCallback, silent
from ckptstore.format.keys import PACKS_PREFIX, pack_id, pack_key
from ckptstore.format.manifest import Manifest, PieceTable
from ckptstore.format.pack import CHUNK_HEADER_BYTES, IndexRow
from ckptstore.maintenance.core.live_set import list_objects
from ckptstore.maintenance.core.relocate import write_alone
from ckptstore.maintenance.core.task_pool import Tasks, at_once, grouped
from ckptstore.model import RoleBytes, Version
from ckptstore.objects.copying import ChunkCopies
from ckptstore.objects.index import Base, KnownPieces, Location, remap
from ckptstore.objects.packs import Placed, read_index
from ckptstore.objects.piece_reader import ReadItem, read_pieces
from ckptstore.objects.sources import piece_in_memory
from ckptstore.repo import Repo

ORIGIN_KEY: Final = "forked_from"
"""Where the metadata of a version that came from another store says which one it was."""

# Versions before and after one in its run that are asked for chunks that it shares, beside its
# parent and the heads. Source: retention and eviction leave gaps; what is missed costs its bytes.
_NEIGHBOURS = 8
# Heads of other runs that are asked too. Source: each is one manifest in memory.
_HEADS = 4


Alike = tuple[bytes, int, int]
"""Id, stored and raw bytes of a chunk: a copy has the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Landed:
    """A manifest whose pieces lie in the target store, durable."""

    manifest: Manifest
    roles: Mapping[str, RoleBytes]
    receipt: Mapping[str, float]
    rows: tuple[int, ...]
    """Rows of its pieces that travelled, without what deltas refer to."""
    owners: tuple[int, ...]
    """For each of them the tensor's index."""
    chunks_count: int
    chunk_bytes: int
    """Stored bytes of the chunks that travelled, headers included."""
    read_back_s: float
    """For how long their packs were read again, of all threads together."""
    is_cold: bool
    """Packs could not be read again, since they went to where they have to be thawed first."""
    rewritten: frozenset[int]
    """Rows of pieces that were stored by themselves, and were not read again."""
    resumed: Mapping[tuple[str, int], Placed]
    """Chunks that an interrupted copy had left in the target, by pack and offset in the source.
    Their content was not read."""

    @property
    def resumed_packs(self) -> frozenset[str]:
        """Packs of the target in which they lie."""
        return frozenset(place.pack for place in self.resumed.values())

    @property
    def resumed_bytes(self) -> int:
        """Stored bytes of these chunks, headers included."""
        return _stored_bytes(self.resumed)


def transplant(
    manifest: Manifest,
    *,
    source: Repo,
    target: Repo,
    candidates: Sequence[Version],
    without: Collection[str],
    progress: ProgressCallback,
    copies: ChunkCopies | None = None,
    orphans: Orphans | None = None,
    alone: bool = False,
) -> Landed:
    """Bring what `manifest` needs to `target`; return the manifest as it is to be written there.

    Parameters
    ----------
    candidates
        Versions of `target` whose chunks may be shared, the likeliest first.
    without
        Packs of `target` that may not be shared.
    copies
        Copies the chunks; None for threads of this process, from one backend to the other.
    orphans
        Finds what an interrupted copy left: the caller reads it before relying on it.
    alone
        Bring nothing but the pieces of `manifest`: those that share a chunk with others, or are
        differences to others, are stored by themselves.

    Raises
    ------
    CorruptTensorError
        A chunk of the source is damaged.
    StorageError
        One of the storages failed.
    """
    began = target.environment.monotonic()
    own = manifest.first[-1]
    named: set[str] = set()
    found, bases = _located(manifest, target, candidates, without, named)
    rewritten: frozenset[int] = frozenset()
    if alone:
        found = {row: found[row] for row in range(own)}  # and no bases
        entangled = [row for row in found if found[row] is None and _is_entangled(manifest, row)]
        found |= _rewritten(manifest, entangled, source, target)
        rewritten = frozenset(entangled)
    left = [row for row, place in found.items() if place is None]
    resumed: Mapping[tuple[str, int], Placed] = {}
    if orphans is not None:
        resumed = orphans.find(source.backend, manifest.pieces, left, named=named, without=without)
    labels, owners = read_content(manifest).labels, _owners(manifest, bases)
    wants = [
        ReadItem(row=row, out=None, label=labels[int(owners[row])])
        for row in left
        if manifest.pieces.chunk_of(row) not in resumed
    ]
    copies = copies or ChunkCopies(
        source=Shared(source.backend),
        target=Shared(target.backend),
        options=target.options,
        environment=target.environment,
    )
    copied = copies.copy(manifest.pieces, wants, progress)
    arrived = [row for row in range(own) if found[row] is None or row in rewritten]
    table = _placed(manifest.pieces, own, found, {**copied.places, **resumed})
    landed = replace(manifest, pieces=table)
    return Landed(
        manifest=landed,
        roles=_role_bytes(landed if alone else manifest, owners, arrived if alone else left),
        receipt={
            "copy_s": target.environment.monotonic() - began,
            "pack_bytes": float(copied.pack_bytes),
            "packs_count": float(copied.packs_count),
        },
        rows=tuple(arrived),
        owners=tuple(owners[arrived].tolist()),
        chunks_count=len(copied.places),
        chunk_bytes=_stored_bytes(copied.places),
        read_back_s=copied.read_back_s,
        is_cold=copied.is_cold,
        rewritten=rewritten,
        resumed=resumed,
    )


def _is_entangled(manifest: Manifest, row: int) -> bool:
    """Return whether a piece cannot be read from its chunk alone, or is not all of it."""
    table = manifest.pieces
    return table.base_of(row) is not None or int(table.slab[row]) != int(table.raw[row])


def _rewritten(
    manifest: Manifest, rows: Sequence[int], source: Repo, target: Repo
) -> dict[int, Location]:
    """Store pieces in new chunks of the target, which hold nothing else; return their places.

    Raises
    ------
    CorruptTensorError
        A piece is lost in the source.
    ColdObjectError, StorageError
        A piece lies in an archive class; one of the storages failed.
    """
    table, labels = manifest.pieces, read_content(manifest).labels
    owners = _owners(manifest, {})
    placed: dict[int, Location] = {}
    sizes = [int(table.raw[row]) for row in rows]
    for batch in grouped(rows, sizes, size=limits.MEND_BATCH_BYTES, count=len(rows)):
        memory = {row: bytearray(int(table.raw[row])) for row in batch}
        read_pieces(
            table,
            [
                ReadItem(row=row, out=memoryview(data), label=labels[int(owners[row])])
                for row, data in memory.items()
            ],
            backend=source.backend,
            options=source.options,
            progress=silent,
        )
        ids = {row: table.ids[row].tobytes() for row in batch}
        dtypes = {row: manifest.tensors[int(owners[row])].dtype for row in batch}
        pieces = {ids[row]: piece_in_memory(memory[row], dtypes[row]) for row in batch}
        places, _ = write_alone(target, pieces)
        placed |= {row: places[ids[row]] for row in batch}
    return placed


def _stored_bytes(places: Mapping[tuple[str, int], Placed]) -> int:
    return sum(CHUNK_HEADER_BYTES + place.stored_bytes for place in places.values())


def foresee(
    manifest: Manifest, *, target: Repo, candidates: Sequence[Version], planned: set[bytes]
) -> tuple[int, int]:
    """Return how many chunks :func:`transplant` would copy, and their stored bytes with headers.

    Reads manifests of the target, nothing else.

    Parameters
    ----------
    planned
        Ids of pieces that travel before, for versions that are copied earlier; is added to.
    """
    table = manifest.pieces
    found, _ = _located(manifest, target, candidates, (), set())
    chunks: dict[tuple[int, int], int] = {}
    for row, place in found.items():
        piece = table.ids[row].tobytes()
        if place is None and piece not in planned:
            planned.add(piece)
            chunks[int(table.pack[row]), int(table.offset[row])] = int(table.stored[row])
    return len(chunks), sum(chunks.values()) + CHUNK_HEADER_BYTES * len(chunks)


def _located(
    manifest: Manifest,
    target: Repo,
    candidates: Sequence[Version],
    without: Collection[str],
    named: set[str],
) -> tuple[dict[int, Location | None], dict[int, int]]:
    """Return where each piece lies in the target already, or None, by row.

    With the pieces of tensors also what those refer to that are deltas and have to travel: these
    bases are given as well, with the row of the first such delta. Packs of the target that were
    looked at are added to `named`.
    """
    table = manifest.pieces

    def find(rows: Collection[int], *, deltas: bool) -> dict[int, Location | None]:
        """Return where some pieces lie."""
        found: dict[int, Location | None] = dict.fromkeys(rows)
        left, looked = list(rows), 0
        for version in candidates:
            if not left or looked > limits.TRANSPLANT_PIECES_MAX:
                break
            try:
                there = target.manifests.load(version).pieces
            except IntegrityError:  # a damaged manifest: nothing can be shared with that one
                continue
            looked += len(there)
            named.update(there.packs)
            gone = target.catalog.gone(map(pack_key, there.packs))
            avoid = {pack for pack in there.packs if pack_key(pack) in gone}.union(without)
            known = KnownPieces([there], without=avoid, deltas=deltas)
            for row in left:
                found[row] = known.find(table.ids[row].tobytes(), int(table.raw[row]))
            left = [row for row in left if found[row] is None]
        return found

    rows = range(manifest.first[-1])
    found = find(rows, deltas=True)
    bases: dict[int, int] = {}
    for row in rows:
        if found[row] is None and (base := table.base_of(row)) is not None:
            bases.setdefault(base, row)
    return found | find(bases, deltas=False), bases


def near_versions(
    catalog: Catalog,
    version: Version,
    *,
    ids: Sequence[str],
    place: int,
    heads: Sequence[str],
    wanted: Callable[[str], bool],
    last: str = "",
) -> list[Version]:
    """Return versions that are likely to share chunks with one, the likeliest first.

    Itself, the nearest before and after it in its run, its parent, and heads.

    Parameters
    ----------
    catalog
        Of the store that has them.
    ids, place
        Of the versions of its run, in order, and where it stands among them.
    wanted
        Says whether a version counts; also asked for ids that the store does not know.
    last
        Id of a version that was looked at just before; empty for none.
    """
    before = ids[max(0, place - _NEIGHBOURS) : place][::-1]
    after = ids[place + 1 : place + 1 + _NEIGHBOURS]
    near = [one for part in (before, after) for one in islice(filter(wanted, part), 1)]
    others = (version.parent, last, catalog.head_id(version.run), *heads)
    likely = dict.fromkeys(filter(wanted, (version.id, *near, *others)))
    return [catalog.version(one) for one in likely]


def newest_heads(catalog: Catalog) -> list[str]:
    """Return the ids of the heads that were committed last, the newest at the end."""
    heads = [catalog.version(info.head) for info in catalog.runs() if info.head]
    return [head.id for head in sorted(heads, key=lambda head: head.commit)[-_HEADS:]]


def likely_versions(catalog: Catalog, source_id: str) -> list[Version]:
    """Return all versions whose pieces are at hand, those likely to share chunks with one first.

    Parameters
    ----------
    source_id
        A version of another store: first come its descendants, then others that came from
        elsewhere, then heads.
    """
    heads = {info.head for info in catalog.runs()}

    def rank(version: Version) -> tuple[bool, bool, bool]:
        """Put copies of the same version first, then other copies, then heads."""
        origin = version.metadata.get(ORIGIN_KEY)
        lineage = isinstance(origin, Mapping)
        same = isinstance(origin, Mapping) and origin.get("version") == source_id
        return (not same, not lineage, version.id not in heads)

    newest = catalog.versions(newest_first=True)
    live = (one for one in newest if one.level != "record" and not (one.damaged or one.deleted))
    return sorted(live, key=rank)


def _placed(
    table: PieceTable,
    own: int,
    found: Mapping[int, Location | None],
    places: Mapping[tuple[str, int], Placed],
) -> PieceTable:
    """Return the table with every piece where it lies in the target.

    Parameters
    ----------
    own
        Pieces of tensors; what deltas refer to comes behind them.
    """

    def place(row: int) -> Location:
        """Return where a piece lies in the target, and what it is a difference to."""
        location = found[row]
        if location is not None:
            return location
        placed = places[table.chunk_of(row)]
        base = table.base_of(row)
        refers = base is not None and Base(piece_id=table.ids[base].tobytes(), location=place(base))
        return Location(
            pack=placed.pack,
            offset=placed.offset,
            stored_bytes=placed.stored_bytes,
            inner=int(table.inner[row]),
            slab_bytes=int(table.slab[row]),
            base=refers or None,
        )

    return remap(table, range(own), place)


def _owners(manifest: Manifest, bases: Mapping[int, int]) -> npt.NDArray[np.int64]:
    """Return the tensor of each row; of a base that travels, that of its first delta."""
    owners = np.zeros(len(manifest.pieces), np.int64)
    counts = np.diff(manifest.first)
    owners[: manifest.first[-1]] = np.repeat(np.arange(len(manifest.tensors)), counts)
    owners[[*bases]] = owners[[*bases.values()]]
    return owners


def _role_bytes(
    manifest: Manifest, owners: npt.NDArray[np.int64], missing: Sequence[int]
) -> dict[str, RoleBytes]:
    """Return bytes by role; a chunk that travelled counts for the role of its first piece.

    What deltas refer to counts for the role of the first of these, by what it takes.
    """
    table = manifest.pieces
    sums = {role: [size, 0, 0] for role, size in logical_bytes(manifest).items()}
    ids: set[bytes] = set()
    chunks: set[tuple[str, int]] = set()
    for row in missing:
        part = sums[manifest.tensors[int(owners[row])].role]
        if row < manifest.first[-1] and (piece := table.ids[row].tobytes()) not in ids:
            ids.add(piece)
            part[1] += int(table.raw[row])
        if (chunk := table.chunk_of(row)) not in chunks:
            chunks.add(chunk)
            part[2] += int(table.stored[row]) + CHUNK_HEADER_BYTES
    return {
        role: RoleBytes(logical=logical, new=new, stored=stored)
        for role, (logical, new, stored) in sorted(sums.items())
    }


# --- chunks of an interrupted copy --------------------------------------------------------------


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
            Packs of the target that were searched already.
        without
            Packs of the target that may not be shared.

        Raises
        ------
        StorageError
            One of the storages failed.
        """
        wanted = {table.chunk_of(row): int(table.stored[row]) for row in rows}
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
        for info in list_objects(Tasks.of(target), PACKS_PREFIX, environment=target.environment):
            pack = pack_id(info.key)
            if pack and pack not in known and info.key not in target.catalog.gone([info.key]):
                listed.append(info)
        listed.sort(key=lambda info: info.modified_at, reverse=True)
        filled = total // target.backend.capabilities.pack_bytes
        most = limits.RESUME_PACKS_MIN + limits.RESUME_PACKS_SHARE * filled
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
            return pack, read_index(backend, pack, size or backend.stat(pack_key(pack)).size_bytes)
        except (IntegrityError, FormatError, NotFoundError, ColdObjectError):
            return pack, []  # its chunks are copied

    return at_once(backend, one, packs)


def _alike(row: IndexRow) -> Alike:
    return row.chunk_id, row.stored_bytes, row.raw_bytes
