"""Packs: framing, sizes, scans, index and parts; every bit counts."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import ckptstore
from ckptstore import errors, limits
from ckptstore.backends import part_sender
from ckptstore.backends.base import Capabilities
from ckptstore.backends.buffers import BufferPool
from ckptstore.backends.memory import CAPABILITIES, MemoryBackend
from ckptstore.backends.part_sender import PartSender
from ckptstore.backends.parted_writer import PartedWriter
from ckptstore.codecs.codec_table import encode
from ckptstore.codecs.plane_layout import Layout
from ckptstore.config import SYSTEM
from ckptstore.format import pack
from ckptstore.format.keys import pack_key
from ckptstore.format.pack import (
    CHUNK_HEADER_BYTES,
    ChunkHeader,
    IndexRow,
    pack_footer,
    pack_header,
)
from ckptstore.hashing import blake3_digest, xxh3_64
from ckptstore.limits import GIB, MIB
from ckptstore.objects import packs
from ckptstore.objects.packs import plan_packs
from ckptstore.objects.scan import FoundChunk, scan_chunks

ID = "0123456789abcdef" * 2
HEADER = ChunkHeader(
    codec=2, layout=1, raw_bytes=4096, stored_bytes=3000, checksum=2**64 - 1, chunk_id=b"\x07" * 32
)


def test_sizes_are_those_of_the_format_page() -> None:
    """Pack header 32, chunk header 64, index row 48, trailer 32 bytes."""
    sizes = (pack.HEADER_BYTES, pack.CHUNK_HEADER_BYTES, pack.INDEX_ROW_BYTES, pack.TRAILER_BYTES)

    assert sizes == (32, 64, 48, 32)


def test_a_pack_header_comes_back_and_only_for_its_own_pack() -> None:
    """The header of a pack is refused under another name: a swapped file is noticed."""
    data = pack.pack_header(ID)

    assert len(data) == 32
    pack.parse_header(data, pack_id=ID)
    with pytest.raises(errors.CorruptObjectError, match="it is pack"):
        pack.parse_header(data, pack_id="f" * 32)


@pytest.mark.parametrize(("at", "value"), [(8, 2), (10, 1)])
def test_a_pack_of_a_newer_format_is_told_apart_from_damage(at: int, value: int) -> None:
    """Format 2 or an unknown flag is a feature that is missing, not a damaged file."""
    data = bytearray(pack.pack_header(ID))
    data[at] = value
    with pytest.raises(errors.UnsupportedFeatureError, match=ID):
        pack.parse_header(bytes(data), pack_id=ID)


@given(
    st.builds(
        ChunkHeader,
        codec=st.integers(0, 255),
        layout=st.integers(0, 255),
        raw_bytes=st.integers(0, limits.CHUNK_RAW_BYTES_MAX),
        stored_bytes=st.integers(0, limits.CHUNK_STORED_BYTES_MAX),
        checksum=st.integers(0, 2**64 - 1),
        chunk_id=st.binary(min_size=32, max_size=32),
    )
)
def test_chunk_headers_come_back(header: ChunkHeader) -> None:
    """Every header within the limits is read as it was written, in 64 bytes."""
    data = header.to_bytes()

    assert len(data) == 64
    assert pack.parse_chunk_header(data, where="p") == header


def test_every_bit_of_a_chunk_header_counts() -> None:
    """Any single flipped bit of a chunk header is noticed by its own check sum."""
    data = HEADER.to_bytes()
    for bit in range(8 * len(data)):
        torn = bytearray(data)
        torn[bit // 8] ^= 1 << bit % 8
        with pytest.raises(errors.CorruptObjectError, match="pack p"):
            pack.parse_chunk_header(bytes(torn), where="p")


@pytest.mark.parametrize(
    ("raw", "stored"),
    [(limits.CHUNK_RAW_BYTES_MAX + 1, 10), (10, limits.CHUNK_STORED_BYTES_MAX + 1)],
)
def test_chunks_over_the_limit_are_refused(raw: int, stored: int) -> None:
    """A header whose check sum is right cannot ask for more memory than a chunk may take."""
    header = ChunkHeader(
        codec=0, layout=0, raw_bytes=raw, stored_bytes=stored, checksum=0, chunk_id=bytes(32)
    )
    with pytest.raises(errors.CorruptObjectError, match="over the limit"):
        pack.parse_chunk_header(header.to_bytes(), where="p")


def rows_of(sizes: list[int]) -> tuple[list[IndexRow], int]:
    """Return the rows of chunks of these stored sizes, and where they end."""
    rows, at = [], pack.HEADER_BYTES
    for size in sizes:
        chunk_id = blake3_digest(size.to_bytes(8, "little"))
        rows.append(IndexRow(chunk_id=chunk_id, offset=at, stored_bytes=size, raw_bytes=size))
        at += pack.CHUNK_HEADER_BYTES + size
    return rows, at


@given(st.lists(st.integers(0, 100_000), max_size=50))
def test_an_index_comes_back(sizes: list[int]) -> None:
    """Trailer and index of any pack are read as they were written."""
    rows, end = rows_of(sizes)

    assert read_footer(pack.pack_footer(rows, offset=end), end) == rows


def test_every_bit_of_an_index_and_trailer_counts() -> None:
    """Any single flipped bit after the last chunk is noticed."""
    rows, end = rows_of([10, 0, 3])
    footer = pack.pack_footer(rows, offset=end)
    for bit in range(8 * len(footer)):
        torn = bytearray(footer)
        torn[bit // 8] ^= 1 << bit % 8
        with pytest.raises(errors.CorruptObjectError):
            read_footer(bytes(torn), end)


def read_footer(footer: bytes, end: int) -> list[IndexRow]:
    """Return the rows of an index that begins at byte `end` of its pack, as a reader does."""
    size = end + len(footer)
    offset, count, checksum = pack.parse_trailer(footer[-32:], pack_bytes=size, where="p")
    index = footer[: 48 * count]
    return pack.parse_index(index, checksum=checksum, offset=offset, where="p")


def test_an_index_that_does_not_follow_the_chunks_is_refused() -> None:
    """A row that points anywhere but to the end of the chunk before is no index of this pack."""
    rows, end = rows_of([10, 20])
    for wrong in ([rows[1], rows[0]], [rows[0], rows[0]], [rows[1]], [rows[0]]):
        index = pack.pack_footer(wrong, offset=end)[:-32]
        with pytest.raises(errors.CorruptObjectError):
            pack.parse_index(index, checksum=xxh3_64(index), offset=end, where="p")


@given(st.binary(max_size=200))
def test_parsers_raise_errors_of_the_tree_only(data: bytes) -> None:
    """No bytes make a parser raise anything foreign."""
    for parse in (
        lambda: pack.parse_header(data, pack_id=ID),
        lambda: pack.parse_chunk_header(data, where="p"),
        lambda: pack.parse_trailer(data, pack_bytes=len(data), where="p"),
    ):
        with pytest.raises(errors.CkptStoreError):
            parse()


@given(
    total=st.integers(0, 1 << 50), whole=st.integers(1, 4 * GIB), threads=st.integers(1, 64),
    memory=st.integers(0, 8 * GIB), beside=st.integers(0, 64 * MIB),
)  # fmt: skip
def test_packs_in_memory_stay_between_their_bounds(
    *, total: int, whole: int, threads: int, memory: int, beside: int
) -> None:
    """Never above the backend's size or the memory, never tiny, sizes grow; one is always begun."""
    plan = plan_packs(
        total, _capabilities(pack_bytes=whole, part_bytes=whole), threads=threads,
        memory_bytes=memory, beside_bytes=beside,
    )  # fmt: skip
    sizes = [plan.closed_at(turn) for turn in range(70)]
    assert sizes == sorted(sizes)
    assert sizes[-1] == plan.most_bytes <= whole
    assert sizes[0] >= min(whole, limits.PACK_BYTES_FIRST)
    assert plan.most_bytes >= min(whole, limits.PACK_BYTES_MIN)
    assert 1 <= plan.streams <= min(plan.at_once, threads)
    assert plan.at_once <= limits.PACKS_AT_ONCE
    held = max(plan.most_bytes + limits.CHUNK_BYTES_DEFAULT, beside)
    assert plan.at_once == 1 or plan.at_once * held <= memory
    enough = max(max(whole, limits.PACK_BYTES_MIN) + limits.CHUNK_BYTES_DEFAULT, beside)
    if memory >= limits.PACKS_AT_ONCE * enough:
        assert plan.at_once == limits.PACKS_AT_ONCE
        if total >= whole * limits.PACKS_OF_A_WRITE:
            assert plan.most_bytes == whole


