"""Tensors that are stored as they are, though a rule asked for less: what versions say of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ckptstore import limits
from ckptstore.errors import LimitError
from ckptstore.format.names import encode_metadata

__all__ = ["KEPT", "Kept", "noting"]

KEPT: Final = "kept_lossless"
"""Key of a version's metadata: a list of names, encodings and reasons."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A tensor that is stored as it is, though a rule asked for less."""

    tensor: str
    encoding: str
    why: str


def noting(metadata: Mapping[str, Any], kept: Sequence[Kept]) -> Mapping[str, Any]:
    """Return metadata that list the tensors; those of the user have precedence, and the room."""
    if not kept:
        return metadata
    listed = [[one.tensor, one.encoding, one.why] for one in kept[: limits.KEPT_LISTED_MAX]]
    more = {KEPT: listed, **metadata}
    try:
        encode_metadata(more)
    except LimitError:  # the log has told it
        return metadata
    return more
