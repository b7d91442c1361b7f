"""From pieces back to bytes: parallel fetches of a plan (see ``plan``), all checked.

Every chunk is checked twice: its stored bytes against the checksum in its header before a decoder
sees them, and each piece against its id after decoding. A chunk that was stored raw is read
straight into the destination and its id checked there. What deltas refer to is fetched a span at a
time, as the deltas are, and decoded where the delta is then applied: in the destination.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from ckptstore import errors
from ckptstore.backends.base import Backend
from ckptstore.byte_copies import copy_bytes
from ckptstore.codecs.codec import CodecError
from ckptstore.codecs.codec_table import BaseData, decode
from ckptstore.config import SYSTEM, Options
from ckptstore.errors import CkptStoreError
from ckptstore.events import Counted, ProgressCallback, silent
from ckptstore.format.keys import pack_key
from ckptstore.format.manifest import PieceTable
from ckptstore.format.pack import CHUNK_HEADER_BYTES, ChunkHeader, corrupt, parse_chunk_header
from ckptstore.hashing import blake3_digest, xxh3_64
from ckptstore.objects.joining import Growing, Stored
from ckptstore.objects.plan import ChunkRead, ReadItem, Span, finer, plan_spans
from ckptstore.objects.threads import in_threads
from ckptstore.prefault import prefault

__all__ = ["ChunkRead", "ReadItem", "Span", "checked", "plan_spans", "read_alone", "read_pieces"]


FailureCallback = Callable[[ReadItem, errors.CkptStoreError], None]
"""Told of each piece that cannot be had; may be called from several threads, one at a time."""
_ReadBase: TypeAlias = "tuple[int, ChunkHeader, memoryview]"
"""What deltas refer to, not decoded yet: its row, the header of its chunk, the stored bytes."""


def read_pieces(
    table: PieceTable,
    items: Sequence[ReadItem],
    *,
    backend: Backend,
    options: Options,
    progress: ProgressCallback,
    on_failure: FailureCallback | None = None,
) -> None:
    """Fetch, check and decode pieces into their destinations.

    Parameters
    ----------
    on_failure
        Told of each piece that is lost, and the rest goes on; without it the first failure is
        raised. Failures of the storage itself (no permission, retries used up) are always raised.

    Raises
    ------
    CorruptTensorError
        A piece is damaged or its pack is gone; the message names tensor, pack and offset. The
        contents of the destinations are then undefined.
    StorageError
        The storage failed.
    """
    past = backend.past_caches()
    if past is not backend:  # what is damaged in a cache is read again
        failed: list[ReadItem] = []

        def note(item: ReadItem, _: errors.CkptStoreError) -> None:
            failed.append(item)

        # Processes that share it begin at different places, to fetch for each other.
        _read(table, items, backend, options, progress, note, int(SYSTEM.random_hex(4), 16))
        if not failed:
            return
        items, backend, progress = failed, past, silent
    _read(table, items, backend, options, progress, on_failure)


def read_alone(
    table: PieceTable, row: int, out: memoryview, backend: Backend, scratch: Growing
) -> bool:
    """Read a piece that fills a chunk; return whether `out` holds it, checked.

    In the fewest steps: what is wrong with other pieces :func:`read_pieces` tells.

    Raises
    ------
    StorageError
        The storage failed.
    """
    stored, at = int(table.stored[row]), int(table.offset[row])
    if int(table.slab[row]) != len(out) or table.base_of(row) is not None:
        return False
    key = pack_key(table.packs[int(table.pack[row])])
    try:
        if stored == len(out):
            backend.read_into(key, at + CHUNK_HEADER_BYTES, [out])
        else:
            memory = scratch(CHUNK_HEADER_BYTES + stored)
            backend.read_into(key, at, [memory])
            body = memory[CHUNK_HEADER_BYTES:]
            chunk = ChunkRead(offset=at, stored_bytes=stored, raw_bytes=len(out), items=())
            _decode(checked(chunk, memory[:CHUNK_HEADER_BYTES], body), body, out)
    except (errors.CorruptObjectError, errors.NotFoundError):
        return False
    return bool(blake3_digest(out) == table.ids[row].tobytes())


def _read(
    table: PieceTable,
    items: Sequence[ReadItem],
    backend: Backend,
    options: Options,
    progress: ProgressCallback,
    on_failure: FailureCallback | None,
    start: int = 0,
) -> None:
    threads = max(options.workers, backend.capabilities.concurrency)
    spans = plan_spans(table, items, finer(backend.capabilities, table, items))
    run = _Reading(
        table=table,
        backend=backend,
        count=Counted(progress, "read", sum(int(table.raw[item.row]) for item in items)),
        on_failure=on_failure,
        decoding=threading.Semaphore(options.workers),
    )
    threads = max(1, min(threads, options.host_bytes // run.held_bytes(spans), len(spans)))
    first = start % max(1, len(spans))
    run.work(iter(spans[first:] + spans[:first]), threads)


@dataclass(slots=True)
class _Reading:
    """One read while its threads run."""

    table: PieceTable
    backend: Backend
    count: Counted
    on_failure: FailureCallback | None
    decoding: threading.Semaphore
    """Passed by threads that check and decode: more of them than processors only wait for the
    interpreter's lock, dozens of them for most of a load (docs/design/0026-cores.md)."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def work(self, spans: Iterator[Span], threads: int) -> None:
        """Run all fetches; raise the first failure once every thread has stopped."""

        def begin(_: int) -> Callable[[Span], None]:
            return partial(self._span, scratch=_Rooms())

        in_threads(threads, spans, begin, name="ckptstore-load", fills=True)

    def held_bytes(self, spans: Sequence[Span]) -> int:
        """Return the most memory that a thread takes besides the destinations, at least 1.

        A span without what goes straight to its destination, the slab of a chunk, and as much again
        for what deltas refer to; an eighth more for its stack, its connection and the decoder.
        """
        if self.table.base is not None:
            return 4 * self.backend.capabilities.read_bytes_max
        most = 1
        for span in spans:
            left = [chunk for chunk in span.chunks if self._direct(chunk) is None]
            stored = sum(chunk.stored_bytes for chunk in left)
            slab = max((chunk.raw_bytes for chunk in left if _needs_slab(chunk)), default=0)
            most = max(most, stored + slab)
        return most + most // 8

    def _span(self, span: Span, scratch: _Rooms) -> None:
        items = (item for chunk in span.chunks for item in chunk.items)
        prefault(*[item.out for item in items if item.out is not None])
        try:
            headers, bodies = self._fetch(span, scratch)
        except (errors.CorruptObjectError, errors.NotFoundError) as error:
            if len(span.chunks) > 1:  # find out which chunks are hit
                for chunk in span.chunks:
                    self._span(Span(pack=span.pack, chunks=(chunk,)), scratch)
                return
            self._failed(span.pack, span.chunks[0], error)
            return
        deltas: dict[int, list[_Delta]] = {}
        with self.decoding:
            for chunk, header, body in zip(span.chunks, headers, bodies, strict=True):
                base = self.table.base_of(chunk.items[0].row)
                try:
                    if base is None:
                        self._chunk(span.pack, chunk, header, body, scratch)
                        continue
                    parsed = checked(chunk, header, body)
                    deltas.setdefault(base, []).append(_Delta(span.pack, chunk, parsed, body))
                except errors.CorruptObjectError as error:
                    self._failed(span.pack, chunk, error)
        if deltas:
            self._deltas(deltas, scratch)
        rows = [item.row for chunk in span.chunks for item in chunk.items]
        self.count.add(sum(int(self.table.raw[row]) for row in rows))

    def _deltas(self, deltas: dict[int, list[_Delta]], scratch: _Rooms) -> None:
        """Fetch what deltas refer to, and apply each of them."""
        items = [ReadItem(row=row, out=None, label="") for row in deltas]
        for span in plan_spans(self.table, items, self.backend.capabilities):
            self._bases(span, deltas, scratch)

    def _bases(self, span: Span, deltas: dict[int, list[_Delta]], scratch: _Rooms) -> None:
        try:
            headers, bodies = self._fetch(span, scratch, for_bases=True)
        except (errors.CorruptObjectError, errors.NotFoundError) as error:
            if len(span.chunks) > 1:
                for chunk in span.chunks:
                    self._bases(Span(pack=span.pack, chunks=(chunk,)), deltas, scratch)
                return
            for item in span.chunks[0].items:
                self._base_lost(span, span.chunks[0].offset, deltas[item.row], error)
            return
        for chunk, header, body in zip(span.chunks, headers, bodies, strict=True):
            for item in chunk.items:
                try:
                    with self.decoding:
                        base = item.row, checked(chunk, header, body), body
                        self._apply(span, chunk, base, deltas[item.row], scratch)
                except errors.CorruptObjectError as error:
                    self._base_lost(span, chunk.offset, deltas[item.row], error)

    def _apply(
        self, span: Span, chunk: ChunkRead, base: _ReadBase, deltas: list[_Delta], scratch: _Rooms
    ) -> None:
        """Decode what deltas refer to, and each delta on it, if it can where it is wanted.

        Raises
        ------
        CorruptObjectError
            Of the base.
        """
        row, header, body = base
        inner, size = int(self.table.inner[row]), int(self.table.raw[row])
        base_id = self.table.ids[row].tobytes()
        for delta in deltas:
            first = delta.chunk.items[0]
            out = first.out
            direct = out if size == chunk.raw_bytes else None
            slab = scratch.slab(chunk.raw_bytes) if direct is None else direct
            _decode(header, body, slab)
            piece = slab[inner : inner + size]
            target = piece if out is None else out
            try:
                data = BaseData(piece_id=base_id, data=piece)
                _decode(delta.header, delta.body, target, data)
                self._check(first, target)
            except errors.CorruptObjectError as error:
                if self._is_sound(chunk, base, scratch):
                    self._failed(delta.pack, delta.chunk, error)
                else:
                    self._base_lost(span, chunk.offset, [delta], _unlike_its_id())
                continue
            self._hand_on(delta, target)

    def _is_sound(self, chunk: ChunkRead, base: _ReadBase, scratch: _Rooms) -> bool:
        """Say whether what a delta refers to is what its id says; nobody has looked at that yet."""
        row, header, body = base
        whole = scratch.slab(chunk.raw_bytes)
        _decode(header, body, whole)
        inner = int(self.table.inner[row])
        base_id, size = self._piece(row)
        return blake3_digest(whole[inner : inner + size]) == base_id

    def _hand_on(self, delta: _Delta, piece: memoryview) -> None:
        """Give a piece that was decoded and checked to the others who item the same."""
        first = delta.chunk.items[0]
        for item in delta.chunk.items[1:]:
            if self._piece(item.row) != self._piece(first.row):
                self._failed(delta.pack, delta.chunk, _unlike_its_id(), only=item)
                continue
            if item.out is not None:
                copy_bytes(item.out, piece)
            for take in item.then:
                take(piece)

    def _base_lost(
        self, span: Span, offset: int, deltas: list[_Delta], error: errors.CkptStoreError
    ) -> None:
        """Report pieces whose own chunks may be sound, but not what these refer to."""
        what = "the pack is gone" if isinstance(error, errors.NotFoundError) else error.message
        where = f"pack {span.pack}, byte {offset}"
        for delta in deltas:
            lost = errors.CorruptObjectError(f"its base is lost ({where}): {what}")
            self._failed(delta.pack, delta.chunk, lost)

    def _fetch(
        self, span: Span, scratch: _Rooms, *, for_bases: bool = False
    ) -> tuple[list[memoryview], list[memoryview]]:
        """Read a span; raw chunks go straight to where they are wanted."""
        headers: list[memoryview] = []
        bodies: list[memoryview] = []
        buffers: list[memoryview] = []
        places = [self._direct(chunk) for chunk in span.chunks]
        size = span.end - span.start - sum(len(place) for place in places if place is not None)
        arena = scratch.arena(size, second=for_bases)
        at = span.start
        for chunk, direct in zip(span.chunks, places, strict=True):
            if chunk.offset > at:
                buffers.append(arena.take(chunk.offset - at))
            headers.append(arena.take(CHUNK_HEADER_BYTES))
            bodies.append(arena.take(chunk.stored_bytes) if direct is None else direct)
            buffers += [headers[-1], bodies[-1]]
            at = chunk.offset + CHUNK_HEADER_BYTES + chunk.stored_bytes
        self.backend.read_into(pack_key(span.pack), span.start, buffers)
        return headers, bodies

    def _direct(self, chunk: ChunkRead) -> memoryview | None:
        """Return the destination if the chunk is raw and wanted by one tensor alone."""
        item = chunk.items[0]
        if self.table.base_of(item.row) is not None or len(chunk.items) > 1 or item.out is None:
            return None
        return item.out if chunk.stored_bytes == chunk.raw_bytes == len(item.out) else None

    def _chunk(
        self, pack: str, chunk: ChunkRead, head: memoryview, body: memoryview, scratch: _Rooms
    ) -> None:
        """Check one chunk and bring each piece of it to its destination."""
        first = chunk.items[0]
        direct = body is first.out
        header = checked(chunk, head, None if direct else body)
        if direct and header.codec != 0:
            raise errors.CorruptObjectError("an encoded chunk of its raw length")
        if direct or not _needs_slab(chunk):
            assert first.out is not None  # noqa: S101  # for the type checker
            if not direct:
                _decode(header, body, first.out)
            self._check(first, first.out)
            return
        slab = scratch.slab(chunk.raw_bytes)
        _decode(header, body, slab)
        for item in chunk.items:
            inner = int(self.table.inner[item.row])
            piece = slab[inner : inner + int(self.table.raw[item.row])]
            try:
                self._check(item, piece)
            except errors.CorruptObjectError as error:
                self._failed(pack, chunk, error, only=item)
                continue
            if item.out is not None:
                copy_bytes(item.out, piece)

    def _piece(self, row: int) -> tuple[bytes, int]:
        """Return the id and the length that the manifest says."""
        return self.table.ids[row].tobytes(), int(self.table.raw[row])

    def _check(self, item: ReadItem, piece: memoryview) -> None:
        if blake3_digest(piece) != self.table.ids[item.row].tobytes():
            raise _unlike_its_id()
        for take in item.then:
            take(piece)

    def _sound(self, item: ReadItem) -> bool:
        """Return whether a piece is as it should be, read again into memory of its own."""
        failed: list[int] = []
        again, options = [ReadItem(row=item.row, out=None, label="")], Options(workers=1)

        def note(item: ReadItem, _: errors.CkptStoreError) -> None:
            failed.append(item.row)

        _read(self.table, again, self.backend, options, silent, note)
        return not failed

    def _failed(
        self, pack: str, chunk: ChunkRead, error: CkptStoreError, *, only: ReadItem | None = None
    ) -> None:
        """Report the pieces of a chunk as lost, or raise for the first."""
        gone = isinstance(error, errors.NotFoundError)
        what = "the pack is gone" if gone else error.message
        for item in chunk.items if only is None else (only,):
            msg = f"tensor {item.label}: {what} (pack {pack}, byte {chunk.offset})"
            hint = "run ckptstore verify; other tensors and versions can still be loaded"
            lost: errors.CkptStoreError = errors.CorruptTensorError(msg, hint=hint)
            if item.out is not None and not gone and all(map(self._sound, chunk.items)):
                msg = f"tensor {item.label}: its memory changed while it was filled"
                hint = "what is stored is sound: let no other thread write there, and load it again"
                lost = errors.TornStateError(msg, hint=hint)
            lost.__cause__ = error
            if self.on_failure is None:
                try:
                    raise lost
                finally:
                    del lost  # it refers to this frame: it would keep itself, and all memory
            with self.lock:
                self.on_failure(item, lost)


