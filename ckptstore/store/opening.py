"""Opens a store at a location; mends what a store cannot be opened without."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

from ckptstore import limits
from ckptstore.backends.key_sources import KeyInput, hidden, read_key
from ckptstore.backends.registry import open_backend
from ckptstore.config import SYSTEM, Options, cache_path
from ckptstore.errors import InvalidInputError
from ckptstore.replicas.options import PLACE, ReplicaOptions, name_in, open_place, open_target
from ckptstore.store.pickling import Opening
from ckptstore.store.store import Store

if TYPE_CHECKING:
    from ckptstore.backends.base import Backend
    from ckptstore.keyring import Rotation
    from ckptstore.maintenance.repair.fix_opening import KeysMended, SuperblockFinding


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
    cache_folder: str | os.PathLike[str] | None = None,
    cache_bytes: int = limits.CACHE_BYTES_DEFAULT,
    encryption_key: KeyInput | None = None,
    replicas: ReplicaOptions | None = None,
    **storage_options: Any,  # noqa: ANN401 - passed on to the storage library
) -> Store:
    """Open the store at a location. Exported as ``ckptstore.open``.

    The store can be pickled: the other process opens it again with these arguments.

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
        You guarantee that nothing else writes. Needed only on storage without put-if-absent
        (``ckptstore doctor``).
    chunk_bytes
        Size of chunks of a new store, in bytes.
    host_bytes
        Host memory for chunks in flight, in bytes, of one save or load.
    workers
        Threads that hash, encode and decode; by default the usable processors, at most 8.
    codec
        ``"auto"``: compressed or raw, whichever should save faster; ``"planes"``: the
        fewest bytes; ``"raw"``, ``"zstd"``, or ``"delta"``:
        see :data:`ckptstore.config.CODEC_CHOICES`.
    base_bytes
        Host memory for what the next save with ``"delta"`` takes differences to, in bytes; 0 keeps
        nothing between saves.
    engine
        Who writes saves in the background: ``"process"``, ``"thread"``, or ``"auto"``, which is a
        process wherever one can reach the storage.
    staging_bytes
        Limit of the host memory for staged states, in bytes; by default half of what the process
        may use. Taken by the first background save, as its state needs.
    in_flight
        Saves in the background that may be under way at once.
    cache_folder
        Folder such as ``"/dev/shm/ckptstore"``, through which loads of this user's processes on
        this host share what they fetch; by default that of ``CKPTSTORE_CACHE``. Linux only. See
        docs/howto/torch-distributed.md.
    cache_bytes
        Bytes that the folder may hold; the oldest are removed.
    encryption_key
        Opens an encrypted store, and makes a new one such: ``"file:PATH"``, ``"env:NAME"``,
        ``"command:CMD"``, or 32 bytes. See docs/howto/encryption.md.
    replicas
        By the name of a replica (:meth:`Store.add_replica`): options to open it with, such as
        ``{"cold": {"url": "s3://...", "endpoint_url": "..."}}``, or an open store. Never stored,
        and used only for the place ``url``.
    storage_options
        Handed to the storage library (s3fs, gcsfs, ...), such as ``endpoint_url`` or ``profile``.
        Credentials belong into their usual chains, not here.

    Raises
    ------
    InvalidUrlError
        It is no location.
    InvalidInputError
        An option is of another type, out of its bounds, or none of its choices; or other users
        have access to `cache_folder`.
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
        "cache_folder": cache_folder and cache_path(cache_folder),
        "cache_bytes": cache_bytes,
        **storage_options,
    }
    here = {"create": create, "chunk_bytes": chunk_bytes, "replicas": replicas}
    repo = open_place(url, {**travelling, **here, "encryption_key": encryption_key})
    opening = Opening.of(open_store, url, encryption_key, travelling)
    return Store(repo, replicas=replicas, opening=opening)


