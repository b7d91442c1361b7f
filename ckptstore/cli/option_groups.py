"""Options that come together: a frozen dataclass whose fields are options, taken as one parameter.

A command asks for a group by a parameter of its type, and gets it filled::

    def pin(refs: ..., *, options: WriterOptions) -> None:

Typer knows parameters alone; :func:`flattened` puts the fields of each group in its place.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_args, get_type_hints

from typer.models import OptionInfo

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

    for parameter in parameters:
        _name_no_value(parameter)
    call.__doc__ = _paragraphs(command.__doc__ or "")
    call.__annotations__ = {one.name: one.annotation for one in parameters}
    call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return call


def _paragraphs(text: str) -> str:
    """Return a docstring with each paragraph in one line, for the help to wrap as wide as it is."""
    return "\n\n".join(" ".join(part.split()) for part in inspect.cleandoc(text).split("\n\n"))


def _name_no_value(parameter: inspect.Parameter) -> None:
    """Have the help show a flag without a value; Typer writes ``<bool>`` beside it."""
    kind, *notes = get_args(parameter.annotation) or (None,)
    for note in notes:
        if kind is bool and isinstance(note, OptionInfo) and note.metavar is None:
            note.metavar = ""


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
