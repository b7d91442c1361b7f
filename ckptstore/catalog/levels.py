"""Levels: the part of a version that is kept, in the log and in a row of the catalog."""

from __future__ import annotations

from typing import Final, Literal

from ckptstore.format.snapshot import Flag, VersionRow

Level = Literal["full", "weights", "weights-bf16", "weights-int8", "record"]
"""How much of a version is kept: everything; the tensors of role ``weights``, as they were saved or
in fewer bits; its record only."""

LowerLevel = Literal["weights", "weights-bf16", "weights-int8", "record"]
"""A level that a version can be aged to."""

Part = Literal["full", "weights", "record"]
"""The same without how the weights are written: what a reader of the first format knows."""

LEVEL_FLAGS: Final = {"full": 0, "weights": Flag.WEIGHTS_ONLY, "record": Flag.RECORD_ONLY}
"""Flags of a row by what is kept."""

STORED: Final[dict[Level, tuple[Part, str]]] = {
    "record": ("record", ""),
    "weights-int8": ("weights", "int8"),
    "weights-bf16": ("weights", "bf16"),
    "weights": ("weights", ""),
    "full": ("full", ""),
}
"""Level to the part that it keeps and the encoding of its weights, as in the log."""
LEVELS: Final = tuple(STORED)
"""From the least that is kept to the most."""
_ROUNDED: Final[dict[str, Level]] = {
    encoding: level for level, (_, encoding) in STORED.items() if encoding
}


def level_of(row: VersionRow) -> Level:
    """Return the level of a version.

    An encoding that this ckptstore does not know, since a newer one wrote it, counts as
    ``weights``.
    """
    if row.flags & Flag.RECORD_ONLY:
        return "record"
    return _ROUNDED.get(row.encoding, "weights") if row.flags & Flag.WEIGHTS_ONLY else "full"
