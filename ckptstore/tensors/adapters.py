"""How objects of other types enter a state: by adapters, the caller's or built-in ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ckptstore.errors import InvalidInputError
from ckptstore.tensors.classes import converters

__all__ = ["TypeAdapter", "adapters_by_name", "adapters_by_type"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeAdapter:
    """Represents the objects of one type by a plain state, on save and again on load.

    Only objects of exactly `type` are represented, not those of its subclasses. Nothing of the
    type itself is stored but `name`, which is compared with the names of the adapters that are
    passed on load, and of those that are built in: it never leads to other code.
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

        An enum is stored by its value, the others by their fields; a dataclass is made again
        without calling ``__init__``. A tensor subclass needs ``__tensor_flatten__`` and
        ``__tensor_unflatten__``, and is stored as its inner tensors and their context.

        Parameters
        ----------
        kind
            The class.
        name
            Stored; by default its module and name. Give one to a class that may move, and to one
            of a script, whose module is ``__main__`` there and has another name elsewhere.

        Raises
        ------
        InvalidInputError
            It is a class of another sort.
        """
        to_state, from_state = converters(kind)
        name = name or f"{kind.__module__}.{kind.__qualname__}"
        return cls(name=name, type=kind, to_state=to_state, from_state=from_state)


def adapters_by_type(adapters: Sequence[TypeAdapter]) -> dict[type[Any], TypeAdapter]:
    """Return the adapters by type.

    Raises
    ------
    InvalidInputError
        Two are for one type or have one name, or one is no adapter.
    """
    adapters_by_name(adapters)
    found = {adapter.type: adapter for adapter in adapters}
    if len(found) != len(adapters):
        raise InvalidInputError("two adapters are for the same type")
    return found


def adapters_by_name(adapters: Sequence[TypeAdapter]) -> dict[str, TypeAdapter]:
    """Return the adapters by name.

    Raises
    ------
    InvalidInputError
        Two have one name, or one is no adapter.
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
