"""The forward scan of packs: finds every intact chunk, whatever was done to the rest."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore import limits
from ckptstore.errors import CkptStoreError
from ckptstore.format.pack import (
    CHUNK_HEADER_BYTES,
    ChunkHeader,
    IndexRow,
    pack_footer,
    pack_header,
)
from ckptstore.hashing import blake3_digest, xxh3_64
from ckptstore.objects.scan import FoundChunk, scan_chunks

PACK = "ab" * 16


def chunk(data: bytes) -> bytes:
    """Return a raw chunk: its header and its bytes."""
    header = ChunkHeader(
        codec=0,
        layout=0,
        raw_bytes=len(data),
        stored_bytes=len(data),
        checksum=xxh3_64(data),
        chunk_id=blake3_digest(data),
    )
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
    except CkptStoreError as error:
        pytest.fail(f"reading cannot fail here: {error}")
    assert all(xxh3_64(f.stored) == f.header.checksum for f in found)


def test_a_pack_of_lies_ends_the_scan_early() -> None:
    """Headers that promise bytes which do not match are not read again without bound."""
    body = b"x" * 5000
    lie = ChunkHeader(
        codec=0,
        layout=0,
        raw_bytes=5000,
        stored_bytes=5000,
        checksum=1,
        chunk_id=blake3_digest(body),
    ).to_bytes()
    data = lie * 400 + body
    asked = 0

    def read(offset: int, size: int) -> bytes:
        nonlocal asked
        asked += size
        return data[offset : offset + size]

    assert list(scan_chunks(read, len(data), start=0)) == []
    assert asked <= (limits.SCAN_REREADS_MAX + 2) * len(data)
