"""Order in which the ranks of a group read the items of a load, so that they can share pieces."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from torch.distributed.checkpoint.planner import ReadItem

from ckptstore.chunking import in_batches
from ckptstore.format.dtypes import ITEM_BYTES
from ckptstore.integrations.dcp.flat_version import Entry
from ckptstore.states.shared_load import SharedLoad

Items = list[tuple[ReadItem, Entry]]
_ROW = np.dtype([("index", "<i4"), ("nbytes", "<i8")])


def in_windows(together: SharedLoad, items: Items, room: int) -> Iterator[Items]:
    """Yield items of this rank in windows; the others yield the same tensors at the same time.

    A window has the tensors of which at least two ranks want a part, and at most the least `room`
    of bytes of each rank, or one tensor. The items of tensors that only this rank wants come last.
    """
    rows = [
        (entry.index, math.prod(item.lengths) * ITEM_BYTES[entry.dtype]) for item, entry in items
    ]
    mine = np.array([(-1, room), *rows], _ROW)
    count: dict[int, int] = {}
    most: dict[int, int] = {}
    for data in together.peers.gather(mine.tobytes()):
        theirs = np.frombuffer(data, _ROW)
        room, theirs = min(room, int(theirs["nbytes"][0])), theirs[1:]
        indices, where = np.unique(theirs["index"], return_inverse=True)
        sums = np.bincount(where, theirs["nbytes"], len(indices))
        for index, nbytes in zip(indices.tolist(), sums.tolist(), strict=True):
            count[index] = count.get(index, 0) + 1
            most[index] = max(most.get(index, 0), int(nbytes))
    shared = sorted(index for index, ranks in count.items() if ranks > 1)
    for window in in_batches(shared, most.__getitem__, room):
        wanted = set(window)
        yield [one for one in items if one[1].index in wanted]
        together.settle()
    rest = set(most) - set(shared)
    yield [one for one in items if one[1].index in rest]
