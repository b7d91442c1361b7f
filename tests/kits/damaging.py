"""Damage to packs: one flipped bit in each chunk, so that whatever chunk counts is damaged."""

from __future__ import annotations

from pathlib import Path

from ckptstore.backends.base import Backend
from ckptstore.format.pack import (
    CHUNK_HEADER_BYTES,
    INDEX_ROW_BYTES,
    TRAILER_BYTES,
    parse_index,
    parse_trailer,
)

__all__ = ["flip_object", "flip_pack", "flipped"]


def flipped(pack: bytes, *, only: int | None = None) -> bytes:
    """Return a pack with a flipped bit in the middle of each chunk, or of only one of them."""
    trailer = pack[-TRAILER_BYTES:]
    start, count, checksum = parse_trailer(trailer, pack_bytes=len(pack), where="pack")
    index = pack[start : start + count * INDEX_ROW_BYTES]
    rows = parse_index(index, checksum=checksum, offset=start, where="pack")
    data = bytearray(pack)
    for row in rows if only is None else [rows[only]]:
        assert row.stored_bytes
        data[row.offset + CHUNK_HEADER_BYTES + row.stored_bytes // 2] ^= 1
    return bytes(data)


def flip_pack(pack: Path, *, only: int | None = None) -> None:
    """Damage the chunks of a pack on disk, or only one of them."""
    pack.chmod(0o600)
    pack.write_bytes(flipped(pack.read_bytes(), only=only))


def flip_object(backend: Backend, key: str) -> None:
    """Damage each chunk of a pack of a backend."""
    data = flipped(backend.get(key, bytes_max=1 << 30))
    backend.delete(key)
    backend.put(key, data)
