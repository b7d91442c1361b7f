"""Names that a mistyped one may have been meant to be."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from ckptstore.errors import UnknownNameError


class Suggesting:
    """Base of public classes: an attribute that is not there is an error that says what is."""

    __slots__ = ()

    if not TYPE_CHECKING:  # so that type checkers still report misspelled names

        def __getattr__(self, name: str) -> object:
            """Raise UnknownNameError with the name that was probably meant."""
            if name.startswith("_"):  # asked for by Python and notebooks, not by people
                raise AttributeError(name)
            kind = type(self)
            known = [each for each in dir(kind) if not each.startswith("_")]
            msg = f"{kind.__name__} has no attribute {name!r}"
            raise UnknownNameError(msg, hint=meant(kind.__name__, name, known))


def meant(owner: str, name: str, known: Iterable[str]) -> str:
    """Return a hint for a name that a class or module lacks: what does the same, or is similar."""
    guesses = tomllib.loads(Path(__file__).with_name("guesses.toml").read_text(encoding="utf-8"))
    return guesses.get(owner, {}).get(name) or did_you_mean(name, known)


def did_you_mean(text: object, known: Iterable[str]) -> str:
    """Return a hint that names what `text` may have been meant to be, or what there is."""
    names = list(known)
    close = get_close_matches(str(text), names[-10_000:], n=3)
    if close:
        return "did you mean " + " or ".join(close) + "?"
    if not names:
        return "there is none yet"
    return "there is " + listed(names, most=5)


def listed(texts: Sequence[str], *, most: int, count: int | None = None) -> str:
    """Return the first `most` texts and the number of the others: ``a, b and 3 more``.

    Parameters
    ----------
    count
        The number of all, where `texts` are only some of them.
    """
    more = (len(texts) if count is None else count) - most
    return ", ".join(texts[:most]) + (f" and {more:,} more" if more > 0 else "")
