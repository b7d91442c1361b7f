"""Groups of options: frozen dataclasses of options that a command takes as one parameter.

A command declares a parameter of the group's type, and receives an instance::

    def pin(refs: ..., *, options: WriterOptions) -> None:

Typer only knows single parameters; :func:`flattened` replaces each group by its fields.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_args, get_type_hints

from typer.models import OptionInfo


def flattened(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command for Typer: each group is replaced by one parameter per option.

    Raises
    ------
    ValueError
        Two groups have an option of the same name.
    TypeError
        A field of a group has a default factory instead of a default.
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
    """Return a docstring with each paragraph on one line, so that the help can wrap it."""
    return "\n\n".join(" ".join(part.split()) for part in inspect.cleandoc(text).split("\n\n"))


def _name_no_value(parameter: inspect.Parameter) -> None:
    """Show a flag without a value in the help, where Typer would write ``<bool>``."""
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
