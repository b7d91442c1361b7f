"""Writing of tensors into packs: stage, digest, look up, encode, append.

A plan of jobs is cut first, without touching a byte; worker threads then take one job after
another, so that the memory in use is one chunk a worker and the packs that are open, whatever the
size of the state. A chunk is staged into the worker's own buffer before its digest is taken, and
encoded from that same buffer: what is stored is what was digested, even if the tensor is changed
meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from ckptstore import limits
from ckptstore.backends.base import Backend
from ckptstore.backends.buffers import BufferPool, Memory
from ckptstore.chunking import cut, piece_bytes
from ckptstore.codecs.codec_table import RAW, Encoded, encode
from ckptstore.codecs.plane_layout import Layout, layout_of
from ckptstore.config import CodecChoice, Environment, Options
from ckptstore.events import Counted, ProgressCallback
from ckptstore.format.manifest import PieceTable
from ckptstore.format.pack import CHUNK_HEADER_BYTES
from ckptstore.hashing import blake3_digest
from ckptstore.objects.deltas import Deltas
from ckptstore.objects.index import NUMBERS, Base, KnownPieces, Location, numbers_of, table_of
from ckptstore.objects.packs import PackSink, plan_packs
from ckptstore.objects.sources import Source, copy_from
from ckptstore.objects.threads import in_threads
from ckptstore.prefault import prefault


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceJob:
    """One piece of a large tensor, or a batch of small tensors of one layout: one chunk."""

    small: bool
    """A batch. The length does not tell: the last piece of a large tensor may be short."""
    sources: tuple[Source, ...]
    slots: tuple[int, ...]
    """Rows of the pieces."""
    start: int
    """Where the piece begins in its tensor; 0 for a batch."""
    length: int
    """Bytes, of a batch all together."""
    layout: Layout
    foreseen: tuple[bytes | None, ...]
    """Per piece: its id, if that is known already."""


def plan_jobs(
    sources: Sequence[Source], chunk_bytes: int
) -> tuple[tuple[int, ...], list[PieceJob]]:
    """Cut every tensor; return the first row of each, and one more, and the jobs.

    A tensor of at least ``SMALL_TENSOR_BYTES`` is cut into pieces, each a job; smaller ones are
    one piece each, and those of one layout share jobs of at most ``SLAB_BYTES``.
    """
    first = [0]
    jobs: list[PieceJob] = []
    batches: dict[Layout, list[tuple[Source, int]]] = {}
    filled: dict[Layout, int] = {}
    for source in sources:
        layout, slot = layout_of(source.dtype), first[-1]
        if source.nbytes >= limits.SMALL_TENSOR_BYTES:
            length = piece_bytes(source.row_bytes, source.itemsize, chunk_bytes)
            ids = _foreseen(source, -(-source.nbytes // length))
            for (start, size), piece_id in zip(cut(source.nbytes, length), ids, strict=True):
                job = PieceJob(
                    small=False, sources=(source,), slots=(slot,), start=start, length=size,
                    layout=layout, foreseen=(piece_id,),
                )  # fmt: skip
                jobs.append(job)
                slot += 1
        elif source.nbytes:
            if filled.get(layout, 0) + source.nbytes > limits.SLAB_BYTES:
                jobs.append(_batch(batches.pop(layout), layout))
                filled[layout] = 0
            batches.setdefault(layout, []).append((source, slot))
            filled[layout] = filled.get(layout, 0) + source.nbytes
            slot += 1
        first.append(slot)
    jobs.extend(_batch(batch, layout) for layout, batch in batches.items())
    return tuple(first), jobs


def _foreseen(source: Source, count: int) -> Sequence[bytes | None]:
    """Return the id of each piece of a source, as far as they are known."""
    return getattr(source, "piece_ids", None) or [None] * count  # a PieceSource may have them


def _batch(members: Iterable[tuple[Source, int]], layout: Layout) -> PieceJob:
    members = tuple(members)
    return PieceJob(
        small=True,
        sources=tuple(source for source, _ in members),
        slots=tuple(slot for _, slot in members),
        start=0,
        length=sum(source.nbytes for source, _ in members),
        layout=layout,
        foreseen=tuple(_foreseen(source, 1)[0] for source, _ in members),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Result of a write: the table of all pieces, and its cost."""

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


