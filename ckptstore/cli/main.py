"""The program ``ckptstore``: wires the commands, and turns every failure into an exit code.

Importing this module imports neither torch nor numpy nor a storage library; each command imports
what it needs when it runs.

A command declares its options as keyword parameters; their help is in the section ``Parameters`` of
its docstring. Options that several commands share form a group: a frozen dataclass that the command
takes as one parameter. :func:`flattened` replaces each group by its fields, as Typer needs it.
"""

from __future__ import annotations

import gc
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import MISSING, fields, is_dataclass
from functools import partial
from importlib import import_module
from typing import Annotated, Any, Final, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command
from typer.models import OptionInfo

from ckptstore import __version__, errors
from ckptstore.cli.completion import completer
from ckptstore.cli.output import SCHEMA, Pipe, Unwritable, terminal, write_document
from ckptstore.cli.text import printable
from ckptstore.config import variable
from ckptstore.errors import CkptStoreError, InvalidInputError
from ckptstore.suggestions import meant

EXIT_INTERRUPTED = errors.OperationCancelledError.exit_code
EXIT_PIPE = 141
"""Exit code that a shell reports for a program that SIGPIPE ended."""

EXIT_CODES: dict[int, str] = {
    0: "done",
    1: "an error without its own code, or a bug in ckptstore",
    errors.InvalidInputError.exit_code: "wrong arguments: correct the command",
    errors.NotFoundError.exit_code: "the store, run, version or tensor does not exist",
    errors.ConflictError.exit_code: "another process was first: read again, then decide again",
    errors.IntegrityError.exit_code: "stored data is damaged (verify: any damage was found)",
    errors.FormatError.exit_code: "a format that this version of ckptstore cannot read",
    errors.PolicyError.exit_code: "refused for safety; the hint says how to allow it",
    errors.StorageError.exit_code: "the storage failed, refused the credentials, or needs a thaw",
    EXIT_INTERRUPTED: "interrupted by Ctrl-C; what was committed before stays",
    EXIT_PIPE: "the reader of the output closed the pipe",
}
"""Exit code to meaning; the same table is in docs/reference/cli.md."""


def report(error: CkptStoreError, *, as_json: bool) -> int:
    """Print an error and return the exit code.

    The message goes to stderr. With ``--json``, stdout gets ``{"error": {...}}`` besides, so that
    it holds one document whatever happens.
    """
    write_error(error.message, error.hint)
    if as_json:
        write_error_document(error.kind, error.message, error.hint, error.exit_code)
    return error.exit_code


def unwritable(why: str) -> int:
    """Report that stdout cannot be written to, and return the exit code."""
    hint = "free space where it goes; what the command was to do is done"
    write_error(f"the output cannot be written: {why}", hint)
    return errors.StorageError.exit_code


def write_error(message: str, hint: str = "") -> None:
    """Print a message, and a hint below it, to stderr; red on a terminal."""
    for label, style, text in (("error:", "bold red", message), ("hint:", "bold", hint)):
        if text and sys.stderr.isatty():
            console = terminal(sys.stderr)
            console.print(label, style=style, end=" ")
            console.print(printable(text), soft_wrap=True)
        elif text:
            print(label, printable(text), file=sys.stderr)


def write_error_document(kind: str, message: str, hint: str, exit_code: int) -> None:
    """Print ``{"error": {...}}`` to stdout."""
    told = {"message": printable(message), "hint": printable(hint)}
    error: dict[str, Any] = {"kind": kind, **told, "exit_code": exit_code}
    try:
        write_document({"schema": SCHEMA, "error": error})
    except BrokenPipeError:
        raise
    except OSError:
        # The error itself stands on stderr, and its exit code is what counts.
        return


# Typer has had its own copy of click since 0.26 and the real one before; both hang here.
_USAGE_ERROR: Final = typer.BadParameter.__mro__[1]

_EPILOG: Final = "Exit codes:\n\n" + "\n\n".join(
    f"{code:>3}  {meaning}" for code, meaning in EXIT_CODES.items()
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
MODULES: Final = {
    "annotate": "tag", "evict": "replicate", "pin": "tag", "repair": "verify", "stats": "du",
    "undelete": "rm",
}  # fmt: skip
"""Commands that stand in the module of another one, which is their counterpart."""

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
        module = import_module(f"ckptstore.cli.{MODULES.get(name, name)}_cmd")
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
        return EXIT_PIPE
    except Unwritable as error:
        return unwritable(str(error))
    except SystemExit as error:
        # rich and Typer exit with 1 where stdout is closed; with 0 after a shell's completion.
        if error.code != 1:
            raise
        return EXIT_PIPE


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
        return report(error, as_json=as_json)
    except (Pipe, Unwritable, BrokenPipeError):
        raise
    except (KeyboardInterrupt, typer.Abort):
        code = EXIT_INTERRUPTED
    except Exception as error:  # noqa: BLE001 - a defect: shown whole, and still one exit code
        if isinstance(error, _USAGE_ERROR):
            return _usage(error, only or arguments[0], as_json=as_json)
        traceback.print_exc()
        if as_json:
            write_error_document("internal", f"{type(error).__name__}: {error}", "", 1)
        return 1
    if code == EXIT_INTERRUPTED:
        hint = _GO_ON.get(only, _AGAIN)
        return report(errors.OperationCancelledError("interrupted", hint=hint), as_json=as_json)
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
    return report(InvalidInputError(message, hint=hint), as_json=as_json)


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
        lost = code == EXIT_PIPE
    except BrokenPipeError:
        code, lost = EXIT_PIPE, True
    except OSError as error:
        # Told already if that is what the command ended with.
        code, lost = code or unwritable(error.strerror or str(error)), True
    if lost:
        # Python flushes stdout once more when it exits: let that go nowhere, in silence.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


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
