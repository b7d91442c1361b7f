"""The reference page and the program say the same."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from ckptstore.cli.main import COMMANDS, EXIT_CODES, build_app

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "cli.md"
_OPTION = r"(?<![\w'\x22-])--?[a-zV][a-z0-9-]*"
COMMON = {"--store", "-s", "--option", "-o", "--key", "--json", "--quiet", "-q", "--utc"}
COMMON |= {"--cache", "--help", "-h"}
SECOND = {f"--{where}{what}" for where in ("to", "from", "heal") for what in ("-option", "-key")}
"""Options of the second store of a command, after the option that names it."""


def _sections() -> dict[str, str]:
    """Return the page by its headings of the second level."""
    parts = re.split(r"^## +(.+)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def _options(command: Any) -> set[str]:  # noqa: ANN401 - of Typer, or of click before it
    return {o for p in command.params for o in p.opts if o.startswith("-")} | {"--help", "-h"}


def _documented(text: str) -> set[str]:
    """Return every option that a text names in code."""
    code = re.findall(
        r"`([^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    )
    return {found for part in code for found in re.findall(_OPTION, part)}


_WITHOUT_KEY = frozenset({"doctor"})
"""Commands that look at a storage, whatever is stored there: they have no key and no cache."""


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_of_a_command_is_described(name: str) -> None:
    """Each command has its section, with all its options and arguments and no others."""
    section = _sections()[f"ckptstore {name}"]
    command = get_command(build_app()).commands[name]  # type: ignore[attr-defined]
    options = _options(command)
    assert _documented(section) - COMMON == options - COMMON
    usage = section.split("```text\n")[1].split("```")[0]
    for option in options - COMMON:
        assert option in usage or not option.startswith("--")
    for argument in (p for p in command.params if not any(o.startswith("-") for o in p.opts)):
        assert argument.metavar.strip("[].") in usage
    assert command.help
    own_place = {"--cache", "--key"} if name in _WITHOUT_KEY else set()
    assert COMMON - {"--utc"} - own_place <= options


def test_common_options_and_commands_are_described() -> None:
    """What all commands share is described once; the table of commands is complete."""
    intro, common = PAGE.read_text(encoding="utf-8").split("## Common to all commands", 1)
    assert re.findall(r"^\| \[`(\w+)`\]", intro, flags=re.MULTILINE) == list(COMMANDS)
    section = common.split("\n## ", 1)[0]
    root = _options(get_command(build_app()))
    second = {"--to", "--from", "--heal-from", "--replica"} | SECOND
    assert _documented(section) == COMMON | root | second
    assert "CKPTSTORE_URL" in section
    assert "CKPTSTORE_KEY" in section


def test_options_of_a_second_store_go_together() -> None:
    """A command that can be told storage options of a second store can be told its key, too."""
    for name, command in get_command(build_app()).commands.items():  # type: ignore[attr-defined]
        options = _options(command)
        for where in ("to", "from", "heal"):
            assert (f"--{where}-option" in options) is (f"--{where}-key" in options), name
        own = {o for o in options - COMMON if o.endswith(("-option", "-key"))}
        assert own <= SECOND | {"--new-key", "--tls-key"}, name


def test_exit_codes_are_described() -> None:
    """The table of the page is the program's."""
    rows = re.findall(r"^\| (\d+) \| (.+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert {int(code): meaning for code, meaning in rows} == EXIT_CODES


def test_help_names_every_option_of_every_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """--help of each command prints; none of its options lacks a text."""
    monkeypatch.setenv("COLUMNS", "200")
    for name in COMMANDS:
        command = get_command(build_app(name)).commands[name]  # type: ignore[attr-defined]
        assert all(getattr(param, "help", "") for param in command.params), name
        assert command.main(["--help"], standalone_mode=False) == 0
        out = capsys.readouterr().out
        for option in _options(command):
            assert option in out, (name, option)