_TINY_MIN: Final = 64
"""A batch of more tensors holds tiny ones: with 4 KiB and less, Python takes most of the time."""
_Member: TypeAlias = "tuple[int, bytes, int]"
"""A piece of a slab: its row, its id and its length."""


class _Rows:
    """The rows of the table in the making; each is filled by one worker."""

    def __init__(self, count: int) -> None:
        self._ids = np.zeros((count, 32), np.uint8)
        self._numbers = np.zeros(count, NUMBERS)
        self.is_new = np.zeros(count, np.bool_)
        self.stored_new = np.zeros(count, np.int64)
        """As in :class:`Written`, `is_new` too."""
        self._packs: dict[str, int] = {}
        """Ids of packs to their places in the table."""
        self._bases: dict[int, Base] = {}
        """The bases of rows that are deltas."""
        self._lock = threading.Lock()
        """Guards packs and bases."""

    def fill(self, slot: int, piece_id: bytes, raw: int, place: Location) -> None:
        """Say in row `slot` that a piece of `raw` bytes lies in a place."""
        with self._lock:
            numbers = numbers_of(raw, place, self._packs)
            if place.base is not None:
                self._bases[slot] = place.base
        self._ids[slot] = np.frombuffer(piece_id, np.uint8)
        self._numbers[slot] = numbers

    def fill_slab(self, members: Sequence[_Member], place: Location) -> None:
        """Say that pieces lie one after the other in the slab at `place`, a column at a time."""
        with self._lock:
            numbers = numbers_of(0, place, self._packs)
        slots, ids, sizes = zip(*members, strict=True)
        rows, raw = np.array(slots), np.array(sizes)
        ends = raw.cumsum()
        self._ids[rows] = np.frombuffer(b"".join(ids), np.uint8).reshape(-1, 32)
        self._numbers[rows] = numbers
        self._numbers["raw"][rows] = raw
        self._numbers["inner"][rows] = ends - raw
        stored = (place.stored_bytes + CHUNK_HEADER_BYTES) * ends // ends[-1]
        self.stored_new[rows] = np.diff(stored, prepend=0)

    def repeat(self, slot: int, of: int) -> None:
        """Give row `slot` the place of row `of`: the same bytes occur twice in one save."""
        self._ids[slot] = self._ids[of]
        self._numbers[slot] = self._numbers[of]
        if of in self._bases:
            self._bases[slot] = self._bases[of]

    def table(self) -> PieceTable:
        """Return the table, once every row is filled."""
        return table_of(self._ids, self._numbers, self._packs, self._bases)


class _Room:
    """Memory in which one worker stages chunks; a buffer that was handed over is replaced.

    Parameters
    ----------
    size
        Bytes of the largest chunk.
    pool
        Of a backend that sends bytes from memory that it is given; None for others.
    """

    def __init__(self, size: int, pool: BufferPool | None) -> None:
        self._kept_min = size * 3 // 4
        self._pool = pool if pool is not None and size <= pool.buffer_bytes else None
        copied = size if self._pool is None else max(self._kept_min, limits.SLAB_BYTES)
        self.own = memoryview(bytearray(copied))
        """For slabs, and for chunks that the writer copies."""
        self._memory: Memory | None = None

    def view(self, length: int) -> memoryview:
        """Return the memory for a chunk of so many bytes."""
        if not self._may_go(length):
            return self.own[:length]
        assert self._pool is not None  # noqa: S101  # for the type checker
        memory = self._memory = self._memory or self._pool.take()
        memory.touched = max(memory.touched, length)
        view = memoryview(memory.memory)[:length]
        prefault(view)
        return view

    def hand_over(self, length: int, *, raw: bool) -> Callable[[], None] | None:
        """Return what the writer calls when it is done with a chunk; None if it has to copy it.

        Parameters
        ----------
        length
            Of the chunk that was staged.
        raw
            Whether the writer gets this memory; else it gets the new memory of an encoder.
        """
        if not raw:
            return _nothing
        if not self._may_go(length) or self._pool is None or self._memory is None:
            return None
        memory, self._memory = self._memory, None
        return partial(self._pool.give, memory)

    def _may_go(self, length: int) -> bool:
        """Return whether chunks of this length are handed over: a short one keeps too much."""
        return self._pool is not None and length >= self._kept_min


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
    total = sum(source.nbytes for source in sources)
    plan = plan_packs(  # as many packs at once as memory and size allow
        total,
        backend.capabilities,
        threads=options.workers,
        memory_bytes=options.host_bytes - options.workers * 3 * chunk_bytes,
        chunk_bytes=chunk_bytes,
    )
    sink = PackSink(backend, environment, plan)
    saving = _PieceWrite(
        rows=_Rows(first[-1]),
        sink=sink,
        known=known,
        choice=choice,
        count=Counted(progress, "write", total),
        buffer_bytes=max(chunk_bytes, limits.SLAB_BYTES),
        staging=backend.staging(),
        clock=environment.monotonic,
        deltas=deltas,
    )
    try:
        saving.work(iter(jobs), options.workers)
    except BaseException:
        sink.abort()
        raise
    rows = saving.rows
    return Written(
        table=rows.table(),
        first=first,
        is_new=rows.is_new,
        stored_new=rows.stored_new,
        pack_bytes=sink.stored_bytes,
        packs_count=sink.packs_count,
        seconds=saving.seconds(),
    )


