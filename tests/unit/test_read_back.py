"""Packs read again as soon as they are durable: all damage is found, however chunks are stored."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore.backends.base import Capabilities
from ckptstore.backends.memory import MemoryBackend
from ckptstore.backends.wrapper import WrapperBackend
from ckptstore.codecs.codec_table import encode
from ckptstore.codecs.plane_layout import Layout
from ckptstore.config import SYSTEM, Options
from ckptstore.errors import (
    ColdObjectError,
    CorruptObjectError,
    CorruptTensorError,
    OperationCancelledError,
)
from ckptstore.events import silent
from ckptstore.format.keys import pack_key
from ckptstore.format.manifest import PieceTable
from ckptstore.format.pack import IndexRow
from ckptstore.hashing import blake3_digest
from ckptstore.objects.copying import ReadBack, copy_chunks
from ckptstore.objects.joining import join_chunks
from ckptstore.objects.packs import PackPlan, PackSink
from ckptstore.objects.piece_reader import ReadItem

Rows = dict[str, Sequence[IndexRow]]


@pytest.fixture(params=["raw", "planes", "zstd"])
def written(request: pytest.FixtureRequest) -> tuple[MemoryBackend, Rows, ReadBack]:
    """Give a storage with packs that were copied to it, and what is in them."""
    name = f"read-back/{SYSTEM.random_hex(8)}"
    state = {f"w{i}": torch.randn(500_000) for i in range(4)} | {"s": torch.arange(10)}
    with ckptstore.open(f"memory://{name}", create=True, codec=request.param) as store:
        store.run("r").save(state, step=1)
        table = _table(store)
    target = MemoryBackend(f"{name}-target")
    check = ReadBack(target, SYSTEM)
    rows: Rows = {}

    def after(pack: str, index: Sequence[IndexRow], go_on: Callable[[], None]) -> None:
        rows[pack] = index
        check(pack, index, go_on)

    copy_chunks(
        table, [ReadItem(row=row, out=None, label="w") for row in range(len(table))],
        source=MemoryBackend(name), target=target, environment=SYSTEM, options=Options(),
        progress=silent, after=after,
    )  # fmt: skip
    assert sum(map(len, rows.values())) >= 5
    return target, rows, check


def test_a_flip_anywhere_in_a_chunk_is_found(written: tuple[MemoryBackend, Rows, ReadBack]) -> None:
    """In its header, at its beginning, in its middle, at its end."""
    target, rows, check = written
    tries = 0
    for pack, index in rows.items():
        check(pack, index)
        data = target.get(pack_key(pack), bytes_max=1 << 30)
        for row in index:
            end = row.offset + 64 + row.stored_bytes
            for at in (row.offset + 40, row.offset + 64, (row.offset + end) // 2, end - 1):
                target.put(pack_key(pack), data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
                with pytest.raises(CorruptObjectError, match="does not hold what was written"):
                    check(pack, index)
                tries += 1
        target.put(pack_key(pack), data)
        check(pack, index)
    assert tries >= 20


def test_chunks_that_changed_places_are_found(
    written: tuple[MemoryBackend, Rows, ReadBack],
) -> None:
    """Each chunk is sound, and another one than the index says."""
    _, rows, check = written
    pack, index = next(iter(rows.items()))
    first, second = index[0], index[1]
    assert first.stored_bytes != second.stored_bytes or first.chunk_id != second.chunk_id
    moved = [_with_id(first, second.chunk_id), *index[1:]]
    with pytest.raises(CorruptObjectError, match="another chunk"):
        check(pack, moved)


def test_a_pack_that_is_gone_or_short_is_found(
    written: tuple[MemoryBackend, Rows, ReadBack],
) -> None:
    """Gone altogether, or cut off within its last chunk."""
    target, rows, check = written
    for pack, index in rows.items():
        data = target.get(pack_key(pack), bytes_max=1 << 30)
        last = index[-1]
        target.put(pack_key(pack), data[: last.offset + 64 + last.stored_bytes - 1])
        with pytest.raises(CorruptObjectError, match="does not hold what was written"):
            check(pack, index)
        target.delete(pack_key(pack))
        with pytest.raises(CorruptObjectError, match="is gone"):
            check(pack, index)


def test_a_pack_that_cannot_be_read_yet_counts_as_not_read(
    written: tuple[MemoryBackend, Rows, ReadBack], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It went to a cold storage class: no failure, and no claim."""
    target, rows, check = written
    assert not check.is_cold
    refusing: Any = lambda *_: (_ for _ in ()).throw(ColdObjectError("cold"))  # noqa: E731
    monkeypatch.setattr(target, "read_into", refusing)
    for pack, index in rows.items():
        check(pack, index)
    assert check.is_cold


