"""From the options of a command to an open store, and from a text to a version of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from ckptstore.catalog.replica_ops import find_replica
from ckptstore.cli.store_options import CommonOptions, SourceOptions, WriterOptions
from ckptstore.errors import InvalidInputError, NotFoundError, RunNotFoundError, UnsafeBackendError
from ckptstore.model import Version
from ckptstore.replicas.options import PLACE, PREFIX
from ckptstore.store import Store, open_store
from ckptstore.store.version_lookup import named_versions

_BARE_ID = re.compile(r"[0-9a-fA-F]{4,32}\Z")


def location(url: str | None) -> str:
    """Return the URL of the store that a command works on.

    Raises
    ------
    InvalidInputError
        None was given.
    """
    if not url:
        raise InvalidInputError("no store is named", hint="give --store URL, or set CKPTSTORE_URL")
    return url


def opened(options: CommonOptions, *, writing: bool = False) -> AbstractContextManager[Store]:
    """Open the store of a command for the length of a block; read-only unless `writing`.

    Raises
    ------
    StoreNotFoundError
        There is none; nothing is ever created here.
    CkptStoreError
        As :func:`ckptstore.store.open_store`.
    """
    url, given = location(options.store), options.given()
    single = isinstance(options, WriterOptions) and options.single_writer
    return opened_place(url, given, writing=writing, single_writer=single)


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
        raise InvalidInputError(f"{own[0]!r} is not an option of the storage library")
    with (
        vouching(),
        open_store(url, read_only=not writing, single_writer=single_writer, **given) as store,
    ):
        yield store


@contextmanager
def opened_for(
    store: Store,
    url: str,
    given: Mapping[str, Any],
    *,
    writing: bool = False,
    single_writer: bool = False,
) -> Iterator[Store]:
    """Open another store for the length of a block: a place, or ``replica:NAME``.

    Raises
    ------
    NotFoundError
        The store has no replica of this name.
    CkptStoreError
        As :func:`opened`.
    """
    if not url.startswith(PREFIX):
        with opened_place(url, given, writing=writing, single_writer=single_writer) as other:
            yield other
        return
    name = url.removeprefix(PREFIX)
    if writing:
        given = {**given, "read_only": False, "single_writer": single_writer}
    if given:
        store.give_options(name, given)
    with vouching():
        yield store.replica(name)


def give_replica(store: Store, named: str | None, source: SourceOptions) -> None:
    """Set the options with which a store opens one of its replicas, if a load needs it.

    Raises
    ------
    InvalidInputError
        Options are given without a replica, or the named store is not a replica.
    NotFoundError
        The store has no replica of this name.
    """
    source.check(named, "replica:NAME")
    if named is None:
        return
    if not named.startswith(PREFIX):
        msg = f"--from wants a replica, not {named!r}"
        raise InvalidInputError(msg, hint="--from replica:NAME; --store URL reads another store")
    name = named.removeprefix(PREFIX)
    find_replica(store.repo.refresh(), name)
    if given := source.given():
        store.give_options(name, given)


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
    if _BARE_ID.match(text) and not store.repo.catalog.has_run(text):
        return f"#{text}"
    return text


def is_run_name(store: Store, text: str) -> bool:
    """Return whether a command's REF is only the name of a run."""
    return "@" not in text and not full_ref(store, text).startswith("#")


def find_version(store: Store, text: str) -> Version:
    """Return the version that a command's REF names; as :func:`find_versions`."""
    return find_versions(store, [text])[0]


def versions_named(store: Store, text: str) -> list[Version]:
    """Return the version of a REF, or all versions of a bare run name; as :func:`find_versions`."""
    one = find_version(store, text)
    return store.versions(text) if is_run_name(store, text) else [one]


def find_versions(store: Store, texts: Sequence[str]) -> list[Version]:
    """Return the versions that a command's REFs name, in their order; the log is read once.

    Raises
    ------
    InvalidRefError, RunNotFoundError, VersionNotFoundError
        One names none; the hint names what there is.
    """
    refs = [full_ref(store, text) for text in texts]
    try:
        return named_versions(store.repo, refs)
    except NotFoundError:
        if len(refs) > 1:
            return [find_version(store, text) for text in texts]  # the error is of one of them
        if refs == texts:
            raise
        (text,) = texts
        msg = f"{text!r} is neither a run nor the beginning of a version's id"
        raise RunNotFoundError(msg, hint="ckptstore ls --limit 0 shows both") from None
