"""What is done to a store as a whole, from outside: its superblock mended, its keys."""

from __future__ import annotations

import os
from contextlib import closing
from typing import TYPE_CHECKING, Any

from ckptstore.backends.key_sources import KeyInput, read_key
from ckptstore.backends.registry import open_backend
from ckptstore.config import SYSTEM, Options
from ckptstore.store.store import Store

if TYPE_CHECKING:
    from ckptstore.keyring import Rotation
    from ckptstore.maintenance.repair.fix_keys import KeysMended
    from ckptstore.maintenance.repair.fix_superblock import SuperblockFinding


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
    from ckptstore.maintenance.repair import fix_superblock as ops

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
        One that opened the store up to now. If a record has to be written anew, it is the only one
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
    from ckptstore.maintenance.repair import fix_keys as ops

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

    One small object is written, read back, and the one before deleted; no version is touched, and
    whoever has the store open goes on. What the key of a user opens is the data key of the store,
    which stays the same: whoever has had both the old key and the old object, or the data key,
    can still read the store. A new data key takes a new store, to which this one is replicated.

    Parameters
    ----------
    url
        As for :func:`ckptstore.open`.
    encryption_key
        One that opens the store.
    new_key
        The one that is to.
    keep_old
        Those that open the store now go on to do so: for a fleet that changes over little by
        little. Rotate to the new key once more, without this, to end that.
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
