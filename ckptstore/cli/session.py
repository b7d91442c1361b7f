"""From the options of a command to an open store, and from a text to a version of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from ckptstore.cli.store_options import CommonOptions, WriterOptions
from ckptstore.errors import InvalidInputError, NotFoundError, RunNotFoundError, UnsafeBackendError
from ckptstore.model import Version
from ckptstore.replicas.places import PLACE, PREFIX
from ckptstore.store import Store, open_store

_BARE_ID = re.compile(r"[0-9a-fA-F]{4,32}\Z")


def location(url: str | None) -> str:
    """Return the URL of the store that a command works on.

    Raises
    ------
    InvalidInputError
        None was given.
    """
    if not url:
        msg = "no store is named"
        raise InvalidInputError(msg, hint="give --store URL, or set CKPTSTORE_URL")
    return url


def opened(options: CommonOptions) -> AbstractContextManager[Store]:
    """Open the store of a command for the length of a block, to read.

    Raises
    ------
    StoreNotFoundError
        There is none; nothing is ever created here.
    CkptStoreError
        As :func:`ckptstore.store.open_store`.
    """
    return opened_place(location(options.store), options.given())


def opened_to_write(
    options: WriterOptions, *, writing: bool = True
) -> AbstractContextManager[Store]:
    """Open the store of a command for the length of a block; read-only unless `writing`.

    Raises
    ------
    CkptStoreError
        As :func:`opened`.
    """
    return opened_place(
        location(options.store),
        options.given(),
        writing=writing,
        single_writer=options.single_writer,
    )


@contextmanager
def opened_place(
    url: str, given: Mapping[str, Any], *, writing: bool = False, single_writer: bool = False
) -> Iterator[Store]:
    """Open the store in a place for the length of a block; read-only unless `writing`.

    Parameters
    ----------
    given
        Options of the storage library, and the key as ``encryption_key``.
    single_writer
        Storage that cannot create an object only if it is absent will do.

    Raises
    ------
    CkptStoreError
        As :func:`opened`.
    """
    if own := sorted(given.keys() & {PLACE, "read_only", "single_writer"}):
        msg = f"{own[0]!r} is not an option of the storage library"
        raise InvalidInputError(msg)
    with (
        vouching(),
        open_store(url, read_only=not writing, single_writer=single_writer, **given) as store,
    ):
        yield store


@contextmanager
def opened_for(store: Store, url: str, given: Mapping[str, Any]) -> Iterator[Store]:
    """Open another store for the length of a block, to read: a place, or ``replica:NAME``.

    Raises
    ------
    NotFoundError
        The store has no replica of this name.
    CkptStoreError
        As :func:`opened`.
    """
    if not url.startswith(PREFIX):
        with opened_place(url, given) as other:
            yield other
        return
    name = url.removeprefix(PREFIX)
    if given:
        store.give_options(name, given)
    yield store.replica(name)


@contextmanager
def vouching() -> Iterator[None]:
    """Rewrite the hint of a refusal of unsafe storage in terms of the command line."""
    try:
        yield
    except UnsafeBackendError as error:
        hint = "add --single-writer if no one else writes at the same time; reading is safe"
        raise UnsafeBackendError(error.message, hint=hint) from error


def full_ref(store: Store, text: str) -> str:
    """Return `text` as a ref of the grammar: ids may also be given without their ``#``.

    A shell takes a word that begins with ``#`` for a comment, and tables show ids bare. Where a
    run has the same name, the run is meant.
    """
    if _BARE_ID.match(text) and not store.repo.refresh().has_run(text):
        return f"#{text}"
    return text


def is_run_name(store: Store, text: str) -> bool:
    """Return whether a command's REF is only the name of a run."""
    return "@" not in text and not full_ref(store, text).startswith("#")


def find_version(store: Store, text: str) -> Version:
    """Return the version that a command's REF names.

    Raises
    ------
    InvalidRefError, RunNotFoundError, VersionNotFoundError
        It names none; the hint names what there is.
    """
    ref = full_ref(store, text)
    try:
        return store.resolve(ref)
    except NotFoundError:
        if ref == text:
            raise
        msg = f"{text!r} is neither a run nor the beginning of a version's id"
        raise RunNotFoundError(msg, hint="ckptstore ls --limit 0 shows both") from None
