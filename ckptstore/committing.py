"""Writes that others may overtake: objects that are created once, and commits under collection."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ckptstore import errors, limits
from ckptstore.backends.base import Backend
from ckptstore.catalog.reading import wait_until
from ckptstore.config import Environment
from ckptstore.format.keys import pack_id

T = TypeVar("T")


def put_once(
    backend: Backend,
    key: str,
    data: bytes,
    environment: Environment,
    *,
    bytes_max: int,
    conditional: bool = True,
) -> bytes:
    """Create an object; return what is stored under its key: `data`, or another creator's.

    As with commits, a lost answer is resolved by reading back, and the same bytes are sent again
    only if nothing is stored yet.

    Parameters
    ----------
    bytes_max
        Most bytes that the object of another creator may have.
    conditional
        False where the storage has no put-if-absent, and the user has promised a single writer.

    Raises
    ------
    AmbiguousWriteError
        The object may or may not be stored.
    """
    write = backend.put_if_absent if conditional else backend.put
    msg = f"it is not known whether {key} was written at {backend.url}"

    def is_listed() -> bool:
        return any(info.key == key for info in backend.list(key))

    for sent in range(limits.COMMIT_SENDS_MAX):
        cause: Exception
        try:
            write(key, data)
        except (
            errors.ObjectExistsError,
            errors.AmbiguousWriteError,
            errors.TransientStorageError,
        ) as error:
            cause = error
        else:
            return data
        taken = isinstance(cause, errors.ObjectExistsError)
        try:
            if wait_until(backend, environment, is_listed) if taken else is_listed():
                backend.make_durable([key])
                return backend.get(key, bytes_max=bytes_max)
        except errors.ObjectNotFoundError as error:  # a listing from a cache: nothing is stored
            cause = error
        except errors.StorageError as error:
            msg = f"{msg}: {error.message}"
            raise errors.AmbiguousWriteError(msg, hint="do it again") from error
        if taken or sent + 1 == limits.COMMIT_SENDS_MAX:
            raise errors.AmbiguousWriteError(msg, hint="do it again") from cause
    raise AssertionError  # pragma: no cover - the loop has no other end


def on_reserve(backend: Backend, write: Callable[[], T]) -> T:
    """Return ``write()``, on a full storage called once more with the room kept for this.

    For writes that lead to deletions. What is left of the room is kept again afterwards.

    Raises
    ------
    StorageFullError
        The storage is full all the same: the room was too small, or another process took it.
    """
    try:
        return write()
    except errors.StorageFullError:
        backend.drop_reserve()  # if another process has just done so, there is room as well
    try:
        return write()
    finally:
        backend.keep_reserve(whole=False)


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
        except errors.CondemnedError as error:
            condemned.update(pack for key in error.keys if (pack := pack_id(key)))
    return attempt(condemned)
