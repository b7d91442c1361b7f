"""Finds tensors of a state that share memory, and chooses the tensors to store for them.

Leaves of one storage are grouped by the bytes that they really touch:

- same place, shape and strides: one tensor, many leaves (tied);
- bytes in common, but not the same view: one base tensor, and views of it; the base is the leaf
  that contains the others, or else the range of bytes from the first to the last one;
- nothing in common: separate tensors, whatever lies between them in the storage.

A tensor with gaps is stored densely. Dimensions of stride 0 are stored once. A tensor whose
elements overlap each other otherwise (``unfold``) is stored as the range of bytes below it.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch

from ckptstore import limits
from ckptstore.format.dtypes import strides_of
from ckptstore.format.paths import Path
from ckptstore.format.skeleton import Node
from ckptstore.tensors.tensor_bytes import (
    SourceTensor,
    TensorBytes,
    TensorPayload,
    dtype_text,
    extent_of,
    offset_of,
    tensor_over,
)


class Occurrence(msgspec.Struct, kw_only=True, eq=False):
    """A tensor met while walking the state; `node` is filled in once its record is known."""

    tensor: torch.Tensor
    path: Path
    position: int
    """Number of leaves before it."""
    node: list[Node]
    """Empty until :meth:`Pending.fill`."""
    flags: int
    identity: int
    """id() of the Python object that the leaf stands for."""
    device: str
    """Its device; empty for the CPU."""


class Pending(msgspec.Struct, kw_only=True, eq=False):
    """A tensor to store that has no index yet."""

    position: int
    """Of its first leaf."""
    dtype: str
    shape: tuple[int, ...]
    order: tuple[int, ...] | None
    payload: TensorPayload
    paths: list[Path]
    whole: list[Occurrence] = []
    """Leaves that are this tensor."""
    views: list[tuple[Occurrence, list[Node]]] = []
    """Leaves that view it, with dtype, byte offset, shape and strides."""
    raw: list[Node] | None = None
    """The node of a leaf that is no tensor; gets the index at position 1."""

    def fill(self, index: int) -> SourceTensor:
        """Write `index` into the nodes of the leaves and return the tensor to store."""
        objects: dict[int, int] = {}
        for occurrence in self.whole:
            _fill(occurrence, ["T", index], objects)
        for occurrence, place in self.views:
            _fill(occurrence, ["V", index, *place], objects)
        if self.raw is not None:
            self.raw[1] = index
        return SourceTensor(
            dtype=self.dtype,
            shape=self.shape,
            order=self.order,
            paths=tuple(self.paths),
            payload=self.payload,
            watched=tuple([one.tensor for one in self.whole + [leaf for leaf, _ in self.views]]),
        )


def _fill(occurrence: Occurrence, node: list[Node], objects: dict[int, int]) -> None:
    number = objects.setdefault(occurrence.identity, len(objects))
    tail: list[Node] = [occurrence.flags, number, occurrence.device]
    while tail and not tail[-1]:
        tail.pop()
    occurrence.node[:] = node + tail


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Place:
    """One view of a storage, with the leaves that are exactly this view."""

    tensor: torch.Tensor
    item: int
    start: int
    """First byte in the storage."""
    stop: int
    """Past the last byte."""
    leaves: list[Occurrence]


def resolve_storage(occurrences: Sequence[Occurrence]) -> list[Pending]:
    """Return the tensors to store for the leaves of one storage, all of known dtypes."""
    if len(occurrences) == 1:
        tensor = occurrences[0].tensor
        if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            shape = tensor.shape
            plain = 0 not in shape and 1 not in shape  # then its strides are those of its shape
            if plain or tensor.stride() == strides_of(shape, None):  # the common case, made fast
                return [_whole(occurrences, tensor, None, dense=True)]
    by_view: dict[tuple[object, ...], list[Occurrence]] = {}
    for occurrence in occurrences:
        tensor = occurrence.tensor
        key = (tensor.dtype, offset_of(tensor), tensor.shape, tensor.stride(),
               tensor.is_conj(), tensor.is_neg())  # fmt: skip
        by_view.setdefault(key, []).append(occurrence)
    if len(by_view) == 1:
        return [_alone(_place(list(occurrences)))]
    places = [_place(leaves) for leaves in by_view.values()]
    pending: list[Pending] = []
    shared: list[_Place] = []
    for place in places:
        if place.tensor.is_conj() or place.tensor.is_neg() or place.start == place.stop:
            pending.append(_alone(place))
        else:
            shared.append(place)
    groups = _overlapping(shared)
    pending += [_alone(group[0]) if len(group) == 1 else _together(group) for group in groups]
    return pending


def _place(leaves: list[Occurrence]) -> _Place:
    tensor = leaves[0].tensor
    item = tensor.element_size()
    start = offset_of(tensor) * item
    return _Place(
        tensor=tensor, item=item, start=start, stop=start + extent_of(tensor) * item, leaves=leaves
    )


def memory_order(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
    """Return the dimensions from the outermost in memory to the innermost; None if 0, 1, 2, ..."""
    dims = range(len(shape))
    order = tuple(sorted(dims, key=lambda dim: (-strides[dim], shape[dim] == 1, dim)))
    return None if order == tuple(dims) else order


def _alone(place: _Place) -> Pending:
    tensor = place.tensor
    shape, strides = tuple(tensor.shape), tensor.stride()
    plain = not (tensor.is_conj() or tensor.is_neg())
    if tensor.is_contiguous() and strides == strides_of(shape, None):
        return _whole(place.leaves, tensor, None, dense=plain)
    once = tuple(1 if step == 0 else size for size, step in zip(shape, strides, strict=True))
    if once != shape and 0 not in shape:
        tensor = tensor.as_strided(once, [step or 1 for step in strides])
    order = memory_order(once, tensor.stride())
    if not injective(once, tensor.stride()):
        if plain:
            return _together([place])
        made = place.tensor.detach().resolve_conj().resolve_neg()  # a base has no such bits
        return _whole(place.leaves, made.contiguous(), None, dense=True)
    dense_strides = strides_of(once, order)
    dense = plain and same_strides(once, tensor.stride(), dense_strides)
    pending = _whole(place.leaves, tensor, order, dense=dense)
    steps = zip(strides, dense_strides, strict=True)
    view = [old if dense or old == 0 else new for old, new in steps]
    if (once, view) != (shape, list(dense_strides)):
        # Dimensions of stride 0, or odd strides of dimensions of size 1, which torch may read.
        pending.whole = []
        entry: list[Node] = [pending.dtype, 0, list(shape), list(view)]
        pending.views = [(leaf, entry) for leaf in place.leaves]
    return pending


def _whole(
    leaves: Sequence[Occurrence],
    tensor: torch.Tensor,
    order: tuple[int, ...] | None,
    *,
    dense: bool,
) -> Pending:
    return Pending(
        position=leaves[0].position,
        dtype=dtype_text(tensor.dtype) or "",
        shape=tuple(tensor.shape),
        order=order,
        payload=TensorBytes(tensor, order, dense=dense),
        paths=[leaf.path for leaf in leaves],
        whole=list(leaves),
    )


def same_strides(shape: Sequence[int], a: Sequence[int], b: Sequence[int]) -> bool:
    """Return whether two strides walk the same memory; dimensions of size 1 do not count."""
    return all(size == 1 or x == y for size, x, y in zip(shape, a, b, strict=True)) or 0 in shape


def injective(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether no two elements overlap: each step is longer than all dimensions inside it."""
    reach = 0
    for step, size in sorted(zip(strides, shape, strict=True)):
        if size > 1 and step <= reach:
            return False
        reach += step * max(size - 1, 0)
    return True


