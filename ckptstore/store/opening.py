"""Opens a store at a location, or the one that versions are to come to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ckptstore import limits
from ckptstore.backends.key_sources import hidden
from ckptstore.errors import InvalidInputError
from ckptstore.replicas.options import ReplicaOptions, check_given, open_place, open_target
from ckptstore.replicas.places import PLACE, name_in
from ckptstore.store.pickling import Opening
from ckptstore.store.store import Store

if TYPE_CHECKING:
    from ckptstore.backends.key_sources import KeyInput


def open_store(
    url: str | os.PathLike[str],
    *,
    create: bool = False,
    read_only: bool = False,
    single_writer: bool = False,
    chunk_bytes: int = limits.CHUNK_BYTES_DEFAULT,
    host_bytes: int = limits.HOST_BYTES_DEFAULT,
    workers: int | None = None,
    codec: str = "auto",
    base_bytes: int = limits.BASE_BYTES_DEFAULT,
    engine: str = "auto",
    staging_bytes: int | None = None,
    in_flight: int = limits.IN_FLIGHT_DEFAULT,
    encryption_key: KeyInput | None = None,
    replicas: ReplicaOptions | None = None,
    **storage_options: Any,  # noqa: ANN401 - passed on to the storage library
) -> Store:
    """Open the store at a location. Exported as ``ckptstore.open``.

    The store can be pickled: the location and these arguments travel (not `create`, never a key
    that is not the place of one), and the other process opens it again.

    Parameters
    ----------
    url
        A path, or any fsspec URL: ``/data/ckpts``, ``s3://bucket/ckpts``, ``gs://bucket/ckpts``,
        ``memory://name``.
    create
        Make a store where there is none; opens it where there is one.
    read_only
        Refuse every write.
    single_writer
        You vouch that no one else writes while this store is open. Needed only on storage that
        cannot create an object conditionally (see ``ckptstore doctor``).
    chunk_bytes
        Size of chunks of a new store, in bytes.
    host_bytes
        Host memory for chunks in flight, in bytes, of one save or load.
    workers
        Threads that hash, encode and decode; by default the usable processors, at most 8.
    codec
        ``"auto"``: compressed or raw, whichever this storage and these processors are measured to
        save faster; ``"planes"``: always the fewest bytes; ``"raw"``, ``"zstd"``, or ``"delta"``:
        see :data:`ckptstore.config.CODEC_CHOICES`.
    base_bytes
        Host memory for what the next save with ``"delta"`` takes differences to, in bytes; 0 keeps
        nothing between saves.
    engine
        Who writes saves in the background: ``"process"``, ``"thread"``, or ``"auto"``, which is a
        process wherever one can reach the storage.
    staging_bytes
        Host memory for states that are staged and not yet durable, in bytes, never exceeded; by
        default half of what the process may use. None of it is taken before the first save in the
        background, and no more than its state needs.
    in_flight
        Saves in the background that may be under way at once.
    encryption_key
        Opens an encrypted store, and makes a new one such: ``"file:PATH"``, ``"env:NAME"``,
        ``"command:CMD"``, or 32 bytes. See docs/howto/encryption.md.
    replicas
        By the name of a replica (:meth:`Store.add_replica`): options to open it with, as for this
        function, such as ``{"cold": {"url": "s3://...", "endpoint_url": "..."}}``; or an open
        store. Never stored. ``url`` says for which place they are: those for the storage library
        are given to no other, whatever the log says by then.
    storage_options
        Handed to the storage library (s3fs, gcsfs, ...), such as ``endpoint_url`` or ``profile``.
        Credentials belong into their usual chains, not here.

    Raises
    ------
    InvalidUrlError
        It is no location.
    InvalidInputError
        An option is of another type, out of its bounds, or none of its choices.
    StoreNotFoundError
        There is no store, and `create` is False.
    MissingKeyError, WrongKeyError, EncryptionKeyError
        The store is encrypted, and no key was given, or another; or it is not, and one was.
    UnsafeBackendError
        A store is to be created where several writers would lose commits.
    StorageError
        The storage failed, or refused the credentials.
    """
    encryption_key = hidden(encryption_key)
    check_given(replicas)
    travelling = {
        "read_only": read_only,
        "single_writer": single_writer,
        "host_bytes": host_bytes,
        "workers": workers,
        "codec": codec,
        "base_bytes": base_bytes,
        "engine": engine,
        "staging_bytes": staging_bytes,
        "in_flight": in_flight,
        **storage_options,
    }
    here = {"create": create, "chunk_bytes": chunk_bytes, "encryption_key": encryption_key}
    repo = open_place(url, {**travelling, **here})
    opening = Opening.of(open_store, url, encryption_key, travelling)
    return Store(repo, replicas=replicas, opening=opening)


@contextmanager
def open_target_of(
    source: Store,
    url: str,
    /,
    *,
    dry_run: bool,
    **options: Any,  # noqa: ANN401 - passed on to open_target
) -> Iterator[Store]:
    """Open what versions of a store are to come to: a place, or ``replica:NAME``.

    Raises
    ------
    NotFoundError
        The store has no replica of this name.
    CkptStoreError
        As :func:`ckptstore.replicas.options.open_target`.
    """
    name = name_in(url)
    if name is not None:
        given = {key: value for key, value in options.items() if value}
        if given:
            source.give_options(name, given)
        yield source.replica(name)
        return
    if PLACE in options:
        msg = f"the place of a store is {url}, and {PLACE} among its options is another word for it"
        raise InvalidInputError(msg, hint=f"{PLACE} goes with replica:NAME alone")
    with open_target(source.repo, url, dry_run=dry_run, **options) as repo, Store(repo) as target:
        yield target
