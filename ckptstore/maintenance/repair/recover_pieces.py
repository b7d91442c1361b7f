"""Brings back pieces whose bytes are damaged where they should be, and writes them to new packs.

The places where they may still be are tried in this order: elsewhere in the store; at their place
after all (only the chunk's header, or another piece of the chunk, is damaged); in the same pack at
another offset; in a second store. Of every origin the digest in the piece's id decides.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product

import numpy as np
import numpy.typing as npt

from ckptstore import limits
from ckptstore.backends.base import Backend
from ckptstore.codecs.codec import CodecError
from ckptstore.codecs.codec_table import CODECS, DELTAS, BaseData, decode
from ckptstore.codecs.plane_layout import Layout
from ckptstore.errors import ColdObjectError, CorruptObjectError, NotFoundError
from ckptstore.events import Progress, ProgressCallback, silent
from ckptstore.format.keys import pack_key
from ckptstore.format.manifest import Manifest, PieceTable
from ckptstore.format.pack import CHUNK_HEADER_BYTES, parse_chunk_header
from ckptstore.hashing import blake3_digest
from ckptstore.maintenance.core.relocate import write_alone
from ckptstore.maintenance.core.task_pool import grouped
from ckptstore.objects.index import Base, Location, location_of, placed_table, remap
from ckptstore.objects.piece_reader import ReadItem, read_pieces
from ckptstore.objects.scan import scan_chunks
from ckptstore.objects.sources import PieceSource, piece_in_memory
from ckptstore.repo import Repo

_Place = tuple[str, int, int]
"""Pack, offset of the chunk, place in the decoded chunk."""


@dataclass(slots=True, kw_only=True)
class Need:
    """One piece that is to be brought back."""

    piece_id: bytes
    raw_bytes: int
    dtype: str
    """Of a tensor that it belongs to, for the codec."""
    places: dict[_Place, tuple[int, int]] = field(default_factory=dict)
    """Where it should be: stored and decoded length of the chunk."""
    bases: dict[bytes, Base] = field(default_factory=dict)
    """Its bases in places where it is a delta, by their ids."""


_Way = tuple[int, int]
"""Codec and layout of a chunk."""
_Members = list[tuple[int, Need]]
"""Pieces that a chunk should hold, each with its place in the decoded chunk."""


@dataclass(slots=True, kw_only=True)
class Rescue:
    """The pieces that are needed, and those of them that were found; owned by one thread.

    In a dry run pieces are found and checked, and not written.
    """

    repo: Repo
    dry_run: bool
    codec: str = ""
    """Codec of the pieces that are written; by default the store's."""
    progress: ProgressCallback = silent
    needs: dict[bytes, Need] = field(default_factory=dict)
    placed: dict[bytes, Location] = field(default_factory=dict)
    """Where pieces lie that were brought back."""
    rescued: set[bytes] = field(default_factory=set)
    origins: Counter[str] = field(default_factory=Counter)
    """Number of pieces by origin: ``elsewhere`` and ``moved`` (sound in this store), ``salvaged``,
    ``scanned``, ``source``, ``rebased`` (their bases are back)."""
    written_bytes: int = 0
    """Bytes of new packs."""
    _held: dict[bytes, PieceSource] = field(default_factory=dict)
    _held_bytes: int = 0

    @property
    def missing(self) -> set[bytes]:
        """Ids of pieces that were not found yet."""
        return self.needs.keys() - self.rescued

    def need(self, manifest: Manifest, row: int) -> None:
        """Ask for the piece in one row of a manifest's table."""
        table = manifest.pieces
        piece_id, raw = table.ids[row].tobytes(), int(table.raw[row])
        need = self.needs.get(piece_id)
        if need is None:
            need = Need(piece_id=piece_id, raw_bytes=raw, dtype=_dtype(manifest, row))
            self.needs[piece_id] = need
        at = location_of(table, row)
        need.places[at.pack, at.offset, at.inner] = (at.stored_bytes, at.slab_bytes)
        if at.base is not None:
            need.bases[at.base.piece_id] = at.base

    def point(self, piece_id: bytes, location: Location) -> None:
        """Note that a piece lies, sound, in another place of the store."""
        self.placed[piece_id] = location
        self._mark(piece_id, "elsewhere")

    def rebase(self, table: PieceTable, rows: Sequence[int]) -> None:
        """Take the missing deltas that can be read now that their bases were brought back.

        Parameters
        ----------
        table
            In which the bases lie where they were brought to.
        """
        lost = _read(self.repo, table, dict.fromkeys(rows))
        for row in rows:
            if row not in lost:
                self.placed[table.ids[row].tobytes()] = location_of(table, row)
                self._mark(table.ids[row].tobytes(), "rebased")

    def give(self, piece_id: bytes, data: bytes | bytearray, origin: str) -> bool:
        """Take the bytes of a piece if they are right; return whether they are."""
        if piece_id in self.rescued:
            return True
        if blake3_digest(data) != piece_id:
            return False
        self._mark(piece_id, origin)
        if not self.dry_run:
            self._held[piece_id] = piece_in_memory(data, self.needs[piece_id].dtype)
            self._held_bytes += len(data)
            if self._held_bytes >= limits.MEND_BATCH_BYTES:
                self.flush()
        return True

    def flush(self) -> None:
        """Write the pieces that were given; return when they are durable.

        Raises
        ------
        StorageError
            The storage failed.
        """
        held, self._held, self._held_bytes = self._held, {}, 0
        if not held:
            return
        places, size = write_alone(self.repo, held, codec=self.codec or self.repo.options.codec)
        self.placed |= places
        self.written_bytes += size

    def forget(self, packs: AbstractSet[str]) -> None:
        """Drop places in packs that a collection condemned: those pieces are needed again."""
        gone = [key for key, place in self.placed.items() if not packs.isdisjoint(place.packs)]
        for piece_id in gone:
            del self.placed[piece_id]
            self.rescued.discard(piece_id)

    def _mark(self, piece_id: bytes, origin: str) -> None:
        self.rescued.add(piece_id)
        self.origins[origin] += 1
        step = Progress(stage="mend", done=len(self.rescued), total=len(self.needs), unit="pieces")
        self.progress(step)

    # --- where pieces may be ----------------------------------------------------------------------

    def fetch(self, table: PieceTable, rows: Sequence[int], repo: Repo, origin: str) -> list[int]:
        """Read rows of a store, take those that are right; return those in an archive class."""
        cold: list[int] = []
        sizes = [int(table.raw[row]) for row in rows]
        for batch in grouped(rows, sizes, size=limits.MEND_BATCH_BYTES, count=len(rows)):
            try:
                self._fetch(table, batch, repo, origin)
            except ColdObjectError:  # of one pack at least: each by itself
                packs: dict[int, list[int]] = {}
                for row in batch:
                    packs.setdefault(int(table.pack[row]), []).append(row)
                for part in packs.values():
                    try:
                        self._fetch(table, part, repo, origin)
                    except ColdObjectError:
                        cold += part
        return cold

    def _fetch(self, table: PieceTable, rows: Sequence[int], repo: Repo, origin: str) -> None:
        memory = {row: bytearray(int(table.raw[row])) for row in rows}
        lost = _read(repo, table, memory)
        for row, data in memory.items():
            if row not in lost:
                self.give(table.ids[row].tobytes(), data, origin)

    def salvage(self) -> None:
        """Decode chunks at their places whatever their headers say; the ids decide."""
        chunks: dict[tuple[str, int, int, int], _Members] = {}
        for piece_id in self.missing:
            need = self.needs[piece_id]
            for (pack, offset, inner), (stored, slab) in need.places.items():
                chunks.setdefault((pack, offset, stored, slab), []).append((inner, need))
        for (pack, offset, stored, slab), members in sorted(chunks.items(), key=lambda x: x[0]):
            data = bytearray(CHUNK_HEADER_BYTES + stored)
            try:
                self.repo.backend.read_into(pack_key(pack), offset, [memoryview(data)])
            except (CorruptObjectError, NotFoundError):
                continue
            ways = _ways(bytes(data[:CHUNK_HEADER_BYTES]), stored, slab)
            self._take(members, ways, memoryview(data)[CHUNK_HEADER_BYTES:], slab, "salvaged")

    def scan(self, sizes: Mapping[str, int]) -> None:
        """Search the packs of missing pieces from end to end.

        Parameters
        ----------
        sizes
            Bytes of each pack that is there, by its id.
        """
        packs: dict[str, dict[tuple[int, int], _Members]] = {}
        for piece_id in self.missing:
            need = self.needs[piece_id]
            for (pack, _, inner), lengths in need.places.items():
                packs.setdefault(pack, {}).setdefault(lengths, []).append((inner, need))
        for pack, members in sorted(packs.items()):
            if pack in sizes:
                self._scan(pack, sizes[pack], members)

    def _scan(self, pack: str, size: int, members: Mapping[tuple[int, int], _Members]) -> None:
        """Search one pack for chunks of the lengths of those that should hold missing pieces."""
        backend, key = self.repo.backend, pack_key(pack)
        try:
            for chunk in scan_chunks(partial(_legible, backend, key), size, start=0):
                header = chunk.header
                wanted = list(members.get((header.stored_bytes, header.raw_bytes), ()))
                if header.chunk_id in self.needs:
                    wanted.append((0, self.needs[header.chunk_id]))
                way = (header.codec, header.layout)
                self._take(wanted, [way], memoryview(chunk.stored), header.raw_bytes, "scanned")
        except (CorruptObjectError, NotFoundError):
            return  # it was cut or removed since: it has no more to offer

    def _take(
        self, members: _Members, ways: Sequence[_Way], stored: memoryview, size: int, origin: str
    ) -> None:
        """Take missing pieces out of a chunk, decoded in each of some ways."""
        if all(need.piece_id in self.rescued for _, need in members):
            return
        bases: list[BaseData] = []
        if any(codec in DELTAS for codec, _ in ways):
            bases = [base for _, need in members for base in self._bases_of(need)]
        for codec, layout in ways:
            for base in bases if codec in DELTAS else (None,):
                out = memoryview(bytearray(size))
                try:
                    decode(codec, layout, stored, out, base=base)
                except CodecError:
                    continue
                for inner, need in members:
                    self.give(need.piece_id, bytes(out[inner : inner + need.raw_bytes]), origin)

    def _bases_of(self, need: Need) -> Iterator[BaseData]:
        """Yield the bases of a piece where it is a delta, as far as they can be read."""
        for piece_id, base in need.bases.items():
            table = placed_table(
                np.frombuffer(piece_id, np.uint8).reshape(1, 32),
                np.array([need.raw_bytes], np.uint32),
                [self.placed.get(piece_id, base.location)],
            )
            memory = bytearray(need.raw_bytes)
            if not _read(self.repo, table, {0: memory}):
                yield BaseData(piece_id=piece_id, data=memoryview(memory))


