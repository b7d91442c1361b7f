"""The fixed grid on which tensors are cut into pieces.

Tensors do not shift, so content-defined cuts gain nothing; a grid that falls on row borders keeps
rows shared when others change or when rows are appended (embeddings, vocabularies).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def piece_bytes(row_bytes: int, item_bytes: int, target_bytes: int) -> int:
    """Return the length of every piece of a tensor but the last, in bytes.

    Parameters
    ----------
    row_bytes
        Bytes of one step along the outermost dimension in memory order; 0 for a scalar.
    item_bytes
        Bytes of one element; pieces never split an element.
    target_bytes
        The store's chunk size; a power of two.

    Returns
    -------
    int
        The largest multiple of the row that is at most `target_bytes`; where one row alone is
        larger, the largest multiple of the element.
    """
    if 0 < row_bytes <= target_bytes:
        return target_bytes // row_bytes * row_bytes
    return target_bytes // item_bytes * item_bytes


def cut(total_bytes: int, length: int) -> Iterator[tuple[int, int]]:
    """Yield ``(start, length)`` of each piece of `total_bytes`; none for an empty tensor."""
    for start in range(0, total_bytes, length):
        yield start, min(length, total_bytes - start)


def in_batches(items: Iterable[T], size_of: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Yield items in batches whose sizes sum up to at most `limit`, or of one item."""
    batch: list[T] = []
    filled = 0
    for item in items:
        size = size_of(item)
        if batch and filled + size > limit:
            yield batch
            batch, filled = [], 0
        batch.append(item)
        filled += size
    if batch:
        yield batch


def batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Return the items in order, at most `size` of them at a time."""
    return (items[start : start + size] for start in range(0, len(items), size))