@given(total=st.integers(0, 1 << 50), whole=st.integers(2, 4 * GIB), memory=st.integers(0, GIB))
def test_packs_that_leave_as_they_are_written_have_one_size(
    total: int, whole: int, memory: int
) -> None:
    """The backend's own, from the first on: nothing waits for a pack to be full."""
    plan = plan_packs(
        total, _capabilities(pack_bytes=whole, part_bytes=0), threads=2, memory_bytes=memory
    )
    assert plan.closed_at(0) == plan.closed_at(9) == whole


@given(total=st.integers(0, 1 << 50), memory=st.integers(0, GIB), threads=st.integers(1, 16))
def test_packs_in_parts_stay_within_the_memory(total: int, memory: int, threads: int) -> None:
    """The parts that are held at most fit into it, or all packs do; one is always begun."""
    plan = plan_packs(
        total,
        _capabilities(pack_bytes=64 * MIB, part_bytes=limits.PART_BYTES),
        threads=threads,
        memory_bytes=memory,
    )
    whole = plan.most_bytes + limits.CHUNK_BYTES_DEFAULT
    held = min(limits.PARTS_HELD_MAX * limits.PART_BYTES, plan.at_once * whole)
    assert held <= memory or plan.at_once == 1
    assert limits.PACK_BYTES_MIN <= plan.most_bytes <= 64 * MIB
    assert plan.closed_at(0) == plan.closed_at(9) == plan.most_bytes
    if memory >= limits.PARTS_HELD_MAX * limits.PART_BYTES:
        assert plan.at_once * 64 * MIB > held, "the packs do not reach all connections"


