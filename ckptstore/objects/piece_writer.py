"""The way of a tensor's bytes into packs: stage, digest, known?, codec, pack.

A plan of jobs is cut first, without touching a byte; worker threads then take one job after
another, so that the memory in use is one chunk a worker and the packs that are open, whatever the
size of the state. A chunk is staged into the worker's own buffer before its digest is taken, and
encoded from that same buffer: what is stored is what was digested, even if the tensor is changed
meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ckptstore import limits
from ckptstore.backends.base import Backend
from ckptstore.codecs.codec_table import encode
from ckptstore.config import CodecChoice, Environment, Options
from ckptstore.events import Progress, ProgressCallback
from ckptstore.format.manifest import PieceTable
from ckptstore.format.pack import CHUNK_HEADER_BYTES
from ckptstore.hashing import blake3_digest
from ckptstore.objects.deltas import Deltas
from ckptstore.objects.index import Base, KnownPieces, Location, with_bases
from ckptstore.objects.pack_plan import plan_packs
from ckptstore.objects.packs import PackSink
from ckptstore.objects.sources import Source
from ckptstore.objects.threads import in_threads
from ckptstore.objects.write_jobs import PieceJob, plan_jobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What a save wrote."""

    table: PieceTable
    """From row ``first[-1]`` on: what deltas refer to, which earlier saves wrote."""
    first: tuple[int, ...]
    """Per tensor, and one more: place of its first piece in `table`."""
    is_new: npt.NDArray[np.bool_]
    """``bool[pieces]`` of tensors: written by this save, not shared."""
    stored_new: npt.NDArray[np.int64]
    """``int64[pieces]``: bytes this save stored for the piece, its share of the header included."""
    pack_bytes: int
    """Bytes of all packs that were written."""
    packs_count: int
    seconds: Mapping[str, float] = field(default_factory=dict)
    """``hashing_s``, ``encoding_s``, ``writing_s``: of all worker threads together."""
    storage_s: float = 0.0
    """How long at least one thread was writing, or waiting until a pack was durable."""


@dataclass(slots=True)
class _Columns:
    """The rows of the table, filled by the workers: each row by one of them."""

    ids: npt.NDArray[np.uint8]
    raw: npt.NDArray[np.uint32]
    pack: npt.NDArray[np.uint32]
    offset: npt.NDArray[np.uint64]
    stored: npt.NDArray[np.uint32]
    inner: npt.NDArray[np.uint32]
    slab: npt.NDArray[np.uint32]
    is_new: npt.NDArray[np.bool_]
    stored_new: npt.NDArray[np.int64]
    """As in :class:`Written`, `is_new` too."""
    packs: dict[str, int] = field(default_factory=dict)
    """Ids of packs to their places in the table."""
    bases: dict[int, Base] = field(default_factory=dict)
    """What rows refer to that are deltas."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Guards `packs` and `bases`."""

    @classmethod
    def empty(cls, count: int) -> _Columns:
        """Return columns of so many rows, all zero."""
        return cls(
            ids=np.zeros((count, 32), np.uint8),
            raw=np.zeros(count, np.uint32),
            pack=np.zeros(count, np.uint32),
            offset=np.zeros(count, np.uint64),
            stored=np.zeros(count, np.uint32),
            inner=np.zeros(count, np.uint32),
            slab=np.zeros(count, np.uint32),
            is_new=np.zeros(count, np.bool_),
            stored_new=np.zeros(count, np.int64),
        )

    def fill(self, slot: int, piece_id: bytes, raw: int, place: Location) -> None:
        """Say in row `slot` that a piece of `raw` bytes lies in a place."""
        with self.lock:
            self.pack[slot] = self.packs.setdefault(place.pack, len(self.packs))
            if place.base is not None:
                self.bases[slot] = place.base
        self.ids[slot] = np.frombuffer(piece_id, np.uint8)
        self.raw[slot] = raw
        self.offset[slot] = place.offset
        self.stored[slot] = place.stored_bytes
        self.inner[slot] = place.inner
        self.slab[slot] = place.slab_bytes

    def repeat(self, slot: int, of: int) -> None:
        """Give row `slot` the place of row `of`: the same bytes occur twice in one save."""
        for column in (self.ids, self.raw, self.pack, self.offset, self.stored, self.inner):
            column[slot] = column[of]
        self.slab[slot] = self.slab[of]
        if of in self.bases:
            self.bases[slot] = self.bases[of]

    def table(self) -> PieceTable:
        """Return the table, once every row is filled."""
        table = PieceTable(
            ids=self.ids,
            raw=self.raw,
            pack=self.pack,
            offset=self.offset,
            stored=self.stored,
            inner=self.inner,
            slab=self.slab,
            packs=list(self.packs),
        )
        return with_bases(table, self.bases)


