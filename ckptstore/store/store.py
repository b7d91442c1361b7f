"""A store: one location with everything in it. Its methods are facades of functions below."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from ckptstore.backends.key_sources import hidden
from ckptstore.catalog import run_ops
from ckptstore.catalog.metrics import check_directions
from ckptstore.engine.engine import EngineSpec
from ckptstore.errors import CkptStoreError
from ckptstore.events import Observer, ProgressCallback, silent
from ckptstore.format.names import check_run_name
from ckptstore.model import RunInfo, Version
from ckptstore.replicas.options import ReplicaOptions
from ckptstore.repo import Repo
from ckptstore.store import (
    archiving,
    checking,
    loading,
    reporting,
    retaining,
    tagging,
    tiers,
    transfers,
)
from ckptstore.store.pickling import Opening, unpickled
from ckptstore.store.refs import known, named_version
from ckptstore.store.run import Run
from ckptstore.store.session import Session

if TYPE_CHECKING:
    from ckptstore.backends.key_sources import KeyInput
    from ckptstore.encodings.encoding_rules import Encodings
    from ckptstore.format.paths import Pattern
    from ckptstore.format.superblock import Superblock
    from ckptstore.maintenance.check.verify import Level
    from ckptstore.maintenance.repair.repair_report import RepairReport
    from ckptstore.maintenance.replicas.replicate import ReplicateReport
    from ckptstore.saver.saver import Saver

_log = logging.getLogger("ckptstore")

Source: TypeAlias = "Store | str | os.PathLike[str]"
"""A second store, its location, or ``replica:NAME``."""


class Store:
    """One location with everything in it; made by :func:`ckptstore.open`.

    A context manager. Any thread may use it. Close it when no save or load is running; saves in
    the background are waited for.

    It can be pickled, and so can its runs and lazy versions: another process opens it again, once
    for all pickles of it, with the same arguments. InvalidInputError says why not: it is in memory,
    has a live write-back, was given a key instead of the place of one, or a backend of its own.
    """

    # Methods that need no other class of this folder are functions in the modules of their topics,
    # bound below under their own names: signature and docstring are there, and only there.

    def __init__(
        self,
        repo: Repo | Session,
        *,
        replicas: ReplicaOptions | None = None,
        opening: Opening | None = None,
    ) -> None:
        self._session = (
            Session(repo, replicas=replicas, opening=opening) if isinstance(repo, Repo) else repo
        )

    def __repr__(self) -> str:
        """Return the location, without credentials."""
        return f"<Store {self.url}>"

    def __reduce__(self) -> tuple[object, ...]:
        return unpickled, (self._session.pickled(),)

    def __enter__(self) -> Self:
        """Return the store itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the store; an error of the block is not hidden behind one of a save.

        After Ctrl-C, or what ends the process, replicas are not waited for.
        """
        try:
            if kind is not None and not issubclass(kind, Exception):
                late = self._session.write_backs.close(at_once=True)
                if late is not None:
                    _log.warning("%s", late)
            self.close()
        except CkptStoreError as failure:
            if error is None:
                raise
            _log.warning("%s, besides what ended the block", failure)

    def close(self) -> None:
        """Wait for saves in the background and for what is written back; release connections.

        Idempotent.

        What is asked of the store or its runs afterwards raises InvalidInputError.

        Raises
        ------
        CkptStoreError
            A save in the background failed and nobody has asked it; the store is closed all the
            same.
        NotReplicatedError
            What is written back did not all reach its replica, within ``close_timeout_s`` if that
            was given. It is durable here, and the store is closed.
        """
        self._session.close()

    @property
    def url(self) -> str:
        """The location, without credentials."""
        return self.repo.url

    @property
    def info(self) -> Superblock:
        """Format, features, chunk size, and what the probe found."""
        return self.repo.superblock

    @property
    def repo(self) -> Repo:
        """The opened location, for maintenance and integrations."""
        return self._session.repo

    # --- runs and versions ------------------------------------------------------------------------

    def run(
        self,
        name: str,
        *,
        metrics: Mapping[str, str] | None = None,
        encodings: Encodings | None = None,
        write_back: str | None = None,
    ) -> Run:
        """Return a run to save to or load from; it appears in the catalog with its first save.

        Parameters
        ----------
        metrics
            Metric to ``"min"`` or ``"max"``: which way it gets better. Needed for ``best:METRIC``.
        encodings
            What saves with this object store in fewer bytes unless they say otherwise; see
            :meth:`Run.save`. By default what the run's policy says.
        write_back
            Name of a replica that is to have what is saved in the run too; see :meth:`write_back`.

        Raises
        ------
        InvalidInputError
            The name, a direction or an encoding is not accepted, or the run has declared the
            other direction.
        NotFoundError
            No replica is called `write_back`.
        StorageError
            `metrics` are given, and the log cannot be read.
        """
        wanted = check_directions({} if metrics is None else metrics)
        rules = None
        if encodings is not None:
            from ckptstore.encodings.encoding_rules import EncodingRules

            rules = EncodingRules(encodings)
        made = Run(self._session, check_run_name(name), wanted, rules)
        if wanted:
            run_ops.ensure_run(known(self.repo), name, wanted)
        if write_back is not None:
            self.write_back(write_back, runs=[name])
        return made

    def runs(self) -> list[RunInfo]:
        """Return all runs, by name.

        Raises
        ------
        StorageError, CorruptObjectError
            The log cannot be read.
        """
        return self.repo.refresh().runs()

    def versions(self, run: str | None = None) -> list[Version]:
        """Return all versions of a run, or of the store, oldest first.

        Raises
        ------
        RunNotFoundError
            There is no such run.
        """
        return list(self.repo.refresh().versions(run))

    def resolve(self, ref: str) -> Version:
        """Return the version that a ref names: ``run@1200``, ``run@best:val_loss``, ``#3fa9`` ...

        Where the log is damaged, ids of versions that were committed before the damage still
        resolve; anything else could mean another version than it should, and is refused.

        Raises
        ------
        InvalidRefError
            The text is not a ref.
        RunNotFoundError, VersionNotFoundError
            It names nothing.
        CorruptObjectError
            The log is damaged; the message names the commit. Or no version is ``latest-valid``.
        """
        return named_version(self.repo, ref)

    log = reporting.log
    diff = reporting.diff

    # --- loads ------------------------------------------------------------------------------------
    version = loading.version
    load = loading.load
    load_into = loading.load_into

    # --- saves ------------------------------------------------------------------------------------

    def reserve(self, size_bytes: int) -> None:
        """Take memory for a staged state from the system, and start what saves in the background.

        The first save then stalls the training no longer than the ones after it. Returns when it
        is done, which takes up to seconds a GiB; does nothing while saves are under way.

        Parameters
        ----------
        size_bytes
            Of the state: the sum of its tensors, tied ones once, and 64 bytes for each.

        Raises
        ------
        LimitError
            It is more than ``staging_bytes``.
        """
        saver = self._saver
        if not saver.in_flight:
            saver.dispatcher.start()
            saver.dispatcher.reserve(size_bytes)

    def wait(self) -> None:
        """Wait until no save in the background is under way.

        Raises
        ------
        CkptStoreError
            One failed, and nobody has asked it.
        """
        saver = self._session.own_saver
        if saver is not None:
            saver.wait()
            saver.raise_failure()

    def observe(self, observer: Observer) -> Callable[[], None]:
        """Have a function called with each event of a save; return what ends that.

        Parameters
        ----------
        observer
            Gets a :class:`ckptstore.events.SaveEvent`, in any thread; must return quickly.
        """
        return self._session.events.observe(observer)

    prometheus = reporting.prometheus

    @property
    def _saver(self) -> Saver:
        return self._session.saver

    # --- changes of the catalog -------------------------------------------------------------------
    tag = tagging.tag
    untag = tagging.untag
    annotate = tagging.annotate

    def fork(
        self,
        ref: str,
        new_run: str,
        *,
        include: Sequence[Pattern] | None = None,
        exclude: Sequence[Pattern] | None = None,
        rename: Mapping[Pattern, Pattern] | None = None,
        roles: Sequence[str] | None = None,
        metrics: Mapping[str, str] | None = None,
        metadata: Mapping[str, Any] | None = None,
        store: Store | None = None,
        progress: ProgressCallback = silent,
    ) -> Run:
        """Begin a run at a version; return the run. No tensor is read or written.

        Its first version shares the chunks of the source, which it has for a parent, for good. It
        has the source's step, and neither its metrics nor its tags. Of a version whose content a
        replica alone has, chunks that are not here travel from there.

        Parameters
        ----------
        ref
            The version to begin at.
        new_run
            A name that no run has.
        include, exclude
            Patterns of paths: which leaves of the state to take over; all if not given. What is at
            ``pretrained`` (configuration, tokenizer) comes along with weights unless excluded.
        rename
            Prefix of a path to what replaces it: ``{"model.backbone": "model.encoder"}``; see
            :mod:`ckptstore.format.renames`.
        roles
            Take over leaves of these roles only, such as ``["weights"]``.
        metrics
            Metric to ``"min"`` or ``"max"``, besides what the source's run has declared.
        metadata
            A JSON object of the user's own.
        store
            Another store to begin the run in. Chunks that it does not have travel, as they are
            stored; where they came from is kept in the metadata, below ``forked_from``.
        progress
            Called with the bytes that have travelled.

        Raises
        ------
        ConflictError
            There is a run `new_run`.
        VersionNotFoundError, TensorNotFoundError
            The ref, a pattern or a prefix names nothing.
        InvalidInputError
            A name or role is not accepted, or two leaves would come to lie in one place.
        ReadOnlyError, UnsafeBackendError, StorageError
            It could not be committed.
        """
        from ckptstore.checkpoint.selection import Selection
        from ckptstore.maintenance.replicas.fork import ForkRequest

        request = ForkRequest(
            run=new_run,
            selection=Selection(include=include, exclude=exclude, roles=roles, rename=rename),
            directions=metrics or {},
            metadata=metadata or {},
            progress=progress,
        )
        target = self if store is None or store.repo is self.repo else store
        transfers.fork(self._session, ref, request, target.repo)
        return target.run(new_run)

    rollback = tagging.rollback
    pin = retaining.pin
    unpin = retaining.unpin

    # --- retention and space ----------------------------------------------------------------------
    set_policy = retaining.set_policy
    retain = retaining.retain
    age = retaining.age
    remove = retaining.remove
    undelete = retaining.undelete
    gc = retaining.gc
    archive = archiving.archive
    thaw = archiving.thaw

    # --- checks and figures -----------------------------------------------------------------------
    verify = checking.verify

    def repair(
        self,
        source: Source | Sequence[Source] | None = None,
        *,
        level: Level = "full",
        dry_run: bool = False,
        source_key: KeyInput | None = None,
        progress: ProgressCallback = silent,
    ) -> RepairReport:
        """Bring back what is damaged as far as it can be had, and say exactly what is lost.

        Nothing is deleted and no object is changed: what is brought back is written anew, and a
        commit makes the versions lie there. Versions of which something stays lost are recorded
        as damaged, so that no save shares with them.

        Parameters
        ----------
        source
            A second store, or where it is: a copy of this one, or any store that holds the same
            tensors. Or ``"replica:NAME"``. It is only read. Of several the next is asked for what
            one has not, or only in an archive class: that is in the report, as ``cold``.
        level
            How the damage is found: ``full`` reads every byte of this store first.
        dry_run
            Say what would be done; write nothing.
        source_key
            Opens the second store if it is encrypted; as ``encryption_key`` of
            :func:`ckptstore.open`. Of several all that are given as places.

        Returns
        -------
        RepairReport
            Its ``ok`` says whether nothing is lost.

        Raises
        ------
        ReadOnlyError, UnsafeBackendError
            The store cannot be written to.
        StoreNotFoundError, CorruptObjectError
            There is no second store, or its log is damaged.
        StorageError
            One of the storages failed; what was committed before stands.
        """
        from ckptstore.maintenance.repair.repair import repair

        source_key = hidden(source_key)
        with ExitStack() as stack:
            sources = checking.second_stores(self._session, source, source_key, stack)
            return repair(
                self.repo, sources=sources, level=level, dry_run=dry_run, progress=progress
            )

    usage = reporting.usage
    stats = reporting.stats
    sharing = reporting.sharing
    sharing_of = reporting.sharing_of

    # --- replicas ---------------------------------------------------------------------------------
    add_replica = tiers.add_replica
    remove_replica = tiers.remove_replica
    replicas = tiers.replicas
    give_options = tiers.give_options

    def replica(self, name: str) -> Store:
        """Return a replica, opened; it is closed with this store.

        Raises
        ------
        NotFoundError
            No replica has the name.
        ReplicaChangedError
            At its location there is another store; or the options that were given for it are for
            another location.
        CkptStoreError
            It cannot be opened.
        """
        repo = self._session.replicas.find(name)
        given = self._session.replicas.pool.given.get(name)
        return given if isinstance(given, Store) else Store(self._session.of_replica(name, repo))

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
        from ckptstore.maintenance.replicas.replicate import ReplicateRequest

        to_key = hidden(to_key)
        request = ReplicateRequest(
            dry_run=dry_run, check=check, bytes_per_s=bytes_per_s, progress=progress
        )
        return transfers.replicate(
            self._session,
            to,
            to_key,
            transfers.Chosen(refs=refs, runs=runs, keep=keep),
            request,
            again=again,
            executor=executor,
            workers=workers,
        )

    evict = tiers.evict
    unpin_for = tiers.unpin_for
    write_back = tiers.write_back
    wait_replicated = tiers.wait_replicated
