"""Rows of the tables of failures: fault, tool, and observation."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["Row", "counted", "row_of_saves", "threads_may_die"]

_GOOD = ("raised", "returned success, loads")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One fault in one tool."""

    fault: str
    tool: str
    observed: str
    silent: bool
    """True if wrong or missing data passed as success, or code was executed."""


def row_of_saves(fault: str, tool: str, outcomes: Counter[str], good: Sequence[str] = _GOOD) -> Row:
    """Return the row of saves with these outcomes; it is silent if one of them is not good."""
    return Row(
        fault=fault,
        tool=tool,
        observed=counted(outcomes),
        silent=any(outcome not in good for outcome in outcomes),
    )


def counted(outcomes: Counter[str]) -> str:
    """Return the outcomes in words, the most common first."""
    total = outcomes.total()
    return "; ".join(f"{what}: {count} of {total}" for what, count in outcomes.most_common())


@contextmanager
def threads_may_die() -> Iterator[None]:
    """Hide the traceback of a dying thread: its death is intended."""
    hook = threading.excepthook
    threading.excepthook = lambda _: None
    try:
        yield
    finally:
        threading.excepthook = hook