@dataclass(slots=True)
class _Spent:
    """Where the seconds of one worker went."""

    hashing_s: float = 0.0
    """Copying into the worker's memory, and the digest."""
    encoding_s: float = 0.0
    writing_s: float = 0.0


def write_pieces(
    sources: Sequence[Source],
    *,
    backend: Backend,
    environment: Environment,
    options: Options,
    known: KnownPieces,
    chunk_bytes: int,
    choice: CodecChoice,
    progress: ProgressCallback,
    deltas: Deltas | None = None,
) -> Written:
    """Write the pieces of all tensors that are not known yet; return when they are durable.

    Host memory stays within ``options.host_bytes`` plus one chunk a worker, for any state.
    What was written before a failure stays behind as orphaned packs, which gc collects.

    Parameters
    ----------
    known
        Where pieces of earlier versions lie; what is found there is shared, not written.
    chunk_bytes
        How long the pieces of large tensors are at most.
    progress
        Called with the bytes of the state that are done.
    deltas
        Decides which pieces of large tensors are stored as differences; None for none.

    Raises
    ------
    StorageError
        Any write failed; nothing may be committed.
    """
    first, jobs = plan_jobs(sources, chunk_bytes)
    if deltas is not None:
        deltas.begin(first)
    saving = _PieceWrite(
        columns=_Columns.empty(first[-1]),
        known=known,
        choice=choice,
        total=sum(source.nbytes for source in sources),
        progress=progress,
        buffer_bytes=max(chunk_bytes, limits.SLAB_BYTES),
        clock=environment.monotonic,
        deltas=deltas,
    )
    sink = _sink(backend, environment, options, total=saving.total, chunk_bytes=chunk_bytes)
    try:
        saving.work(iter(jobs), sink, options.workers)
        saving.finish(sink)
    except BaseException:
        sink.abort()
        raise
    saving.resolve()
    columns = saving.columns
    return Written(
        table=columns.table(),
        first=first,
        is_new=columns.is_new,
        stored_new=columns.stored_new,
        pack_bytes=sink.stored_bytes,
        packs_count=sink.packs_count,
        seconds=saving.seconds(),
        storage_s=sink.storage_s,
    )


def _sink(
    backend: Backend, environment: Environment, options: Options, *, total: int, chunk_bytes: int
) -> PackSink:
    """Return where the chunks of a save go: as many packs at once as memory and size allow."""
    plan = plan_packs(
        total,
        backend.capabilities,
        threads=options.workers,
        memory_bytes=options.host_bytes - options.workers * 3 * chunk_bytes,
        chunk_bytes=chunk_bytes,
    )
    return PackSink(backend, environment, plan)


