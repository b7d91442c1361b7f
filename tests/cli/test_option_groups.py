"""Groups of options: one parameter of a command, many of the command line."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Annotated

import pytest
import typer

from ckptstore.cli.main import COMMANDS, build_app, flattened, run

COUNT = typer.Option("--count", help="How many.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """Two numbers."""

    count: Annotated[int, COUNT] = 3
    other: Annotated[int | None, typer.Option("--other")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Required:
    """One that must be given."""

    need: Annotated[str, typer.Option("--need")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Again:
    """A name that is in another group, too."""

    count: Annotated[int, COUNT] = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Two limits.

    Parameters
    ----------
    most
        The largest number,
        in all.
    """

    most: int = 3


def test_fields_take_the_place_of_their_group() -> None:
    """Each field is a parameter where the group stood, with its option, default and no other."""

    def command(ref: str, *, numbers: Numbers, required: Required, last: bool = False) -> None:
        """Do it."""

    found = inspect.signature(flattened(command)).parameters
    assert list(found) == ["ref", "count", "other", "need", "last"]
    assert found["count"].default == 3
    (count,) = found["count"].annotation.__metadata__
    assert (count.default, count.help) == ("--count", "How many.")
    assert found["other"].default is None
    assert found["need"].default is inspect.Parameter.empty
    assert flattened(command).__doc__ == "Do it."


def test_the_help_of_an_option_is_its_text_in_the_docstring() -> None:
    """Of a command and of a group; a flag has one name, and the section is not in the help."""

    def command(*, limits: Limits, dry_run: bool = False) -> None:
        """Do it.

        Not often.

        Parameters
        ----------
        dry_run
            Change nothing.
        """

    call = flattened(command)
    most, dry_run = (
        parameter.annotation.__metadata__[0]
        for parameter in inspect.signature(call).parameters.values()
    )
    assert call.__doc__ == "Do it.\n\nNot often."
    assert (most.help, most.default) == ("The largest number, in all.", ...)
    assert (dry_run.help, dry_run.default) == ("Change nothing.", "--dry-run")


def test_a_command_gets_its_groups_filled() -> None:
    """What Typer passes by name arrives in the groups, and what is of no group beside them."""
    got: list[object] = []

    def command(ref: str, *, numbers: Numbers, last: bool = False) -> None:
        got.extend((ref, numbers, last))

    flattened(command)(ref="a", count=1, other=2, last=True)
    assert got == ["a", Numbers(count=1, other=2), True]


def test_an_option_stands_in_one_group_only() -> None:
    """Two groups with an option of the same name are refused when the program is built."""

    def command(*, numbers: Numbers, again: Again) -> None:
        pass

    with pytest.raises(ValueError, match="count"):
        flattened(command)


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A list, made anew for each call."""

    names: Annotated[list[str], typer.Option("--name")] = field(default_factory=list)


def test_a_default_is_a_value() -> None:
    """A default that is made anew is refused: Typer would take the option for a required one."""

    def command(*, made: Made) -> None:
        pass

    with pytest.raises(TypeError, match="names"):
        flattened(command)


def test_no_default_of_an_option_is_a_tuple() -> None:
    """A comma too many after a default makes it a tuple, which Typer takes without a word."""
    app = build_app()
    for command in app.registered_commands:
        assert command.callback is not None
        for name, parameter in inspect.signature(command.callback).parameters.items():
            assert not isinstance(parameter.default, tuple), (command.name, name)
    assert len(app.registered_commands) == len(COMMANDS)


@pytest.mark.parametrize("command", ["gc", "verify", "export"])
def test_flags_take_no_value_in_the_help(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The help of a flag names no value, so that nobody writes --json true."""
    monkeypatch.setenv("COLUMNS", "200")
    run([command, "--help"])
    lines = capsys.readouterr().out.splitlines()
    flags = [line for line in lines if "--json" in line or "--quiet" in line or "--force" in line]
    assert len(flags) >= 2
    assert not any("bool" in line for line in flags)


def test_help_is_wrapped_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A paragraph of the help fills the terminal, wherever the docstring breaks its lines."""
    monkeypatch.setenv("COLUMNS", "72")
    run(["export", "--help"])
    out = capsys.readouterr().out
    lines = [line.strip() for line in out.split("Arguments")[0].splitlines()]
    start = next(place for place, line in enumerate(lines) if line.startswith("The file appears"))
    paragraph = lines[start : lines.index("", start)]
    assert len(paragraph) >= 2
    assert min(map(len, paragraph[:-1])) > 50