def _together(group: list[_Place]) -> Pending:
    """Return one base for views that share bytes."""
    low, high = min(p.start for p in group), max(p.stop for p in group)
    largest = max(place.item for place in group)
    for place in group if len(group) > 1 else ():  # one alone was tried
        tensor = place.tensor
        fits = (place.start, place.stop) == (low, high) and low % largest == 0
        if fits and place.stop - place.start == tensor.numel() * place.item:
            pending = _alone(place)
            if pending.whole:
                rest = [other for other in group if other is not place]
                return _add_views(pending, rest, low)
    first = min(group, key=lambda place: place.leaves[0].position)
    if all(place.tensor.dtype == first.tensor.dtype for place in group):
        dtype, name, item = first.tensor.dtype, dtype_text(first.tensor.dtype) or "", first.item
    else:
        dtype, name, item = torch.uint8, "uint8", 1
        low -= low % largest  # offsets of views are whole elements of their own
    count = (high - low) // item
    base = tensor_over(first.tensor.untyped_storage(), dtype, low // item, (count,), (1,))
    pending = Pending(
        position=first.leaves[0].position,
        dtype=name,
        shape=(count,),
        order=None,
        payload=TensorBytes(base, None, dense=True),
        paths=[],
    )
    return _add_views(pending, group, low)


def _add_views(pending: Pending, places: Sequence[_Place], low: int) -> Pending:
    for place in places:
        tensor = place.tensor
        shape: list[Node] = [*tensor.shape]
        entry: list[Node] = [dtype_text(tensor.dtype), place.start - low, shape, [*tensor.stride()]]
        pending.views += [(leaf, entry) for leaf in place.leaves]
        pending.paths += [leaf.path for leaf in place.leaves]
        pending.position = min(pending.position, place.leaves[0].position)
    leaves = sorted(
        [*pending.whole, *(leaf for leaf, _ in pending.views)], key=lambda leaf: leaf.position
    )
    pending.paths = [leaf.path for leaf in leaves]
    return pending


def _overlapping(places: Sequence[_Place]) -> list[list[_Place]]:
    """Return the places in groups that share bytes, directly or through others."""
    ordered = sorted(places, key=lambda place: (place.start, place.stop))
    clusters: list[list[_Place]] = []
    high = -1
    for place in ordered:
        if clusters and place.start < high:
            clusters[-1].append(place)
        else:
            clusters.append([place])
        high = max(high, place.stop)
    groups: list[list[_Place]] = []
    for cluster in clusters:
        groups += _truly_overlapping(cluster)
    return groups


def _truly_overlapping(cluster: list[_Place]) -> list[list[_Place]]:
    count = len(cluster)
    if count == 1 or count * (count - 1) // 2 > limits.ALIAS_PAIRS_MAX:
        return [cluster]
    masks = [memory_array(place.tensor, 4096 + place.start) for place in cluster]
    group_of = list(range(count))
    for i in range(count):
        for j in range(i + 1, count):
            apart = group_of[i] != group_of[j]
            if apart and cluster[j].start < cluster[i].stop and share(masks[i], masks[j]):
                old, new = group_of[j], group_of[i]
                group_of = [new if group == old else group for group in group_of]
    groups: dict[int, list[_Place]] = {}
    for place, group in zip(cluster, group_of, strict=True):
        groups.setdefault(group, []).append(place)
    return list(groups.values())


def memory_array(tensor: torch.Tensor, address: int) -> np.ndarray[Any, Any]:
    """Return a shape at an address that nobody reads: overlap tests on any device."""
    item = tensor.element_size()
    interface = {
        "shape": tuple(tensor.shape),
        "strides": tuple(step * item for step in tensor.stride()),
        "typestr": f"|V{item}",
        "data": (address, True),
        "version": 3,
    }
    return np.asarray(types.SimpleNamespace(__array_interface__=interface))


def share(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    """Return whether two arrays have a byte in common; also where that is too hard to tell."""
    try:
        return np.shares_memory(a, b, max_work=10_000)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True  # at worst one base too many; never a wrong result
