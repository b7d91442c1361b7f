"""Distributes items that several ranks hold among these ranks, evenly by bytes.

The default planner gives a replica to the rank with the least so far, in the order of
the state, and counts a shard as large as its whole tensor. Here each rank first lists the items
that it could write, and the coordinator gives shared ones to the rank with the least, the largest
first. Values that are no tensors stay with the first rank that has them, since they may differ.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from ckptstore.hashing import blake3_digest

_MARK_BYTES = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Offers:
    """Items that a rank holds, before the coordinator distributes them; sent with its plan."""

    marks: bytes
    """8 bytes an item: the beginning of a digest of its name and offsets. Two items of one mark
    could be mistaken for each other: a rank would refuse an item that it lacks, and the save
    fail."""


def offers(items: Iterable[WriteItem]) -> Offers:
    """Return the items of a local plan."""
    return Offers(b"".join(_mark(item) for item in items))


def _mark(item: WriteItem) -> bytes:
    offset = item.index.offset
    text = f"{item.index.fqn}\0{None if offset is None else tuple(offset)}"
    return blake3_digest(text.encode("utf-8", "surrogatepass"))[:_MARK_BYTES]


def balance(plans: Sequence[SavePlan]) -> list[SavePlan]:
    """Return the plans with each item that several ranks hold at only one of them.

    Plans stay unchanged if the planner keeps them for later saves: it would then
    combine decisions of its own with some of these.
    """
    if _kept_by_planner(plans) or not all(isinstance(p.storage_data, Offers) for p in plans):
        return list(plans)
    holders: dict[bytes, list[int]] = {}
    for rank, plan in enumerate(plans):
        marks = plan.storage_data.marks
        for at in range(0, len(marks), _MARK_BYTES):
            holders.setdefault(marks[at : at + _MARK_BYTES], []).append(rank)
    loads = [0] * len(plans)
    chosen: list[list[WriteItem]] = [[] for _ in plans]
    free: list[tuple[int, WriteItem, list[int]]] = []
    for rank, plan in enumerate(plans):
        for item in plan.items:
            ranks = holders.get(_mark(item), [rank])
            if item.type is WriteItemType.BYTE_IO:
                chosen[ranks[0]].append(item)
            elif len(ranks) > 1:
                free.append((_bytes(item), item, ranks))
            else:
                loads[rank] += _bytes(item)
                chosen[rank].append(item)
    for size, item, ranks in sorted(free, key=lambda entry: -entry[0]):
        best = min(ranks, key=lambda rank: (loads[rank], len(chosen[rank]), rank))
        loads[best] += max(size, 1)
        chosen[best].append(item)
    return [
        dataclasses.replace(plan, items=_in_order(items), storage_data=None)
        for plan, items in zip(plans, chosen, strict=True)
    ]


def _in_order(items: list[WriteItem]) -> list[WriteItem]:
    """Group small tensors that belong together: they share chunks."""
    return sorted(items, key=lambda item: (item.index.fqn, item.index.offset or ()))


def _bytes(item: WriteItem) -> int:
    data = item.tensor_data
    return 0 if data is None else math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


def _kept_by_planner(plans: Sequence[SavePlan]) -> bool:
    if not all(getattr(plan, "usable", True) for plan in plans):
        return True
    kept: dict[str, list[SavePlan]] = getattr(SavePlanner, "_cached_global_plan", {})
    known = {id(plan) for cached in kept.values() for plan in cached}
    return any(id(plan) in known for plan in plans)
