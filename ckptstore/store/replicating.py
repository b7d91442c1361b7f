"""The part of the facade that brings versions to other stores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from ckptstore.backends.key_sources import hidden
from ckptstore.config import SYSTEM
from ckptstore.engine.engine import EngineSpec
from ckptstore.errors import InvalidInputError, MissingKeyError, StoreNotFoundError
from ckptstore.events import ProgressCallback, silent
from ckptstore.format.names import check_listed
from ckptstore.model import Version
from ckptstore.repo import Repo
from ckptstore.store.replica_options import PLACE

if TYPE_CHECKING:
    import os

    from ckptstore.backends.key_sources import KeyInput
    from ckptstore.maintenance.replicas.replicate import ReplicateReport
    from ckptstore.store.store import Store

__all__ = ["Replicating", "check_selection", "open_target", "open_target_of"]


class Replicating:
    """What :class:`ckptstore.Store` does to be in more than one place."""

    _repo: Repo

    if TYPE_CHECKING:

        def resolve(self, ref: str) -> Version:
            """Return the version that a ref names."""

        def _named(self, text: object) -> Store | None: ...

    def replicate(
        self,
        to: Store | str | os.PathLike[str],
        refs: Sequence[str] | None = None,
        *,
        runs: Sequence[str] | None = None,
        keep: str | Sequence[str] | None = None,
        check: bool = True,
        bytes_per_s: float = 0.0,
        to_key: KeyInput | None = None,
        again: bool | None = None,
        dry_run: bool = False,
        executor: EngineSpec | None = None,
        workers: int | None = None,
        progress: ProgressCallback = silent,
    ) -> ReplicateReport:
        """Make versions of this store versions of another, under the same ids.

        Only chunks that the other store does not have travel. Metrics, tags, the heads of runs and
        where forks began come along, and of ancestors that are not copied the record. A repetition
        finishes what was interrupted, and costs a few requests where nothing is new. Nothing is
        deleted in either store.

        Parameters
        ----------
        to
            The other store; or where it is: it is made there, if there is none. Or
            ``"replica:NAME"``; see :meth:`Store.add_replica`.
        refs
            Versions; with neither `refs` nor `runs` nor `keep`: all of the store.
        runs
            Names of runs, of which all versions count.
        keep
            Rules as in a retention policy, such as ``"tagged, best 2 val_loss"``: the versions of
            `runs`, or of all runs, that they would keep.
        check
            Read back every chunk that travelled before its version becomes visible in the target.
        bytes_per_s
            Bandwidth limit, both directions together; 0 for none.
        to_key
            Opens the other store if it is encrypted, and makes a new one such; as
            ``encryption_key`` of :func:`ckptstore.open`. Only where `to` is a place.
        again
            Whether versions come that the other store has deleted, or of which it keeps less than
            this one. None: those that `refs` name alone. Others are ``left`` in the report.
        dry_run
            Change nothing; the report says what would travel.
        executor
            Who copies chunks and reads them back: ``threads`` of this process, which None means
            too, ``processes``, ``dask:local``, ``dask://HOST:PORT``, or any executor of
            ``concurrent.futures``. This process alone writes manifests and commits.
        workers
            How many tasks run at once; by default what the engine has.
        progress
            Called with the bytes (in memory) of the versions that are done.

        Returns
        -------
        ReplicateReport
            Versions that could not be copied since they are damaged are listed in it.

        Raises
        ------
        InvalidRefError, RunNotFoundError, VersionNotFoundError, InvalidInputError
            Something names nothing. Nothing was written.
        ConflictError
            Both are one store; or the other has a run of the same name with other versions.
            Nothing was written.
        WorkerDiedError, MissingDependencyError
            Of the engine. What was committed stays.
        ReadOnlyError, UnsafeBackendError, StorageError
            The other store cannot be written to, or a storage failed. What was committed stays.
        """
        from ckptstore.maintenance.core.select_versions import select_versions
        from ckptstore.maintenance.replicas.replicate import ReplicateRequest, replicate

        to_key = hidden(to_key)
        to = self._named(to) or to
        target = self._target(to, to_key, dry_run=dry_run)
        if bytes_per_s < 0:
            msg = f"bytes_per_s={bytes_per_s} must not be negative"
            raise InvalidInputError(msg)
        named = [self.resolve(ref) for ref in check_listed(refs or (), "refs")]
        of = check_listed(runs or (), "runs")
        chosen = select_versions(self._repo, refs=named, runs=of, rules=keep)
        asked = {None: named, True: chosen, False: ()}[again]
        request = ReplicateRequest(
            dry_run=dry_run,
            check=check,
            bytes_per_s=bytes_per_s,
            again=frozenset(version.id for version in asked),
            progress=progress,
        )
        with target as there:
            return replicate(
                self._repo, there._repo, chosen, request, executor=executor, workers=workers
            )

    def _target(
        self, to: Store | str | os.PathLike[str], key: KeyInput | None, *, dry_run: bool
    ) -> AbstractContextManager[Store]:
        """Return what gives the other store: as it is open, or opened for the length of a block."""
        from ckptstore.store.store import Store

        if not isinstance(to, Store):
            return open_target(
                to,
                chunk_bytes=self._repo.superblock.chunk_bytes,
                dry_run=dry_run,
                encryption_key=key,
                encrypted=self._repo.superblock.encryption is not None,
            )
        if key is not None:
            msg = "to_key is for the place of a store, not for one that is open"
            raise InvalidInputError(msg, hint="open it with its key")
        return nullcontext(to)


@contextmanager
def open_target(
    url: str | os.PathLike[str],
    *,
    chunk_bytes: int,
    dry_run: bool,
    single_writer: bool = False,
    encryption_key: KeyInput | None = None,
    encrypted: bool = False,
    **storage_options: Any,  # noqa: ANN401 - passed on to the storage library
) -> Iterator[Store]:
    """Open the store that versions are to come to; make it if there is none.

    For a dry run nothing is made: where there is no store, an empty one in memory stands in.

    Parameters
    ----------
    encrypted
        What is to come is encrypted where it is: no store without encryption is made for it.

    Raises
    ------
    MissingKeyError
        There is no store yet, no key for one, and what is to come is encrypted where it is.
    CkptStoreError
        As :func:`ckptstore.store.open_store`.
    """
    from ckptstore.store.opening import open_store

    with ExitStack() as stack:
        try:
            store = open_store(
                url,
                create=not dry_run and not (encrypted and encryption_key is None),
                read_only=dry_run,
                chunk_bytes=chunk_bytes,
                single_writer=single_writer,
                encryption_key=encryption_key,
                **storage_options,
            )
        except StoreNotFoundError as error:
            if encrypted and encryption_key is None:
                msg = f"{error.message}, and what is to come is encrypted where it is"
                hint = (
                    "give the new store a key: to_key=, --to-key, key in a job's file; or make one "
                    "without first, with ckptstore init"
                )
                raise MissingKeyError(msg, hint=hint) from error
            if not dry_run:
                raise
            name = SYSTEM.random_hex(8)
            store = open_store(f"memory://stand-in-{name}", create=True, chunk_bytes=chunk_bytes)
        yield stack.enter_context(store)


def check_selection(
    source: Store, *, runs: Sequence[str] | None, keep: str | Sequence[str] | None
) -> None:
    """Refuse runs and rules that name nothing, before a store is made for what they name.

    Raises
    ------
    RunNotFoundError, InvalidInputError
        There is no such run; or a rule does not follow the grammar, or its metric no direction.
    """
    from ckptstore.maintenance.core.select_versions import select_versions

    select_versions(source.repo, runs=runs or (), rules=keep)


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
        As :func:`open_target`.
    """
    from ckptstore.store.tiers import PREFIX

    if url.startswith(PREFIX):
        name = url.removeprefix(PREFIX)
        given = {key: value for key, value in options.items() if value}
        if given:
            source.give_options(name, given)
        yield source.replica(name)
        return
    if PLACE in options:
        msg = f"the place of a store is {url}, and {PLACE} among its options is another word for it"
        raise InvalidInputError(msg, hint=f"{PLACE} goes with replica:NAME alone")
    size = source.info.chunk_bytes
    encrypted = source.info.encryption is not None
    with open_target(
        url, chunk_bytes=size, dry_run=dry_run, encrypted=encrypted, **options
    ) as target:
        yield target