@dataclass(slots=True)
class _PieceWrite:
    """One save while its workers run."""

    rows: _Rows
    sink: PackSink
    known: KnownPieces
    choice: CodecChoice
    count: Counted
    """Bytes that were written or shared, of all tensors'."""
    buffer_bytes: int
    staging: BufferPool | None
    clock: Callable[[], float]
    deltas: Deltas | None
    spent: list[_Spent] = field(default_factory=list)
    claimed: dict[bytes, int] = field(default_factory=dict)
    """Id of each new piece of this save to its row."""
    repeats: list[tuple[int, int]] = field(default_factory=list)
    """Rows whose bytes another row of this save brings."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    tiny: threading.Lock = field(default_factory=threading.Lock)
    """Held while tiny tensors are staged: that holds the interpreter's lock, and two threads that
    take turns at it need a fifth longer than one."""

    def work(self, jobs: Iterator[PieceJob], workers: int) -> None:
        """Run all jobs, and return when every pack is durable.

        Raises the first failure once every worker has stopped.
        """
        in_threads(workers, jobs, self._worker, name="ckptstore-save")
        began = self.clock()
        self.sink.finish()
        self.spent.append(_Spent(writing_s=self.clock() - began))
        for slot, of in self.repeats:  # every place is known by now
            self.rows.repeat(slot, of)

    def seconds(self) -> dict[str, float]:
        """Return where the seconds of all workers went."""
        return {
            name: sum(getattr(one, name) for one in self.spent)
            for name in ("hashing_s", "encoding_s", "writing_s")
        }

    def _worker(self, turn: int) -> Callable[[PieceJob], None]:
        """Return the function that runs the jobs of one thread."""
        room = _Room(self.buffer_bytes, self.staging)
        shared = True  # whether the last piece was shared: the next one then is, most likely
        spent = _Spent()
        with self.lock:
            self.spent.append(spent)

        def run(job: PieceJob) -> None:
            """Write the pieces of one job."""
            nonlocal shared
            if job.small:
                self._small_pieces(turn, job, room.own, spent)
            else:
                shared = self._large_piece(turn, job, room, spent, shared=shared)
            self.count.add(job.length)

        return run

    def _large_piece(
        self, turn: int, job: PieceJob, room: _Room, spent: _Spent, *, shared: bool
    ) -> bool:
        """Write one piece as a chunk of its own, unless it is known; return whether it was."""
        source, slot, foreseen = job.sources[0], job.slots[0], job.foreseen[0]
        if foreseen is not None and self._share(slot, foreseen, job.length):
            return True
        began = self.clock()
        if shared and (view := source.payload.view()) is not None:
            # Digest in place: nothing is stored from these bytes, so no copy is needed to keep
            # them still.
            piece = view[job.start : job.start + job.length]
            if self._share(slot, blake3_digest(piece), job.length):
                spent.hashing_s += self.clock() - began
                return True
        staged = room.view(job.length)
        copy_from(source.payload, job.start, staged)
        piece_id, hashed = blake3_digest(staged), self.clock()
        spent.hashing_s += hashed - began
        if self._share(slot, piece_id, job.length):
            return True
        if self._claim(slot, piece_id):
            base = done = None
            if self.deltas is None:
                encoded = encode(staged, job.layout, self.choice)
                done = room.hand_over(job.length, raw=encoded.codec == RAW)
            else:
                encoded, base = self.deltas.encode(slot, piece_id, staged, job.layout)
            place = self._append(turn, encoded, piece_id, job.length, spent, hashed, done)
            self.rows.fill(slot, piece_id, job.length, replace(place, base=base))
            self.rows.stored_new[slot] = place.stored_bytes + CHUNK_HEADER_BYTES
        return False

    def _small_pieces(self, turn: int, job: PieceJob, buffer: memoryview, spent: _Spent) -> None:
        """Write those small tensors of a batch that are not known as one chunk, a slab."""
        began = self.clock()
        with self.tiny if len(job.sources) > _TINY_MIN else nullcontext():
            members, filled = self._stage_small(job, buffer)
        hashed = self.clock()
        spent.hashing_s += hashed - began
        if not members:
            return
        slab = buffer[:filled]
        encoded = encode(slab, job.layout, self.choice)
        slab_id = members[0][1] if len(members) == 1 else blake3_digest(slab)
        place = self._append(turn, encoded, slab_id, filled, spent, hashed)
        self.rows.fill_slab(members, place)

    def _stage_small(self, job: PieceJob, buffer: memoryview) -> tuple[list[_Member], int]:
        """Copy the unknown tensors of a batch into `buffer`; return them, and their bytes."""
        due = [
            (source, slot)
            for source, slot, foreseen in zip(job.sources, job.slots, job.foreseen, strict=True)
            if foreseen is None or not self._share(slot, foreseen, source.nbytes)
        ]
        _stage_all([source for source, _ in due], buffer)
        stop = filled = 0
        members: list[_Member] = []
        for source, slot in due:
            size = source.nbytes
            start, stop = stop, stop + size
            staged = buffer[start:stop]
            piece_id = blake3_digest(staged)
            if self._share(slot, piece_id, size) or not self._claim(slot, piece_id):
                continue
            if filled < start:  # one before it is left out
                buffer[filled : filled + size] = staged
            members.append((slot, piece_id, size))
            filled += size
        return members, filled

    def _append(
        self,
        turn: int,
        encoded: Encoded,
        chunk_id: bytes,
        size: int,
        spent: _Spent,
        hashed: float,
        done: Callable[[], None] | None = None,
    ) -> Location:
        """Write a chunk whose encoding began at `hashed`; return where it lies."""
        ready = self.clock()
        placed = self.sink.append(turn, encoded, chunk_id, size, done)
        spent.encoding_s += ready - hashed
        spent.writing_s += self.clock() - ready
        pack, offset, stored = placed.pack, placed.offset, placed.stored_bytes
        return Location(pack=pack, offset=offset, stored_bytes=stored, inner=0, slab_bytes=size)

    def _share(self, slot: int, piece_id: bytes, length: int) -> bool:
        """Let a row point to where its bytes lie already; return whether they do anywhere."""
        place = self.known.find(piece_id, length)
        if place is None:
            return False
        self.rows.fill(slot, piece_id, length, place)
        return True

    def _claim(self, slot: int, piece_id: bytes) -> bool:
        """Return whether this row is the first of the save with these bytes."""
        with self.lock:
            of = self.claimed.setdefault(piece_id, slot)
            if of != slot:
                self.repeats.append((slot, of))
                return False
        self.rows.is_new[slot] = True
        return True


def _stage_all(sources: Sequence[Source], out: memoryview) -> None:
    """Copy tensors one after the other into `out`; those of torch in one call, where they can."""
    payloads = [source.payload for source in sources]
    together = getattr(payloads[0], "copy_together", None) if payloads else None
    if together is not None and together(payloads, out):
        return
    start = 0
    for source in sources:
        copy_from(source.payload, 0, out[start : start + source.nbytes])
        start += source.nbytes


def _nothing() -> None:
    """Do nothing: no one waits for this memory."""
