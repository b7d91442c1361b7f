"""Blocks: a tensor that is stored as boxes, each dense and row-major, one after the other.

Ranks that hold parts of one tensor each write their own. Where the parts are slabs of the outermost
dimension, one after the other, their bytes are those of the whole tensor, and nothing is recorded.
Otherwise (columns, tiles of a mesh) the manifest says which boxes there are, in the order in
which they are stored. They tile the tensor: every element is in exactly one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from ckptstore import limits
from ckptstore.hashing import Buffer

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes, by dimension."""


class Blocks:
    """The boxes of one tensor, in the order in which they are stored. Immutable.

    Parameters
    ----------
    table
        ``int64[boxes, 2, dimensions]``: offsets and sizes.
    """

    __slots__ = ("table",)

    def __init__(self, table: npt.NDArray[np.int64]) -> None:
        self.table: npt.NDArray[np.int64] = table
        """Offsets and sizes, ``int64[boxes, 2, dimensions]``; not to be written to."""
        self.table.flags.writeable = False

    @classmethod
    def of(cls, boxes: Sequence[Box]) -> Blocks:
        """Return the blocks of some boxes; there must be one at least."""
        return cls(np.array(boxes, np.int64).reshape(len(boxes), 2, -1))

    @classmethod
    def decode(cls, data: bytes, dims: int) -> Blocks | None:
        """Return what :meth:`encode` made; None if it cannot be that. Says nothing of a tiling."""
        count, rest = divmod(len(data), max(1, 16 * dims))
        if rest or not dims or not count:
            return None
        table = np.frombuffer(data, "<u8").reshape(count, 2, dims)
        if bool((table >= 1 << 63).any()):
            return None
        return cls(table.astype(np.int64))

    def encode(self) -> bytes:
        """Return the stored form: per box its offsets, then its sizes, u64 each."""
        return self.table.astype("<u8").tobytes()

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.table)

    def __iter__(self) -> Iterator[Box]:
        """Iterate in stored order."""
        for offsets, sizes in self.table.tolist():
            yield tuple(offsets), tuple(sizes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Blocks) and np.array_equal(self.table, other.table)

    def __hash__(self) -> int:
        return hash(self.table.tobytes())

    def __repr__(self) -> str:
        return f"<Blocks {len(self)}>"


def is_row_major(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Return whether the boxes, one after the other, are the tensor itself, row by row.

    They are if they are consecutive slabs of the first dimension that is larger than 1. They must
    tile the tensor.
    """
    outer = next((dim for dim, size in enumerate(shape) if size > 1), 0)
    return all(
        size == whole
        for _, sizes in boxes
        for dim, (size, whole) in enumerate(zip(sizes, shape, strict=True))
        if dim != outer
    ) and all(
        before[0][outer] + before[1][outer] == after[0][outer]
        for before, after in itertools.pairwise(boxes)
    )


def tiling_problem(shape: Sequence[int], blocks: Blocks) -> str:
    """Return why the boxes do not tile a tensor of `shape`; empty if they do.

    Costs memory and time in proportion to the cells of the grid that all their borders make: one
    cell a box where a mesh made them. More than ``BLOCK_CELLS_MAX`` are refused.
    """
    starts, sizes = blocks.table[:, 0], blocks.table[:, 1]
    whole = np.array(shape, np.int64)
    # Not starts + sizes > whole: that could overflow.
    if bool((sizes < 1).any() or (starts < 0).any() or (sizes > whole - starts).any()):
        return "a box is empty, or reaches out of the tensor"
    first: list[npt.NDArray[np.intp]] = []
    last: list[npt.NDArray[np.intp]] = []
    grid: list[int] = []
    for dim in range(len(shape)):
        low, high = starts[:, dim], starts[:, dim] + sizes[:, dim]
        borders = np.unique(np.concatenate((low, high)))
        if borders[0] != 0 or borders[-1] != shape[dim]:
            return "the boxes leave out a part of the tensor"
        if len(borders) > 2:
            first.append(np.searchsorted(borders, low))
            last.append(np.searchsorted(borders, high))
            grid.append(len(borders) - 1)
    if not grid:  # every box is the whole tensor
        return "" if len(blocks) == 1 else "two boxes overlap"
    cells = math.prod(grid)
    if cells > limits.BLOCK_CELLS_MAX:
        return f"the boxes' borders make a grid of {cells} cells"
    if cells == len(blocks) and all(
        bool((b - a == 1).all()) for a, b in zip(first, last, strict=True)
    ):
        places = np.ravel_multi_index(tuple(first), tuple(grid))
        return "" if len(np.unique(places)) == cells else "two boxes overlap"
    hits = np.zeros([*grid], np.uint8)
    for low_cells, high_cells in zip(np.stack(first, 1), np.stack(last, 1), strict=True):
        part = hits[tuple(slice(a, b) for a, b in zip(low_cells, high_cells, strict=True))]
        if part.any():
            return "two boxes overlap"
        part[...] = 1
    return "" if hits.all() else "the boxes leave out a part of the tensor"


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes that elements `start` to `stop` of a row-major tensor make, in order.

    There are fewer than two for each dimension: what is left of rows at either end, and whole rows.
    """
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # inside of one row
        for offsets, sizes in boxes_of_range(shape[1:], start - last * row, stop - last * row):
            yield (last, *offsets), (1, *sizes)
        return
    if first * row > start:
        for offsets, sizes in boxes_of_range(shape[1:], start - (first - 1) * row, row):
            yield (first - 1, *offsets), (1, *sizes)
    if last > first:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    if stop > last * row:
        for offsets, sizes in boxes_of_range(shape[1:], 0, stop - last * row):
            yield (last, *offsets), (1, *sizes)


def gather(blocks: Blocks, shape: Sequence[int], item: int, stored: Buffer, out: Buffer) -> None:
    """Bring a tensor's bytes from stored order into row-major order.

    Parameters
    ----------
    item
        Bytes of an element.
    stored, out
        All bytes of the tensor; they must not overlap.
    """
    element = np.dtype(f"V{item}")
    whole = np.frombuffer(out, element).reshape(shape)
    source, at = np.frombuffer(stored, element), 0
    for offsets, sizes in blocks:
        part = tuple(slice(start, start + n) for start, n in zip(offsets, sizes, strict=True))
        count = math.prod(sizes)
        whole[part] = source[at : at + count].reshape(sizes)
        at += count
