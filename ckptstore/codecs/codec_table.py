"""All codecs, by the code in the chunk header; and which one a chunk gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from ckptstore.codecs.codec import Codec, CodecError, Part
from ckptstore.codecs.delta import ARRANGED, DELTA, Delta
from ckptstore.codecs.differences import PLAIN, DeltaForm
from ckptstore.codecs.plane_layout import Layout
from ckptstore.codecs.planes import Planes
from ckptstore.codecs.zstd import Zstd
from ckptstore.config import CodecChoice


class Raw:
    """Codec that stores a chunk unchanged; on a fast disk the quickest."""

    code = 0
    name = "raw"

    def encode(self, raw: memoryview, layout: Layout) -> Sequence[Part]:
        """Return the chunk itself."""
        del layout
        return (raw,)

    def decode(self, stored: memoryview, layout: Layout, out: memoryview) -> None:
        """Copy; see :class:`ckptstore.codecs.codec.Codec`."""
        del layout
        if len(stored) != len(out):
            raise CodecError(f"raw chunk of {len(stored)} bytes where {len(out)} are due")
        out[:] = stored


_RAW = Raw()
_ZSTD = Zstd()
_PLANES = Planes()
CODECS: Final[dict[int, Codec]] = {codec.code: codec for codec in (_RAW, _ZSTD, _PLANES)}
"""Those that need nothing but the chunk."""
RAW: Final = _RAW.code
_NAMED: Final[dict[str, Codec]] = {codec.name: codec for codec in CODECS.values()}
DELTAS: Final[dict[int, Delta]] = {codec.code: codec for codec in (DELTA, ARRANGED)}
"""Those that need another piece besides; see :class:`BaseData`."""

# A chunk is stored encoded only below this share of its raw bytes. Source: raw chunks are read
# straight into the tensor, which is worth more than 2% of the bytes on every storage measured.
_WORTH: Final = 0.98


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseData:
    """The piece that a delta refers to, in memory."""

    piece_id: bytes
    """BLAKE3-256 of `data`."""
    data: memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A chunk ready to be stored."""

    codec: int
    layout: Layout
    parts: Sequence[Part]
    stored_bytes: int


def encode(raw: memoryview, layout: Layout, choice: CodecChoice) -> Encoded:
    """Return the smallest form of a chunk among those that `choice` allows and that need no base.

    For deltas see :mod:`ckptstore.objects.deltas`. ``auto`` is ``planes`` here: which of the two
    ways a save takes is decided before, and for what is only moved there is nothing to decide.
    """
    codec = _NAMED.get(choice, _PLANES)
    if codec is _PLANES and layout is Layout.BYTES:
        codec = _ZSTD
    if codec is not _RAW and len(raw) > 0:
        used = layout if codec is _PLANES else Layout.BYTES
        parts = codec.encode(raw, used)
        stored = sum(len(part) for part in parts)
        if stored < _WORTH * len(raw):
            return Encoded(codec=codec.code, layout=used, parts=parts, stored_bytes=stored)
    return Encoded(codec=_RAW.code, layout=Layout.BYTES, parts=(raw,), stored_bytes=len(raw))


def encode_delta(raw: memoryview, base: BaseData, layout: Layout, form: DeltaForm) -> Encoded:
    """Return a chunk as its difference to a base.

    Parameters
    ----------
    form
        As :func:`ckptstore.codecs.delta.sampled` chose it.
    """
    codec = DELTA if form == PLAIN else ARRANGED
    parts = codec.encode(raw, base.data, base.piece_id, layout, form)
    stored = sum(map(len, parts))
    return Encoded(codec=codec.code, layout=layout, parts=parts, stored_bytes=stored)


def is_known(codec: int, layout: int) -> bool:
    """Say whether this ckptstore can decode chunks whose headers name `codec` and `layout`."""
    return (codec in CODECS or codec in DELTAS) and layout in set(Layout)


def decoded(
    codec: int, layout: int, stored: memoryview, raw_bytes: int, room: Callable[[int], memoryview]
) -> memoryview:
    """Return what a stored chunk that is no delta decodes to: in `stored` itself if that is raw.

    Parameters
    ----------
    room
        Gives the memory for it otherwise.

    Raises
    ------
    CodecError
        As :func:`decode`.
    """
    if codec == _RAW.code and is_known(codec, layout) and len(stored) == raw_bytes:
        return stored
    out = room(raw_bytes)
    decode(codec, layout, stored, out)
    return out


def decode(
    codec: int, layout: int, stored: memoryview, out: memoryview, *, base: BaseData | None = None
) -> None:
    """Fill `out` from a stored chunk whose header names `codec` and `layout`.

    Parameters
    ----------
    base
        What the manifest says that it refers to. `out` may be the memory of its bytes.

    Raises
    ------
    CodecError
        If either is unknown, the bytes are not of that codec, or there is a base and no delta or
        a delta and no base.
    """
    if not is_known(codec, layout):
        raise CodecError(f"unknown codec {codec} or layout {layout}")
    if (codec in DELTAS) != (base is not None):
        msg = "a delta without a base" if base is None else "a base, and a chunk that is no delta"
        raise CodecError(msg)
    if base is None:
        CODECS[codec].decode(stored, Layout(layout), out)
    else:
        DELTAS[codec].decode(stored, Layout(layout), out, base.data, base.piece_id)
