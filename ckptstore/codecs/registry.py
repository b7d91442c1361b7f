"""All codecs, by the code in the chunk header; and which one a chunk gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ckptstore.codecs.base import Codec, CodecError, Part
from ckptstore.codecs.layout import Layout
from ckptstore.codecs.planes import Planes
from ckptstore.codecs.raw import Raw
from ckptstore.codecs.zstd import Zstd
from ckptstore.config import CODEC_CHOICES, CodecChoice, check_choice

__all__ = ["CODECS", "CODEC_CHOICES", "CodecChoice", "Encoded", "check_choice", "decode", "encode"]

_RAW = Raw()
_ZSTD = Zstd()
_PLANES = Planes()
CODECS: Final[dict[int, Codec]] = {codec.code: codec for codec in (_RAW, _ZSTD, _PLANES)}

# A chunk is stored encoded only below this share of its raw bytes. Source: raw chunks are read
# straight into the tensor, which is worth more than 2% of the bytes on every storage measured.
_WORTH: Final = 0.98


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A chunk ready to be stored."""

    codec: int
    layout: Layout
    parts: Sequence[Part]
    stored_bytes: int


def encode(raw: memoryview, layout: Layout, choice: CodecChoice) -> Encoded:
    """Return the smallest form of a chunk among those that `choice` allows."""
    if choice != "raw" and len(raw) > 0:
        planes = choice == "auto" and layout is not Layout.BYTES
        codec: Codec = _PLANES if planes else _ZSTD
        used = layout if planes else Layout.BYTES
        parts = codec.encode(raw, used)
        stored = sum(len(part) for part in parts)
        if stored < _WORTH * len(raw):
            return Encoded(codec=codec.code, layout=used, parts=parts, stored_bytes=stored)
    return Encoded(codec=_RAW.code, layout=Layout.BYTES, parts=(raw,), stored_bytes=len(raw))


def decode(codec: int, layout: int, stored: memoryview, out: memoryview) -> None:
    """Fill `out` from a stored chunk whose header names `codec` and `layout`.

    Raises
    ------
    CodecError
        If either is unknown, or the bytes are not of that codec.
    """
    try:
        known, planes = CODECS[codec], Layout(layout)
    except (KeyError, ValueError) as error:
        msg = f"unknown codec {codec} or layout {layout}"
        raise CodecError(msg) from error
    known.decode(stored, planes, out)