@given(total=st.integers(0, 1 << 40), beyond=st.integers(1, 1 << 50), memory=st.integers(0, GIB))
def test_a_part_of_a_write_has_the_packs_of_the_whole(total: int, beyond: int, memory: int) -> None:
    """As large as those of the whole write, the first one too: others are on their way already."""
    size = CAPABILITIES.pack_bytes
    capabilities = _capabilities(pack_bytes=size, part_bytes=size)
    whole = total + beyond
    part = plan_packs(
        total, capabilities, threads=2, memory_bytes=memory, in_memory=3, whole_bytes=whole
    )
    alone = plan_packs(whole, capabilities, threads=2, memory_bytes=memory, in_memory=3)
    assert part.closed_at(0) == part.closed_at(9) == alone.most_bytes
    assert part.at_once == alone.at_once <= limits.PACKS_AT_ONCE


def test_a_little_is_one_pack() -> None:
    """A write of a few megabytes takes one request, as many of them are made."""
    backend = MemoryBackend("little")
    state = {f"w{i}": torch.randn(MIB) for i in range(3)}  # 12 MiB
    with ckptstore.open("memory://little", create=True, codec="raw") as store:
        store.run("r").save(state, step=1)
    assert len(list(backend.list("packs/"))) == 1


def test_a_save_sends_its_first_pack_before_the_last_is_filled() -> None:
    """A state that would fill one pack and a half goes in several; all of it comes back."""
    backend = MemoryBackend("sizes")  # sees what the store puts there
    state = {f"w{i}": torch.randn(2 * MIB) for i in range(12)}  # 96 MiB
    with ckptstore.open("memory://sizes", create=True, codec="raw") as store:
        store.run("r").save(state, step=1)
        sizes = [info.size_bytes for info in backend.list("packs/")]
        assert len(sizes) >= 6
        spare = 2 * limits.CHUNK_BYTES_DEFAULT
        assert max(sizes) < limits.PACK_BYTES_MIN + spare
        assert sum(size < limits.PACK_BYTES_FIRST + spare for size in sizes) >= 2
        loaded = store.load("r@1")
    assert all(torch.equal(loaded[name], state[name]) for name in state)


def _capabilities(*, pack_bytes: int, part_bytes: int) -> Capabilities:
    return replace(CAPABILITIES, pack_bytes=pack_bytes, part_bytes=part_bytes)


class _Late(Future[None]):
    """A result that comes when somebody waits for it."""

    def __init__(self, call: Callable[[], None]) -> None:
        super().__init__()
        self._call = call

    def result(self, timeout: float | None = None) -> None:
        if not self.done():
            self._call()
            self.set_result(None)
        return super().result(timeout)


class _Finishers:
    """Threads that come to their work as late as anybody lets them."""

    def __init__(self, *_: object, **__: object) -> None:
        self._given: list[_Late] = []

    def submit(self, call: Callable[..., None], *arguments: object) -> _Late:
        self._given.append(_Late(partial(call, *arguments)))
        return self._given[-1]

    def shutdown(self, wait: bool = True) -> None:
        """Let it be done, if it is waited for."""
        for one in self._given if wait else ():
            one.result()