def test_requests_stay_within_their_size(written: tuple[MemoryBackend, Rows, ReadBack]) -> None:
    """Neighbours are read together, up to the limit; each chunk once."""
    target, rows, _ = written
    for index in rows.values():
        for limit in (1, 3_000_000, 1 << 30):
            parts = list(join_chunks(index, replace(target.capabilities, read_bytes_max=limit)))
            assert [row for part in parts for row in part] == list(index)
            for part in parts:
                size = part[-1].offset + 64 + part[-1].stored_bytes - part[0].offset
                assert len(part) == 1 or size <= limit
    assert list(join_chunks([], target.capabilities)) == []


class _Altering(WrapperBackend):
    """Small packs, of which a byte is another one when they are read."""

    reads = 0

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.inner.capabilities, pack_bytes=1 << 20, part_bytes=1 << 20)

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        self.reads += 1
        self.inner.read_into(key, offset, buffers)
        buffers[0][100] ^= 1


def test_damage_in_the_target_is_not_told_as_damage_in_the_source() -> None:
    """Whichever call hears of it first: the next chunk that is appended, or the end."""
    name = f"read-back/{SYSTEM.random_hex(8)}"
    with ckptstore.open(f"memory://{name}", create=True, codec="raw", chunk_bytes=1 << 20) as store:
        store.run("r").save({f"w{i}": torch.randn(500_000) for i in range(20)}, step=1)
        table = _table(store)
    target = _Altering(MemoryBackend(f"{name}-target"))
    with pytest.raises(CorruptObjectError, match="does not hold what was written") as caught:
        copy_chunks(
            table, [ReadItem(row=row, out=None, label="w") for row in range(len(table))],
            source=MemoryBackend(name), target=target, environment=SYSTEM,
            options=Options(workers=1), progress=silent, after=ReadBack(target, SYSTEM),
        )  # fmt: skip
    assert not isinstance(caught.value, CorruptTensorError)


def test_an_abort_ends_what_is_still_read() -> None:
    """However much of a pack is left to read: an abort does not wait for it."""
    started = threading.Event()

    def read_for_ever(_: str, __: Sequence[IndexRow], go_on: Callable[[], None]) -> None:
        started.set()
        while True:
            go_on()

    target = MemoryBackend(f"read-back/{SYSTEM.random_hex(8)}")
    plan = PackPlan(streams=1, at_once=2, first_bytes=1, most_bytes=1)
    sink = PackSink(target, SYSTEM, plan, after=read_for_ever)
    raw = memoryview(bytes(range(256)))
    sink.append(0, encode(raw, Layout.BYTES, "raw"), blake3_digest(raw), len(raw))
    assert started.wait(60)
    sink.abort()


def test_reading_asks_before_each_request(written: tuple[MemoryBackend, Rows, ReadBack]) -> None:
    """Whether it is to go on: else nothing is read."""
    target, rows, _ = written
    watched = _Altering(target)
    check = ReadBack(watched, SYSTEM)

    def stop() -> None:
        raise OperationCancelledError("the save was aborted")

    for pack, index in rows.items():
        with pytest.raises(OperationCancelledError):
            check(pack, index, stop)
    assert watched.reads == 0


def _table(store: ckptstore.Store) -> PieceTable:
    (version,) = store.versions()
    table: PieceTable = store.repo.manifests.load(version).pieces
    return table


def _with_id(row: IndexRow, chunk_id: bytes) -> IndexRow:
    return IndexRow(
        chunk_id=chunk_id, offset=row.offset, stored_bytes=row.stored_bytes, raw_bytes=row.raw_bytes
    )
