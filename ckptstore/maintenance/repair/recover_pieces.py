"""Brings back pieces whose bytes are damaged where they should be, and writes them to new packs.

Where they may still be, in the order in which it is tried: elsewhere in the store; at their place
after all (only the chunk's header, or another piece of the chunk, is damaged); in the same pack at
another offset; in a second store. Whatever the origin, the digest in the piece's id decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from ckptstore import limits
from ckptstore.codecs.codec import CodecError
from ckptstore.codecs.codec_table import DELTAS, BaseData, decode
from ckptstore.config import check_choice
from ckptstore.errors import (
    CkptStoreError,
    ColdObjectError,
    CorruptObjectError,
    IntegrityError,
    NotFoundError,
)
from ckptstore.events import Progress, ProgressCallback, silent
from ckptstore.format.dtypes import ITEM_BYTES
from ckptstore.format.keys import pack_key
from ckptstore.format.manifest import PieceTable
from ckptstore.hashing import blake3_digest
from ckptstore.maintenance.repair.raw_recovery import decodings, legible, read_chunk
from ckptstore.objects.index import Base, KnownPieces, Location, location_of, placed_table, remap
from ckptstore.objects.piece_reader import Want, read_pieces
from ckptstore.objects.piece_writer import write_pieces
from ckptstore.objects.scan import FoundChunk, scan_chunks
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
    """What it refers to in places where it is a delta, by the id of that."""


_Slabs = dict[tuple[int, int], list[tuple[int, Need]]]
"""Stored and decoded length of a chunk to the places in it, and what should be there."""


@dataclass(frozen=True, slots=True)
class _Bytes:
    """A piece in memory, as what a writer of packs takes."""

    need: Need
    data: bytes | bytearray

    @property
    def nbytes(self) -> int:
        return len(self.data)

    @property
    def dtype(self) -> str:
        return self.need.dtype

    @property
    def itemsize(self) -> int:
        return ITEM_BYTES[self.need.dtype]

    @property
    def row_bytes(self) -> int:
        return len(self.data)  # never cut

    @property
    def payload(self) -> _Bytes:
        return self

    def view(self) -> memoryview:
        return memoryview(self.data)

    def copy_into(self, start: int, out: memoryview) -> None:
        out[:] = self.view()[start : start + len(out)]


@dataclass(slots=True, kw_only=True)
class Rescue:
    """The pieces that are needed, and how far they have come; owned by one thread.

    In a dry run pieces are found and checked, and not written.
    """

    repo: Repo
    dry_run: bool
    codec: str = ""
    """What pieces are written with; by default the store's."""
    progress: ProgressCallback = silent
    needs: dict[bytes, Need] = field(default_factory=dict)
    placed: dict[bytes, Location] = field(default_factory=dict)
    """Where pieces lie that were brought back."""
    rescued: set[bytes] = field(default_factory=set)
    origins: Counter[str] = field(default_factory=Counter)
    """How many came from where: ``elsewhere`` and ``moved`` (sound in
    this store), ``salvaged``, ``scanned``, ``source``, ``rebased`` (what it refers to is back)."""
    written_bytes: int = 0
    """Bytes of new packs."""
    _held: list[_Bytes] = field(default_factory=list)
    _held_bytes: int = 0

    @property
    def missing(self) -> set[bytes]:
        """Ids of pieces that were not found yet."""
        return self.needs.keys() - self.rescued

    def need(self, table: PieceTable, row: int, dtype: str) -> None:
        """Ask for the piece in one row."""
        piece_id = table.ids[row].tobytes()
        raw = int(table.raw[row])
        need = self.needs.setdefault(piece_id, Need(piece_id=piece_id, raw_bytes=raw, dtype=dtype))
        pack = table.packs[int(table.pack[row])]
        place = (pack, int(table.offset[row]), int(table.inner[row]))
        need.places[place] = (int(table.stored[row]), int(table.slab[row]))
        if (base := location_of(table, row).base) is not None:
            need.bases[base.piece_id] = base

    def point(self, piece_id: bytes, location: Location) -> None:
        """Note that a piece lies, sound, in another place of the store."""
        self.placed[piece_id] = location
        self._mark(piece_id, "elsewhere")

    def rebase(self, table: PieceTable, rows: Sequence[int]) -> None:
        """Find out which missing deltas can be had now that what they refer to was brought back.

        Parameters
        ----------
        table
            In which the bases lie where they were brought to.
        """
        lost: set[int] = set()
        wants = [Want(row=row, out=None, label="") for row in rows]

        def failed(want: Want, _: CkptStoreError) -> None:
            lost.add(want.row)

        repo = self.repo
        read_pieces(
            table,
            wants,
            backend=repo.backend,
            options=repo.options,
            progress=silent,
            on_failure=failed,
        )
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
            self._held.append(_Bytes(self.needs[piece_id], data))
            self._held_bytes += len(data)
            if self._held_bytes >= limits.MEND_BATCH_BYTES:
                self.flush()
        return True

    def flush(self) -> None:
        """Write what was given; return when it is durable.

        Raises
        ------
        StorageError
            The storage failed.
        """
        held, self._held, self._held_bytes = self._held, [], 0
        if not held:
            return
        repo = self.repo
        written = write_pieces(
            held,
            backend=repo.backend,
            environment=repo.environment,
            options=repo.options,
            known=KnownPieces([]),
            chunk_bytes=max(repo.chunk_bytes, *(item.nbytes for item in held)),
            choice=check_choice(self.codec or repo.options.codec),
            progress=silent,
        )
        self.written_bytes += written.pack_bytes
        known = KnownPieces([written.table])
        for item in held:
            place = known.find(item.need.piece_id, item.nbytes)
            if place is None:  # pragma: no cover - its digest was checked above
                msg = f"a piece of {item.nbytes} bytes changed in memory while it was written"
                raise IntegrityError(msg)
            self.placed[item.need.piece_id] = place

    def forget(self, packs: AbstractSet[str]) -> None:
        """Drop places in packs that were condemned meanwhile: those pieces are needed again."""
        gone = [key for key, place in self.placed.items() if not packs.isdisjoint(place.packs)]
        for piece_id in gone:
            del self.placed[piece_id]
            self.rescued.discard(piece_id)

    def _mark(self, piece_id: bytes, origin: str) -> None:
        self.rescued.add(piece_id)
        self.origins[origin] += 1
        self.progress(
            Progress(stage="mend", done=len(self.rescued), total=len(self.needs), unit="pieces")
        )

    # --- where pieces may be ----------------------------------------------------------------------

    def fetch(self, table: PieceTable, rows: Sequence[int], repo: Repo, origin: str) -> list[int]:
        """Read rows of a store, take those that are right; return those in an archive class."""
        cold: list[int] = []
        for batch in _batches(table, rows):
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
        lost: set[int] = set()
        read_pieces(
            table,
            [Want(row=row, out=memoryview(memory[row]), label="") for row in rows],
            backend=repo.backend,
            options=repo.options,
            progress=silent,
            on_failure=lambda want, _: lost.add(want.row),
        )
        for row in rows:
            if row not in lost:
                self.give(table.ids[row].tobytes(), memory[row], origin)

    def salvage(self) -> None:
        """Decode chunks at their places whatever their headers say; the ids decide."""
        chunks: dict[tuple[str, int, int, int], list[tuple[int, Need]]] = {}
        for piece_id in self.missing:
            need = self.needs[piece_id]
            for (pack, offset, inner), (stored, slab) in need.places.items():
                chunks.setdefault((pack, offset, stored, slab), []).append((inner, need))
        for (pack, offset, stored, slab), members in sorted(chunks.items(), key=lambda x: x[0]):
            data = read_chunk(self.repo.backend, pack, offset, stored)
            if data is not None:
                bases = [base for _, need in members for base in self._bases_of(need)]
                for decoded in decodings(data, stored, slab, bases):
                    for inner, need in members:
                        piece = decoded[inner : inner + need.raw_bytes]
                        self.give(need.piece_id, bytes(piece), "salvaged")

    def scan(self, sizes: Mapping[str, int]) -> None:
        """Search the packs of missing pieces from end to end.

        Parameters
        ----------
        sizes
            Bytes of each pack that is there, by its id.
        """
        backend = self.repo.backend
        for pack, slabs in sorted(self._missing_by_pack().items()):
            if pack in sizes:
                key = pack_key(pack)

                def read(offset: int, size: int, key: str = key) -> bytes:
                    return legible(backend, key, offset, size)

                try:
                    for chunk in scan_chunks(read, sizes[pack], start=0):
                        self._take(chunk, slabs)
                except (CorruptObjectError, NotFoundError):
                    continue  # it was cut or removed meanwhile: no more to be had from it

    def _missing_by_pack(self) -> dict[str, _Slabs]:
        """Return, per pack, which chunks of it (by their lengths) should hold missing pieces."""
        found: dict[str, _Slabs] = {}
        for piece_id in self.missing:
            need = self.needs[piece_id]
            for (pack, _, inner), lengths in need.places.items():
                found.setdefault(pack, {}).setdefault(lengths, []).append((inner, need))
        return found

    def _take(self, chunk: FoundChunk, slabs: _Slabs) -> None:
        """Take what is missing out of a chunk that a scan found."""
        header = chunk.header
        wanted = list(slabs.get((header.stored_bytes, header.raw_bytes), ()))
        if header.chunk_id in self.needs:
            wanted.append((0, self.needs[header.chunk_id]))
        if all(need.piece_id in self.rescued for _, need in wanted):
            return
        bases: list[BaseData | None] = [None]
        if header.codec in DELTAS:
            bases = [base for _, need in wanted for base in self._bases_of(need)]
        for base in bases:
            out = bytearray(header.raw_bytes)
            stored = memoryview(chunk.stored)
            try:
                decode(header.codec, header.layout, stored, memoryview(out), base=base)
            except CodecError:
                continue
            for inner, need in wanted:
                self.give(need.piece_id, bytes(out[inner : inner + need.raw_bytes]), "scanned")

    def _bases_of(self, need: Need) -> Iterator[BaseData]:
        """Yield what a piece refers to where it is a delta, as far as that can be read."""
        for piece_id, place in need.bases.items():
            table = placed_table(
                np.frombuffer(piece_id, np.uint8).reshape(1, 32),
                np.array([need.raw_bytes], np.uint32),
                [self.placed.get(piece_id, place.location)],
            )
            lost: list[CkptStoreError] = []
            memory = memoryview(bytearray(need.raw_bytes))
            read_pieces(
                table,
                [Want(row=0, out=memory, label="")],
                backend=self.repo.backend,
                options=self.repo.options,
                progress=silent,
                on_failure=lambda _, error, lost=lost: lost.append(error),  # type: ignore[misc]
            )
            if not lost:
                yield BaseData(piece_id=piece_id, data=memory)


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
        Pieces of tensors; what deltas refer to comes behind them, as far as it is still needed.
    """

    def place(row: int) -> Location:
        """Return where a piece lies, and what it is a difference to."""
        if row in places:
            return places[row]
        old, base = location_of(table, row), table.base_of(row)
        if base is None or base not in places or old.base is None:
            return old
        return replace(old, base=replace(old.base, location=places[base]))

    return remap(table, range(own), place)


def _batches(table: PieceTable, rows: Sequence[int]) -> Iterator[list[int]]:
    """Cut rows into batches that fit into memory, one row at least."""
    batch: list[int] = []
    held = 0
    for row in rows:
        raw = int(table.raw[row])
        if batch and held + raw > limits.MEND_BATCH_BYTES:
            yield batch
            batch, held = [], 0
        batch.append(row)
        held += raw
    if batch:
        yield batch
