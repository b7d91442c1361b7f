"""The help: grouped, with examples that parse, the same as the reference page; completion."""

from __future__ import annotations

import inspect
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.main import get_command

import ckptstore
from ckptstore.cli.main import COMMANDS, EXIT_CODES, GROUPS, build_app, flattened, run
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


PROGRAM = "import sys; from ckptstore.cli.main import main; main()"


def completed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, shell: str, line: str
) -> set[str]:
    """Return what the program offers at the end of a line; its words must not be parted."""
    words = line.split(" ")
    monkeypatch.setenv("_CKPTSTORE_COMPLETE", f"complete_{shell}")
    if shell == "bash":
        monkeypatch.setenv("COMP_WORDS", "\n".join(words))
        monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    else:
        monkeypatch.setenv("_TYPER_COMPLETE_ARGS", line)
        monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    capsys.readouterr()
    with pytest.raises(SystemExit) as done:
        run([])
    assert done.value.code == 0
    out, err = capsys.readouterr()
    assert err == ""
    if shell == "zsh":  # "name":"help", with colons escaped
        return {name.replace(r"\\:", ":") for name in re.findall(r'(?:\(\(|\n)"([^"]+)"', out)}
    return {line.partition("\t")[0] for line in out.splitlines() if line}


@pytest.fixture
def _url(history: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTSTORE_URL", str(history))


@pytest.mark.usefixtures("_url")
@pytest.mark.short(sample=1)
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_names_of_a_store_are_completed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, shell: str
) -> None:
    """Commands, runs, refs, tags and metrics."""

    def offered(line: str) -> set[str]:
        return completed(capsys, monkeypatch, shell, line)

    assert {"retain", "repair", "replicate"} <= offered("ckptstore re")
    assert {"gpt"} <= offered("ckptstore ls g")
    assert "lora" in offered("ckptstore show ")
    assert not {"lora", "gpt"} & offered("ckptstore show x")
    assert "first" in offered("ckptstore ls --tag f")
    assert "val_loss" in offered("ckptstore ls gpt --sort va")
    assert "val_loss" in offered("ckptstore ls gpt --metric ")
    if shell != "bash":
        found = offered("ckptstore show gpt@")
        assert {"gpt@latest", "gpt@best:val_loss", "gpt@first", "gpt@500"} <= found


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_names_that_a_shell_would_run_are_not_offered(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shell: str
) -> None:
    """A metric in a store of somebody else may be called like a command substitution."""
    with ckptstore.open(tmp_path / "store", create=True) as store:
        names = ["val_loss", "val$(touch x)", "val`touch x`", "val'; touch x; '", "val *", "val\\x"]
        store.run("gpt").save([1], 1, metrics=dict.fromkeys(names, 1.0))
    monkeypatch.setenv("CKPTSTORE_URL", str(tmp_path / "store"))
    assert completed(capsys, monkeypatch, shell, "ckptstore ls --sort val") == {"val_loss"}


def test_a_store_that_is_not_there_offers_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No error disturbs the line that is being typed."""
    monkeypatch.setenv("CKPTSTORE_URL", str(tmp_path / "nowhere"))
    assert completed(capsys, monkeypatch, "bash", "ckptstore ls g") == set()


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("words", "reply"),
    [
        (["show", "gpt", "@", "best", ":", "v"], ["val_loss"]),
        (["show", "gpt", "@", "fi"], ["first"]),
        (["show", "gpt", "@"], ["latest", "best:val_loss", "first", "500"]),
        (["annotate", "gpt", "@", "100", "ac"], ["acc"]),
    ],
)
@pytest.mark.short(sample=1)
def test_bash_parts_refs_and_gets_the_part_at_the_cursor(
    history: Path, tmp_path: Path, words: list[str], reply: list[str]
) -> None:
    """Bash sees ``gpt@best:v`` as five words, and replaces the last one."""
    program = tmp_path / "ckptstore"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{PROGRAM}" "$@"\n')
    program.chmod(0o755)
    typed = " ".join(f"'{word}'" for word in ("ckptstore", *words))
    script = (
        f"PATH={tmp_path}:$PATH; export CKPTSTORE_URL={history}\n"
        'eval "$(_CKPTSTORE_COMPLETE=source_bash ckptstore)"\n'
        f"COMP_WORDS=({typed}); COMP_CWORD={len(words)}\n"
        '_ckptstore_completion ckptstore; printf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, check=True, text=True)
    assert done.stdout.split()[: len(reply)] == reply, done.stderr
