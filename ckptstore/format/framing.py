r"""Wrapping of records: the JSON envelope and the binary frame. Pure functions, no I/O.

JSON envelope (superblock, commits), byte-exact so that the digest needs no canonical form::

    {"body":<body>,"blake3":"<64 hex>"}\n        digest over the raw bytes of <body>

Binary frame (manifests, snapshots), little-endian::

    offset  size  field
    0       8     magic
    8       2     format
    10      2     flags
    12      4     zero
    16      8     raw_len      bytes of the payload, decompressed
    24      8     stored_len   bytes of the payload that follow the header
    32      32    BLAKE3-256 of the stored payload
    64      ...   payload: one zstd frame that declares its content size

Everything is treated as hostile: lengths, ratio and digest are checked before anything is
decompressed, so that no record can ask for more memory than its reader allows.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final, TypeVar

import msgspec
import zstandard

from ckptstore import limits
from ckptstore.errors import CorruptObjectError, FormatError, LimitError, UnsupportedFeatureError
from ckptstore.hashing import DIGEST_HEX_CHARS, Buffer, blake3_digest, blake3_hex

S = TypeVar("S", bound=msgspec.Struct)
T = TypeVar("T")

UNDECODABLE: Final = (msgspec.DecodeError, RecursionError, UnicodeError)
"""Errors of msgspec's decoders for hostile data."""
_BODY: Final = b'{"body":'
_DIGEST: Final = b',"blake3":"'
_END: Final = b'"}\n'
_TAIL_BYTES: Final = len(_DIGEST) + DIGEST_HEX_CHARS + len(_END)

_HEADER: Final = struct.Struct("<8sHHIQQ32s")
FRAME_HEADER_BYTES: Final = _HEADER.size
_FORMAT: Final = 1

_ZSTD_RAW: Final = struct.Struct("<IBQ")
_ZSTD_MAGIC: Final = 0xFD2FB528
_ZSTD_SINGLE_SEGMENT_FCS8: Final = 0xE0
_ZSTD_BLOCK_BYTES: Final = 128 * limits.KIB


def encode_envelope(body: bytes) -> bytes:
    """Wrap the JSON text `body` with its digest."""
    return b"".join((_BODY, body, _DIGEST, blake3_hex(body).encode(), _END))


def decode_envelope(data: bytes, *, where: str) -> tuple[bytes, str]:
    """Unwrap what :func:`encode_envelope` made; the body is checked, but not parsed.

    Parameters
    ----------
    data
        The whole object; the caller that fetched it bounded its size.
    where
        The object's key, for errors.

    Returns
    -------
    tuple
        The body, and its digest as 64 hex digits.

    Raises
    ------
    CorruptObjectError
        If the wrapping is not exact or the digest does not match.
    """
    split = len(data) - _TAIL_BYTES
    if split < len(_BODY) or not data.startswith(_BODY) or not data.endswith(_END):
        msg = f"{where} is not a record of ckptstore, or is cut off ({len(data)} bytes)"
        raise CorruptObjectError(msg)
    tail, body = data[split:], data[len(_BODY) : split]
    said = tail[len(_DIGEST) : -len(_END)]
    digest = blake3_hex(body)
    if not tail.startswith(_DIGEST) or said != digest.encode():
        raise CorruptObjectError(f"{where} does not match its digest")
    return body, digest


def decode_record(
    kind: type[S], data: bytes, *, where: str, unlike: str, refusal: str, hint: str = ""
) -> S:
    """Check an envelope, and parse the JSON record in it.

    Parameters
    ----------
    kind
        A structure; the defaults of its fields ``magic`` and ``format`` are the only magic and the
        newest format that are accepted.
    unlike
        What to say of a record with another magic, such as ``is no superblock``.
    refusal, hint
        Begin of the message about a damaged record, and its hint.

    Raises
    ------
    CorruptObjectError
        The digest, a type or a limit is wrong.
    FormatError
        It is a record of another kind.
    UnsupportedFeatureError
        A newer version made it.
    """
    body, _ = decode_envelope(data, where=where)
    try:
        return msgspec.json.decode(body, type=kind)
    except UNDECODABLE as error:
        known = {field.name: field.default for field in msgspec.structs.fields(kind)}
        _check_kind_and_format(body, known["magic"], known["format"], where, unlike)
        raise CorruptObjectError(f"{refusal}: {error}", hint=hint) from error


def _check_kind_and_format(
    body: bytes, magic: str, format_max: int, where: str, unlike: str
) -> None:
    """Raise if a record is sound, but of another kind or of a later format."""
    try:
        loose = msgspec.json.decode(body)
        found, version = loose["magic"], loose["format"]
    except (*UNDECODABLE, KeyError, TypeError):
        return
    if found != magic:
        raise FormatError(f"{where} {unlike}: its magic is {str(found)[:40]!r}")
    if isinstance(version, int) and version > format_max:
        msg = f"{where} has format {version}; this version reads up to {format_max}"
        raise UnsupportedFeatureError(msg, hint="a newer ckptstore made it: upgrade")


