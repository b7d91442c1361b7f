"""Chunks from packs to other packs, in this store or another, as they are stored.

Nothing is encoded again. Each chunk is checked as on a load before it is written: its stored bytes
against their checksum, its content against its id; damage never travels.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from ckptstore.backends.base import Backend
from ckptstore.codecs.base import CodecError
from ckptstore.codecs.layout import Layout
from ckptstore.codecs.registry import Encoded, decode
from ckptstore.config import Environment, Options
from ckptstore.errors import CorruptObjectError, CorruptTensorError, NotFoundError
from ckptstore.events import Progress, ProgressCallback
from ckptstore.format.keys import pack_key
from ckptstore.format.manifest import PieceTable
from ckptstore.format.pack import CHUNK_HEADER_BYTES, parse_chunk_header
from ckptstore.hashing import blake3_digest, xxh3_64
from ckptstore.limits import MIB
from ckptstore.objects.packs import PackSink, Placed
from ckptstore.objects.reader import ChunkRead, Span, Want, plan_spans

__all__ = ["Copied", "copy_chunks"]

# One more pack is open at once for each of these. Source: as for a save (docs/design/0003).
_STREAM_BYTES = 32 * MIB


@dataclass(slots=True, kw_only=True)
class Copied:
    """What was copied and where it lies now."""

    places: dict[tuple[str, int], Placed] = field(default_factory=dict)
    """By pack and offset where it lay."""
    pack_bytes: int = 0
    packs_count: int = 0


def copy_chunks(
    table: PieceTable,
    wants: Sequence[Want],
    *,
    source: Backend,
    target: Backend,
    environment: Environment,
    options: Options,
    progress: ProgressCallback,
) -> Copied:
    """Copy the chunks that hold the wanted pieces into new packs; return when these are durable.

    Each chunk is copied once, whole, in the order in which they lie. Memory stays near
    ``options.host_bytes``. What was written before a failure stays behind as orphans for gc.

    Parameters
    ----------
    wants
        Pieces of `table`, with ``out`` None; labels are for errors.
    progress
        Called with the stored bytes that are done.

    Raises
    ------
    CorruptTensorError
        A chunk is damaged or its pack is gone; the message names tensor, pack and offset.
    StorageError
        One of the storages failed.
    """
    spans = plan_spans(table, wants, source.capabilities)
    total = sum(span.end - span.start for span in spans)
    capabilities = target.capabilities
    per_thread = 2 * source.capabilities.read_bytes_max
    threads = max(1, min(options.workers, options.host_bytes // per_thread, len(spans)))
    spare = options.host_bytes - threads * per_thread
    packs_max = max(1, min(2 * threads, spare // max(1, capabilities.part_bytes)))
    streams = max(1, min(threads, packs_max, total // _STREAM_BYTES))
    sink = PackSink(target, environment, streams=streams, packs_max=packs_max)
    run = _Copying(table=table, source=source, sink=sink, progress=progress, total=total)
    try:
        run.work(iter(spans), threads)
        sink.finish()
    except BaseException:
        sink.abort()
        raise
    run.copied.pack_bytes = sink.stored_bytes
    run.copied.packs_count = sink.packs_count
    return run.copied


@dataclass(slots=True)
class _Copying:
    """One copy while its threads run."""

    table: PieceTable
    source: Backend
    sink: PackSink
    progress: ProgressCallback
    total: int
    done: int = 0
    copied: Copied = field(default_factory=Copied)
    lock: threading.Lock = field(default_factory=threading.Lock)
    stop: threading.Event = field(default_factory=threading.Event)

    def work(self, spans: Iterator[Span], threads: int) -> None:
        """Copy all spans; raise the first failure once every thread has stopped."""
        taking = threading.Lock()

        def loop(turn: int) -> None:
            while True:
                with taking:
                    span = None if self.stop.is_set() else next(spans, None)
                if span is None:
                    return
                try:
                    self._span(turn, span)
                except BaseException:
                    self.stop.set()
                    raise

        with ThreadPoolExecutor(threads, thread_name_prefix="ckptstore-copy") as pool:
            futures = [pool.submit(loop, turn) for turn in range(threads)]
            try:
                wait(futures)
            except BaseException:  # Ctrl-C in the owner: the threads stop after their span
                self.stop.set()
                raise
        for future in futures:
            future.result()

    def _span(self, turn: int, span: Span) -> None:
        memory = memoryview(bytearray(span.end - span.start))
        try:
            self.source.read_into(pack_key(span.pack), span.start, [memory])
        except (CorruptObjectError, NotFoundError) as error:
            raise _lost(span.pack, span.chunks[0], error) from error
        for chunk in span.chunks:
            start = chunk.offset - span.start
            data = memory[start : start + CHUNK_HEADER_BYTES + chunk.stored_bytes]
            try:
                placed = self._chunk(turn, f"{span.pack} at {chunk.offset}", chunk, data)
            except CorruptObjectError as error:
                raise _lost(span.pack, chunk, error) from error
            with self.lock:
                self.copied.places[span.pack, chunk.offset] = placed
        with self.lock:
            self.done += len(memory)
            self.progress(Progress(stage="copy", done=self.done, total=self.total))

    def _chunk(self, turn: int, where: str, chunk: ChunkRead, data: memoryview) -> Placed:
        header = parse_chunk_header(data[:CHUNK_HEADER_BYTES], where=where)
        body = data[CHUNK_HEADER_BYTES:]
        if (header.stored_bytes, header.raw_bytes) != (chunk.stored_bytes, chunk.raw_bytes):
            raise _broken(where, "lengths differ from the manifest's")
        if xxh3_64(body) != header.checksum:
            raise _broken(where, "stored bytes do not match their checksum")
        raw = memoryview(bytearray(header.raw_bytes))
        try:
            decode(header.codec, header.layout, body, raw)
            layout = Layout(header.layout)
        except (CodecError, ValueError) as error:
            raise _broken(where, str(error)) from error
        chunk_id = blake3_digest(raw)
        for want in chunk.wants:
            inner = int(self.table.inner[want.row])
            size = int(self.table.raw[want.row])
            whole = size == header.raw_bytes
            found = chunk_id if whole else blake3_digest(raw[inner : inner + size])
            if found != self.table.ids[want.row].tobytes():
                raise _broken(where, "content does not match its chunk id")
        encoded = Encoded(
            codec=header.codec, layout=layout, parts=(body,), stored_bytes=header.stored_bytes
        )
        return self.sink.append(turn, encoded, chunk_id, header.raw_bytes)


def _lost(
    pack: str, chunk: ChunkRead, error: CorruptObjectError | NotFoundError
) -> CorruptTensorError:
    label = chunk.wants[0].label
    msg = f"tensor {label}: pack {pack}, chunk at byte {chunk.offset}: {error.message}"
    return CorruptTensorError(msg, hint="run ckptstore verify; leave the tensor out (exclude)")


def _broken(where: str, what: str) -> CorruptObjectError:
    msg = f"pack {where}: {what}"
    return CorruptObjectError(msg)
