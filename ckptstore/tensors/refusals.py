"""Errors for values that cannot be stored: the reason, and the remedy."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import enum
import types
from typing import Any

import numpy as np
import torch

from ckptstore.errors import StateError
from ckptstore.format.paths import Path, path_text
from ckptstore.tensors.tensor_bytes import check_there, extent_of, offset_of

_ADAPTER = "represent it by plain values, or pass a TypeAdapter for its type"
_OF = "pass adapters=[TypeAdapter.of(its class)] on save and on load"


def is_record(value: object) -> bool:
    """Return whether ``plain=True`` stores a value without its class."""
    kind = type(value)
    records = (enum.Enum, types.SimpleNamespace, argparse.Namespace)
    return issubclass(kind, records) or dataclasses.is_dataclass(kind)


def fields_of(value: Any) -> dict[str, Any]:  # noqa: ANN401 - a dataclass or a namespace
    """Return the fields of a dataclass or a namespace by name; nested ones as they are."""
    if dataclasses.is_dataclass(type(value)):
        return {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
    return dict(vars(value))


def refusal(value: object, path: Path) -> StateError:
    """Return the error for a value that has no representation."""
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    where = repr(path_text(path)) if path else "the state itself"
    reason, hint = "", _ADAPTER
    with contextlib.suppress(Exception):  # of a tensor of a foreign class; others are not asked
        reason, hint = _why(value, kind)
    return StateError(f"{where} is a {name}, which cannot be stored{reason}", hint=hint)


def _why(value: Any, kind: type) -> tuple[str, str]:  # noqa: ANN401 - anything at all
    """Return why a value is refused, and what to do; asks nothing but its class."""
    if issubclass(kind, torch.Tensor):
        return _why_tensor(value)
    if str(kind.__module__).partition(".")[0] in ("jax", "jaxlib", "flax", "optax"):
        return "", "save state_of(tree) of ckptstore.integrations.jax"
    if issubclass(kind, torch.nn.Module | torch.optim.Optimizer):
        return "", "save its state_dict()"
    if callable(getattr(kind, "state_dict", None)):
        return "", "save its state_dict(), or pass a TypeAdapter for its type"
    code = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)
    if issubclass(kind, code):
        hint = "leave it out and set it again after loading (a scheduler's lr_lambda, for example)"
        return ": code is never stored", hint
    if issubclass(kind, np.random.Generator):
        return "", "save its bit_generator.state"
    if issubclass(kind, np.random.RandomState) or hasattr(kind, "getstate"):
        return "", "save what its get_state() or getstate() returns"
    if issubclass(kind, torch.UntypedStorage | torch.TypedStorage):
        return "", "save a tensor over it"
    if issubclass(kind, np.ndarray):
        return ": only plain arrays are", "save numpy.asarray(value), and a mask beside it"
    if issubclass(kind, enum.Enum):
        return "", f"save its value or name (plain=True does), or {_OF}"
    if is_record(value):
        return "", f"save its fields as a dict (plain=True does), or {_OF}"
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return ": its class would be lost", f"save tuple(value), or {_OF}"
    for plain in (dict, tuple, list, str, int, float, bytes):
        if issubclass(kind, plain):
            name = plain.__name__
            hint = f"save {name}(value), or pass a TypeAdapter for its type"
            return f": its class would be lost (only {name} itself is)", hint
    return "", _ADAPTER


def _why_tensor(value: torch.Tensor) -> tuple[str, str]:
    names = {base.__name__ for base in type(value).__mro__}
    if "DTensor" in names or "ShardedTensor" in names:
        hint = "save it with dcp.save and ckptstore.integrations.dcp.CkptStoreWriter"
        return ": it is one shard of a distributed tensor", hint
    if value.is_meta or "FakeTensor" in names:
        return ": it has no data", "materialize it first (to_empty, or load its weights)"
    if "UninitializedTensorMixin" in names:
        return ": it is not initialized", "run the lazy module once first"
    if value.is_nested:
        return ": it is nested", "save its parts: tensor.unbind()"
    if value.layout == torch._mkldnn:  # type: ignore[attr-defined]
        return ": it is in an mkldnn layout", "save tensor.to_dense()"
    if value.layout != torch.strided:
        return (f": its layout is {value.layout}", "save its parts, or tensor.to_dense()")
    if hasattr(value, "__tensor_flatten__"):
        return ": its class is not known", f"save its inner tensors, or {_OF}"
    hint = "save its parts (tensor.dequantize() or its inner tensors), or pass a TypeAdapter"
    return ": its class is not known", hint


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """Return the storage of a tensor; raises StateError if it does not hold all of it."""
    storage = tensor.untyped_storage()
    check_there(storage, (offset_of(tensor) + extent_of(tensor)) * tensor.element_size())
    return storage
