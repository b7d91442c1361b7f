"""What is left of damaged packs: bytes that can be read, and all that a chunk may decode to.

Nothing here is known to be right: whoever takes a piece out of it compares it with its id.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product

from ckptstore import limits
from ckptstore.backends.base import Backend
from ckptstore.codecs.codec import CodecError
from ckptstore.codecs.codec_table import CODECS, DELTAS, BaseData, decode
from ckptstore.codecs.plane_layout import Layout
from ckptstore.errors import CorruptObjectError, NotFoundError
from ckptstore.format.keys import pack_key
from ckptstore.format.pack import CHUNK_HEADER_BYTES, parse_chunk_header


def legible(backend: Backend, key: str, offset: int, size: int) -> bytes:
    """Return a range of a pack; what of an encrypted one does not decrypt reads as zeros.

    Raises
    ------
    NotFoundError
        The pack is gone, or ends before.
    StorageError
        The storage failed.
    """
    memory = bytearray(size)
    try:
        backend.read_into(key, offset, [memoryview(memory)])
    except CorruptObjectError:
        half = size // 2
        if size <= limits.SEGMENT_BYTES_DEFAULT:
            return bytes(size)
        first = legible(backend, key, offset, half)
        return first + legible(backend, key, offset + half, size - half)
    return bytes(memory)


def read_chunk(backend: Backend, pack: str, offset: int, stored: int) -> bytes | None:
    """Return the header of a chunk and its stored bytes; None if they cannot be had."""
    memory = bytearray(CHUNK_HEADER_BYTES + stored)
    try:
        backend.read_into(pack_key(pack), offset, [memoryview(memory)])
    except (CorruptObjectError, NotFoundError):
        return None
    return bytes(memory)


def decodings(
    data: bytes, stored: int, slab: int, bases: Sequence[BaseData]
) -> Iterator[memoryview]:
    """Yield what a chunk may decode to: as its header says, or where that is damaged, every way.

    Parameters
    ----------
    data
        The header of the chunk, and its stored bytes.
    stored, slab
        Stored and decoded length that the chunk should have.
    bases
        What it may be a delta to.
    """
    body = memoryview(data)[CHUNK_HEADER_BYTES:]
    ways: Iterable[tuple[int, int]]
    try:
        header = parse_chunk_header(data[:CHUNK_HEADER_BYTES], where="")
    except CorruptObjectError:
        ways = product((*CODECS, *DELTAS), Layout)
    else:
        if (header.stored_bytes, header.raw_bytes) != (stored, slab):
            return  # another chunk lies here
        ways = ((header.codec, header.layout),)
    for codec, layout in ways:
        for base in bases if codec in DELTAS else (None,):
            out = memoryview(bytearray(slab))
            try:
                decode(codec, layout, body, out, base=base)
            except CodecError:
                continue
            yield out
