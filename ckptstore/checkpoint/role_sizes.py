"""How many bytes each role of a version has: in memory, new, and stored."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ckptstore.format.manifest import TensorRecord
from ckptstore.model import RoleBytes
from ckptstore.objects.piece_writer import Written


def role_bytes(
    records: Sequence[TensorRecord],
    attempts: Sequence[Written],
    *,
    visible_count: int | None = None,
) -> dict[str, RoleBytes]:
    """Return logical, new and stored bytes by role; what was written twice is stored twice.

    Of a tensor that hidden ones stand for, as much is new as of those; one that is derived from a
    visible tensor has nothing new.

    Parameters
    ----------
    visible_count
        How many of the records leaves name, the first so many; None for all.
    """
    written = attempts[-1]
    visible = records[:visible_count]
    is_new = np.logical_or.reduce([part.is_new for part in attempts])
    stored_new = np.add.reduce([part.stored_new for part in attempts])
    counts = [last - first for first, last in pairwise(written.first)]
    by_piece = np.repeat(np.arange(len(records)), counts)
    raw = written.table.raw[: written.first[-1]].astype(np.float64)
    new = np.bincount(by_piece, raw * is_new, minlength=len(records)).astype(np.float64)
    stored = np.bincount(by_piece, stored_new, minlength=len(records))
    sums = {record.role: [0, 0, 0] for record in sorted(records, key=lambda one: one.role)}
    for place, record in enumerate(records):
        sums[record.role][2] += int(stored[place])
        if place < len(visible):
            sums[record.role][0] += record.nbytes
            sums[record.role][1] += _new_bytes(record, int(new[place]), records, new, len(visible))
    return {
        role: RoleBytes(logical=logical, new=new_bytes, stored=stored_bytes)
        for role, (logical, new_bytes, stored_bytes) in sums.items()
    }


def _new_bytes(
    record: TensorRecord,
    own: int,
    records: Sequence[TensorRecord],
    new: npt.NDArray[np.float64],
    visible_count: int,
) -> int:
    """Return how many bytes of a visible tensor are new."""
    if record.recipe is None:
        return own
    hidden = [place for place in record.recipe.sources if place >= visible_count]
    size = sum(records[place].nbytes for place in hidden)
    return round(record.nbytes * float(new[hidden].sum()) / size) if size else 0