def _dtype(manifest: Manifest, row: int) -> str:
    """Return the dtype of the tensor that a row belongs to, or of the first delta to it."""
    base = manifest.pieces.base
    if base is not None and row >= manifest.first[-1]:
        row = int(np.flatnonzero(base == row)[0])
    return manifest.tensors[bisect_right(manifest.first, row) - 1].dtype


def _read(repo: Repo, table: PieceTable, outs: Mapping[int, bytearray | None]) -> set[int]:
    """Read pieces of a store, None to check them alone; return the rows of those that are lost."""
    lost: set[int] = set()
    read_pieces(
        table,
        [
            ReadItem(row=row, out=None if out is None else memoryview(out), label="")
            for row, out in outs.items()
        ],
        backend=repo.backend,
        options=repo.options,
        progress=silent,
        on_failure=lambda want, _: lost.add(want.row),
    )
    return lost


def _legible(backend: Backend, key: str, offset: int, size: int) -> bytes:
    """Return a range of a pack; parts of an encrypted one that fail to decrypt are zeros.

    Raises
    ------
    NotFoundError
        The pack is gone, or ends before.
    StorageError
        The storage failed.
    """
    memory = bytearray(size)
    try:
        backend.read_into(key, offset, [memoryview(memory)])
    except CorruptObjectError:
        half = size // 2
        if size <= limits.SEGMENT_BYTES_DEFAULT:
            return bytes(size)
        first = _legible(backend, key, offset, half)
        return first + _legible(backend, key, offset + half, size - half)
    return bytes(memory)


