"""The byte layout of packs: what is written comes back, and everything else is refused."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from ckptstore import limits
from ckptstore.errors import CkptStoreError, CorruptObjectError, UnsupportedFeatureError
from ckptstore.format import pack
from ckptstore.format.pack import ChunkHeader, IndexRow
from ckptstore.hashing import blake3_digest, xxh3_64

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
    with pytest.raises(CorruptObjectError, match="it is pack"):
        pack.parse_header(data, pack_id="f" * 32)


@pytest.mark.parametrize(("at", "value"), [(8, 2), (10, 1)])
def test_a_pack_of_a_newer_format_is_told_apart_from_damage(at: int, value: int) -> None:
    """Format 2 or an unknown flag is a feature that is missing, not a damaged file."""
    data = bytearray(pack.pack_header(ID))
    data[at] = value
    with pytest.raises(UnsupportedFeatureError, match=ID):
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
        with pytest.raises(CorruptObjectError, match="pack p"):
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
    with pytest.raises(CorruptObjectError, match="over the limit"):
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
        with pytest.raises(CorruptObjectError):
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
        with pytest.raises(CorruptObjectError):
            pack.parse_index(index, checksum=xxh3_64(index), offset=end, where="p")


@given(st.binary(max_size=200))
def test_parsers_raise_errors_of_the_tree_only(data: bytes) -> None:
    """No bytes make a parser raise anything foreign."""
    for parse in (
        lambda: pack.parse_header(data, pack_id=ID),
        lambda: pack.parse_chunk_header(data, where="p"),
        lambda: pack.parse_trailer(data, pack_bytes=len(data), where="p"),
    ):
        with pytest.raises(CkptStoreError):
            parse()
