"""Boxes of stored tensors: which pieces they need, and where in memory each of these goes.

Used where a part of a tensor is wanted that is not a range of its bytes: columns, a tile of a mesh,
any part of a tensor that is itself stored in blocks. A piece is fetched only if it holds an element
that is wanted; of a tensor with a recipe, a piece is what follows from one of its first source.
Needs no torch.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptstore.backends.base import Backend
from ckptstore.checkpoint.content import Content
from ckptstore.checkpoint.ranges import Range, piece_ends, read_ranges
from ckptstore.chunking import in_batches
from ckptstore.config import Options
from ckptstore.encodings.casts import Rounding
from ckptstore.events import ProgressCallback, silent
from ckptstore.format.blocks import Box, boxes_of_range
from ckptstore.format.dtypes import ITEM_BYTES
from ckptstore.format.manifest import TensorRecord

Elements = npt.NDArray[np.void]


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A box of one stored tensor, and the memory that it goes to."""

    content: Content
    index: int
    """The tensor's record."""
    offsets: tuple[int, ...]
    """The first element of the box, by dimension."""
    out: Elements
    """Of the box's shape, with any strides; elements are opaque bytes of the tensor's item size."""
    shape: tuple[int, ...] | None = None
    """The tensor's memory in another shape, of elements as large as those of `out`."""


@dataclass(slots=True)
class _Piece:
    """One piece that a region needs."""

    index: int
    """The tensor's record."""
    start: int
    """The first byte in the tensor, in stored order."""
    nbytes: int
    direct: memoryview | None = None
    """Where it is decoded to, if all of it is wanted, and lies there as it is stored."""
    copies: list[tuple[int, tuple[int, ...], tuple[slice, ...], Elements]] = field(
        default_factory=list
    )
    """First element in the piece and shape of a box of it, what is wanted of that, and whither."""

    def scatter(self, data: memoryview) -> None:
        """Bring the elements that are wanted to where they go."""
        for start, shape, part, out in self.copies:
            flat = np.frombuffer(data, out.dtype)
            out[...] = flat[start : start + math.prod(shape)].reshape(shape)[part]