def _ways(header: bytes, stored: int, slab: int) -> list[_Way]:
    """Return the codecs and layouts that a chunk may have: every one where its header is damaged.

    Parameters
    ----------
    stored, slab
        Stored and decoded length that the chunk should have; with others, another chunk lies there.
    """
    try:
        found = parse_chunk_header(header, where="")
    except CorruptObjectError:
        return list(product((*CODECS, *DELTAS), Layout))
    same = (found.stored_bytes, found.raw_bytes) == (stored, slab)
    return [(found.codec, found.layout)] if same else []


def rows_of(table: PieceTable, wanted: Collection[bytes]) -> list[int]:
    """Return the rows of a table whose pieces are among `wanted`."""
    if not wanted or not len(table):
        return []
    heads: npt.NDArray[np.uint64] = np.ascontiguousarray(table.ids).view(np.uint64)[:, 0]
    asked = np.frombuffer(b"".join(piece_id[:8] for piece_id in wanted), np.uint64)
    rows = np.nonzero(np.isin(heads, asked))[0].tolist()
    return [row for row in rows if table.ids[row].tobytes() in wanted]


def replaced(table: PieceTable, own: int, places: Mapping[int, Location]) -> PieceTable:
    """Return a table with other places for some rows, over the packs that are then needed.

    Parameters
    ----------
    own
        Pieces of tensors; the bases of deltas come behind them, as far as they are still needed.
    """

    def place(row: int) -> Location:
        """Return where a piece and its base lie."""
        if row in places:
            return places[row]
        old, base = location_of(table, row), table.base_of(row)
        if base is None or base not in places or old.base is None:
            return old
        return replace(old, base=replace(old.base, location=places[base]))

    return remap(table, range(own), place)
