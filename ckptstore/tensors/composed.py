"""Tensors made of others: sparse ones, and subclasses with ``__tensor_flatten__``.

Each is stored as a dict: ``tensors`` by name, ``context`` (plain values for rebuilding it),
and ``dtype``, ``shape``, ``stride`` and ``flags`` of the whole. The context of a sparse tensor is
its layout (``coo``, ``csr``, ``csc``, ``bsr``, ``bsc``) and whether it is coalesced.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Final

import torch

from ckptstore.errors import CorruptObjectError, StateError
from ckptstore.format.skeleton import BUFFER, BUFFER_TRANSIENT, PARAMETER, REQUIRES_GRAD

_BY_NAME: Final[Mapping[str, torch.layout]] = {
    name: getattr(torch, f"sparse_{name}") for name in ("coo", "csr", "csc", "bsr", "bsc")
}
SPARSE_LAYOUTS: Final = {layout: name for name, layout in _BY_NAME.items()}
_BY_ROWS: Final = ("csr", "bsr")
_FIELDS: Final[Mapping[str, Any]] = {
    "dtype": torch.dtype,
    "shape": torch.Size,
    "stride": (tuple, type(None)),
    "tensors": dict,
    "context": object,
    "flags": int,
}


def describe_subclass(tensor: torch.Tensor) -> dict[str, object]:
    """Return the parts of a tensor whose class has ``__tensor_flatten__``, sharing its memory.

    Raises
    ------
    StateError
        Its parts do not rebuild it, so that it could not be loaded.
    """
    whole: Any = tensor
    names, context = whole.__tensor_flatten__()
    parts = {name: getattr(tensor, name) for name in names}
    state = _described(tensor, parts, context, tuple(tensor.stride()))
    try:
        build_subclass(type(tensor), state)
    except Exception as error:
        raise StateError(f"its __tensor_unflatten__ does not make it again: {error}") from error
    return state


def build_subclass(kind: type[Any], state: object) -> torch.Tensor:
    """Return a tensor of the class `kind`, rebuilt from its parts.

    Raises
    ------
    CorruptObjectError
        The parts are not those of a tensor, or make another one than was saved.
    """
    dtype, shape, stride, parts, context, flags = _checked(state)
    built = kind.__tensor_unflatten__(parts, context, shape, stride)
    same = type(built) is kind and (built.dtype, built.shape) == (dtype, shape)
    if not same or sorted(built.__tensor_flatten__()[0]) != sorted(parts):
        raise CorruptObjectError("its parts make another tensor than was saved")
    return dressed(built, flags)


def describe_sparse(tensor: torch.Tensor) -> dict[str, object]:
    """Return the parts of a sparse tensor, sharing its memory."""
    layout = SPARSE_LAYOUTS[tensor.layout]
    plain = tensor.detach()
    if layout == "coo":
        parts = {"indices": plain._indices(), "values": plain._values()}
        return _described(tensor, parts, (layout, plain.is_coalesced()), None)
    rows = layout in _BY_ROWS
    parts = {
        "compressed": plain.crow_indices() if rows else plain.ccol_indices(),
        "indices": plain.col_indices() if rows else plain.row_indices(),
        "values": plain.values(),
    }
    return _described(tensor, parts, (layout, True), None)


def build_sparse(state: object) -> torch.Tensor:
    """Return a sparse tensor, rebuilt from its parts; its indices are checked.

    Raises
    ------
    CorruptObjectError, RuntimeError
        The parts are not those of a sparse tensor.
    """
    dtype, shape, _, parts, context, flags = _checked(state)
    match context:
        case (str(layout), bool(coalesced)) if layout in _BY_NAME:
            indices, values = parts["indices"], parts["values"]
        case _:
            raise CorruptObjectError("its context is not that of a sparse layout")
    if values.dtype != dtype:
        raise CorruptObjectError(f"its values are {values.dtype}, not {dtype}")
    with warnings.catch_warnings():
        # Making one warns, once, that some layouts are in beta; a load must not fail on that.
        warnings.simplefilter("ignore", UserWarning)
        if layout == "coo":
            built = torch.sparse_coo_tensor(
                indices, values, shape, device=values.device, is_coalesced=coalesced,
                check_invariants=True,
            )  # fmt: skip
        else:
            built = torch.sparse_compressed_tensor(
                parts["compressed"], indices, values, shape,
                device=values.device, layout=_BY_NAME[layout], check_invariants=True,
            )  # fmt: skip
    return dressed(built, flags)


def _described(
    tensor: torch.Tensor, parts: dict[str, Any], context: object, stride: tuple[int, ...] | None
) -> dict[str, object]:
    return {
        "dtype": tensor.dtype,
        "shape": tensor.shape,
        "stride": stride,
        "flags": flags_of(tensor),
        "context": context,
        "tensors": parts,
    }


def _checked(state: object) -> tuple[Any, ...]:
    """Return the values of the fields, in their order, with their types checked."""
    if not isinstance(state, dict) or state.keys() != _FIELDS.keys():
        raise CorruptObjectError(f"its fields are not {', '.join(_FIELDS)}")
    for name, kind in _FIELDS.items():
        if not isinstance(state[name], kind):
            raise CorruptObjectError(f"its field {name!r} is a {type(state[name]).__name__}")
    for name, part in state["tensors"].items():
        if not isinstance(name, str) or not isinstance(part, torch.Tensor):
            raise CorruptObjectError(f"its part {name!r} is no tensor with a name")
    return tuple([state[name] for name in _FIELDS])


def flags_of(tensor: torch.Tensor) -> int:
    """Return the flags of a tensor's node: Parameter, Buffer, requires grad."""
    flags = REQUIRES_GRAD if tensor.requires_grad else 0
    if type(tensor) is torch.Tensor and not tensor.__dict__:
        return flags  # no marks of Parameter or Buffer, whose checks take as long as all of this
    if isinstance(tensor, torch.nn.Parameter):
        return flags | PARAMETER
    if isinstance(tensor, torch.nn.Buffer):
        transient = not getattr(tensor, "persistent", True)
        return flags | BUFFER | (BUFFER_TRANSIENT if transient else 0)
    return flags


def dressed(tensor: torch.Tensor, flags: int) -> torch.Tensor:
    """Return the tensor as Parameter or Buffer, and with ``requires_grad``, as the flags say."""
    grad = bool(flags & REQUIRES_GRAD)
    if flags & PARAMETER:
        return torch.nn.Parameter(tensor, requires_grad=grad)
    if flags & BUFFER:
        tensor = torch.nn.Buffer(tensor, persistent=not flags & BUFFER_TRANSIENT)
    return tensor.requires_grad_() if grad else tensor
