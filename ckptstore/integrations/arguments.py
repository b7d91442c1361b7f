"""Checks of arguments of integrations: wrong types, such as a path or a name, fail at once."""

from __future__ import annotations

from ckptstore.errors import InvalidInputError
from ckptstore.store import Run, Store


def check_run(given: object) -> None:
    """Refuse an argument that is no run of a store.

    Raises
    ------
    InvalidInputError
        `given` is a name, a store or anything else.
    """
    if not isinstance(given, Run):
        name = given if isinstance(given, str) else "gpt"
        msg = f"a run of a store is needed, not {_described(given)}"
        raise InvalidInputError(msg, hint=f"give store.run({name!r})")


def check_run_name(given: object) -> None:
    """Refuse an argument that is no name of a run, where a store is given too.

    Raises
    ------
    InvalidInputError
        `given` is a run or anything else that is no text.
    """
    if not isinstance(given, str):
        msg = f"the name of a run is needed, not {_described(given)}"
        raise InvalidInputError(msg, hint="give the name: 'gpt'")


def check_store(given: object) -> None:
    """Refuse an argument that is no open store.

    Raises
    ------
    InvalidInputError
        `given` is a path, a run or anything else.
    """
    if not isinstance(given, Store):
        where = given if isinstance(given, str) else "ckpts"
        msg = f"an open store is needed, not {_described(given)}"
        raise InvalidInputError(msg, hint=f"give ckptstore.open({where!r})")


def _described(given: object) -> str:
    return f"the text {given!r}" if isinstance(given, str) else f"a {type(given).__name__}"
