"""Methods of :class:`ckptstore.Store` about other stores: replicas, copies, forks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeAlias

from ckptstore.backends.key_sources import KeyInput, hidden
from ckptstore.errors import InvalidInputError, NotFoundError
from ckptstore.events import ProgressCallback, silent
from ckptstore.format.names import check_listed, check_replica_name
from ckptstore.model import ReplicaInfo, Version
from ckptstore.replicas.options import HasRepo, name_in, open_target
from ckptstore.repo import Repo
from ckptstore.store.store_session import HasSession, Session
from ckptstore.store.version_lookup import named_version, named_versions

if TYPE_CHECKING:
    from ckptstore.backends.base import Backend
    from ckptstore.engine.engine import EngineSpec
    from ckptstore.maintenance.replicas.evict import EvictReport
    from ckptstore.maintenance.replicas.replicate import ReplicateReport
    from ckptstore.maintenance.reports.publish import PublishReport
    from ckptstore.replicas.writeback import WriteBack

Place: TypeAlias = HasRepo | str | os.PathLike[str]
"""A second store, its location, or ``replica:NAME``."""


def add_replica(
    self: HasSession,
    name: str,
    url: str | os.PathLike[str],
    *,
    create: bool = False,
    **storage_options: Any,  # noqa: ANN401 - passed on to the storage library
) -> ReplicaInfo:
    """Give another store a name, by which it is a replica of this one from now on.

    Loads read evicted and damaged data there. The log keeps its location and id, for everyone;
    options and credentials count for this object alone. Nothing is copied.

    Parameters
    ----------
    name
        ASCII letters, digits, and ``. _ -``. One that is there is moved to `url`, if the store
        there is the same.
    url
        A path or URL, as for :func:`ckptstore.open`.
    create
        Make the store where there is none.
    storage_options
        As for :func:`ckptstore.open`. Another process gives them to ``ckptstore.open(url,
        replicas={name: {"url": ..., ...}})``, or through the environment.

    Raises
    ------
    StoreNotFoundError
        There is no store, and `create` is False.
    ConflictError
        It is this store; or the name is another store's; or the store has another name.
    ReadOnlyError, UnsafeBackendError, StorageError
        It could not be opened, or not be noted.
    """
    return self._session.replicas.add(name, url, storage_options, create=create)


def remove_replica(self: HasRepo, name: str) -> None:
    """Forget the name of a replica; nothing is deleted there, and notes about it stay here.

    Raises
    ------
    NotFoundError
        No replica has it.
    """
    from ckptstore.catalog.replica_ops import unname_replica

    self.repo.log.append_any(lambda now: unname_replica(now, name))


def replicas(self: HasRepo) -> list[ReplicaInfo]:
    """Return the stores that have a name here, in the order in which they were named."""
    return list(self.repo.refresh().replicas.values())


def give_options(self: HasSession, name: str, options: Mapping[str, Any]) -> None:
    """Open a replica with these options from now on, through this object alone.

    Parameters
    ----------
    options
        As for :func:`ckptstore.open`. Never stored. Those for a storage library need ``url``, the
        place that they are for: the log cannot send them elsewhere.

    Raises
    ------
    InvalidInputError
        They do not say for which place they are.
    """
    self._session.replicas.give(check_replica_name(name), options)


def replicate(
    self: HasSession,
    to: Place,
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

    Copies only chunks that the other store lacks, with metrics, tags, heads of runs, lineage, and
    the records of ancestors. A repetition continues, and costs a few requests if nothing is new.
    Deletes nothing.

    Parameters
    ----------
    to
        The other store; or where it is: it is made there, if there is none. Or
        ``"replica:NAME"``; see :meth:`Store.add_replica`.
    refs
        Versions; with neither `refs` nor `runs` nor `keep`: all of the store.
    runs
        Names of runs, whose versions all count.
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
        Also copy versions that the other store has deleted or reduced. None: only those that `refs`
        name. Others are ``left`` in the report.
    dry_run
        Change nothing; the report says what would travel.
    executor
        Who copies chunks and reads them back: ``threads`` of this process, which None means
        too, the workers of a Dask scheduler, ``dask://HOST:PORT``, or any executor of
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
    from ckptstore.maintenance.replicas.replicate import replicate
    from ckptstore.maintenance.replicas.replicate_version import ReplicateRequest

    here = self._session.repo
    to_key = hidden(to_key)  # in place, so that no frame shows the key
    target = _target(self._session, to, to_key, dry_run=dry_run)
    if bytes_per_s < 0:
        raise InvalidInputError(f"bytes_per_s={bytes_per_s} must not be negative")
    named = named_versions(here, refs or ())
    of = check_listed(runs or (), "runs")
    versions = select_versions(here, refs=named, runs=of, rules=keep)
    asked = {None: named, True: versions, False: ()}[again]
    request = ReplicateRequest(
        again=frozenset(version.id for version in asked),
        dry_run=dry_run,
        check=check,
        bytes_per_s=bytes_per_s,
        progress=progress,
    )
    with target as there:
        return replicate(here, there, versions, request, executor=executor, workers=workers)


def publish(
    self: HasSession,
    to: Place | None = None,
    refs: Sequence[str] | None = None,
    *,
    add: bool = False,
    to_key: KeyInput | None = None,
    progress: ProgressCallback = silent,
) -> PublishReport:
    """Prepare the store, or a copy of some versions, for reading through a web server.

    Writes ``published.json``, which saves requests of readers, and ``index.html``, a page for
    people; the next publication replaces both.

    Parameters
    ----------
    to
        Publish a copy: another store, or where it is, made if there is none. Only versions that it
        does not have are copied.
    refs
        Versions to publish in the copy, which has nothing of others, not even their names: a parent
        that is not among them is left out. Default: the whole store.
    add
        The copy may keep versions of earlier publications that are not among these.
    to_key
        As for :meth:`replicate`.
    progress
        Called with the bytes (in memory) of the versions that are copied.

    Raises
    ------
    InvalidInputError
        `refs` or `add` without `to`.
    InvalidRefError, RunNotFoundError, VersionNotFoundError
        Something names nothing. Nothing was written.
    PolicyError
        The copy shows versions that are not among these (those that the store has deleted may stay
        where it is published whole), or an ``index.html`` that is not of a publication. Nothing was
        written.
    ConflictError
        As :meth:`replicate`.
    ReadOnlyError, UnsafeBackendError, StorageError
        The store cannot be written to, or a storage failed.
    """
    from ckptstore.maintenance.reports import publish as ops

    here = self._session.repo
    to_key = hidden(to_key)  # in place, so that no frame shows the key
    if to is None:
        if refs is not None or add or to_key is not None:
            msg = "refs, add and to_key are for a copy, and `to` names none"
            raise InvalidInputError(msg, hint="a store is published whole")
        return ops.publish(here)
    restricted = refs is not None
    versions = named_versions(here, refs) if refs is not None else list(here.refresh().versions())
    with _target(self._session, to, to_key, dry_run=False, check=ops.check_page) as there:
        return ops.publish_copy(
            here, there, versions, restricted=restricted, add=add, progress=progress
        )


def evict(
    self: HasSession,
    refs: Sequence[str] | None = None,
    *,
    replica: str,
    runs: Sequence[str] | None = None,
    keep: str | Sequence[str] | None = None,
    pin: bool = True,
    dry_run: bool = False,
) -> EvictReport:
    """Keep only the record, here, of versions that a replica has; loads then fall through.

    The replica must hold the version now, with every byte read back. Tagged and pinned versions and
    heads of runs stay. The next collection (:meth:`gc`) frees the space.

    Evicted versions are pinned in the replica, for this store, so that nothing there deletes what
    may be the only copy. The pin is removed when the content returns, by the next eviction after
    the version was deleted here, or by hand there (:meth:`unpin`, :meth:`unpin_for`).

    Parameters
    ----------
    refs
        Versions; one of `refs`, `runs` and `keep` must be given. One that was evicted before
        is pinned in the replica, if it is not yet.
    replica
        Its name; see :meth:`add_replica`.
    runs
        Names of runs, whose versions all count.
    keep
        Rules as in a retention policy, such as ``"last 5, best 2 val_loss"``: what they name
        stays, of `runs` or of all runs.
    pin
        False leaves it to the rules of the replica how long it keeps what is evicted.
    dry_run
        Change nothing; the report says what would go.

    Raises
    ------
    NotFoundError
        No replica has the name; or something names nothing.
    InvalidInputError
        Nothing says which versions.
    ReplicaChangedError
        At the location of the replica there is another store.
    ReadOnlyError, UnsafeBackendError, StorageError
        This store cannot be written to, or with `pin` the replica; or a storage failed. What
        was evicted stays so.
    """
    from ckptstore.maintenance.core.select_versions import select_versions
    from ckptstore.maintenance.replicas.evict import evict

    if refs is None and runs is None and keep is None:
        msg = "nothing says which versions are to be evicted"
        raise InvalidInputError(msg, hint="name versions or runs, or what stays: keep='last 5'")
    here, there = self._session.repo, self._session.replicas.find(replica)
    named, of = named_versions(here, refs or ()), check_listed(runs or (), "runs")
    versions = select_versions(here, refs=named, runs=of)
    if keep is not None:
        kept = {one.id for one in select_versions(here, runs=of, rules=keep)}
        versions = [one for one in versions if one.id not in kept]
    versions = [*versions, *(one for one in named if one.level == "record")]
    there.refresh()
    return evict(here, there, versions, pin=pin, dry_run=dry_run)


def unpin_for(self: HasRepo, store: str) -> list[Version]:
    """Take the pins away that another store has left here; return the versions that had one.

    For a store that is gone for good. Versions that it evicted may be in no other store than this
    one.

    Parameters
    ----------
    store
        Its id, or the beginning of it.

    Raises
    ------
    NotFoundError
        No version is pinned for such a store.
    InvalidInputError
        Several stores have pins here whose ids begin so.
    ReadOnlyError, UnsafeBackendError, StorageError
        This store cannot be written to.
    """
    from ckptstore.maintenance.replicas.evict import release

    pinning = {one for version in self.repo.refresh().pinned() for one in version.pinned_for}
    found = sorted(one for one in pinning if store and one.startswith(store))
    if not found:
        msg = f"no version is pinned for a store {store[:40]!r}"
        raise NotFoundError(msg, hint="ckptstore show REF says for which store one is pinned")
    if len(found) > 1:
        msg = f"{len(found)} stores have pins here whose ids begin with {store[:40]!r}"
        raise InvalidInputError(msg, hint=f"such as {found[0]}")
    return [self.repo.catalog.version(one) for one in release(self.repo, found[0])]


def write_back(
    self: HasSession,
    name: str,
    *,
    runs: Sequence[str] | None = None,
    bytes_per_s: float = 0.0,
    close_timeout_s: float | None = None,
) -> WriteBack:
    """Replicate to a replica, from now on, what is saved here, in a thread of low priority.

    Saves neither wait for the replica nor fail with it. Versions that the replica lacks are copied
    first. Called again, it covers more runs. Other processes write back themselves, or a job does.

    Parameters
    ----------
    name
        Of a replica; see :meth:`add_replica`. It need not answer now.
    runs
        Names of runs, which need not be there yet; None for all of the store.
    bytes_per_s
        Bandwidth limit, both directions together; 0 for none.
    close_timeout_s
        How long :meth:`close` waits for what was saved here; None for as long as it goes on.

    Returns
    -------
    WriteBack
        Its ``pending`` and ``error`` say how it goes; ``wait`` waits.

    Raises
    ------
    NotFoundError
        No replica has the name.
    ReadOnlyError, UnsafeBackendError
        This store cannot be written to: what is there could not be noted.
    """
    return self._session.write_backs.begin(
        name, runs=runs, bytes_per_s=bytes_per_s, close_timeout_s=close_timeout_s
    )


def wait_replicated(
    self: HasSession,
    version: Version | str,
    timeout_s: float | None = None,
    *,
    replica: str | None = None,
) -> Version:
    """Wait until a version that is written back is in its replica; return it.

    Parameters
    ----------
    version
        Or a ref of it.
    timeout_s
        In seconds. None: until it is there, or an attempt to bring it fails.
    replica
        Which, if it is written back to several; None for all of them.

    Raises
    ------
    NotReplicatedError
        It is durable here, and not there (yet); says why.
    InvalidInputError
        Nothing is written back.
    """
    found = named_version(self._session.repo, version) if isinstance(version, str) else version
    return self._session.write_backs.wait(found, timeout_s, replica)


def _target(
    session: Session,
    to: Place,
    key: KeyInput | None,
    *,
    dry_run: bool,
    check: Callable[[Backend], None] | None = None,
) -> AbstractContextManager[Repo]:
    """Return a context with the other store: the open one, or one that is open for the block."""
    name = name_in(to)
    if name is None and not isinstance(to, HasRepo):
        return open_target(session.repo, to, check, dry_run=dry_run, encryption_key=key)
    there = to.repo if isinstance(to, HasRepo) else session.replicas.find(name or "")
    if key is not None:
        msg = "to_key is for the place of a store, not for one that is open"
        raise InvalidInputError(msg, hint="open it with its key")
    return nullcontext(there)
