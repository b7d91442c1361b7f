"""Plain states of enums, named tuples, dataclasses and tensor subclasses, and the way back."""

from __future__ import annotations

import dataclasses
import enum
import operator
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from ckptstore.errors import CorruptObjectError, InvalidInputError, StateError
from ckptstore.tensors.composed import build_subclass, describe_subclass

_HOLD_MORE = (dict, list, set, frozenset, str, bytes, bytearray, int, float, complex)


def converters(kind: type[Any]) -> tuple[Callable[[Any], object], Callable[[Any], object]]:
    """Return two functions: from an object of the class `kind` to a state, and back.

    Raises
    ------
    InvalidInputError
        `kind` is none of these kinds of class.
    """
    if isinstance(kind, type):
        if issubclass(kind, enum.Enum):
            return operator.attrgetter("value"), kind
        if issubclass(kind, torch.Tensor) and hasattr(kind, "__tensor_flatten__"):
            return describe_subclass, partial(build_subclass, kind)
        if issubclass(kind, tuple) and hasattr(kind, "_fields"):
            return _named_state, partial(_named, kind)
        others = (*_HOLD_MORE, tuple, torch.Tensor, torch.nn.Module)
        if dataclasses.is_dataclass(kind) and not issubclass(kind, others):
            return _dataclass_state, partial(_dataclass, kind)
    raise InvalidInputError(
        f"{kind!r} is no enum, named tuple, dataclass or tensor subclass with __tensor_flatten__",
        hint="pass TypeAdapter(name=..., type=..., to_state=..., from_state=...)",
    )


def _named_state(value: Any) -> dict[str, Any]:  # noqa: ANN401 - a named tuple
    _check_attributes(value, ())
    return dict(zip(value._fields, value, strict=True))


def _named(kind: type[Any], state: Any) -> Any:  # noqa: ANN401
    _check_fields(kind, state, kind._fields)
    return tuple.__new__(kind, [state[name] for name in kind._fields])


def _dataclass_state(value: Any) -> dict[str, Any]:  # noqa: ANN401 - a dataclass
    names = [field.name for field in dataclasses.fields(value)]
    _check_attributes(value, names)
    return {name: getattr(value, name) for name in names}


def _dataclass(kind: type[Any], state: Any) -> Any:  # noqa: ANN401
    _check_fields(kind, state, [field.name for field in dataclasses.fields(kind)])
    made = object.__new__(kind)  # as copy.copy: the results of __init__ are in the fields
    for name, value in state.items():
        object.__setattr__(made, name, value)
    return made


def _check_attributes(value: object, names: Iterable[str]) -> None:
    """Refuse an object with attributes that are no fields, since they would be lost."""
    more = sorted({*getattr(value, "__dict__", {})} - {*names})
    if more:
        raise StateError(f"it has attributes that are no fields: {', '.join(more)}")


def _check_fields(kind: type[Any], state: object, names: Iterable[str]) -> None:
    if not isinstance(state, dict) or state.keys() != {*names}:
        stored = sorted(map(str, state)) if isinstance(state, dict) else type(state).__name__
        raise CorruptObjectError(
            f"the fields of {kind.__qualname__} are {', '.join(names)}; stored are {stored}"
        )