def test_a_write_returns_once_its_packs_are_durable(monkeypatch: pytest.MonkeyPatch) -> None:
    """However late the threads are that make packs durable: a commit may name them afterwards."""
    monkeypatch.setattr(packs, "Threads", _Finishers)
    backend = MemoryBackend("pack-sizes/late")
    sink = packs.PackSink(backend, SYSTEM, plan_packs(1, CAPABILITIES, threads=1, memory_bytes=GIB))
    chunk = encode(memoryview(b"x"), Layout.BYTES, "raw")
    placed = sink.append(0, chunk, bytes(32), 1)
    assert not backend.objects
    sink.finish()
    assert pack_key(placed.pack) in backend.objects


PACK = "ab" * 16


def chunk(data: bytes) -> bytes:
    """Return a raw chunk: its header and its bytes."""
    header = ChunkHeader(
        codec=0, layout=0, raw_bytes=len(data), stored_bytes=len(data), checksum=xxh3_64(data),
        chunk_id=blake3_digest(data),
    )  # fmt: skip
    return header.to_bytes() + data


def pack_of(bodies: list[bytes]) -> tuple[bytes, list[tuple[int, int]]]:
    """Return a pack of raw chunks, and where each begins and ends."""
    data, spans, rows = pack_header(PACK), [], []
    for body in bodies:
        start = len(data)
        data += chunk(body)
        spans.append((start, len(data)))
        rows.append(
            IndexRow(
                chunk_id=blake3_digest(body),
                offset=start,
                stored_bytes=len(body),
                raw_bytes=len(body),
            )
        )
    return data + pack_footer(rows, offset=len(data)), spans


def scan(data: bytes) -> list[FoundChunk]:
    """Return what a scan of these bytes finds."""

    def read(offset: int, size: int) -> bytes:
        assert 0 <= offset <= offset + size <= len(data)
        return data[offset : offset + size]

    return list(scan_chunks(read, len(data), start=0))


BODIES = st.lists(
    st.one_of(
        st.binary(min_size=1, max_size=300),
        st.just(b"CHNK" * 20),
        st.binary(max_size=40).map(lambda x: x + chunk(b"a chunk within a chunk")[:70]),
    ),
    min_size=1,
    max_size=6,
)


@given(bodies=BODIES)
def test_an_intact_pack_gives_up_all_its_chunks_in_order(bodies: list[bytes]) -> None:
    """Every chunk, where it lies, and nothing else."""
    data, spans = pack_of(bodies)

    found = scan(data)

    assert [(f.offset, f.stored) for f in found] == [
        (start, body) for (start, _), body in zip(spans, bodies, strict=True)
    ]


@given(bodies=BODIES, data=st.data(), window=st.sampled_from([64, 65, 100, 4096]))
def test_damage_hides_no_chunk_that_it_does_not_touch(
    bodies: list[bytes], data: st.DataObject, window: int
) -> None:
    """After overwriting, cutting out and inserting anywhere, each untouched chunk is found.

    Whatever the window in which magics are searched; and only chunks that match their check sums.
    """
    packed, spans = pack_of(bodies)
    start = data.draw(st.integers(0, len(packed)))
    end = data.draw(st.integers(start, len(packed)))
    instead = data.draw(st.binary(max_size=200))
    torn = packed[:start] + instead + packed[end:]
    shift = len(instead) - (end - start)
    kept = {
        (first, body) if last <= start else (first + shift, body)
        for (first, last), body in zip(spans, bodies, strict=True)
        if last <= start or first >= end
    }
    patch = pytest.MonkeyPatch()
    patch.setattr(limits, "SCAN_WINDOW_BYTES", window)
    # Reading again is bounded; a small pack of lies may pass the bound, an honest one does not.
    patch.setattr(limits, "SCAN_REREADS_MAX", 100)
    try:
        found = scan(torn)
    finally:
        patch.undo()
    covered = [(f.offset, f.offset + CHUNK_HEADER_BYTES + len(f.stored)) for f in found]
    for first, body in kept:
        last = first + CHUNK_HEADER_BYTES + len(body)
        inside = any(a < last and first < b for a, b in covered)
        assert (first, body) in {(f.offset, f.stored) for f in found} or inside
    assert all(xxh3_64(f.stored) == f.header.checksum for f in found)


