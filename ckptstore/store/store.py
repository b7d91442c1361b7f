"""A store: one location with everything in it. Its methods are facades of functions below."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ckptstore.catalog import run_ops
from ckptstore.catalog.metrics import check_directions
from ckptstore.errors import CkptStoreError
from ckptstore.events import Observer, ProgressCallback, silent
from ckptstore.format.names import check_run_name
from ckptstore.model import RunInfo, Version
from ckptstore.replicas.options import ReplicaOptions
from ckptstore.repo import Repo
from ckptstore.store import checking, loading, replicating, retaining
from ckptstore.store.pickling import Opening, unpickled
from ckptstore.store.run import Run
from ckptstore.store.store_session import Session
from ckptstore.store.version_lookup import known, named_version

if TYPE_CHECKING:
    from ckptstore.encodings.encoding_rules import Encodings
    from ckptstore.format.paths import Pattern
    from ckptstore.format.superblock import Superblock
    from ckptstore.saver.saver import Saver

_log = logging.getLogger("ckptstore")


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
        """Wait for background saves and for write-backs; release connections.

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

    log = checking.log
    diff = checking.diff

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

    prometheus = checking.prometheus

    @property
    def _saver(self) -> Saver:
        return self._session.saver

    # --- changes of the catalog -------------------------------------------------------------------
    tag = retaining.tag
    untag = retaining.untag
    annotate = retaining.annotate

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
        replicating.fork(self._session, ref, request, target.repo)
        return target.run(new_run)

    rollback = retaining.rollback
    pin = retaining.pin
    unpin = retaining.unpin

    # --- retention and space ----------------------------------------------------------------------
    set_policy = retaining.set_policy
    retain = retaining.retain
    age = retaining.age
    remove = retaining.remove
    undelete = retaining.undelete
    gc = retaining.gc
    archive = retaining.archive
    thaw = retaining.thaw

    # --- checks and figures -----------------------------------------------------------------------
    verify = checking.verify

    repair = checking.repair
    usage = checking.usage
    stats = checking.stats
    sharing = checking.sharing
    sharing_of = checking.sharing_of

    # --- replicas ---------------------------------------------------------------------------------
    add_replica = replicating.add_replica
    remove_replica = replicating.remove_replica
    replicas = replicating.replicas
    give_options = replicating.give_options

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
        given = self._session.replicas.given.get(name)
        return given if isinstance(given, Store) else Store(self._session.of_replica(name, repo))

    replicate = replicating.replicate
    evict = replicating.evict
    unpin_for = replicating.unpin_for
    write_back = replicating.write_back
    wait_replicated = replicating.wait_replicated