def read_regions(
    regions: Sequence[Region],
    *,
    backend: Backend,
    options: Options,
    progress: ProgressCallback = silent,
    rounding: Rounding | None = None,
) -> None:
    """Fill the memory of some regions of one version; every byte is checked.

    Pieces that are wanted whole are decoded where they go. Others pass through host memory, at most
    ``options.host_bytes`` of them at a time (one piece at least).

    Parameters
    ----------
    rounding
        Rounds to bfloat16 faster than NumPy; None for NumPy.

    Raises
    ------
    CorruptTensorError
        A piece that is needed is damaged; names the tensor.
    StorageError
        The storage failed.
    """
    if not regions:
        return
    content, room = regions[0].content, options.host_bytes
    if any(content.manifest.tensors[region.index].recipe for region in regions):
        room = max(1, room // 2)  # the other half is for what they follow from
        options = replace(options, host_bytes=room)
    pieces = itertools.chain.from_iterable(
        _shared(group) for _, group in itertools.groupby(regions, key=lambda one: one.index)
    )
    for batch in in_batches(pieces, lambda one: one.nbytes if one.direct is None else 0, room):
        ranges: list[Range] = []
        arrived: list[tuple[_Piece, memoryview]] = []
        for piece in batch:
            out = piece.direct
            if out is None:
                out = memoryview(bytearray(piece.nbytes))
                arrived.append((piece, out))
            ranges.append(Range(index=piece.index, start=piece.start, nbytes=piece.nbytes, out=out))
        read_ranges(
            content, ranges, backend=backend, options=options, progress=progress, rounding=rounding
        )
        for piece, memory in arrived:
            piece.scatter(memory)


def _shared(regions: Iterable[Region]) -> Iterator[_Piece]:
    """Yield the pieces of boxes of one tensor; one that several need is held once."""
    merged = heapq.merge(*map(_pieces, regions), key=lambda one: one.start)
    for (_, direct), same in itertools.groupby(merged, lambda one: (one.start, bool(one.direct))):
        first, *others = same
        if not direct:
            first.copies += [copy for other in others for copy in other.copies]
            others.clear()
        yield from (first, *others)


def _pieces(region: Region) -> Iterator[_Piece]:
    """Yield the pieces that hold an element of a region, in stored order."""
    manifest = region.content.manifest
    record = manifest.tensors[region.index]
    offsets, out = region.offsets, region.out
    item = out.itemsize
    shape = record.shape if region.shape is None else region.shape
    if not out.size:
        return
    if record.order is not None and region.shape is None:
        shape = tuple(shape[dim] for dim in record.order)
        offsets = tuple(offsets[dim] for dim in record.order)
        out = out.transpose(record.order)
    ends = piece_ends(manifest, region.index) * (ITEM_BYTES[record.dtype] // item)
    for start, box in _boxes_met(record, shape, offsets, out.shape):
        low, high, inside = _common(box, offsets, out)
        reach = _reach(box[1], low, high)
        row = int(np.searchsorted(ends, start + reach[0], "right"))
        while row < len(ends) and (int(ends[row - 1]) if row else 0) < start + reach[1]:
            begin = (int(ends[row - 1]) if row else 0) - start
            stop = int(ends[row]) - start
            piece = _Piece(
                index=region.index, start=(start + begin) * item, nbytes=(stop - begin) * item
            )
            if _fit(piece, (begin, stop), box[1], low, high, inside):
                yield piece
            row += 1


def _boxes_met(
    record: TensorRecord, shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]
) -> Iterator[tuple[int, Box]]:
    """Yield the stored boxes that a box meets, each with the number of elements before it."""
    if record.blocks is None:
        yield 0, ((0,) * len(shape), tuple(shape))
        return
    table = record.blocks.table
    before = np.concatenate(([0], np.cumsum(table[:, 1].prod(axis=1))))
    low = np.array(offsets, np.int64)
    high = low + np.array(sizes, np.int64)
    met = ((table[:, 0] < high) & (table[:, 0] + table[:, 1] > low)).all(axis=1)
    for place in np.flatnonzero(met):
        starts, extents = table[place].tolist()
        yield int(before[place]), (tuple(starts), tuple(extents))


def _common(
    box: Box, offsets: Sequence[int], out: Elements
) -> tuple[tuple[int, ...], tuple[int, ...], Elements]:
    """Return the wanted part of a stored box, as bounds in the box, and where it goes."""
    low, high, part = [], [], []
    for begin, size, start, length in zip(*box, offsets, out.shape, strict=True):
        low.append(max(start - begin, 0))
        high.append(min(start + length - begin, size))
        part.append(slice(begin + low[-1] - start, begin + high[-1] - start))
    return tuple(low), tuple(high), _part(out, part)


def _part(out: Elements, part: Sequence[slice]) -> Elements:
    """Return a part of an array as an array, where it has no dimensions too."""
    index: tuple[Any, ...] = (*part, ...)
    found: Elements = out[index]
    return found


def _reach(shape: Sequence[int], low: Sequence[int], high: Sequence[int]) -> tuple[int, int]:
    """Return the first element of a box in a row-major tensor, and the one after its last."""
    first = last = 0
    for size, start, stop in zip(shape, low, high, strict=True):
        first = first * size + start
        last = last * size + stop - 1
    return first, last + 1


def _fit(
    piece: _Piece,
    elements: tuple[int, int],
    shape: Sequence[int],
    low: Sequence[int],
    high: Sequence[int],
    out: Elements,
) -> bool:
    """Note which elements of a piece go where; return whether there are any.

    Parameters
    ----------
    elements
        The first and the end of those of the piece, in a block of `shape`.
    low, high
        What is wanted of the block, and goes to `out`.
    """
    begin, stop = max(elements[0], 0), min(elements[1], math.prod(shape))
    at = begin - elements[0]
    for starts, sizes in boxes_of_range(shape, begin, stop):
        first = [max(a, b) for a, b in zip(starts, low, strict=True)]
        end = [min(a + n, b) for a, n, b in zip(starts, sizes, high, strict=True)]
        if all(a < b for a, b in zip(first, end, strict=True)):
            source = tuple(slice(a - s, b - s) for a, b, s in zip(first, end, starts, strict=True))
            target = _part(
                out, [slice(a - m, b - m) for a, b, m in zip(first, end, low, strict=True)]
            )
            if target.size * target.itemsize == piece.nbytes and target.flags.c_contiguous:
                piece.direct = memoryview(target.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
                return True
            piece.copies.append((at, sizes, source, target))
        at += math.prod(sizes)
    return bool(piece.copies)
