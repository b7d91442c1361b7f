"""Processes that train together: one decides and tells the others; all tell what is their own.

Nothing of torch.distributed is asked where no process group was made: a single process is rank 0
of 1. What travels between ranks is pickled by torch.distributed, from one's own processes to one's
own processes; none of it is stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

__all__ = ["from_first", "gathered", "place", "together"]

T = TypeVar("T")


def together() -> bool:
    """Return whether a process group of more than one rank is there."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def place() -> tuple[int, int]:
    """Return the rank of this process, and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if together() else (0, 1)


def from_first(make: Callable[[], T]) -> T:
    """Call a function on rank 0 and return what it returned on every rank. All ranks must call.

    Parameters
    ----------
    make
        What it returns must be picklable, and so should be what it raises.

    Raises
    ------
    Exception
        What the function raised on rank 0, on every rank.
    """
    if not together():
        return make()
    told: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            told[0] = make()
        except Exception as error:  # noqa: BLE001 - told to all ranks, and raised by all
            told[1] = error
    dist.broadcast_object_list(told, src=0)
    if told[1] is not None:
        raise told[1]
    value: T = told[0]
    return value


def gathered(value: T) -> list[T]:
    """Return the values of all ranks, by rank, on every rank. All ranks must call."""
    if not together():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
