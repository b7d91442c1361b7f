"""Views that are loaded without their base: memory for what they cover, and its place."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ckptstore.format.dtypes import ITEM_BYTES, strides_of
from ckptstore.format.manifest import TensorRecord
from ckptstore.format.skeleton import Leaf
from ckptstore.tensors.destination import host_memory
from ckptstore.tensors.tensor_bytes import dtype_named, memory_of, tensor_over


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A box of a record's memory, seen in some shape, that one view or several lie in."""

    index: int
    """The record."""
    shape: tuple[int, ...]
    """Of the record's memory, in elements of `item` bytes."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    item: int
    views: dict[int, tuple[int, tuple[int, ...]]]
    """By the id of a node: the view's first byte in the part, and its strides."""

    @property
    def nbytes(self) -> int:
        """Bytes of the box."""
        return math.prod(self.sizes) * self.item

    def memory(self) -> tuple[torch.UntypedStorage, np.ndarray[Any, np.dtype[np.void]]]:
        """Return new host memory for the box, as a storage and as the array to fill."""
        storage = host_memory(self.nbytes)
        view = memory_of(storage, 0, self.nbytes)
        return storage, np.ndarray(self.sizes, np.dtype(f"V{self.item}"), view)

    def tensor(self, storage: torch.UntypedStorage, node: list[Any]) -> torch.Tensor:
        """Return the tensor of a ``V`` node over the memory of the part."""
        start, strides = self.views[id(node)]
        dtype = str(node[2])
        return tensor_over(
            storage, dtype_named(dtype), start // ITEM_BYTES[dtype], node[4], strides
        )


def view_node(leaf: Leaf) -> list[Any] | None:
    """Return the ``V`` node of a leaf, of a quantized one too; None where there is none."""
    node: Any = leaf.node
    inner = node[1] if node[0] == "Q" else node
    return inner if isinstance(inner, list) and inner[0] == "V" else None


def plan_parts(leaves: Iterable[Leaf], records: Sequence[TensorRecord]) -> list[Part]:
    """Return what to read of records of which only views are loaded; others are read whole."""
    found: dict[int, list[list[Any]] | None] = {}
    for leaf in leaves:
        node = view_node(leaf)
        if node is None or records[leaf.index].blocks is not None:
            found[leaf.index] = None
        elif (nodes := found.setdefault(leaf.index, [])) is not None:
            nodes.append(node)
    parts: list[Part] = []
    for index, nodes in found.items():
        mine = [_part(records[index], index, group) for group in _grouped(nodes or ())]
        if sum(part.nbytes for part in mine) < records[index].nbytes:
            parts += mine
    return parts


def _bounds(node: list[Any]) -> tuple[int, int]:
    """Return the first byte of a view in its record, and the one after its last."""
    dtype, start, shape, strides = node[2:6]
    reach = sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    return start, start + (0 if 0 in shape else 1 + reach) * ITEM_BYTES[dtype]


def _grouped(nodes: Iterable[list[Any]]) -> Iterator[list[list[Any]]]:
    """Yield views in groups whose bytes do not overlap."""
    group: list[list[Any]] = []
    end = 0
    for node in sorted(nodes, key=_bounds):
        start, stop = _bounds(node)
        if group and start >= end:
            yield group
            group = []
        group.append(node)
        end = max(end, stop)
    if group:
        yield group


def _part(record: TensorRecord, index: int, nodes: list[list[Any]]) -> Part:
    """Return the box of one view, or else the range of bytes of some."""
    item = ITEM_BYTES[record.dtype]
    if all(node[2:6] == nodes[0][2:6] for node in nodes):
        box = _box(record.nbytes, item, *nodes[0][2:6])
        if box is not None:
            shape, offsets, sizes, strides = box
            views = {id(node): (0, strides) for node in nodes}
            return Part(index, shape, offsets, sizes, ITEM_BYTES[nodes[0][2]], views)
    low = min(_bounds(node)[0] for node in nodes) // 16 * 16 // item  # aligned for every dtype
    high = -(-max(_bounds(node)[1] for node in nodes) // item)
    views = {id(node): (node[3] - low * item, tuple(node[5])) for node in nodes}
    return Part(index, (record.nbytes // item,), (low,), (high - low,), item, views)


def _box(
    nbytes: int, stored: int, dtype: str, start: int, shape: Sequence[int], strides: Sequence[int]
) -> tuple[tuple[int, ...], ...] | None:
    """Return a shape of memory in which a view is a box, offsets, sizes, and the copy's strides.

    None where its elements are no box in any shape.
    """
    item = ITEM_BYTES[dtype]
    if stored % item or start % item or 0 in shape:
        return None
    at, above = start // item, nbytes // item
    seen, offsets, sizes = [], [], []
    dims = sorted(
        (d for d in range(len(shape)) if shape[d] > 1 and strides[d]), key=lambda d: -strides[d]
    )
    for place, dim in enumerate(dims):
        step, size = strides[dim], shape[dim]
        if place and (above % step or at // step + size > above // step):
            return None
        seen.append(-(-above // step))
        offsets.append(at // step)
        sizes.append(size)
        at, above = at % step, step
    if above > 1:  # the elements between those of the innermost dimension
        seen, offsets, sizes = [*seen, above], [*offsets, at], [*sizes, 1]
    own = [0] * len(shape)
    for dim, step in zip(dims, strides_of(sizes, None), strict=False):
        own[dim] = step
    return tuple(seen), tuple(offsets), tuple(sizes), tuple(own)
