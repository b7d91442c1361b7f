"""commit_retrying: what a collection condemned is written again, a bounded number of times."""

from __future__ import annotations

import pytest

from ckptstore import limits
from ckptstore.committing import commit_retrying
from ckptstore.errors import CommitConflictError, CondemnedError
from ckptstore.format.keys import manifest_key, pack_key

FIRST, SECOND = "1" * 32, "2" * 32


def condemned(*keys: str) -> CondemnedError:
    """Return the error of a commit that relied on condemned objects."""
    error = CondemnedError("condemned")
    error.keys = frozenset(keys)
    return error


def test_each_try_is_given_all_packs_that_were_condemned_before_it() -> None:
    """A try avoids the packs of every earlier error; keys of manifests are no packs."""
    errors = [
        condemned(pack_key(FIRST)),
        condemned(manifest_key(FIRST)),
        condemned(pack_key(SECOND)),
    ]
    given: list[set[str]] = []

    def attempt(packs: set[str]) -> str:
        given.append(set(packs))
        if errors:
            raise errors.pop(0)
        return "done"

    assert commit_retrying(attempt) == "done"
    assert given == [set(), {FIRST}, {FIRST}, {FIRST, SECOND}]


def test_the_last_try_lets_its_error_through() -> None:
    """Collections that condemn again and again end the commit with the error of the last try."""
    raised: list[CondemnedError] = []

    def attempt(_: set[str]) -> None:
        raised.append(condemned(pack_key(FIRST)))
        raise raised[-1]

    with pytest.raises(CondemnedError) as caught:
        commit_retrying(attempt)
    assert len(raised) == limits.CONDEMNED_TRIES_MAX
    assert caught.value is raised[-1]


def test_another_error_is_raised_at_once() -> None:
    """Only a condemned object is a reason to write again."""
    tries: list[None] = []

    def attempt(_: set[str]) -> None:
        tries.append(None)
        raise CommitConflictError("others were faster")

    with pytest.raises(CommitConflictError, match="faster"):
        commit_retrying(attempt)
    assert len(tries) == 1
