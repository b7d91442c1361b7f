"""Zstandard frames, bounded on the way back: shared by the codecs that compress."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import zstandard

from ckptstore.codecs.codec import CodecError, Part
from ckptstore.codecs.plane_layout import Layout

# Level 1 with a longer minimum match and a tiny hash table: on exponent planes, whose only gain is
# in the entropy coder, about 2.5x faster and 8% smaller than plain level 1; on noise it gives up at
# 14 GB/s. Higher levels gain nothing. Source: measured, ``benchmarks/codecs.py``.
_LEVEL = 1
_MIN_MATCH = 7
_HASH_LOG = 6

# For data whose statistics change within a few kilobytes: zstd's blocks, each with a code of its
# own, are no longer than the window. Source: measured, 4 KiB took as much, 16 KiB 2% more and
# 128 KiB 7% more (docs/design/0012-deltas.md).
_LOCAL_WINDOW_LOG = 13


def _compressor(**more: int) -> zstandard.ZstdCompressor:
    parameters = zstandard.ZstdCompressionParameters.from_level(
        _LEVEL, min_match=_MIN_MATCH, hash_log=_HASH_LOG, **more
    )
    return zstandard.ZstdCompressor(compression_params=parameters)


class _Contexts(threading.local):
    """Compressors and decompressor of one thread: threads must not share contexts of zstd."""

    def __init__(self) -> None:
        self.compressor = _compressor()
        self.local_compressor = _compressor(window_log=_LOCAL_WINDOW_LOG)
        self.decompressor = zstandard.ZstdDecompressor()


_contexts = _Contexts()


def compress(data: Part, *, local: bool = False) -> bytes:
    """Return one zstd frame that states its content size.

    Parameters
    ----------
    local
        Whether what follows is soon unlike what came before; takes longer, to decompress as well.
    """
    return (_contexts.local_compressor if local else _contexts.compressor).compress(data)


def decompress(frame: memoryview, size: int) -> bytes:
    """Decompress one frame that must hold exactly `size` bytes.

    Raises
    ------
    CodecError
        If it is no frame, states another content size, or holds more or less than it states.
        The stated size is compared before anything is allocated, and bounds the memory of the
        decoder, whatever window the frame asks for.
    """
    try:
        stated = zstandard.frame_content_size(frame)
        if stated != size:
            raise CodecError(f"zstd frame states {stated} bytes where {size} are due")
        read = _contexts.decompressor.decompress
        data = read(frame, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CodecError(f"not a zstd frame of {size} bytes: {error}") from error
    if len(data) != size:
        raise CodecError(f"zstd frame holds {len(data)} bytes where {size} are due")
    return data


class Zstd:
    """One zstd frame over the bytes as they are; for data without planes."""

    code = 1
    name = "zstd"

    def encode(self, raw: memoryview, layout: Layout) -> Sequence[Part]:
        """Return one frame."""
        del layout
        return (compress(raw),)

    def decode(self, stored: memoryview, layout: Layout, out: memoryview) -> None:
        """Decompress; see :class:`ckptstore.codecs.codec.Codec`."""
        del layout
        out[:] = decompress(stored, len(out))