@dataclass(slots=True)
class _PieceWrite:
    """One save while its workers run."""

    columns: _Columns
    known: KnownPieces
    choice: CodecChoice
    total: int
    """Bytes of all tensors."""
    progress: ProgressCallback
    buffer_bytes: int
    clock: Callable[[], float]
    deltas: Deltas | None
    spent: list[_Spent] = field(default_factory=list)
    done: int = 0
    """Bytes that were written or shared."""
    claimed: dict[bytes, int] = field(default_factory=dict)
    """Id of each new piece of this save to its row."""
    repeats: list[tuple[int, int]] = field(default_factory=list)
    """Rows whose bytes another row of this save brings."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    stop: threading.Event = field(default_factory=threading.Event)

    def work(self, jobs: Iterator[PieceJob], sink: PackSink, workers: int) -> None:
        """Run all jobs; raise the first failure once every worker has stopped."""
        in_threads(
            workers,
            jobs,
            lambda turn: self._worker(turn, sink),
            self.stop,
            name="ckptstore-save",
        )

    def finish(self, sink: PackSink) -> None:
        """Wait until every pack is durable."""
        began = self.clock()
        sink.finish()
        self.spent.append(_Spent(writing_s=self.clock() - began))

    def seconds(self) -> dict[str, float]:
        """Return where the seconds of all workers went."""
        return {
            name: sum(getattr(one, name) for one in self.spent)
            for name in ("hashing_s", "encoding_s", "writing_s")
        }

    def resolve(self) -> None:
        """Give each repeated row its place, now that every place is known."""
        for slot, of in self.repeats:
            self.columns.repeat(slot, of)

    def _worker(self, turn: int, sink: PackSink) -> Callable[[PieceJob], None]:
        """Return the function that runs the jobs of one thread."""
        buffer = memoryview(bytearray(self.buffer_bytes))
        shared = True  # whether the last piece was shared: the next one then is, most likely
        spent = _Spent()
        with self.lock:
            self.spent.append(spent)

        def run(job: PieceJob) -> None:
            """Write the pieces of one job."""
            nonlocal shared
            if job.small:
                self._small_pieces(turn, job, buffer, sink, spent)
            else:
                shared = self._large_piece(turn, job, buffer, sink, spent, shared=shared)
            self._advance(job.length)

        return run

    def _large_piece(
        self,
        turn: int,
        job: PieceJob,
        buffer: memoryview,
        sink: PackSink,
        spent: _Spent,
        *,
        shared: bool,
    ) -> bool:
        """Write one piece as a chunk of its own, unless it is known; return whether it was."""
        source, foreseen = job.sources[0], job.foreseen[0]
        if foreseen is not None and self._share(job.slot, foreseen, job.length):
            return True
        began = self.clock()
        if shared and (view := source.payload.view()) is not None:
            # Digest in place: nothing is stored from these bytes, so no copy is needed to keep
            # them still.
            piece = view[job.start : job.start + job.length]
            if self._share(job.slot, blake3_digest(piece), job.length):
                spent.hashing_s += self.clock() - began
                return True
        staged = buffer[: job.length]
        _stage(source, job.start, staged)
        piece_id = blake3_digest(staged)
        hashed = self.clock()
        spent.hashing_s += hashed - began
        if self._share(job.slot, piece_id, job.length):
            return True
        if self._claim(job.slot, piece_id):
            base = None
            if self.deltas is None:
                encoded = encode(staged, job.layout, self.choice)
            else:
                encoded, base = self.deltas.encode(job.slot, piece_id, staged, job.layout)
            ready = self.clock()
            placed = sink.append(turn, encoded, piece_id, job.length)
            spent.encoding_s += ready - hashed
            spent.writing_s += self.clock() - ready
            place = Location(
                pack=placed.pack,
                offset=placed.offset,
                stored_bytes=placed.stored_bytes,
                inner=0,
                slab_bytes=job.length,
                base=base,
            )
            self.columns.fill(job.slot, piece_id, job.length, place)
            self.columns.stored_new[job.slot] = placed.stored_bytes + CHUNK_HEADER_BYTES
        return False

    def _small_pieces(
        self, turn: int, job: PieceJob, buffer: memoryview, sink: PackSink, spent: _Spent
    ) -> None:
        """Write those small tensors of a batch that are not known as one chunk, a slab."""
        began = self.clock()
        filled = 0
        members: list[tuple[int, bytes, int, int]] = []
        for source, slot, foreseen in zip(job.sources, job.slots, job.foreseen, strict=True):
            if foreseen is not None and self._share(slot, foreseen, source.nbytes):
                continue
            end = filled + source.nbytes
            staged = buffer[filled:end]
            _stage(source, 0, staged)
            piece_id = blake3_digest(staged)
            if self._share(slot, piece_id, source.nbytes) or not self._claim(slot, piece_id):
                continue
            members.append((slot, piece_id, filled, source.nbytes))
            filled = end
        hashed = self.clock()
        spent.hashing_s += hashed - began
        if not members:
            return
        slab = buffer[:filled]
        encoded = encode(slab, job.layout, self.choice)
        slab_id = members[0][1] if len(members) == 1 else blake3_digest(slab)
        ready = self.clock()
        placed = sink.append(turn, encoded, slab_id, filled)
        spent.encoding_s += ready - hashed
        spent.writing_s += self.clock() - ready
        stored = placed.stored_bytes + CHUNK_HEADER_BYTES
        for slot, piece_id, inner, length in members:
            place = Location(
                pack=placed.pack,
                offset=placed.offset,
                stored_bytes=placed.stored_bytes,
                inner=inner,
                slab_bytes=filled,
            )
            self.columns.fill(slot, piece_id, length, place)
            share = stored * (inner + length) // filled - stored * inner // filled
            self.columns.stored_new[slot] = share

    def _share(self, slot: int, piece_id: bytes, length: int) -> bool:
        """Let a row point to where its bytes lie already; return whether they do anywhere."""
        place = self.known.find(piece_id, length)
        if place is None:
            return False
        self.columns.fill(slot, piece_id, length, place)
        return True

    def _claim(self, slot: int, piece_id: bytes) -> bool:
        """Return whether this row is the first of the save with these bytes."""
        with self.lock:
            of = self.claimed.setdefault(piece_id, slot)
            if of != slot:
                self.repeats.append((slot, of))
                return False
        self.columns.is_new[slot] = True
        return True

    def _advance(self, length: int) -> None:
        with self.lock:
            self.done += length
            self.progress(Progress(stage="write", done=self.done, total=self.total))


def _stage(source: Source, start: int, out: memoryview) -> None:
    """Copy bytes of a tensor into host memory that no one else writes."""
    view = source.payload.view()
    if view is None:
        source.payload.copy_into(start, out)
    else:
        np.copyto(
            np.frombuffer(out, np.uint8), np.frombuffer(view[start : start + len(out)], np.uint8)
        )
