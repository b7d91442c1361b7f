"""Exchange between processes that train together: from rank 0 to all, and from all to all.

torch.distributed is not used unless a process group exists: a single process is rank 0
of 1. torch.distributed pickles the exchanged values, between one's own processes; none of them
is stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist

T = TypeVar("T")


def together() -> bool:
    """Return whether a process group of more than one rank exists."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def place(group: dist.ProcessGroup | None = None) -> tuple[int, int]:
    """Return the rank of this process, and the number of ranks; of a group, if one is given."""
    return (dist.get_rank(group), dist.get_world_size(group)) if together() else (0, 1)


def from_first(make: Callable[[], T]) -> T:
    """Call a function on rank 0 and return its result on every rank. All ranks must call it.

    Parameters
    ----------
    make
        Its result must be picklable, and its errors should be.

    Raises
    ------
    Exception
        The function's error on rank 0, raised on every rank.
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


def gathered(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the values of all ranks (of a group), by rank, on every rank. All must call it."""
    if not together():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def on_all(make: Callable[[], T]) -> T:
    """Call a function on every rank and return its result. All ranks must call it.

    Raises
    ------
    Exception
        The function's error on the first rank that failed, raised on every rank.
    """
    try:
        value, error = make(), None
    except Exception as failure:  # noqa: BLE001 - told to all ranks, and raised by all
        value, error = None, failure
    for each in gathered(error):
        if each is not None:
            raise error or each
    return cast("T", value)
