"""Packs in the making: chunks are appended from many threads, packs become durable behind them.

Disks take a pack as it is written, S3 and Azure in parts (docs/design/0025). Other storage takes it
whole: it waits in memory until it is full, and nothing of it is on its way before. Three things
follow, measured in docs/design/0014: the first packs are small, so that a link has something to do
at once; those of a small write stay so; and many fit into the memory, since one connection is slow,
and those that are sent together end together.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from ckptstore import limits
from ckptstore.backends.base import Backend, Capabilities, ObjectWriter
from ckptstore.backends.transfers import Threads
from ckptstore.codecs.codec_table import Encoded
from ckptstore.config import Environment
from ckptstore.errors import OperationCancelledError
from ckptstore.format import pack as layout
from ckptstore.format.keys import pack_key
from ckptstore.hashing import xxh3_64_of

# A write fills one more pack at once for each of these, and begins with a small one only from here
# on. Source: below, a second pack costs a second fsync and a second request without being any
# faster (measured: docs/design/0003).
_STREAM_BYTES = 32 * limits.MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class PackPlan:
    """Sizes and numbers of the packs of one write."""

    streams: int
    """How many are filled at once."""
    at_once: int
    """How many are unfinished at once: filled, sent, or read back."""
    first_bytes: int
    """Where the first pack of a stream is closed; each next one at twice the size."""
    most_bytes: int
    """Where all later ones are closed."""

    def closed_at(self, turn: int) -> int:
        """Return the size at which pack number `turn` of a stream, from 0 on, is closed."""
        return min(self.most_bytes, self.first_bytes << min(turn, 64))


def plan_packs(
    total: int,
    capabilities: Capabilities,
    *,
    threads: int,
    memory_bytes: int,
    chunk_bytes: int = limits.CHUNK_BYTES_DEFAULT,
    beside_bytes: int = 0,
    in_memory: int = limits.PACKS_AT_ONCE,
    whole_bytes: int = 0,
) -> PackPlan:
    """Return how a write goes into packs.

    Parameters
    ----------
    total
        Bytes that the write will take at most.
    threads
        How many fill packs.
    memory_bytes
        What all packs together may hold in host memory. One pack of ``PACK_BYTES_MIN`` is begun
        even if there is less.
    chunk_bytes
        Of the largest chunk: a pack is closed behind the one that fills it.
    beside_bytes
        What is held for a pack that is finished, instead of the pack: while it is read back.
    in_memory
        How many of the largest are to find room in that memory, where packs are collected there.
    whole_bytes
        Of the write of which this is a part, if it is one: the size of its packs goes by that, and
        none is small to be the first, since other parts are on their way already.
    """
    whole = capabilities.pack_bytes
    if capabilities.part_bytes < whole:  # bytes leave before their pack is full
        first = most = whole
        held, unfinished = capabilities.part_bytes, 2 * threads
        in_parts = limits.PARTS_HELD_MAX * capabilities.part_bytes
        if in_parts and memory_bytes < in_parts:
            first = most = min(whole, max(limits.PACK_BYTES_MIN, memory_bytes))
            held = most + chunk_bytes
        elif in_parts:
            unfinished += in_parts // whole
    else:
        wide = min(capabilities.concurrency, memory_bytes // (limits.PACK_BYTES_MIN + chunk_bytes))
        wanted = max(total, whole_bytes) // limits.PACKS_OF_A_WRITE
        fitting = memory_bytes // max(in_memory, wide) - chunk_bytes
        most = min(whole, max(limits.PACK_BYTES_MIN, min(wanted, fitting)))
        overlaps = total >= _STREAM_BYTES and not whole_bytes
        first = min(most, limits.PACK_BYTES_FIRST) if overlaps else most
        held, unfinished = most + chunk_bytes, max(limits.PACKS_AT_ONCE, wide)
    unfinished = max(1, min(unfinished, memory_bytes // max(1, held, beside_bytes)))
    streams = max(1, min(threads, unfinished, total // _STREAM_BYTES))
    return PackPlan(streams=streams, at_once=unfinished, first_bytes=first, most_bytes=most)


After = Callable[[str, Sequence[layout.IndexRow], Callable[[], None]], None]
"""Told of each pack, by its name, and what is in it, when it is durable; calls the third between
its requests, which raises once the write was aborted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Where a chunk went."""

    pack: str
    offset: int
    stored_bytes: int


@dataclass(slots=True)
class _Stream:
    """One pack that is being filled; guarded by its lock."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    writer: ObjectWriter | None = None
    pack: str = ""
    offset: int = 0
    rows: list[layout.IndexRow] = field(default_factory=list)
    packs: int = 0
    """Closed before this one."""


