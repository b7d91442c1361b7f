"""How much of a version is kept: its level, in the log and in a row of the catalog."""

from __future__ import annotations

from typing import Final, Literal

from ckptstore.format.snapshot import RECORD_ONLY, WEIGHTS_ONLY, VersionRow

Level = Literal["full", "weights", "weights-bf16", "weights-int8", "record"]
"""How much of a version is kept: everything; the tensors of role ``weights``, as they were saved or
in fewer bits; its record only."""

LowerLevel = Literal["weights", "weights-bf16", "weights-int8", "record"]
"""A level that a version can be aged to."""

Part = Literal["full", "weights", "record"]
"""The same without how the weights are written: what a reader of the first format knows."""

LEVELS: Final[tuple[Level, ...]] = ("record", "weights-int8", "weights-bf16", "weights", "full")
"""From the least that is kept to the most."""

LEVEL_FLAGS: Final = {"full": 0, "weights": WEIGHTS_ONLY, "record": RECORD_ONLY}
"""Flags of a row by what is kept."""

_STORED: Final[dict[Level, tuple[Part, str]]] = {
    "record": ("record", ""),
    "weights-int8": ("weights", "int8"),
    "weights-bf16": ("weights", "bf16"),
    "weights": ("weights", ""),
    "full": ("full", ""),
}
_ROUNDED: Final[dict[str, Level]] = {
    encoding: level for level, (_, encoding) in _STORED.items() if encoding
}


def parts_of_level(level: Level) -> tuple[Part, str]:
    """Return what is kept at a level, and what it is rounded to; how the log writes a level."""
    return _STORED[level]


def level_of(row: VersionRow) -> Level:
    """Return how much of a version is kept.

    What a newer ckptstore rounds to and this one does not know counts as ``weights``.
    """
    return level_by(row.flags, row.encoding)


def level_by(flags: int, encoding: str) -> Level:
    """Return the level that a row of these flags and this encoding has."""
    if flags & RECORD_ONLY:
        return "record"
    if flags & WEIGHTS_ONLY:
        return _ROUNDED.get(encoding, "weights")
    return "full"
