"""Values that are no tensors, between the planners of torch, which pickle them, and the store."""

from __future__ import annotations

import io
import pickle
from typing import TYPE_CHECKING, Any

import torch

from ckptstore.errors import StateError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

__all__ = ["from_planner", "pickled", "unpickled"]


def from_planner(planner: SavePlanner, item: WriteItem) -> Any:  # noqa: ANN401 - any value
    """Return the value that a planner gives for an item, itself and not as the pickle of it.

    Where it is the state's own value, as the default planner gives it, it can be anything that the
    store keeps. What a planner makes of it comes as a pickle, of plain values.

    Raises
    ------
    StateError
        The planner gives a pickle of other things, or no pickle.
    """
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner as Default

    hooks = ("resolve_data", "lookup_object", "transform_object")
    if isinstance(planner, Default) and all(_is_own(planner, name, Default) for name in hooks):
        return planner.lookup_object(item.index)
    data = planner.resolve_data(item)
    if not isinstance(data, io.BytesIO):
        return data
    try:
        return unpickled(io.BytesIO(data.getvalue()))
    except Exception as error:  # what torch raises for bytes that are no pickle is not known
        found = getattr(planner, "state_dict", {}).get(item.index.fqn)
        if pickled(found).getvalue() == data.getvalue():
            return found  # the planner has changed nothing of it
        msg = f"{item.index.fqn!r} is a pickle of the planner's, and not of plain values"
        raise StateError(msg, hint="let the planner's resolve_data return the value") from error


def _is_own(planner: object, name: str, kind: type) -> bool:
    """Return whether a planner has the method of the class `kind`, and none in its place."""
    return getattr(getattr(planner, name), "__func__", None) is getattr(kind, name)


def unpickled(data: io.BytesIO) -> Any:  # noqa: ANN401 - any value
    """Return what ``torch.load`` makes of a pickle of plain values, BytesIO among them.

    Raises
    ------
    pickle.UnpicklingError
        It is of other things, or no pickle.
    """
    try:
        return torch.load(data, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if "BytesIO" not in str(error):
            raise
        data.seek(0)
        with torch.serialization.safe_globals([io.BytesIO]):
            return torch.load(data, map_location="cpu", weights_only=True)


def pickled(value: object) -> io.BytesIO:
    """Return what planners expect of a reader: a value as ``torch.save`` writes it.

    It is made here, in memory, of a value that was rebuilt from the store, and read by the planner
    at once: no pickle comes from storage.
    """
    data = io.BytesIO()
    torch.save(value, data)
    data.seek(0)
    return data
