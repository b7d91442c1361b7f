"""Chunks from packs to other packs, in this store or another, as they are stored.

Nothing is encoded again. Each chunk is checked as on a load before it is written: its stored bytes
against their checksum, its content against its id; damage never travels. The content of a delta is
not decoded, since that takes its base: its header, its checksum and the id of its base are checked.
A collection that copies live chunks to new packs reads them by :func:`read_rows`.

Tasks of an engine can copy, too: each fills packs of its own in the target. One that runs twice
leaves packs that nobody names, for a collection; its result says which of the two is used.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from ckptstore import errors, limits
from ckptstore.backends.base import Backend
from ckptstore.backends.throttled import ThrottledBackend
from ckptstore.codecs.codec import CodecError
from ckptstore.codecs.codec_table import DELTAS, Encoded, decoded, is_known
from ckptstore.codecs.delta import BASE_ID_BYTES
from ckptstore.codecs.plane_layout import Layout
from ckptstore.config import SYSTEM, Environment, Options
from ckptstore.engine.calls import Shared
from ckptstore.engine.engine import Engine
from ckptstore.errors import IntegrityError
from ckptstore.events import Counted, Progress, ProgressCallback, silent
from ckptstore.format.keys import pack_key
from ckptstore.format.manifest import PieceTable
from ckptstore.format.pack import CHUNK_HEADER_BYTES, IndexRow, corrupt
from ckptstore.hashing import blake3_digest
from ckptstore.objects.joining import C, Growing, Stored, join_chunks
from ckptstore.objects.packs import After, PackSink, Placed, plan_packs
from ckptstore.objects.piece_reader import checked, read_pieces
from ckptstore.objects.plan import ChunkRead, Items, ReadItem, Span, cut_rows, finer, plan_spans
from ckptstore.objects.threads import in_threads


@dataclass(slots=True, kw_only=True)
class Copied:
    """Result of a copy: the new places of chunks, and its cost."""

    places: dict[tuple[str, int], Placed] = field(default_factory=dict)
    """By pack and offset where it lay."""
    pack_bytes: int = 0
    packs_count: int = 0
    read_back_s: float = 0.0
    """For how long packs were read again, of all threads together."""
    is_cold: bool = False
    """Packs could not be read again: they went to a storage class that has to be thawed."""


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A chunk as it lies in a pack, and what it decodes to."""

    chunk_id: bytes
    """As the header says; whether that is so is for the caller to check."""
    encoded: Encoded
    raw_bytes: int
    raw: memoryview | None
    """What it decodes to, in `data` itself where that is stored raw; None for a delta."""
    base_id: bytes | None
    """What a delta says that it refers to."""

    def piece_id(self, inner: int, size: int) -> bytes:
        """Return the id of a piece of it; of a delta, the id that its header states."""
        if self.raw is None:
            return self.chunk_id
        return blake3_digest(self.raw[inner : inner + size])


class Room:
    """Memory of one thread: for what is read, and for what a chunk decodes to."""

    def __init__(self) -> None:
        self.bytes = Growing()
        self.decoded = Growing()


def _fetched(
    backend: Backend, pack: str, chunks: Sequence[C], room: Room
) -> list[tuple[C, str, memoryview]]:
    """Read neighbouring chunks with one request; return each, where it lies, and its bytes."""
    start, last = chunks[0].offset, chunks[-1]
    memory = room.bytes(last.offset + CHUNK_HEADER_BYTES + last.stored_bytes - start)
    backend.read_into(pack_key(pack), start, [memory])
    fetched = []
    for chunk in chunks:
        at = chunk.offset - start
        data = memory[at : at + CHUNK_HEADER_BYTES + chunk.stored_bytes]
        fetched.append((chunk, f"{pack} at {chunk.offset}", data))
    return fetched


def _taken(data: memoryview, chunk: Stored, *, where: str, room: Room) -> StoredChunk:
    """Return the chunk in `data`, its stored bytes checked by their checksum, and decoded.

    A delta is not decoded: without its base, which may lie anywhere, its checksum and the check sum
    of its header are what there is to tell whether it is what was written.

    Parameters
    ----------
    data
        Header and stored bytes.
    chunk
        Its lengths, as the manifest or the index says.
    where
        Pack and offset, for errors.
    room
        Where it is decoded: what is returned holds until the next chunk is taken.

    Raises
    ------
    CorruptObjectError
        The chunk is damaged, or another one.
    UnsupportedFeatureError
        A newer ckptstore wrote it.
    """
    body = data[CHUNK_HEADER_BYTES:]
    header = checked(chunk, data[:CHUNK_HEADER_BYTES], body, where=where)
    if not is_known(header.codec, header.layout):
        msg = f"pack {where}: unknown codec {header.codec} or layout {header.layout}"
        raise errors.UnsupportedFeatureError(msg, hint="upgrade ckptstore")
    raw = base_id = None
    if header.codec in DELTAS:
        base_id = bytes(body[:BASE_ID_BYTES])
    else:
        try:
            raw = decoded(header.codec, header.layout, body, header.raw_bytes, room.decoded)
        except CodecError as error:
            raise corrupt(where, str(error)) from error
    layout, stored = Layout(header.layout), header.stored_bytes
    encoded = Encoded(codec=header.codec, layout=layout, parts=(body,), stored_bytes=stored)
    return StoredChunk(header.chunk_id, encoded, header.raw_bytes, raw, base_id)


