"""Adapters, the caller's or built-in ones, by which objects of other types enter a state."""

from __future__ import annotations

import dataclasses
import enum
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ckptstore.errors import CorruptObjectError, InvalidInputError, StateError
from ckptstore.shown import shown
from ckptstore.tensors.composed import build_subclass, describe_subclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeAdapter:
    """Represents the objects of one type by a plain state, on save and again on load.

    Represents only objects of exactly `type`, not of subclasses. Only `name` is stored; it selects
    an adapter on load, and never other code.
    """

    name: str
    """Stored with the object; choose one that will still be right in years."""
    type: type[Any]
    """The exact type."""
    to_state: Callable[[Any], object]
    """Object to a state (anything that can be saved, tensors too). Called once an occurrence."""
    from_state: Callable[[Any], object]
    """That state, loaded, to an object. Called once an occurrence."""

    @classmethod
    def of(cls, kind: Any, *, name: str = "") -> TypeAdapter:  # noqa: ANN401 - a class
        """Return the adapter of an enum, a named tuple, a dataclass or a tensor subclass.

        An enum is stored by its value, the others by their fields; a dataclass is restored
        without calling ``__init__``. A tensor subclass needs ``__tensor_flatten__`` and
        ``__tensor_unflatten__``, and is stored as its inner tensors and their context.

        Parameters
        ----------
        kind
            The class.
        name
            The stored name; by default module and name of the class. Pass one for a class that may
            move, and for one of a script, whose module ``__main__`` has another name elsewhere.

        Raises
        ------
        InvalidInputError
            `kind` is none of these.
        """
        to_state, from_state = _converters(kind)
        name = name or f"{kind.__module__}.{kind.__qualname__}"
        return cls(name=name, type=kind, to_state=to_state, from_state=from_state)


def adapters_by_type(adapters: Sequence[TypeAdapter]) -> dict[type[Any], TypeAdapter]:
    """Return a mapping of the adapters by type.

    Raises
    ------
    InvalidInputError
        Two adapters are for one type or have one name, or an item is no adapter.
    """
    adapters_by_name(adapters)
    found = {adapter.type: adapter for adapter in adapters}
    if len(found) != len(adapters):
        raise InvalidInputError("two adapters are for the same type")
    return found


def adapters_by_name(adapters: Sequence[TypeAdapter]) -> dict[str, TypeAdapter]:
    """Return a mapping of the adapters by name.

    Raises
    ------
    InvalidInputError
        Two adapters have one name, or an item is no adapter.
    """
    found: dict[str, TypeAdapter] = {}
    for adapter in adapters:
        if not issubclass(type(adapter), TypeAdapter):
            raise InvalidInputError(f"{shown(adapter)} is not a TypeAdapter")
        if not adapter.name or len(adapter.name) > 200:
            raise InvalidInputError("the name of an adapter must have 1 to 200 characters")
        if adapter.name in found:
            raise InvalidInputError(f"two adapters have the name {adapter.name!r}")
        found[adapter.name] = adapter
    return found


# --- classes as plain states, and back ------------------------------------------------------------

_HOLD_MORE = (dict, list, set, frozenset, str, bytes, bytearray, int, float, complex)


def _converters(kind: type[Any]) -> tuple[Callable[[Any], object], Callable[[Any], object]]:
    """Return two functions: from an object of the class `kind` to a state, and back."""
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
    msg = f"{kind!r} is no enum, named tuple, dataclass or tensor subclass with __tensor_flatten__"
    hint = "pass TypeAdapter(name=..., type=..., to_state=..., from_state=...)"
    raise InvalidInputError(msg, hint=hint)


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
        msg = f"the fields of {kind.__qualname__} are {', '.join(names)}; stored are {stored}"
        raise CorruptObjectError(msg)
