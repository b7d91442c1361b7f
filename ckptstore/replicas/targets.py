"""Opens the store that versions are to come to."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from ckptstore.backends.key_sources import hidden
from ckptstore.config import SYSTEM
from ckptstore.errors import MissingKeyError, StoreNotFoundError
from ckptstore.replicas.options import open_place
from ckptstore.repo import Repo

if TYPE_CHECKING:
    from ckptstore.backends.key_sources import KeyInput


@contextmanager
def open_target(
    source: Repo,
    url: str | os.PathLike[str],
    *,
    dry_run: bool,
    single_writer: bool = False,
    encryption_key: KeyInput | None = None,
    **storage_options: Any,  # noqa: ANN401 - passed on to the storage library
) -> Iterator[Repo]:
    """Open the store that versions are to come to; make it if there is none.

    For a dry run nothing is made: where there is no store, an empty one in memory stands in. If
    the source is encrypted, no store without encryption is made for it.

    Parameters
    ----------
    source
        The store that they come from.

    Raises
    ------
    MissingKeyError
        There is no store yet, no key for one, and the source is encrypted.
    CkptStoreError
        As :func:`ckptstore.open`.
    """
    encryption_key = hidden(encryption_key)
    keyless = source.superblock.encryption is not None and encryption_key is None
    new: Mapping[str, Any] = {"create": True, "chunk_bytes": source.superblock.chunk_bytes}
    wanted = {
        **new,
        **storage_options,
        "create": not dry_run and not keyless,
        "read_only": dry_run or storage_options.get("read_only", False),
        "single_writer": single_writer,
        "encryption_key": encryption_key,
    }
    with ExitStack() as stack:
        try:
            repo = open_place(url, wanted)
        except StoreNotFoundError as error:
            if keyless:
                msg = f"{error.message}, and what is to come is encrypted where it is"
                hint = (
                    "give the new store a key: to_key=, --to-key, key in a job's file; or make one "
                    "without first, with ckptstore init"
                )
                raise MissingKeyError(msg, hint=hint) from error
            if not dry_run:
                raise
            repo = open_place(f"memory://stand-in-{SYSTEM.random_hex(8)}", new)
        yield stack.enter_context(repo)