def read_rows(
    backend: Backend, pack: str, rows: Sequence[IndexRow], room: Room
) -> Iterator[StoredChunk]:
    """Read neighbouring chunks with one request; yield each, checked as far as it can be.

    Its lengths, its id, the checksum of its stored bytes, and what it decodes to with its id. Of a
    delta, which takes its base to be decoded, all but the last.

    Parameters
    ----------
    rows
        What the chunks should be, in the order of their offsets.

    Raises
    ------
    CorruptObjectError
        A chunk is damaged, or another one.
    StorageError
        The storage failed.
    """
    for row, where, data in _fetched(backend, pack, rows, room):
        found = _taken(data, row, where=where, room=room)
        if found.chunk_id != row.chunk_id:
            raise corrupt(where, "another chunk is there")
        if found.piece_id(0, row.raw_bytes) != row.chunk_id:
            raise corrupt(where, "content does not match its chunk id")
        yield found


def copy_chunks(
    table: PieceTable,
    items: Sequence[ReadItem],
    *,
    source: Backend,
    target: Backend,
    environment: Environment,
    options: Options,
    progress: ProgressCallback,
    after: After | None = None,
    whole_bytes: int = 0,
) -> Copied:
    """Copy the chunks that hold the wanted pieces into new packs; return when these are durable.

    Each chunk is copied once, whole, in the order in which they lie. Memory stays near
    ``options.host_bytes``. What was written before a failure stays behind as orphans for gc.

    Parameters
    ----------
    items
        Pieces of `table`, with ``out`` None; labels are for errors.
    progress
        Called with the stored bytes that are done.
    after
        Called with each pack that is durable, from several threads: see
        :class:`ckptstore.objects.packs.PackSink`. It may hold ``read_bytes_max`` of the target.
        A :class:`ReadBack` compares what the target holds with what was to be written, but for
        what deltas decode to.
    whole_bytes
        Of the copy of which this is one part, if it is: see
        :func:`ckptstore.objects.packs.plan_packs`.

    Raises
    ------
    CorruptTensorError
        A chunk is damaged or its pack is gone; the message names tensor, pack and offset.
    UnsupportedFeatureError
        A newer ckptstore wrote a chunk.
    StorageError
        One of the storages failed.
    """
    threads = max(options.workers, source.capabilities.concurrency)
    spans = plan_spans(table, items, finer(source.capabilities, table, items, threads))
    total = sum(span.end - span.start for span in spans)
    capabilities = target.capabilities
    per_thread = max((span.end - span.start for span in spans), default=1)
    per_thread += max((chunk.raw_bytes for span in spans for chunk in span.chunks), default=0)
    threads = max(1, min(threads, options.host_bytes // 2 // per_thread, len(spans)))
    reading_back = 0 if after is None else capabilities.read_bytes_max + limits.CHUNK_BYTES_DEFAULT
    plan = plan_packs(
        total,
        capabilities,
        threads=threads,
        memory_bytes=options.host_bytes - threads * per_thread,
        beside_bytes=reading_back,
        in_memory=limits.COPIED_PACKS_IN_MEMORY,
        whole_bytes=whole_bytes,
    )
    sink = PackSink(target, environment, plan, after=after)
    run = _Copying(table, source, sink, Counted(progress, "copy", total))
    try:
        run.work(iter(spans), threads)
        sink.finish()
    except BaseException:
        sink.abort()
        raise
    copied = run.copied
    copied.pack_bytes, copied.packs_count = sink.stored_bytes, sink.packs_count
    if isinstance(after, ReadBack):
        copied.read_back_s, copied.is_cold = after.seconds, after.is_cold
    return copied


@dataclass(slots=True)
class _Copying:
    """One copy while its threads run."""

    table: PieceTable
    source: Backend
    sink: PackSink
    count: Counted
    copied: Copied = field(default_factory=Copied)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def work(self, spans: Iterator[Span], threads: int) -> None:
        """Copy all spans; raise the first failure once every thread has stopped."""

        def begin(turn: int) -> Callable[[Span], None]:
            return partial(self._span, turn, Room())

        in_threads(threads, spans, begin, name="ckptstore-copy")

    def _span(self, turn: int, room: Room, span: Span) -> None:
        try:
            fetched = _fetched(self.source, span.pack, span.chunks, room)
        except (errors.CorruptObjectError, errors.NotFoundError) as error:
            raise _lost(span.pack, span.chunks[0], error) from error
        for chunk, where, data in fetched:
            try:
                found, chunk_id = self._chunk(where, chunk, data, room)
            except errors.CorruptObjectError as error:
                raise _lost(span.pack, chunk, error) from error
            # May raise what was found out of packs of the target: not to be told as damage here.
            placed = self.sink.append(turn, found.encoded, chunk_id, chunk.raw_bytes)
            with self.lock:
                self.copied.places[span.pack, chunk.offset] = placed
        self.count.add(span.end - span.start)

    def _chunk(
        self, where: str, chunk: ChunkRead, data: memoryview, room: Room
    ) -> tuple[StoredChunk, bytes]:
        """Return a chunk in which every piece is what the manifest says, and its id."""
        found = _taken(data, chunk, where=where, room=room)
        chunk_id = found.piece_id(0, chunk.raw_bytes)
        for item in chunk.items:
            inner = int(self.table.inner[item.row])
            size = int(self.table.raw[item.row])
            piece = chunk_id if size == chunk.raw_bytes else found.piece_id(inner, size)
            if piece != self.table.ids[item.row].tobytes():
                raise corrupt(where, "content does not match its chunk id")
            base = self.table.base_of(item.row)
            if found.base_id != (None if base is None else self.table.ids[base].tobytes()):
                raise corrupt(where, "it does not refer to the base that the manifest names")
        return found, chunk_id


def _lost(
    pack: str, chunk: ChunkRead, error: errors.CorruptObjectError | errors.NotFoundError
) -> errors.CorruptTensorError:
    label = chunk.items[0].label
    msg = f"tensor {label}: pack {pack}, chunk at byte {chunk.offset}: {error.message}"
    hint = "run ckptstore verify; leave the tensor out (exclude)"
    return errors.CorruptTensorError(msg, hint=hint)


def altered(url: str, error: errors.IntegrityError) -> errors.CorruptObjectError:
    """Return the error for a target that gives back something else than was written."""
    msg = f"{url} does not hold what was written there: {error.message}"
    return errors.CorruptObjectError(msg, hint="examine the target: ckptstore doctor")


class ReadBack:
    """Reads each pack as soon as it is durable, while the next ones are filled and sent.

    Each chunk is compared with its row of the index: its lengths, its id, the checksum of its
    stored bytes, and what it decodes to with its id. Of a delta, which takes its base to be
    decoded, all but the last.

    May be called from any thread. A call holds one request of the backend at a time
    (``read_bytes_max`` or one chunk) and one decoded chunk.
    """

    def __init__(self, backend: Backend, environment: Environment) -> None:
        self._backend = backend
        self._clock = environment.monotonic
        self._lock = threading.Lock()
        self._rooms: list[Room] = []
        """Memory of calls that ended, for those that come: of at most so many as ran at once."""
        self.seconds = 0.0
        """Of all calls together."""
        self.is_cold = False
        """Some pack went to a storage class that cannot be read: it counts as not read."""

    def __call__(
        self, pack: str, rows: Sequence[IndexRow], go_on: Callable[[], None] = lambda: None
    ) -> None:
        """Read a pack.

        Parameters
        ----------
        go_on
            Called before each request; what it raises ends the reading.

        Raises
        ------
        CorruptObjectError
            The storage does not hold what was written there.
        StorageError
            It failed.
        """
        began = self._clock()
        with self._lock:
            room = self._rooms.pop() if self._rooms else Room()
        try:
            for part in join_chunks(rows, self._backend.capabilities):
                go_on()
                for _ in read_rows(self._backend, pack, part, room):
                    pass
        except errors.ColdObjectError:
            self.is_cold = True
        except errors.NotFoundError as error:
            gone = errors.CorruptObjectError(f"pack {pack} is gone")
            raise altered(self._backend.url, gone) from error
        except errors.IntegrityError as error:
            raise altered(self._backend.url, error) from error
        with self._lock:
            self._rooms.append(room)
            self.seconds += self._clock() - began


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyTask:
    """Chunks that one task copies."""

    copies: ChunkCopies
    """As it does that itself: with its own share of the memory, the threads and the bandwidth."""
    table: PieceTable
    """What is copied, and behind it what deltas refer to."""
    labels: tuple[str, ...]
    """Of the tensors to which the pieces belong that are copied: the table's first rows."""
    whole_bytes: int
    """Stored bytes of all tasks; 0 where nothing is written."""

    def items(self) -> list[ReadItem]:
        """Return what is copied, for a call of this process."""
        return [ReadItem(row=row, out=None, label=label) for row, label in enumerate(self.labels)]


def copy_part(task: CopyTask) -> Copied:
    """Do a task; it may be done any number of times.

    Raises
    ------
    CorruptTensorError
        A chunk of the source is damaged.
    CorruptObjectError
        The target does not hold what was written there.
    StorageError
        One of the storages failed.
    """
    return task.copies.copy(task.table, task.items(), silent, task.whole_bytes)


def read_part(task: CopyTask) -> None:
    """Read pieces from the target, where the task's table says that they lie.

    Raises
    ------
    CorruptObjectError
        The target does not hold what was written there.
    StorageError
        The storage failed.
    """
    task.copies.read_back(task.table, task.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkCopies:
    """Copies chunks from one storage to another, in this process or by tasks of an engine."""

    source: Shared[Backend]
    target: Shared[Backend]
    options: Options
    """Of the target, whole: tasks that share a machine share its budget."""
    environment: Environment
    """Of this process; tasks elsewhere have that of theirs."""
    engine: Engine | None = None
    bytes_per_s: float = 0.0
    """Of all tasks together; 0 for no limit."""
    check: bool = False
    """Read back what was written, but for what deltas decode to."""

    def copy(
        self, table: PieceTable, items: Items, progress: ProgressCallback, whole_bytes: int = 0
    ) -> Copied:
        """Copy the chunks of pieces; see :func:`ckptstore.objects.copying.copy_chunks`.

        Raises
        ------
        CorruptTensorError, CorruptObjectError, StorageError
            As :func:`copy_part`, of the first task that failed; WorkerDiedError of the engine.
        """
        if self.engine is None:
            target = self._throttled()
            return copy_chunks(
                table,
                items,
                source=self.source.value,
                target=target,
                environment=self.environment,
                options=self.options,
                progress=progress,
                after=ReadBack(target, self.environment) if self.check else None,
                whole_bytes=whole_bytes,
            )
        pack, offset, stored = (
            column[[item.row for item in items]].tolist()
            for column in (table.pack, table.offset, table.stored)
        )
        sizes = dict(zip(zip(pack, offset, strict=True), stored, strict=True))
        total = sum(sizes.values()) + CHUNK_HEADER_BYTES * len(sizes)
        most = max(self.target.value.capabilities.pack_bytes, limits.COPY_TASK_BYTES)
        size = max(limits.COPY_TASK_BYTES_MIN, min(most, -(-total // self.engine.workers)))
        copied, done = Copied(), 0
        tasks = self._tasks(self.engine, table, items, size, total)
        for part in self.engine.map(copy_part, tasks):
            copied.places.update(part.places)
            copied.pack_bytes += part.pack_bytes
            copied.packs_count += part.packs_count
            copied.read_back_s += part.read_back_s
            copied.is_cold |= part.is_cold
            done += sum(CHUNK_HEADER_BYTES + p.stored_bytes for p in part.places.values())
            progress(Progress(stage="copy", done=min(done, total), total=total))
        return copied

    def read_back(self, table: PieceTable, items: Items) -> None:
        """Read pieces from the target, where `table` says that they lie, as a load does.

        Raises
        ------
        CorruptObjectError
            The target does not hold what was written there.
        StorageError
            The storage failed; WorkerDiedError of the engine.
        """
        if self.engine is None:
            target, options = self._throttled(), self.options
            try:
                read_pieces(table, items, backend=target, options=options, progress=silent)
            except IntegrityError as error:
                raise altered(target.url, error) from error
            return
        tasks = self._tasks(self.engine, table, items, limits.COPY_TASK_BYTES_MIN)
        for _ in self.engine.map(read_part, tasks):
            pass

    def _throttled(self) -> Backend:
        """Return the target at the bandwidth that is allowed."""
        if not self.bytes_per_s:
            return self.target.value
        return ThrottledBackend(
            self.target.value, bytes_per_s=self.bytes_per_s, environment=self.environment
        )

    def _tasks(
        self, engine: Engine, table: PieceTable, items: Items, size: int, whole_bytes: int = 0
    ) -> Iterator[CopyTask]:
        """Yield tasks of `size` stored bytes each, with their shares of what tasks share."""
        labels = {item.row: item.label for item in items}
        for rows in cut_rows(table, np.fromiter(labels, np.int64), size):
            own = replace(
                self,
                engine=None,
                environment=SYSTEM,
                options=engine.options_of_tasks(self.options),
                bytes_per_s=self.bytes_per_s / engine.workers,
            )
            told = tuple(labels[row] for row in rows.tolist())
            part = table.take(rows)
            yield CopyTask(copies=own, table=part, labels=told, whole_bytes=whole_bytes)
