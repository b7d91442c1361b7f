"""Bases: the pieces that deltas refer to, as rows of a manifest's table.

A piece may be stored as its difference to another one, its *base*. The base need not belong to any
tensor of the version: it is a piece of an older one, most likely. So a manifest lists the bases
that it needs behind the pieces of its tensors, as one more tensor of role ``base`` that no leaf
names; in memory these are the rows of the table after those of the last tensor. Packs of bases are
thus named by the manifest like any others, and live as long as a child does.

A base is never a delta itself: whatever is loaded takes one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

NO_BASE: Final = 0xFFFF_FFFF
"""In the column ``base``: the piece is stored by itself."""
ROLE: Final = "base"
"""Of the record that stands for the bases in a manifest."""

Column = npt.NDArray[np.uint32]


def bases_problem(
    base: Column, raw: Column, inner: Column, slab: Column, *, own: int, ids: npt.NDArray[np.uint8]
) -> str:
    """Return why the bases of a table cannot be followed; empty if they can.

    Parameters
    ----------
    base, raw, inner, slab, ids
        Columns of the whole table.
    own
        How many rows are pieces of tensors; the others are the bases.
    """
    if bool((base[own:] != NO_BASE).any()):
        return "a base that is a delta itself"
    rows = np.flatnonzero(base[:own] != NO_BASE)
    named = base[rows].astype(np.int64)
    if own == len(base) or not len(rows):
        return "no base, or none that is needed"
    if int(named.min()) < own or int(named.max()) >= len(base):
        return "a base that is not there"
    if len(np.unique(named)) != len(base) - own:
        return "a base that nothing needs"
    if bool((raw[rows] != raw[named]).any()):
        return "a base of another length"
    if bool((inner[rows] != 0).any()) or bool((slab[rows] != raw[rows]).any()):
        return "a delta that is a part of a chunk"
    if bool((ids[rows] == ids[named]).all(axis=1).any()):
        return "a delta of a piece to itself"
    return ""


def taking(
    base: Column | None, rows: npt.NDArray[Any] | Sequence[int]
) -> tuple[Any, Column | None]:
    """Return which rows a part of a table needs, bases behind the others, and its column ``base``.

    Parameters
    ----------
    rows
        Pieces of tensors, in the order that they are to have.
    """
    wanted = np.asarray(rows, np.int64)
    if base is None:
        return wanted, None
    named = base[wanted]
    deltas = named != NO_BASE
    bases, places = np.unique(named[deltas], return_inverse=True)
    if not len(bases):
        return wanted, None
    column = np.full(len(wanted) + len(bases), NO_BASE, np.uint32)
    column[np.flatnonzero(deltas)] = places.astype(np.uint32) + np.uint32(len(wanted))
    return np.concatenate((wanted, bases.astype(np.int64))), column
