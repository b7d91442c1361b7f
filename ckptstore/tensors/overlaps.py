"""Targets of a load that share memory: compared by the elements that they cover.

Needs addresses only: the memory itself is not read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from ckptstore.format.dtypes import ITEM_BYTES, strides_of
from ckptstore.format.manifest import TensorRecord
from ckptstore.format.skeleton import Leaf
from ckptstore.tensors.aliasing import injective, memory_array, share
from ckptstore.tensors.tensor_bytes import dtype_text, extent_of


@dataclass(slots=True, eq=False)
class Fill:
    """A tensor to fill, and what it is filled from."""

    name: str
    target: torch.Tensor
    leaf: Leaf
    record: TensorRecord

    def _source(self) -> tuple[str, int, Sequence[int]]:
        """Return dtype, first byte and strides, in elements, of what it is filled from."""
        node: Any = self.leaf.node
        if isinstance(node, list) and node[0] == "V":
            return node[2], node[3], node[5]
        return self.record.dtype, 0, strides_of(self.record.shape, self.record.order)

    def agrees(self, other: Fill) -> bool:
        """Return whether both write the same values where they overlap.

        They do if both are one view of one tensor, or lie to each other in memory as they do in the
        version.
        """
        mine, theirs = self.target, other.target
        (given, start, steps), (given2, start2, steps2) = self._source(), other._source()
        kinds = (given, mine.dtype), (given2, theirs.dtype)
        bits = (mine.is_conj(), mine.is_neg()) == (theirs.is_conj(), theirs.is_neg())
        converted = any(given != dtype_text(own) for given, own in kinds)
        if self.leaf.index != other.leaf.index or not bits or (converted and kinds[0] != kinds[1]):
            return False
        moved = theirs.data_ptr() - mine.data_ptr()
        dims = [*zip(mine.shape, mine.stride(), steps, strict=True)]
        dims2 = [*zip(theirs.shape, theirs.stride(), steps2, strict=True)]
        if (moved, start, kinds[0], dims) == (0, start2, kinds[1], dims2):
            return True
        alike = all(size <= 1 or own == step for size, own, step in dims + dims2)
        return alike and moved * ITEM_BYTES[given] == (start2 - start) * mine.element_size()


AnyFill = TypeVar("AnyFill", bound=Fill)


def clashes(fills: Iterable[AnyFill]) -> list[tuple[AnyFill, AnyFill]]:
    """Return pairs that overlap and would receive different values, the earlier one first.

    A tensor that is the later one of a pair is not the earlier one of another.
    """
    order = {fill: place for place, fill in enumerate(fills)}
    pairs = [sorted(pair, key=order.__getitem__) for pair in _overlapping(order)]
    gone: set[AnyFill] = set()
    found = []
    for one, other in sorted(pairs, key=lambda pair: order[pair[1]]):
        if not gone & {one, other} and not one.agrees(other):
            gone.add(other)
            found.append((one, other))
    return found


def _overlapping(fills: Iterable[AnyFill]) -> Iterator[tuple[AnyFill, AnyFill]]:
    """Yield pairs with a byte in common; also those where that is too hard to tell."""
    spans: list[tuple[str, int, int, int, AnyFill]] = []
    for place, one in enumerate(fills):
        target = one.target
        if nbytes := extent_of(target) * target.element_size():
            start = target.data_ptr()
            device = "" if target.is_cpu else str(target.device)
            spans.append((device, start, start + nbytes, place, one))
    near: list[tuple[str, int, AnyFill]] = []
    for device, start, stop, _, one in sorted(spans):
        near = [it for it in near if it[0] == device and it[1] > start] if near else near
        for _, _, other in near:
            if share(*(memory_array(it.target, it.target.data_ptr()) for it in (one, other))):
                yield other, one
        near.append((device, stop, one))


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Return whether two elements of a tensor may lie in the same memory."""
    return not (tensor.is_contiguous() or injective(tensor.shape, tensor.stride()))
