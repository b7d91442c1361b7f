"""Mending what a store cannot be opened without."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ckptstore.backends.registry import open_backend
from ckptstore.config import SYSTEM, Options
from ckptstore.store.store import Store

if TYPE_CHECKING:
    from ckptstore.ops.mend_superblock import SuperblockFinding

__all__ = ["mend_superblock"]


def mend_superblock(
    url: str | os.PathLike[str],
    *,
    source: Store | None = None,
    single_writer: bool = False,
    dry_run: bool = False,
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
    UnsafeBackendError, StorageError
        The storage cannot be written to.
    """
    from ckptstore.ops import mend_superblock as ops

    backend = open_backend(url, environment=SYSTEM, **storage_options)
    try:
        return ops.mend_superblock(
            backend,
            source=None if source is None else source.repo,
            options=Options(single_writer=single_writer),
            dry_run=dry_run,
        )
    finally:
        backend.close()