def parsed(decode: Callable[[bytes], T], raw: bytes, refusal: str) -> T:
    """Return what a decoder makes of a record.

    Raises
    ------
    CorruptObjectError
        It refuses the record; the message begins with `refusal`.
    """
    try:
        return decode(raw)
    except UNDECODABLE as error:
        raise CorruptObjectError(f"{refusal}: {error}") from error


def encode_frame(magic: bytes, payload: Buffer, *, flags: int = 0) -> bytes:
    """Compress `payload` and put the 64-byte header before it.

    Raises
    ------
    LimitError
        If `magic` does not have 8 bytes.
    """
    if len(magic) != 8:
        raise LimitError(f"a magic has 8 bytes, not {len(magic)}")
    raw_len = memoryview(payload).nbytes
    stored = zstandard.ZstdCompressor(limits.RECORD_ZSTD_LEVEL, write_content_size=True).compress(
        payload
    )
    if not _ratio_allowed(raw_len, len(stored)):
        stored = _uncompressed(payload)  # a reader would take it for a bomb
    digest = blake3_digest(stored)
    return _HEADER.pack(magic, _FORMAT, flags, 0, raw_len, len(stored), digest) + stored


def frame_flags(data: Buffer) -> int:
    """Return the flags of a frame that :func:`decode_frame` has accepted."""
    flags: int = _HEADER.unpack_from(memoryview(data).cast("B"))[2]
    return flags


def decode_frame(
    magic: bytes, data: Buffer, *, where: str, raw_bytes_max: int, flags_known: int = 0
) -> bytes:
    """Check what :func:`encode_frame` made and return its payload, decompressed.

    Parameters
    ----------
    magic
        The 8 bytes that this kind of record begins with.
    data
        The whole object; the caller that fetched it bounded its stored size.
    where
        The object's key, for errors.
    raw_bytes_max
        Most bytes that the payload may decompress to.
    flags_known
        Bits that the caller understands.

    Raises
    ------
    CorruptObjectError
        If a length, the digest or the compressed data is wrong, or a limit would be passed.
    UnsupportedFeatureError
        If the format or a flag is not known.
    """
    view = memoryview(data).cast("B")
    if view.nbytes < FRAME_HEADER_BYTES or bytes(view[:8]) != magic:
        msg = f"{where} does not begin with {magic.decode()}: not that kind of record, or cut off"
        raise CorruptObjectError(msg)
    _, version, flags, zero, raw_len, stored_len, digest = _HEADER.unpack_from(view)
    stored = view[FRAME_HEADER_BYTES:]
    if stored_len != stored.nbytes or zero:
        msg = f"{where} says that {stored_len} bytes follow its header, but {stored.nbytes} do"
        raise CorruptObjectError(msg)
    if blake3_digest(stored) != digest:
        raise CorruptObjectError(f"{where} does not match its digest")
    if version != _FORMAT or flags & ~flags_known:
        msg = f"{where} has format {version} and flags {flags:#x}"
        raise UnsupportedFeatureError(msg, hint="a newer ckptstore wrote it: upgrade")
    if raw_len > raw_bytes_max or not _ratio_allowed(raw_len, stored_len):
        msg = f"{where} would decompress from {stored_len} to {raw_len} bytes, which is refused"
        raise CorruptObjectError(msg)
    return _decompress(stored, raw_len, where)


def _ratio_allowed(raw_len: int, stored_len: int) -> bool:
    return raw_len <= max(limits.RECORD_RATIO_FREE_BYTES, stored_len * limits.RECORD_RATIO_MAX)


def _uncompressed(payload: Buffer) -> bytes:
    """Return `payload` as a zstd frame of raw blocks (RFC 8878, sections 3.1.1.1 and 3.1.1.2)."""
    view = memoryview(payload).cast("B")
    parts: list[Buffer] = [_ZSTD_RAW.pack(_ZSTD_MAGIC, _ZSTD_SINGLE_SEGMENT_FCS8, view.nbytes)]
    for start in range(0, view.nbytes, _ZSTD_BLOCK_BYTES):
        block = view[start : start + _ZSTD_BLOCK_BYTES]
        last = start + block.nbytes == view.nbytes
        parts += ((block.nbytes << 3 | last).to_bytes(3, "little"), block)
    return b"".join(parts)


def _decompress(stored: memoryview, raw_len: int, where: str) -> bytes:
    try:
        # zstandard allocates what the frame declares: it must be what the header declares.
        if zstandard.frame_content_size(stored) != raw_len:
            msg = f"{where}: the compressed data declares another length than the header"
            raise CorruptObjectError(msg)
        read = zstandard.ZstdDecompressor().decompress
        payload = read(stored, max_output_size=raw_len, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptObjectError(f"{where} cannot be decompressed: {error}") from error
    if len(payload) != raw_len:
        msg = f"{where} decompresses to {len(payload)} bytes instead of {raw_len}"
        raise CorruptObjectError(msg)
    return payload
