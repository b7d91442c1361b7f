"""The program ``ckptstore``: wires the commands, and turns every failure into an exit code.

Importing this module imports neither torch nor numpy nor a storage library; each command imports
what it needs when it runs.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Final

import typer
from typer.main import get_command

from ckptstore import __version__
from ckptstore.cli import error_text
from ckptstore.cli.option_groups import QuietCommand, QuietGroup, examples, flattened
from ckptstore.cli.output import Pipe, Unwritable
from ckptstore.config import variable
from ckptstore.errors import CkptStoreError, InvalidInputError
from ckptstore.suggestions import meant

# Typer has had its own copy of click since 0.26 and the real one before; both hang here.
_USAGE_ERROR: Final = typer.BadParameter.__mro__[1]

_EPILOG: Final = "Exit codes:\n\n" + "\n\n".join(
    f"{code:>3}  {meaning}" for code, meaning in error_text.EXIT_CODES.items()
)

GROUPS: Final = {
    "Start": ("init", "import", "export", "doctor"),
    "Look": ("ls", "show", "log", "diff", "du", "stats", "report", "top"),
    "Name and branch": ("tag", "annotate", "fork", "rollback", "pin"),
    "Free space": ("roles", "retain", "rm", "undelete", "gc"),
    "Check and repair": ("verify", "repair"),
    "Share": ("serve", "push", "publish"),
    "Other stores": ("replicate", "replica", "evict", "archive", "thaw", "key"),
}
"""Every command by what people do, in the order of the help."""
COMMANDS: Final = {name: title for title, names in GROUPS.items() for name in names}

_AGAIN: Final = "what was committed stays; the same command again continues"
_GO_ON: Final = {
    **dict.fromkeys((*GROUPS["Look"], "doctor"), "nothing was changed"),
    "export": "no file appeared; the same command starts again",
    "push": "nothing shows at the target; the same command sends what it lacks",
    "verify": "the same command starts again; with --resume FILE it keeps its progress",
    "": "nothing was done",
}
"""What an interrupted command left, and how to go on."""
_GC_OBJECTS: Final = 200_000
_BEFORE_WITH_VALUE: Final = frozenset({"--store", "-s", "--option", "-o", "--key"})
_BEFORE: Final = frozenset({"--json", "--quiet", "-q"})
"""Common options, which may also stand before the command."""


def build_app(only: str = "") -> typer.Typer:
    """Return the program, with all commands or one.

    Building a command costs milliseconds (its imports, and Typer's inspection), so that a run
    builds the one it needs; the help needs all.
    """
    app = typer.Typer(
        name="ckptstore",
        cls=QuietGroup,
        help="Keep the checkpoints of deep-learning training: list, check, load and move them.",
        epilog=_EPILOG,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(invoke_without_command=True)(_root)
    for name in [only] if only else COMMANDS:
        module = import_module(f"ckptstore.cli.{name}_cmd")
        command = getattr(module, "import_" if name == "import" else name)
        shown = "\n\n".join(["Examples:", *(f"$ {line}" for line in examples(command))])
        decorate = app.command(name, cls=QuietCommand, epilog=shown, rich_help_panel=COMMANDS[name])
        decorate(flattened(command))
    return app


def _root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", "-V", metavar="", help="Print the version and exit.", is_eager=True
        ),
    ] = False,
) -> None:
    if version:
        print(f"ckptstore {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


def run(arguments: Sequence[str]) -> int:
    """Run one command line, print its results and errors, and return its exit code.

    Parameters
    ----------
    arguments
        Without the program's name.
    """
    try:
        if variable("_CKPTSTORE_COMPLETE"):
            from ckptstore.cli.completion import completing

            with completing() as name:
                get_command(build_app(name if name in COMMANDS else "")).main([], "ckptstore")
        return _run(arguments)
    except (Pipe, BrokenPipeError):
        return error_text.EXIT_PIPE
    except Unwritable as error:
        return error_text.unwritable(str(error))
    except SystemExit as error:
        # rich and Typer exit with 1 where stdout is closed; with 0 after a shell's completion.
        if error.code != 1:
            raise
        return error_text.EXIT_PIPE


def _run(arguments: Sequence[str]) -> int:
    as_json = "--json" in arguments
    arguments = _command_first(arguments)
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:2], "--help"]
    try:
        only = arguments[0] if arguments and arguments[0] in COMMANDS else ""
        code = get_command(build_app(only)).main(
            args=list(arguments), prog_name="ckptstore", standalone_mode=False
        )
    except CkptStoreError as error:
        return error_text.report(error, as_json=as_json)
    except (Pipe, Unwritable, BrokenPipeError):
        raise
    except (KeyboardInterrupt, typer.Abort):
        code = error_text.EXIT_INTERRUPTED
    except Exception as error:  # noqa: BLE001 - a defect: shown whole, and still one exit code
        if isinstance(error, _USAGE_ERROR):
            return _usage(error, only or arguments[0], as_json=as_json)
        traceback.print_exc()
        if as_json:
            error_text.write_error_document("internal", f"{type(error).__name__}: {error}", "", 1)
        return 1
    if code == error_text.EXIT_INTERRUPTED:
        hint = _GO_ON.get(only, _AGAIN)
        error_text.write_error("interrupted", hint)
        if as_json:
            error_text.write_error_document("cancelled", "interrupted", hint, code)
    return code if isinstance(code, int) else 0


def _command_first(arguments: Sequence[str]) -> Sequence[str]:
    """Return a command line with common options moved behind the command."""
    place = 0
    while place < len(arguments) and arguments[place].startswith("-"):
        name = arguments[place]
        if name in _BEFORE_WITH_VALUE:
            place += 2
        elif name in _BEFORE or name.startswith(("--store=", "--option=", "--key=")):
            place += 1
        else:
            return arguments
    if place >= len(arguments) or arguments[place] not in COMMANDS:
        return arguments
    return [arguments[place], *arguments[:place], *arguments[place + 1 :]]


def _usage(error: Exception, command: str, *, as_json: bool) -> int:
    """Report an invalid command line, and how to get help."""
    path = f"ckptstore {command}".rstrip() if command in COMMANDS else "ckptstore"
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    message = " ".join(message.split())  # choices come one a line
    message = message.replace(": Value error, ", ": ")  # whose error it is helps nobody
    hint = f"see {path} --help"
    if message.startswith("No such command"):
        hint = meant("command", command, COMMANDS)
    if command in {"log", "stats"} and "--plot" in message:
        hint = "ckptstore report FILE.html draws it, and more"
    problem = InvalidInputError(message, hint=hint)
    return error_text.report(problem, as_json=as_json)


def main() -> None:
    """Run the program on the process's arguments, and exit."""
    # Imports and rows are many objects that stay: to look through them again and again takes a
    # tenth of a second of each command. What long commands leave behind is still collected.
    gc.set_threshold(_GC_OBJECTS, *gc.get_threshold()[1:])
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by who started this: nobody wants to read it
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115, PTH123 - for good
    # A name that the terminal's encoding has no character for is escaped, not an error.
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
    code = run(sys.argv[1:])
    try:
        sys.stdout.flush()
        lost = code == error_text.EXIT_PIPE
    except BrokenPipeError:
        code, lost = error_text.EXIT_PIPE, True
    except OSError as error:
        # Told already if that is what the command ended with.
        code, lost = code or error_text.unwritable(error.strerror or str(error)), True
    if lost:
        # Python flushes stdout once more when it exits: let that go nowhere, in silence.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)
