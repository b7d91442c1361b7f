"""commit_retrying: what a collection condemned is written again, a bounded number of times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest

from ckptstore import limits
from ckptstore.backends.base import Backend, Buffer, ObjectInfo
from ckptstore.backends.memory import MemoryBackend, open_memory
from ckptstore.backends.wrapper import WrapperBackend
from ckptstore.committing import commit_retrying, put_once
from ckptstore.config import SYSTEM
from ckptstore.errors import (
    AmbiguousWriteError,
    CommitConflictError,
    CondemnedError,
    ObjectExistsError,
    ObjectNotFoundError,
)
from ckptstore.format.keys import manifest_key, pack_key

T = TypeVar("T")

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


class StaleListing(WrapperBackend):
    """Some creations fail, with nothing stored; a listing shows the name all the same."""

    def __init__(self, inner: Backend, errors: list[Exception]) -> None:
        super().__init__(inner)
        self.errors = errors

    def put_if_absent(self, key: str, data: Buffer) -> None:
        """Fail while there are errors."""
        if self.errors:
            raise self.errors.pop(0)
        super().put_if_absent(key, data)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """List the name, from a cache."""
        return iter([ObjectInfo(key=prefix, size_bytes=1, modified_at=0.0)])


def test_an_object_that_is_only_listed_is_sent_again() -> None:
    """What a stale listing names, and cannot be read, is not stored: the same bytes are sent."""
    backend = StaleListing(open_memory("memory://stale"), [AmbiguousWriteError("lost")])
    assert put_once(backend, "store.json", b"mine", SYSTEM, bytes_max=10) == b"mine"
    assert backend.get("store.json", bytes_max=10) == b"mine"


@pytest.mark.parametrize(
    "errors",
    [
        [AmbiguousWriteError("lost") for _ in range(limits.COMMIT_SENDS_MAX)],
        [ObjectExistsError("taken")],
    ],
    ids=["lost", "taken"],
)
def test_an_object_that_cannot_be_read_back_is_not_known_to_be_written(
    errors: list[Exception],
) -> None:
    """Never success, and never "not there": the storage said that another has created it."""
    backend = StaleListing(open_memory("memory://unread"), errors)
    with pytest.raises(AmbiguousWriteError, match="not known whether"):
        put_once(backend, "store.json", b"mine", SYSTEM, bytes_max=10)


class Unreadable(WrapperBackend):
    """Says that a write was lost, or that the name is taken; lists it, and cannot read it."""

    def __init__(self, inner: MemoryBackend, error: type[Exception]) -> None:
        super().__init__(inner)
        self.error = error

    def around(self, call: str, key: str, action: Callable[[], T], size_bytes: int = 0) -> T:
        """Fail a write after it was done, and each read as a cached lookup would."""
        if call == "get":
            raise ObjectNotFoundError(f"{key} is not there")
        found = action()
        if call == "put_if_absent":
            raise self.error("lost")
        return found


@pytest.mark.parametrize("error", [ObjectExistsError, AmbiguousWriteError])
def test_an_object_that_is_listed_and_cannot_be_read_stays_unclear(error: type[Exception]) -> None:
    """It is no missing object to the caller: whether it was written is not known."""
    backend = Unreadable(MemoryBackend("unreadable"), error)
    with pytest.raises(AmbiguousWriteError, match="not known whether"):
        put_once(backend, "store.json", b"ours", SYSTEM, bytes_max=100)
