"""Commits that a collection may overtake: what it condemned is written again under new names."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ckptstore import limits
from ckptstore.errors import CondemnedError
from ckptstore.format.keys import pack_id

T = TypeVar("T")


def commit_retrying(attempt: Callable[[set[str]], T]) -> T:
    """Return the result of `attempt`, called again each time a collection condemned what it needs.

    A writer needs no lock against collections: its commit checks, in the same step on the log, that
    nothing that it names was condemned. If something was, the writer still holds the bytes, writes
    them again under new names and commits again. No live version can therefore name a swept object;
    and since no name is used twice, a late delete hits no new object.

    Parameters
    ----------
    attempt
        Called with the ids of the packs that collections condemned so far, which it may neither
        share nor name; it may add others that it avoids from then on. Writes what it needs, under
        names that were never used, and commits.

    Raises
    ------
    CondemnedError
        Of the last of ``CONDEMNED_TRIES_MAX`` tries.
    """
    condemned: set[str] = set()
    for _ in range(limits.CONDEMNED_TRIES_MAX - 1):
        try:
            return attempt(condemned)
        except CondemnedError as error:
            condemned.update(pack for key in error.keys if (pack := pack_id(key)))
    return attempt(condemned)