@given(data=st.binary(max_size=3000))
def test_any_bytes_raise_nothing_but_typed_errors(data: bytes) -> None:
    """Arbitrary bytes are scanned to their end, without a chunk being made up."""
    try:
        found = scan(data)
    except errors.CkptStoreError as error:
        pytest.fail(f"reading cannot fail here: {error}")
    assert all(xxh3_64(f.stored) == f.header.checksum for f in found)


def test_a_pack_of_lies_ends_the_scan_early() -> None:
    """Headers that promise bytes which do not match are not read again without bound."""
    body = b"x" * 5000
    lie = ChunkHeader(
        codec=0, layout=0, raw_bytes=5000, stored_bytes=5000, checksum=1,
        chunk_id=blake3_digest(body),
    ).to_bytes()  # fmt: skip
    data = lie * 400 + body
    asked = 0

    def read(offset: int, size: int) -> bytes:
        nonlocal asked
        asked += size
        return data[offset : offset + size]

    assert list(scan_chunks(read, len(data), start=0)) == []
    assert asked <= (limits.SCAN_REREADS_MAX + 2) * len(data)


PART = 100
MOST = 4


class Storage:
    """Takes objects whole or in parts; fails as often as it is told to."""

    def __init__(self, failures: Sequence[Exception] = ()) -> None:
        self.objects: list[bytes] = []
        self.calls: list[str] = []
        self.abandoned = 0
        self.gate: threading.Event | None = None
        """Parts wait for it."""
        self.at_once = self.most_at_once = 0
        self._failures = list(failures)
        self._parts: dict[int, bytes] = {}
        self._lock = threading.Lock()

    def _call(self, name: str) -> None:
        with self._lock:
            self.calls.append(name)
            if self._failures:
                raise self._failures.pop(0)

    def whole(self, body: Sequence[memoryview]) -> None:
        self._call("whole")
        self.objects.append(b"".join(body))

    def begin(self) -> None:
        self._call("begin")

    def part(self, number: int, body: Sequence[memoryview]) -> int:
        with self._lock:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            if self.gate is not None:
                assert self.gate.wait(120)
            self._call(f"part {number}")
            self._parts[number] = b"".join(body)
        finally:
            with self._lock:
                self.at_once -= 1
        return number

    def complete(self, receipts: Sequence[Any], size_bytes: int) -> None:
        self._call("complete")
        data = b"".join(self._parts[number] for number in receipts)
        assert len(data) == size_bytes
        self.objects.append(data)

    def abandon(self) -> None:
        assert not self.at_once
        self.abandoned += 1
        raise errors.StorageError("it fails, too")


