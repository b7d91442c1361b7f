"""Error output of commands: message, JSON document and exit code."""

from __future__ import annotations

import sys
from typing import Any

from ckptstore import errors
from ckptstore.cli.output import SCHEMA, terminal, write_document
from ckptstore.cli.text import printable
from ckptstore.errors import CkptStoreError

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
