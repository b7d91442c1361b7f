"""Packs: the byte layout of the objects that hold chunks. Pure: bytes to records and back.

::

    header   32   magic "CKPTPACK", u16 format, u16 flags, u32 zero, 16-byte pack id
    chunk    64   header: magic "CHNK", u8 codec, u8 layout, u16 zero, u32 raw length, u32 stored
                  length, u64 xxh3-64 of the stored bytes, 32-byte chunk id, u32 zero, u32 CRC-32
                  of the 60 bytes before
             n    stored bytes; the next chunk follows at once
    index    48   per chunk: 32-byte chunk id, u64 offset of its header, u32 stored, u32 raw length
    trailer  32   u64 offset of the index, u32 count, u32 zero, u64 xxh3-64 of the index,
                  magic "CKPTEND1"

All numbers are little-endian. Every chunk can be found by a forward scan, so the index is only a
convenience: manifests name chunks by offset, and a lost index is rebuilt.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from ckptstore import limits
from ckptstore.errors import CorruptObjectError, UnsupportedFeatureError
from ckptstore.hashing import xxh3_64

FORMAT: Final = 1
_HEADER: Final = struct.Struct("<8sHHI16s")
_CHUNK: Final = struct.Struct("<4sBBHIIQ32sI")
_CRC: Final = struct.Struct("<I")
_ROW: Final = struct.Struct("<32sQII")
_TRAILER: Final = struct.Struct("<QIIQ8s")
_MAGIC: Final = b"CKPTPACK"
CHUNK_MAGIC: Final = b"CHNK"
"""What every chunk's header begins with."""
_END_MAGIC: Final = b"CKPTEND1"

HEADER_BYTES: Final = _HEADER.size
CHUNK_HEADER_BYTES: Final = _CHUNK.size + _CRC.size
INDEX_ROW_BYTES: Final = _ROW.size
TRAILER_BYTES: Final = _TRAILER.size


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """Header of a chunk, which stands before its stored bytes."""

    codec: int
    layout: int
    raw_bytes: int
    stored_bytes: int
    checksum: int
    """xxh3-64 of the stored bytes."""
    chunk_id: bytes
    """BLAKE3-256 of the raw bytes."""

    def to_bytes(self) -> bytes:
        """Return the 64 bytes of the header."""
        sizes, seals = (self.raw_bytes, self.stored_bytes), (self.checksum, self.chunk_id)
        body = _CHUNK.pack(CHUNK_MAGIC, self.codec, self.layout, 0, *sizes, *seals, 0)
        return body + _CRC.pack(zlib.crc32(body))


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexRow:
    """One chunk in the index at the end of a pack."""

    chunk_id: bytes
    offset: int
    """Of the chunk's header, in bytes from the start of the pack."""
    stored_bytes: int
    raw_bytes: int


def pack_header(pack_id: str) -> bytes:
    """Return the 32 bytes that begin a pack; `pack_id` is 32 hex digits."""
    return _HEADER.pack(_MAGIC, FORMAT, 0, 0, bytes.fromhex(pack_id))


def parse_header(data: bytes, *, pack_id: str) -> None:
    """Check the first 32 bytes of a pack against the id in its name.

    Raises
    ------
    CorruptObjectError
        If it is not the beginning of this pack.
    UnsupportedFeatureError
        If it was written in a newer format.
    """
    if len(data) != HEADER_BYTES:
        raise corrupt(pack_id, f"header of {len(data)} bytes")
    magic, version, flags, zero, found = _HEADER.unpack(data)
    if magic != _MAGIC or zero:
        raise corrupt(pack_id, "no pack header")
    if version != FORMAT or flags:
        msg = f"pack {pack_id} has format {version}, flags {flags}; this ckptstore reads format 1"
        raise UnsupportedFeatureError(msg, hint="upgrade ckptstore")
    if found.hex() != pack_id:
        raise corrupt(pack_id, f"it is pack {found.hex()}")


def parse_chunk_header(data: bytes | bytearray | memoryview, *, where: str) -> ChunkHeader:
    """Return the header in 64 bytes of a pack, with every length within its limit.

    Parameters
    ----------
    where
        Pack and offset, for the error; empty where the caller adds them.

    Raises
    ------
    CorruptObjectError
        If magic, check sum or a limit is broken.
    """
    if len(data) != CHUNK_HEADER_BYTES:
        raise corrupt(where, f"chunk header of {len(data)} bytes")
    magic, codec, layout, zero, raw, stored, checksum, chunk_id, zero2 = _CHUNK.unpack_from(data)
    (crc,) = _CRC.unpack_from(data, _CHUNK.size)
    if magic != CHUNK_MAGIC or zlib.crc32(data[: _CHUNK.size]) != crc or zero or zero2:
        raise corrupt(where, "damaged chunk header")
    if raw > limits.CHUNK_RAW_BYTES_MAX or stored > limits.CHUNK_STORED_BYTES_MAX:
        raise corrupt(where, f"chunk of {raw} bytes, {stored} stored, is over the limit")
    return ChunkHeader(codec, layout, raw, stored, checksum, chunk_id)


def pack_footer(rows: Iterable[IndexRow], *, offset: int) -> bytes:
    """Return index and trailer of a pack whose chunks end at byte `offset`."""
    packed = [_ROW.pack(r.chunk_id, r.offset, r.stored_bytes, r.raw_bytes) for r in rows]
    index = b"".join(packed)
    return index + _TRAILER.pack(offset, len(packed), 0, xxh3_64(index), _END_MAGIC)


def parse_trailer(data: bytes, *, pack_bytes: int, where: str) -> tuple[int, int, int]:
    """Return offset, row count and check sum of the index, from a pack's last 32 bytes.

    Raises
    ------
    CorruptObjectError
        If the trailer is damaged or does not fit a pack of `pack_bytes`.
    """
    if len(data) != TRAILER_BYTES:
        raise corrupt(where, f"trailer of {len(data)} bytes")
    offset, count, zero, checksum, magic = _TRAILER.unpack(data)
    if magic != _END_MAGIC or zero:
        raise corrupt(where, "no trailer; the pack is cut short or damaged")
    if offset < HEADER_BYTES or offset + count * INDEX_ROW_BYTES + TRAILER_BYTES != pack_bytes:
        raise corrupt(where, f"index of {count} rows at {offset} in {pack_bytes} bytes")
    return offset, count, checksum


def parse_index(data: bytes, *, checksum: int, offset: int, where: str) -> list[IndexRow]:
    """Return the rows of an index that lies at byte `offset` of its pack.

    Raises
    ------
    CorruptObjectError
        If the check sum differs or a row points outside the chunks.
    """
    if len(data) % INDEX_ROW_BYTES or xxh3_64(data) != checksum:
        raise corrupt(where, "damaged index")
    rows = []
    at = HEADER_BYTES
    for chunk_id, start, stored, raw in _ROW.iter_unpack(data):
        if start != at or raw > limits.CHUNK_RAW_BYTES_MAX:
            raise corrupt(where, f"index row for offset {start} where {at} is due")
        at += CHUNK_HEADER_BYTES + stored
        rows.append(IndexRow(chunk_id=chunk_id, offset=start, stored_bytes=stored, raw_bytes=raw))
    if at != offset:
        raise corrupt(where, f"chunks end at {at}, the index begins at {offset}")
    return rows


def corrupt(where: str, what: str) -> CorruptObjectError:
    """Return the error for a damaged pack, or a part of it; `where` may be empty."""
    msg = f"pack {where}: {what}" if where else what
    return CorruptObjectError(msg, hint="run ckptstore verify to see which versions it touches")