@contextmanager
def small_parts() -> Iterator[PartSender]:
    """Give threads and memory for a few tiny parts; all of it is given back."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "PART_BYTES", PART)
        patch.setattr(part_sender, "SMALL_PART_BYTES", PART)
        sender = PartSender(MOST, MOST * PART)
        yield sender
        sender.close()
        assert sender._held_bytes == 0, "memory was not given back, or twice"


@pytest.fixture
def sender() -> Iterator[PartSender]:
    """Return threads and memory for a few tiny parts."""
    with small_parts() as found:
        yield found


def test_an_object_is_what_was_written(sender: PartSender) -> None:
    """Whatever the pieces are; one that fits into a part takes one request."""
    for sizes in ([], [0], [1], [100], [60, 60], [1000], [7] * 100, [30, 500, 1], [100, 100]):
        storage = Storage()
        parts = [os.urandom(size) for size in sizes]
        with PartedWriter(storage, sender) as writer:
            for part in parts[:2]:
                writer.write(part)
            writer.write([bytearray(part) for part in parts[2:]])
            assert not storage.objects
            writer.commit()
            writer.commit()
        assert storage.objects == [b"".join(parts)]
        count = -(-sum(sizes) // PART)
        assert len(storage.calls) == (1 if count < 2 else count + 2)
        assert not storage.abandoned
    with pytest.raises(ValueError, match="finished"):
        writer.write(b"x")


@given(pieces=st.lists(st.tuples(st.integers(0, 350), st.booleans()), max_size=12))
def test_memory_that_is_kept_stays_until_it_was_sent(pieces: list[tuple[int, bool]]) -> None:
    """Each buffer is given back once, when no part needs it: also after an abort."""
    for ends in ("commit", "abort"):
        storage = Storage()
        done: list[int] = []
        data = [os.urandom(size) for size, _ in pieces]
        with small_parts() as sender, PartedWriter(storage, sender) as writer:
            for number, (piece, (_, kept)) in enumerate(zip(data, pieces, strict=True)):
                memory = bytearray(piece)
                wipe = partial(_wipe, memory, done, number)
                if kept:
                    view = memoryview(memory)
                    writer.write_kept([view[: len(piece) // 2], view[len(piece) // 2 :]], wipe)
                else:
                    writer.write(memory)
                    wipe()
            getattr(writer, ends)()
        assert sorted(done) == list(range(len(pieces)))
        assert storage.objects == ([b"".join(data)] if ends == "commit" else [])


def _wipe(memory: bytearray, done: list[int], number: int) -> None:
    """Use memory again, as its owner may."""
    memory[:] = bytes(len(memory))
    done.append(number)


def test_two_objects_never_share_memory(sender: PartSender) -> None:
    """Also when many threads write at once; never more parts on their way than allowed."""
    most = []

    def write(number: int) -> bool:
        storage = Storage()
        data = bytes([number % 251]) * (number % 1500)
        with PartedWriter(storage, sender) as writer:
            for at in range(0, len(data), 70):
                writer.write(data[at : at + 70])
            writer.commit()
        most.append(storage.most_at_once)
        return storage.objects == [data]

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(write, range(400)))
    assert max(most) <= MOST


@given(failures=st.lists(st.booleans(), max_size=12))
def test_a_part_that_failed_for_a_while_is_sent_again(failures: list[bool]) -> None:
    """Each call of commit tries what failed before; the object is whole, whichever calls failed."""
    with small_parts() as sender:
        storage = Storage([errors.TransientStorageError("busy") for fails in failures if fails])
        data = os.urandom(6 * PART + 1)
        with PartedWriter(storage, sender) as writer:
            for at in range(0, len(data), 130):
                writer.write(data[at : at + 130])
            for _ in range(20):
                try:
                    writer.commit()
                except errors.TransientStorageError:
                    assert not storage.objects
                    continue
                break
        assert storage.objects == [data]
        assert not storage.abandoned


def test_a_lasting_failure_is_raised_and_the_parts_are_dropped(sender: PartSender) -> None:
    """By a later write or the commit; the error is that of the part, not that of dropping it."""
    storage = Storage([errors.StoragePermissionError("no"), errors.StoragePermissionError("no")])
    with PartedWriter(storage, sender) as writer:
        with pytest.raises(errors.StoragePermissionError):  # noqa: PT012 - by one of them
            for _ in range(100):
                writer.write(bytes(PART))
            writer.commit()
        with pytest.raises(errors.StoragePermissionError):
            writer.commit()
    assert not storage.objects


def test_an_abort_drops_the_parts_once_none_is_on_its_way(sender: PartSender) -> None:
    """It waits for no request itself, and no object appears."""
    storage = Storage()
    storage.gate = threading.Event()
    with PartedWriter(storage, sender) as writer:
        writer.write(bytes(3 * PART))
        writer.abort()
        writer.abort()
        before = storage.abandoned
    storage.gate.set()
    sender.close()
    assert (before, storage.abandoned) == (0, 1)
    assert not storage.objects
    assert sender._held_bytes == 0


def test_writers_that_fill_the_memory_do_not_wait_for_each_other(sender: PartSender) -> None:
    """More unfinished parts than there is memory for: with none on its way, there is one more."""
    writers = [PartedWriter(Storage(), sender) for _ in range(3 * MOST)]
    for writer in writers:
        writer.write(bytes(PART))
    for writer in writers:
        writer.write(bytes(PART // 2))
    for writer in writers:
        writer.commit()
        assert writer._upload.objects == [bytes(PART + PART // 2)]  # type: ignore[attr-defined]


def test_the_memory_kept_is_bounded() -> None:
    """Buffers are used again; closing lets go of all; a pickle carries none."""
    pool = BufferPool(buffer_bytes=1000, kept_max=8, kept_bytes=2500)
    one = pool.take()
    pool.give(one)
    assert pool.take() is one

    def give(count: int, touched: int) -> int:
        taken = [pool.take() for _ in range(count)]
        for memory in taken:
            memory.touched = touched
            pool.give(memory)
        return len(pool._free)

    assert give(6, 100) == 6
    assert give(10, 100) == 8
    assert not pickle.loads(pickle.dumps(pool))._free  # noqa: S301
    pool.clear()
    assert give(4, 1000) == 2
    assert sum(buffer.touched for buffer in pool._free) == 2000
