"""Names that a mistyped one may have been meant to be."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(text: str, known: Iterable[str]) -> str:
    """Return a hint that names what `text` may have been meant to be, or what there is."""
    names = list(known)
    close = get_close_matches(text, names[-10_000:], n=3)
    if close:
        return "did you mean " + " or ".join(close) + "?"
    if not names:
        return "there is none yet"
    return "there is " + ", ".join(names[:5]) + (f" and {len(names) - 5} more" if names[5:] else "")
