"""Packs in the making: chunks are appended from many threads, packs become durable behind them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from ckptstore.backends.base import Backend, ObjectWriter
from ckptstore.codecs.codec_table import Encoded
from ckptstore.config import Environment
from ckptstore.errors import OperationCancelledError
from ckptstore.format.keys import pack_key
from ckptstore.format.pack import (
    CHUNK_HEADER_BYTES,
    HEADER_BYTES,
    ChunkHeader,
    IndexRow,
    pack_footer,
    pack_header,
)
from ckptstore.hashing import xxh3_64_of
from ckptstore.objects.pack_plan import PackPlan

After = Callable[[str, Sequence[IndexRow], Callable[[], None]], None]
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
    rows: list[IndexRow] = field(default_factory=list)
    packs: int = 0
    """Closed before this one."""


class _Busy:
    """Counts the seconds in which at least one thread is inside; entered from any thread."""

    def __init__(self, environment: Environment) -> None:
        self._clock = environment.monotonic
        self._lock = threading.Lock()
        self._inside = 0
        self._since = 0.0
        self.seconds = 0.0

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._since = self._clock()
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self.seconds += self._clock() - self._since


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

    def __init__(
        self,
        backend: Backend,
        environment: Environment,
        plan: PackPlan,
        *,
        after: After | None = None,
    ) -> None:
        self._backend = backend
        self._after = after
        self._plan = plan
        self._environment = environment
        self._streams = [_Stream() for _ in range(plan.streams)]
        self._room = threading.BoundedSemaphore(plan.at_once)
        self._finishers = ThreadPoolExecutor(plan.at_once, thread_name_prefix="ckptstore-pack")
        self._finishing: list[Future[None]] = []
        self._stopped = threading.Event()
        self._counting = threading.Lock()
        self.stored_bytes = 0
        """Bytes of all packs so far, headers and indexes included."""
        self.packs_count = 0
        self._busy = _Busy(environment)

    @property
    def storage_s(self) -> float:
        """For how long at least one thread was writing, or waiting until a pack is durable."""
        return self._busy.seconds

    def append(self, turn: int, encoded: Encoded, chunk_id: bytes, raw_bytes: int) -> Placed:
        """Write one chunk and return where it lies; `encoded` may be reused afterwards.

        Parameters
        ----------
        turn
            Picks the stream; callers that run at once pass different numbers.

        Raises
        ------
        StorageError
            Of this write, or of a pack that failed to become durable meanwhile.
        OperationCancelledError
            After ``abort``.
        """
        header = ChunkHeader(
            codec=encoded.codec,
            layout=encoded.layout,
            raw_bytes=raw_bytes,
            stored_bytes=encoded.stored_bytes,
            checksum=xxh3_64_of(encoded.parts),
            chunk_id=chunk_id,
        ).to_bytes()
        parts = [header, *encoded.parts]
        stream = self._streams[turn % len(self._streams)]
        with stream.lock:
            # Only a worker that Ctrl-C hit while it was started: no one waits for such a one.
            self._check_stopped()
            if stream.writer is None:
                self._open(stream)
            assert stream.writer is not None  # noqa: S101  # for the type checker
            with self._busy:
                stream.writer.write(parts)
            placed = Placed(
                pack=stream.pack, offset=stream.offset, stored_bytes=encoded.stored_bytes
            )
            stream.rows.append(
                IndexRow(
                    chunk_id=chunk_id,
                    offset=stream.offset,
                    stored_bytes=encoded.stored_bytes,
                    raw_bytes=raw_bytes,
                )
            )
            stream.offset += CHUNK_HEADER_BYTES + encoded.stored_bytes
            if stream.offset >= self._plan.closed_at(stream.packs):
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
            stream.pack = self._environment.random_hex(16)
            stream.writer = self._backend.open_writer(pack_key(stream.pack))
            stream.writer.write(pack_header(stream.pack))
        except BaseException:
            if stream.writer is not None:
                stream.writer.abort()
                stream.writer = None
            self._room.release()
            raise
        stream.offset = HEADER_BYTES
        stream.rows = []

    def _close(self, stream: _Stream) -> None:
        writer, stream.writer = stream.writer, None
        assert writer is not None  # noqa: S101  # for the type checker
        footer = pack_footer(stream.rows, offset=stream.offset)
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

    def _commit(self, writer: ObjectWriter, pack: str, rows: Sequence[IndexRow]) -> None:
        try:
            with writer:
                if not self._stopped.is_set():
                    with self._busy:
                        writer.commit()
            if self._after is not None and not self._stopped.is_set():
                self._after(pack, rows, self._check_stopped)
        finally:
            self._room.release()

    def _check_stopped(self) -> None:
        if self._stopped.is_set():
            msg = "the save was aborted"
            raise OperationCancelledError(msg)

    def _raise_failures(self) -> None:
        for future in self._finishing:
            if future.done() and not future.cancelled():
                future.result()
