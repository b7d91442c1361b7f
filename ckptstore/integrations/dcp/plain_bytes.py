"""Values that are no tensors, between the planners of torch, which pickle them, and the store."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from ckptstore.errors import StateError

__all__ = ["from_planner", "pickled"]


def from_planner(planner: SavePlanner, item: WriteItem) -> Any:  # noqa: ANN401 - any value
    """Return the value that a planner has for an item, itself and not as the pickle of it.

    Raises
    ------
    StateError
        The planner only gives a pickle, of something else than tensors and plain containers.
    """
    lookup = getattr(planner, "lookup_object", None)
    if lookup is not None:
        return lookup(item.index)
    data = planner.resolve_data(item)
    if not isinstance(data, io.BytesIO):
        return data
    data.seek(0)
    try:
        return torch.load(data, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        msg = f"{item.index.fqn!r} is a pickle of the planner's, and not of plain values"
        raise StateError(msg, hint="give the planner a method lookup_object(index)") from error


def pickled(value: object) -> io.BytesIO:
    """Return what planners expect of a reader: a value as ``torch.save`` writes it.

    It is made here, in memory, of a value that was rebuilt from the store, and read by the planner
    at once: no pickle comes from storage.
    """
    data = io.BytesIO()
    torch.save(value, data)
    data.seek(0)
    return data
