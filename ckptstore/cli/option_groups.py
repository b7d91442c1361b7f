"""From the signature and docstring of a command to what Typer reads.

A command declares its options as keyword parameters. The help of a parameter is its text in the
numpy-style section ``Parameters`` of the docstring. Options that several commands share form a
group: a frozen dataclass that the command takes as one parameter, and receives as an instance::

    def pin(refs: ..., *, options: WriterOptions) -> None:

Typer only knows single parameters; :func:`flattened` replaces each group by its fields.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import MISSING, fields, is_dataclass
from functools import partial
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import OptionInfo

from ckptstore.cli.completion import completer

_SECTION = "\n\nParameters\n----------\n"
_EXAMPLES = "\n\nExamples\n--------\n"
_ENTRY = re.compile(r"(\w+)\n((?: +.*(?:\n|$))+)")


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
    intro, texts = _read(command.__doc__)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, tuple[Callable[..., object], list[str]]] = {}
    for parameter in signature.parameters.values():
        kind = parameter.annotation
        if isinstance(kind, type) and is_dataclass(kind):
            own = _parameters(kind)
            groups[parameter.name] = kind, [one.name for one in own]
            parameters += own
        else:
            found = _described(parameter, texts)
            parameters.append(found.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    def call(**values: Any) -> None:  # noqa: ANN401 - whatever the options hold
        for name, (group, names) in groups.items():
            values[name] = group(**{field: values.pop(field) for field in names})
        command(**values)

    call.__doc__ = intro
    call.__annotations__ = {one.name: one.annotation for one in parameters}
    call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return call


def examples(command: Callable[..., None]) -> list[str]:
    """Return the command lines in the section ``Examples`` of a command's docstring."""
    return inspect.cleandoc(command.__doc__ or "").partition(_EXAMPLES)[2].splitlines()


class _Quiet:
    """Part of commands whose help shows the names of values, and not their Python types."""

    def get_params(self, ctx: Any) -> list[Any]:  # noqa: ANN401 - of Typer, or of click
        """Return the parameters, without ``<str>`` and ``[x>=0]`` in the help."""
        found: list[Any] = super().get_params(ctx)  # type: ignore[misc]  # of Typer's classes
        for one in found:
            shown = getattr(type(one), "display_type_rich", None)
            if shown is not None:
                one.display_type_rich = partial(_without_type, partial(shown, one))
                one._get_number_range_help_str = lambda: None
        return found


class QuietCommand(_Quiet, TyperCommand):
    """A command."""


class QuietGroup(_Quiet, TyperGroup):
    """The program."""


def _without_type(shown: Callable[..., str | None], ctx: typer.Context) -> str | None:
    text = shown(ctx=ctx)
    return None if text is None or text.startswith("<") else text


def _read(docstring: str | None) -> tuple[str, dict[str, str]]:
    """Return the text before the section of parameters, and the text of each parameter.

    Each paragraph is on one line, so that the help can wrap it.
    """
    text = inspect.cleandoc(docstring or "").partition(_EXAMPLES)[0]
    intro, _, section = text.partition(_SECTION)
    paragraphs = [" ".join(part.split()) for part in intro.split("\n\n")]
    texts = {name: " ".join(text.split()) for name, text in _ENTRY.findall(section)}
    return "\n\n".join(paragraphs), texts


def _described(parameter: inspect.Parameter, texts: Mapping[str, str]) -> inspect.Parameter:
    """Return a parameter with its help; a flag has one name and takes no value."""
    kind: Any = parameter.annotation
    note: Any = typer.Option()
    if get_origin(kind) is Annotated:
        kind, note = get_args(kind)
    elif parameter.default is parameter.empty:
        return parameter
    note = copy(note)
    note.help = note.help or texts.get(parameter.name)
    note.autocompletion = note.autocompletion or completer(parameter.name, note.metavar)
    if kind is bool and isinstance(note, OptionInfo):
        note.metavar = note.metavar or ""  # Typer would write <bool>
        if note.default is ...:  # Typer would add a second name for the opposite
            note.default = f"--{parameter.name.replace('_', '-')}"
    return parameter.replace(annotation=Annotated[kind, note])


def _parameters(group: type) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    texts: dict[str, str] = {}
    for one in reversed(group.__mro__):
        texts |= _read(one.__doc__)[1]
    for field in fields(group):
        if field.default_factory is not MISSING:
            msg = f"{group.__name__}.{field.name} has a default factory, and options have defaults"
            raise TypeError(msg)
    return [
        _described(
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if field.default is MISSING else field.default,
                annotation=hints[field.name],
            ),
            texts,
        )
        for field in fields(group)
    ]
