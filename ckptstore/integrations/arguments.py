"""Checks of arguments of integrations: wrong types, such as a path or a name, fail at once."""

from __future__ import annotations

from ckptstore.errors import InvalidInputError
from ckptstore.store import Run, Store


def check_run(given: object) -> None:
    """Raise InvalidInputError for an argument that is no run of a store."""
    _check(given, Run, "a run of a store", "gpt", "give store.run({!r})")


def check_run_name(given: object) -> None:
    """Raise InvalidInputError for an argument that is no name of a run."""
    _check(given, str, "the name of a run", "gpt", "give the name: {!r}")


def check_store(given: object) -> None:
    """Raise InvalidInputError for an argument that is no open store."""
    _check(given, Store, "an open store", "ckpts", "give ckptstore.open({!r})")


def _check(given: object, kind: type, needed: str, example: str, hint: str) -> None:
    if not isinstance(given, kind):
        text = isinstance(given, str)
        what = f"the text {given!r}" if text else f"a {type(given).__name__}"
        msg = f"{needed} is needed, not {what}"
        raise InvalidInputError(msg, hint=hint.format(given if text else example))
