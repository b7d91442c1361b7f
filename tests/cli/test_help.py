"""The help is grouped by what people do, has examples that parse, and no noise."""

from __future__ import annotations

import shlex
import subprocess
import sys
from typing import Any

import pytest
from typer.main import get_command

from ckptstore.cli.main import COMMANDS, GROUPS, build_app
from tests.cli.conftest import Cli


@pytest.fixture(scope="module")
def program() -> Any:  # noqa: ANN401 - of Typer, or of click before it
    """Return the whole program."""
    return get_command(build_app())


def test_commands_are_grouped(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each group is a panel with its commands; the panels come in the order of the table."""
    monkeypatch.setenv("COLUMNS", "100")
    out = cli("--help").out
    places = [out.index(f" {title} ") for title in GROUPS]
    assert places == sorted(places)
    for title, group in GROUPS.items():
        panel = out[out.index(f" {title} ") :].partition("╰")[0]
        assert all(f"│ {name} " in panel for name in group), title


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_two_examples_that_parse(program: Any, name: str) -> None:  # noqa: ANN401
    """Names, options and numbers of arguments in the examples are those of the command."""
    command = program.commands[name]
    lines = [line for line in command.epilog.split("\n\n") if line.startswith("$ ")]
    assert len(lines) == 2
    for line in lines:
        prompt, called, own, *arguments = shlex.split(line)
        assert (prompt, called, own) == ("$", "ckptstore", name)
        command.make_context(name, arguments)


@pytest.mark.parametrize("name", ["", "ls", "verify", "replica"])
def test_the_help_has_no_noise(cli: Cli, name: str) -> None:
    """Names of Python types and ranges of numbers are not in it."""
    out = cli(*name.split(), "--help").out
    for noise in ("<str>", "<bool>", "<path>", "[x>="):
        assert noise not in out
    assert not name or "$ ckptstore" in out


@pytest.mark.parametrize("option", ["--version", "-V"])
def test_the_version_imports_nothing(option: str) -> None:
    """Neither Typer nor torch nor the commands are imported to print it."""
    code = (
        "import sys; sys.argv[1:] = [sys.argv[1]]\n"
        "from ckptstore.__main__ import main\nmain()\n"
        "print({'typer', 'rich', 'torch', 'numpy', 'msgspec'} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, option], capture_output=True, check=True, text=True
    )
    assert done.stdout.startswith("ckptstore 0.")
    assert done.stderr == "set()\n"


def test_the_package_is_a_program() -> None:
    """``python -m ckptstore`` is the same program."""
    words = [sys.executable, "-m", "ckptstore", "lss"]
    done = subprocess.run(words, capture_output=True, check=False, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "hint: did you mean ls?" in done.stderr
