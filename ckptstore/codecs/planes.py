"""Byte planes, each compressed if that pays and stored as it is if not.

Stored form: for each plane of the layout, in order, a 4-byte little-endian length, whose top bit
says that the plane is a zstd frame; then the planes one after another.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from ckptstore.codecs import plane_layout as layouts
from ckptstore.codecs.codec import CodecError, Part
from ckptstore.codecs.plane_layout import U8, Layout
from ckptstore.codecs.zstd import compress, decompress

_COMPRESSED = 1 << 31
# A plane is stored compressed only if it shrinks below this share: less is not worth the time to
# decompress it. Source: at 2% a 2.6 GB/s decoder still beats an object store, not a page cache.
_WORTH = 0.98
# Before a large plane is compressed, so many spread samples of so many bytes are: mantissas are
# noise, and zstd takes 0.1 ms a MiB to find that out. Source: measured, 0.32 of 2.2 ms for 4 MiB of
# float32. What compresses only outside of the samples, a small part of the plane, stays as it is.
_SAMPLES = 16
_SAMPLE_BYTES = 4096
_SAMPLED_FROM_BYTES = 4 * _SAMPLES * _SAMPLE_BYTES


def _promising(plane: U8) -> bool:
    """Tell whether a plane is worth an attempt at compressing all of it."""
    if plane.nbytes < _SAMPLED_FROM_BYTES:
        return plane.nbytes > 0
    step = plane.nbytes // _SAMPLES
    samples = plane[: step * _SAMPLES].reshape(_SAMPLES, step)[:, :_SAMPLE_BYTES].tobytes()
    return len(compress(samples)) < _WORTH * len(samples)


class Planes:
    """Splits elements into planes; see :mod:`ckptstore.codecs.plane_layout` for why."""

    code = 2
    name = "planes"

    def encode(self, raw: memoryview, layout: Layout) -> Sequence[Part]:
        """Return the table of lengths and the planes."""
        return stored_planes(layouts.split(layout, raw))

    def decode(self, stored: memoryview, layout: Layout, out: memoryview) -> None:
        """Join the planes again; see :class:`ckptstore.codecs.codec.Codec`."""
        try:
            due = layouts.plane_bytes(layout, len(out))
        except ValueError as error:
            raise CodecError(f"no planes: {error}") from error
        layouts.join(layout, read_planes(stored, due), out)


def stored_planes(planes: Sequence[U8], *, local: bool = False) -> Sequence[Part]:
    """Return the table of lengths and the planes, each compressed where that pays.

    Parameters
    ----------
    local
        See :func:`ckptstore.codecs.zstd.compress`.
    """
    lengths: list[int] = []
    parts: list[Part] = []
    for plane in planes:
        frame = compress(plane.data, local=local) if _promising(plane) else b""
        if 0 < len(frame) < _WORTH * plane.nbytes:
            lengths.append(len(frame) | _COMPRESSED)
            parts.append(frame)
        else:
            lengths.append(plane.nbytes)
            parts.append(plane.data)
    return (struct.pack(f"<{len(lengths)}I", *lengths), *parts)


def read_planes(stored: memoryview, due: Sequence[int]) -> list[Part]:
    """Return the planes of these lengths that :func:`stored_planes` stored.

    Raises
    ------
    CodecError
        If `stored` holds something else.
    """
    try:
        lengths = struct.unpack_from(f"<{len(due)}I", stored)
    except struct.error as error:
        raise CodecError(f"no table of planes: {error}") from error
    at = 4 * len(due)
    planes: list[Part] = []
    for length, bytes_due in zip(lengths, due, strict=True):
        end = at + (length & ~_COMPRESSED)
        part = stored[at:end]
        if length & _COMPRESSED:
            planes.append(decompress(part, bytes_due))
        elif length == len(part) == bytes_due:
            planes.append(part)
        else:
            raise CodecError(f"a plane of {length} bytes where {bytes_due} are due")
        at = end
    if at != len(stored):
        raise CodecError(f"planes end at byte {at} of {len(stored)}")
    return planes