@contextmanager
def open_target_of(
    source: Store,
    url: str,
    check: Callable[[Backend], None] | None = None,
    /,
    *,
    dry_run: bool,
    **options: Any,  # noqa: ANN401 - passed on to open_target
) -> Iterator[Store]:
    """Open what versions of a store are to come to: a place, or ``replica:NAME``.

    Parameters
    ----------
    check
        As of :func:`ckptstore.replicas.options.open_target`; not called for a replica.

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
    opening = open_target(source.repo, url, check, dry_run=dry_run, **options)
    with opening as repo, Store(repo) as target:
        yield target


def mend_superblock(
    url: str | os.PathLike[str],
    *,
    source: Store | None = None,
    single_writer: bool = False,
    dry_run: bool = False,
    encryption_key: KeyInput | None = None,
    **storage_options: Any,  # noqa: ANN401 - passed on to the storage library
) -> SuperblockFinding | None:
    """Put the ``store.json`` of a store back, without which it cannot be opened.

    What is in it is taken from a copy of the same store; or found again, from the log, a manifest
    and a new probe of the storage. The store's id is then a new one.

    Parameters
    ----------
    url
        As for :func:`ckptstore.open`.
    source
        A second store, which helps if it is a copy of this one. It is only read.
    single_writer
        You vouch that no one else writes meanwhile: needed to replace a damaged ``store.json``,
        and on storage that cannot create an object conditionally.
    dry_run
        Say what would be done; write nothing.
    encryption_key
        Of an encrypted store, whose records of keys have all that is needed, its id too.
    storage_options
        As for :func:`ckptstore.open`.

    Returns
    -------
    SuperblockFinding or None
        What was wrong, and which fields are new; None if nothing was.

    Raises
    ------
    StoreNotFoundError
        There is nothing of a store.
    CorruptObjectError
        It is damaged, and no commit can be read.
    MissingKeyError, WrongKeyError, EncryptionKeyError
        The store is encrypted, and no key was given, or another; or it is not, and one was.
    UnsafeBackendError, StorageError
        The storage cannot be written to.
    """
    from ckptstore.maintenance.repair import fix_opening as ops

    encryption_key = None if encryption_key is None else read_key(encryption_key)
    with closing(open_backend(url, environment=SYSTEM, **storage_options)) as backend:
        return ops.mend_superblock(
            backend,
            source=None if source is None else source.repo,
            options=Options(single_writer=single_writer),
            dry_run=dry_run,
            key=encryption_key,
        )


def mend_keys(
    url: str | os.PathLike[str],
    *,
    encryption_key: KeyInput,
    single_writer: bool = False,
    dry_run: bool = False,
    **storage_options: Any,  # noqa: ANN401 - passed on to the storage library
) -> KeysMended:
    """Take away records of keys that somebody without the key has put below ``keys/``.

    They open nothing, but stand in the way: the record of the highest number counts. Nothing but
    the key that you give says which are right. So never while somebody rotates the key: of a
    rotation that was killed, what it had written goes.

    Parameters
    ----------
    url
        As for :func:`ckptstore.open`.
    encryption_key
        One that opened the store up to now. If a record has to be written again, it is the only one
        that opens the store from then on; the result says so.
    single_writer
        You vouch that no one else writes meanwhile; see :func:`ckptstore.open`.
    dry_run
        Say what would go; change nothing.
    storage_options
        As for :func:`ckptstore.open`.

    Raises
    ------
    StoreNotFoundError, EncryptionKeyError
        There is no store, or it is not encrypted.
    WrongKeyError
        The key opens no record.
    CorruptObjectError, LimitError
        None can be read; or there are too many to look at.
    UnsafeBackendError, StorageError
        The storage cannot be written to, or failed. Do it again.
    """
    from ckptstore.maintenance.repair import fix_opening as ops

    encryption_key = read_key(encryption_key)
    with closing(open_backend(url, environment=SYSTEM, **storage_options)) as backend:
        return ops.mend_keys(backend, encryption_key, single_writer=single_writer, dry_run=dry_run)


def rotate_key(
    url: str | os.PathLike[str],
    *,
    encryption_key: KeyInput,
    new_key: KeyInput,
    keep_old: bool = False,
    single_writer: bool = False,
    **storage_options: Any,  # noqa: ANN401 - passed on to the storage library
) -> Rotation:
    """Have an encrypted store opened by another key from now on.

    Writes one small object, reads it back and deletes the old one; open stores continue. The data
    key stays the same: anyone with the old key and the old object can still read the store. For a
    new data key, replicate to a new store.

    Parameters
    ----------
    url
        As for :func:`ckptstore.open`.
    encryption_key
        One that opens the store.
    new_key
        The one that is to.
    keep_old
        The present keys still open the store, for a gradual change. Rotate to the new key once
        more, without this, to end that.
    single_writer
        You vouch that no one else writes meanwhile; see :func:`ckptstore.open`.
    storage_options
        As for :func:`ckptstore.open`.

    Raises
    ------
    WrongKeyError, EncryptionKeyError
        `encryption_key` does not open the store; one of the keys cannot be read; the store is not
        encrypted.
    UnsafeBackendError, StorageError
        The storage cannot be written to. The store then opens with the one or the other.
    """
    from ckptstore import keyring
    from ckptstore.backends.base import PutIfAbsent
    from ckptstore.repo import open_repo

    old, new = encryption_key, new_key = read_key(encryption_key), read_key(new_key)
    options = Options(single_writer=single_writer)
    with open_repo(url, key=old, options=options, storage_options=storage_options) as repo:
        repo.check_writable()
        conditional = repo.put_if_absent() is PutIfAbsent.ATOMIC
        return keyring.rotate(repo.backend, old, new, keep_old=keep_old, conditional=conditional)