@dataclass(eq=False, repr=False)
class PackSink:
    """Takes encoded chunks and writes packs, several at a time.

    A pack that is full is made durable by a thread of its own, while the stream goes on with the
    next one. At most ``plan.at_once`` packs are unfinished at any moment, which bounds the memory
    of backends that buffer a whole pack; ``append`` waits when there are more.

    A pack is finished when `after`, called by the thread that made it durable, has returned; what
    it raises is a failure of that pack.

    ``append`` may be called from any thread; ``finish`` and ``abort`` once, by the owner, when no
    ``append`` is running.
    """

    backend: Backend
    environment: Environment
    plan: PackPlan
    after: After | None = None

    def __post_init__(self) -> None:
        self._streams = [_Stream() for _ in range(self.plan.streams)]
        self._room = threading.BoundedSemaphore(self.plan.at_once)
        self._finishers = Threads(self.plan.at_once, thread_name_prefix="ckptstore-pack")
        self._finishing: list[Future[None]] = []
        self._stopped = threading.Event()
        self._counting = threading.Lock()
        self.stored_bytes = 0
        """Bytes of all packs so far, headers and indexes included."""
        self.packs_count = 0

    def append(
        self,
        turn: int,
        encoded: Encoded,
        chunk_id: bytes,
        raw_bytes: int,
        done: Callable[[], None] | None = None,
    ) -> Placed:
        """Write one chunk and return where it lies.

        Parameters
        ----------
        turn
            Picks the stream; callers that run at once pass different numbers.
        done
            Called, from any thread, when the memory of `encoded` may be reused; without it, that is
            when this returns.

        Raises
        ------
        StorageError
            Of this write, or of a pack that failed to become durable meanwhile.
        OperationCancelledError
            After ``abort``.
        """
        header = layout.ChunkHeader(
            codec=encoded.codec,
            layout=encoded.layout,
            raw_bytes=raw_bytes,
            stored_bytes=encoded.stored_bytes,
            checksum=xxh3_64_of(encoded.parts),
            chunk_id=chunk_id,
        ).to_bytes()
        stream = self._streams[turn % len(self._streams)]
        with stream.lock:
            # Only a worker that Ctrl-C hit while it was started: no one waits for such a one.
            self._check_stopped()
            if stream.writer is None:
                self._open(stream)
            assert stream.writer is not None  # noqa: S101  # for the type checker
            if done is None:
                stream.writer.write([header, *encoded.parts])
            else:
                stream.writer.write(header)
                stream.writer.write_kept(encoded.parts, done)
            stored_bytes = encoded.stored_bytes
            placed = Placed(pack=stream.pack, offset=stream.offset, stored_bytes=stored_bytes)
            row = layout.IndexRow(
                chunk_id=chunk_id,
                offset=stream.offset,
                stored_bytes=stored_bytes,
                raw_bytes=raw_bytes,
            )
            stream.rows.append(row)
            stream.offset += layout.CHUNK_HEADER_BYTES + stored_bytes
            if stream.offset >= self.plan.closed_at(stream.packs):
                self._close(stream)
        return placed

    def finish(self) -> None:
        """Return when every pack is durable.

        Raises
        ------
        StorageError
            The first failure of any pack; nothing may then be committed.
        """
        for stream in self._streams:
            with stream.lock:
                if stream.writer is not None:
                    self._close(stream)
        for future in self._finishing:
            future.result()
        self._finishers.shutdown()

    def abort(self) -> None:
        """Drop what is unfinished. Packs that are durable stay as orphans for gc; never raises."""
        self._stopped.set()
        for stream in self._streams:
            with stream.lock:
                if stream.writer is not None:
                    stream.writer.abort()
                    stream.writer = None
                    self._room.release()
        self._finishers.shutdown()  # none is queued: there are as many threads as packs

    def _open(self, stream: _Stream) -> None:
        self._room.acquire()
        try:
            self._raise_failures()
            stream.pack = self.environment.random_hex(16)
            stream.writer = self.backend.open_writer(pack_key(stream.pack))
            stream.writer.write(layout.pack_header(stream.pack))
        except BaseException:
            if stream.writer is not None:
                stream.writer.abort()
                stream.writer = None
            self._room.release()
            raise
        stream.offset = layout.HEADER_BYTES
        stream.rows = []

    def _close(self, stream: _Stream) -> None:
        writer, stream.writer = stream.writer, None
        assert writer is not None  # noqa: S101  # for the type checker
        footer = layout.pack_footer(stream.rows, offset=stream.offset)
        try:
            writer.write(footer)
        except BaseException:
            writer.abort()
            self._room.release()
            raise
        stream.packs += 1
        with self._counting:
            self.stored_bytes += stream.offset + len(footer)
            self.packs_count += 1
        self._finishing.append(
            self._finishers.submit(self._commit, writer, stream.pack, tuple(stream.rows))
        )

    def _commit(self, writer: ObjectWriter, pack: str, rows: Sequence[layout.IndexRow]) -> None:
        try:
            with writer:
                if not self._stopped.is_set():
                    writer.commit()
            if self.after is not None and not self._stopped.is_set():
                self.after(pack, rows, self._check_stopped)
        finally:
            self._room.release()

    def _check_stopped(self) -> None:
        if self._stopped.is_set():
            raise OperationCancelledError("the save was aborted")

    def _raise_failures(self) -> None:
        for future in self._finishing:
            if future.done() and not future.cancelled():
                future.result()


def read_index(backend: Backend, pack: str, size_bytes: int) -> list[layout.IndexRow]:
    """Return the rows of a pack's index; checks header, trailer and index, no chunk.

    Raises
    ------
    CorruptObjectError, UnsupportedFeatureError
        One of the three is damaged, or of a newer format.
    ObjectNotFoundError, ColdObjectError
        The pack is gone, or has to be thawed first.
    StorageError
        The storage failed.
    """

    def read(offset: int, size: int) -> bytes:
        memory = bytearray(size)
        backend.read_into(pack_key(pack), offset, [memoryview(memory)])
        return bytes(memory)

    layout.parse_header(read(0, layout.HEADER_BYTES), pack_id=pack)
    tail = read(max(0, size_bytes - layout.TRAILER_BYTES), layout.TRAILER_BYTES)
    offset, count, checksum = layout.parse_trailer(tail, pack_bytes=size_bytes, where=pack)
    index = read(offset, count * layout.INDEX_ROW_BYTES)
    return layout.parse_index(index, checksum=checksum, offset=offset, where=pack)