@dataclass(frozen=True, slots=True)
class _Delta:
    """A delta that was read, and waits for what it refers to."""

    pack: str
    chunk: ChunkRead
    header: ChunkHeader
    body: memoryview


class _Rooms:
    """Memory of one thread, reused from span to span."""

    def __init__(self) -> None:
        self._spans = (Growing(), Growing())
        """For a span, and for one of what its deltas refer to."""
        self.slab = Growing()

    def arena(self, size: int, *, second: bool = False) -> _Arena:
        return _Arena(self._spans[second](size))


class _Arena:
    """Hands out consecutive parts of one buffer."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._at = 0

    def take(self, size: int) -> memoryview:
        part = self._memory[self._at : self._at + size]
        self._at += size
        return part


def _needs_slab(chunk: ChunkRead) -> bool:
    """Return whether a chunk is decoded into memory of its own, not where it is wanted."""
    out = chunk.items[0].out
    return len(chunk.items) > 1 or out is None or len(out) != chunk.raw_bytes


def checked(
    chunk: Stored, header_bytes: memoryview, body: memoryview | None, *, where: str = ""
) -> ChunkHeader:
    """Return the header of a chunk that it fits, and whose stored bytes, if given, are right."""
    header = parse_chunk_header(header_bytes, where=where)
    if (header.stored_bytes, header.raw_bytes) != (chunk.stored_bytes, chunk.raw_bytes):
        raise corrupt(where, "lengths differ from the manifest's")
    if body is not None and xxh3_64(body) != header.checksum:
        raise corrupt(where, "stored bytes do not match their checksum")
    return header


def _decode(
    header: ChunkHeader, body: memoryview, out: memoryview, base: BaseData | None = None
) -> None:
    try:
        decode(header.codec, header.layout, body, out, base=base)
    except CodecError as error:
        raise errors.CorruptObjectError(str(error)) from error


def _unlike_its_id() -> errors.CorruptObjectError:
    return errors.CorruptObjectError("content does not match its chunk id")
