"""Options that come together: a frozen dataclass whose fields are options, taken as one parameter.

A command asks for a group by a parameter of its type, and gets it filled::

    def pin(refs: ..., *, options: WriterOptions) -> None:

Typer knows parameters alone; :func:`flattened` puts the fields of each group in its place.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_type_hints

__all__ = ["flattened"]


def flattened(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command as Typer wants it: each option a parameter of its own, none a group.

    Raises
    ------
    ValueError
        Two groups have an option of the same name.
    TypeError
        A field has a default factory, where an option has a default.
    """
    signature = inspect.signature(command, eval_str=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, tuple[Callable[..., object], list[str]]] = {}
    for parameter in signature.parameters.values():
        kind = parameter.annotation
        if isinstance(kind, type) and is_dataclass(kind):
            own = _parameters(kind)
            groups[parameter.name] = kind, [one.name for one in own]
            parameters += own
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    def call(**values: Any) -> None:  # noqa: ANN401 - whatever the options hold
        for name, (group, names) in groups.items():
            values[name] = group(**{field: values.pop(field) for field in names})
        command(**values)

    call.__doc__ = command.__doc__
    call.__annotations__ = {one.name: one.annotation for one in parameters}
    call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return call


def _parameters(group: type) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    for field in fields(group):
        if field.default_factory is not MISSING:
            msg = f"{group.__name__}.{field.name} has a default factory, and options have defaults"
            raise TypeError(msg)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(group)
    ]
