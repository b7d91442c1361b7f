"""The index of a published store, ``published.json``: what a reader without listings begins with.

A JSON envelope (:mod:`ckptstore.format.framing`), and the one object that is replaced. It saves
requests, and nothing else: the log decides, and goes on past it. Unknown fields are ignored.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from ckptstore import limits
from ckptstore.format.framing import decode_record, encode_envelope

FORMAT: Final = 1
Number = Annotated[int, msgspec.Meta(ge=0, le=limits.COMMIT_NUMBER_MAX)]


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of the newest objects of a store when it was published."""

    magic: Literal["ckptstore-published"] = "ckptstore-published"
    format: Annotated[int, msgspec.Meta(ge=1, le=FORMAT)] = FORMAT
    commits: Number = 0
    """Of the newest commit."""
    snapshot: Number = 0
    """Of the newest catalog snapshot; 0 for none."""
    key_record: Number = 0
    """Of the newest record of keys; 0 for a store that is not encrypted."""


def encode_published(published: Published) -> bytes:
    """Return the object."""
    return encode_envelope(msgspec.json.encode(published))


def decode_published(data: bytes, *, where: str) -> Published:
    """Check and parse ``published.json``.

    Raises
    ------
    CorruptObjectError
        If the digest, a type or a limit is wrong.
    UnsupportedFeatureError
        If a newer ckptstore wrote it.
    FormatError
        If it is a record of another kind.
    """
    unlike, hint = "is no index of a published store", "publish the store again"
    return decode_record(Published, data, where=where, unlike=unlike, refusal=where, hint=hint)
