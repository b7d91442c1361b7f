"""Views that are loaded without their base: memory for what they cover, and its place."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
import torch

from ckptstore.format.dtypes import ITEM_BYTES, strides_of
from ckptstore.format.manifest import TensorRecord
from ckptstore.format.skeleton import Leaf
from ckptstore.tensors.destination import host_memory
from ckptstore.tensors.tensor_bytes import dtype_named, memory_of, tensor_over

VIEWS: Final = frozenset({"view", "quantized"})
"""Kinds of leaves that may view a part of their record."""

_ALIGNED: Final = 16
"""Bytes of the largest element."""

T = TypeVar("T")


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


def plan_parts(leaves: Sequence[Leaf], records: Sequence[TensorRecord]) -> list[Part]:
    """Return what to read of records of which only views are loaded; others are read whole."""
    found: dict[int, list[list[Any]] | None] = {}
    if not any(leaf.kind in VIEWS for leaf in leaves):
        return []
    for leaf in leaves:
        node = view_node(leaf)
        if node is None or records[leaf.index].blocks is not None:
            found[leaf.index] = None
        elif (nodes := found.setdefault(leaf.index, [])) is not None:
            nodes.append(node)
    parts: list[Part] = []
    for index, nodes in found.items():
        if nodes:
            record = records[index]
            mine = [_part(index, boxes) for boxes in _grouped(record, nodes)]
            if sum(part.nbytes for part in mine) < record.nbytes:
                parts += mine
    return parts


@dataclass(frozen=True, slots=True, eq=False)
class _Box:
    """The box of a record's memory that a view lies in."""

    node: list[Any]
    item: int
    shape: tuple[int, ...]
    """Of the record's memory, in elements of `item` bytes."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dims: tuple[int, ...] | None = None
    """Dimensions of the view that are those of the box; None where the view has gaps in it."""


def _grouped(record: TensorRecord, nodes: Sequence[list[Any]]) -> Iterator[list[_Box]]:
    """Yield the boxes of views in groups that do not overlap; those of a group have one shape."""
    for near in _apart(nodes, list(map(_bounds, nodes))):
        boxes = [_box(record, node) for node in near]
        if len({(box.item, box.shape, box.dims is None) for box in boxes}) > 1:
            boxes = [_line(record, node) for node in near]
        todo = [boxes]
        while todo:
            group = todo.pop()
            for dim in range(len(group[0].shape)):
                divided = _apart(group, [_span(box, dim) for box in group])
                if len(divided) > 1:
                    todo += divided
                    break
            else:
                yield group


def _apart(items: Sequence[T], bounds: Sequence[tuple[int, int]]) -> list[list[T]]:
    """Return items in groups whose bounds do not overlap."""
    groups: list[list[T]] = []
    end = 0
    for place in sorted(range(len(items)), key=bounds.__getitem__):
        start, stop = bounds[place]
        if not groups or start >= end:
            groups.append([])
        groups[-1].append(items[place])
        end = max(end, stop)
    return groups


def _span(box: _Box, dim: int) -> tuple[int, int]:
    return box.offsets[dim], box.offsets[dim] + box.sizes[dim]


def _bounds(node: list[Any]) -> tuple[int, int]:
    """Return the first byte of a view in its record, and the one after its last."""
    dtype, start, shape, strides = node[2:6]
    if 0 in shape:
        return 0, 0
    reach = sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    return start, start + (1 + reach) * ITEM_BYTES[dtype]


def _part(index: int, boxes: list[_Box]) -> Part:
    """Return the box around some, and where their views are in it."""
    item, shape = boxes[0].item, boxes[0].shape
    spans = [[_span(box, dim) for box in boxes] for dim in range(len(shape))]
    low = tuple(min(span)[0] for span in spans)
    sizes = tuple(max(stop for _, stop in span) - at for at, span in zip(low, spans, strict=True))
    steps = strides_of(sizes, None)
    views = {}
    for box in boxes:
        if box.dims is None:
            start, strides = box.node[3] - low[0] * item, tuple(box.node[5])
        else:
            moved = zip(box.offsets, low, steps, strict=True)
            start = sum((at - first) * step for at, first, step in moved) * item
            by_dim = dict(zip(box.dims, steps, strict=False))
            strides = tuple(by_dim.get(dim, 0) for dim in range(len(box.node[4])))
        views[id(box.node)] = start, strides
    return Part(index, shape, low, sizes, item, views)


def _line(record: TensorRecord, node: list[Any]) -> _Box:
    """Return the range of a record's elements that a view lies in, aligned for every dtype."""
    item = ITEM_BYTES[record.dtype]
    start, stop = _bounds(node)
    low = start // _ALIGNED * _ALIGNED // item
    return _Box(node, item, (record.nbytes // item,), (low,), (-(-stop // item) - low,))


def _box(record: TensorRecord, node: list[Any]) -> _Box:
    """Return the box of a view, in the shape of memory that makes it one; else the range."""
    dtype, start, shape, strides = node[2:6]
    item = ITEM_BYTES[dtype]
    at, above = start // item, record.nbytes // item
    if 0 in shape:
        return _Box(node, item, (above,), (0,), (0,), ())
    if ITEM_BYTES[record.dtype] % item or start % item:
        return _line(record, node)
    seen, offsets, sizes = [], [], []
    dims = [dim for dim in range(len(shape)) if shape[dim] > 1 and strides[dim]]
    dims.sort(key=lambda dim: -strides[dim])
    for place, dim in enumerate(dims):
        step, size = strides[dim], shape[dim]
        if place and (above % step or at // step + size > above // step):
            return _line(record, node)
        seen.append(-(-above // step))
        offsets.append(at // step)
        sizes.append(size)
        at, above = at % step, step
    if above > 1:  # the elements between those of the innermost dimension
        seen, offsets, sizes = [*seen, above], [*offsets, at], [*sizes, 1]
    return _Box(node, item, tuple(seen), tuple(offsets), tuple(sizes), tuple(dims))
