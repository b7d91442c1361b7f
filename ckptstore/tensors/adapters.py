"""Adapters, the caller's or built-in ones, by which objects of other types enter a state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ckptstore.errors import InvalidInputError
from ckptstore.tensors.classes import converters


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeAdapter:
    """Represents the objects of one type by a plain state, on save and again on load.

    Only objects of exactly `type` are represented, not those of its subclasses. Of the type only
    `name` is stored. It is compared with the names of the built-in adapters and of those passed on
    load: it never leads to other code.
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
        to_state, from_state = converters(kind)
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
        if not isinstance(adapter, TypeAdapter):
            raise InvalidInputError(f"{adapter!r} is not a TypeAdapter")
        if not adapter.name or len(adapter.name) > 200:
            raise InvalidInputError("the name of an adapter must have 1 to 200 characters")
        if adapter.name in found:
            raise InvalidInputError(f"two adapters have the name {adapter.name!r}")
        found[adapter.name] = adapter
    return found
