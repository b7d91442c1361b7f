"""Reading the index in a pack's footer."""

from __future__ import annotations

from ckptstore.backends.base import Backend
from ckptstore.format.keys import pack_key
from ckptstore.format.pack import (
    HEADER_BYTES,
    INDEX_ROW_BYTES,
    TRAILER_BYTES,
    IndexRow,
    parse_header,
    parse_index,
    parse_trailer,
)


def read_index(backend: Backend, pack: str, size_bytes: int) -> list[IndexRow]:
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

    parse_header(read(0, HEADER_BYTES), pack_id=pack)
    tail = read(max(0, size_bytes - TRAILER_BYTES), TRAILER_BYTES)
    offset, count, checksum = parse_trailer(tail, pack_bytes=size_bytes, where=pack)
    index = read(offset, count * INDEX_ROW_BYTES)
    return parse_index(index, checksum=checksum, offset=offset, where=pack)
