"""A store: one location with everything in it. Its methods are facades of functions below."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from ckptstore import errors
from ckptstore.catalog import run_ops
from ckptstore.catalog.metrics import check_directions
from ckptstore.catalog.refs import parse_ref
from ckptstore.events import Observer, ProgressCallback, silent
from ckptstore.format.names import check_run_name
from ckptstore.model import Ref, RunInfo, Version
from ckptstore.replicas.options import ReplicaOptions
from ckptstore.repo import Repo
from ckptstore.shown import HtmlTable, Shown
from ckptstore.store import checking, loading, replicating, resume_check, retaining
from ckptstore.store.pickling import Opening, unpickled
from ckptstore.store.run import Run
from ckptstore.store.store_session import Session, ready
from ckptstore.store.version_lookup import known, named_version

if TYPE_CHECKING:
    from ckptstore.encodings.encoding_rules import Encodings
    from ckptstore.format.paths import Pattern
    from ckptstore.format.superblock import Superblock
    from ckptstore.states.lazy import LazyVersion

_log = logging.getLogger("ckptstore")


class Store(Shown):
    """One location with everything in it; made by :func:`ckptstore.open`.

    A context manager. Any thread may use it. Close it when no save or load is running; background
    saves are waited for. It can be pickled, and so can its runs and lazy versions: another process
    opens it again with the same arguments, unless it is in memory, has a live write-back, or was
    given a key or a backend as an object.
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
        if isinstance(repo, Repo):
            repo = Session(repo, replicas=replicas, opening=opening)
        elif not isinstance(repo, Session):
            msg = f"a store is not made of {repo!r:.80}"  # type: ignore[unreachable]  # a text, say
            raise errors.InvalidInputError(msg, hint="ckptstore.open(URL) opens one")
        self._session = repo

    def __repr__(self) -> str:
        """Return the location, without credentials."""
        return f"<Store {self.url}>"

    def _summary(self) -> HtmlTable:
        rows = [(x.name, x.versions_count, x.head[:8], ", ".join(x.tags)) for x in self.runs()]
        columns = ("RUN", "VERSIONS", "LATEST", "TAGS")
        return HtmlTable(title=repr(self), columns=columns, rows=rows)

    def __reduce__(self) -> tuple[object, ...]:
        return unpickled, (self._session.pickled(),)

    def __enter__(self) -> Self:
        """Return the store itself."""
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Close the store; an error of the block is not hidden behind one of a save.

        After Ctrl-C, or what ends the process, replicas are not waited for.
        """
        try:
            if error is not None and not isinstance(error, Exception):
                late = self._session.write_backs.close(at_once=True)
                if late is not None:
                    _log.warning("%s", late)
            self.close()
        except errors.CkptStoreError as failure:
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
        keep_last: int | None = None,
        keep_best: int | None = None,
        roles: Mapping[str, str] | None = None,
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
        keep_last, keep_best
            Keep the newest N versions, and the best N by each metric, and delete others after each
            save. Tagged and pinned ones stay. Deleted ones can be undeleted until :meth:`gc`.
        roles
            Pattern of paths to the role of such tensors: stored, and from then on valid for the
            run's saves and for all versions that it has; see :meth:`Run.save`. ``{}`` ends that.

        Raises
        ------
        InvalidInputError
            The name, a direction, an encoding or a count is not accepted, or the run has declared
            the other direction. Or `keep_best` is given and no metric is declared, or the run has
            a policy of another kind.
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
        keeps = keep_last is not None or keep_best is not None
        made = Run(self._session, check_run_name(name), wanted, rules, keeps)
        if "torch" in sys.modules:
            ready()
        if wanted:
            run_ops.ensure_run(known(self.repo), name, wanted)
        if keeps:
            retaining.keep(self.repo, name, wanted, last=keep_last, best=keep_best)
        if roles is not None:
            from ckptstore.maintenance.retention.retain import set_policy

            set_policy(self.repo, name, {"roles": roles}, directions=wanted)
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

    def __bool__(self) -> bool:
        """Return True, also if there is no run."""
        return True

    def __len__(self) -> int:
        """Return the number of runs."""
        return len(self.runs())

    def __iter__(self) -> Iterator[Run]:
        """Yield the runs, by name."""
        return iter([self.run(one.name) for one in self.runs()])

    def __contains__(self, ref: object) -> bool:
        """Return whether there is a run of this name, or a version of this ref."""
        if not isinstance(ref, str):
            return False
        try:
            return self.repo.refresh().has_run(ref) or bool(self.resolve(ref).id)
        except (errors.NotFoundError, errors.InvalidRefError):
            return False

    def __getitem__(self, ref: str) -> Run | LazyVersion:
        """Return the run of this name, ``store["gpt"]``, or a version: ``store["gpt@best:loss"]``.

        Raises
        ------
        InvalidRefError
            The text is neither a name nor a ref.
        RunNotFoundError, VersionNotFoundError
            It names nothing.
        """
        if self.repo.refresh().has_run(ref):
            return self.run(ref)
        return self.version(ref)

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

    def _parsed(self, ref: str) -> Ref:
        return parse_ref(ref)

    log = checking.log
    diff = checking.diff

    # --- loads ------------------------------------------------------------------------------------
    version = loading.version
    load = loading.load
    load_into = loading.load_into
    from_pretrained = loading.from_pretrained

    # --- saves ------------------------------------------------------------------------------------

    def reserve(self, size_bytes: int) -> None:
        """Take memory for a staged state from the system, and start what saves in the background.

        The first save then stalls the training no longer than later ones. Takes up to seconds a
        GiB; does nothing while saves are running.

        Parameters
        ----------
        size_bytes
            Of the state: the sum of its tensors, tied ones once, and 64 bytes for each.

        Raises
        ------
        LimitError
            It is more than ``staging_bytes``.
        """
        saver = self._session.saver
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

        Its first version shares the chunks of the source, which stays its parent. It has the
        source's step, without metrics and tags. Chunks of an evicted version are copied from the
        replica.

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
            Another store to begin the run in. Chunks that it lacks are copied as stored; the
            metadata names the source, below ``forked_from``.
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
        from ckptstore.maintenance.replicas.fork import ForkRequest, fork

        request = ForkRequest(
            run=new_run,
            selection=Selection(include=include, exclude=exclude, roles=roles, rename=rename),
            directions=metrics or {},
            metadata=metadata or {},
            progress=progress,
        )
        target = self if store is None or store.repo is self.repo else store
        source = self.resolve(ref)
        self._session.replicas.lent(
            source, lambda lender: fork(target.repo, self.repo, source, request, lender=lender)
        )
        resume_check.chosen(target.repo, new_run)
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
    stats = checking.stats
    transfers = checking.transfers
    sharing = checking.sharing

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
    publish = replicating.publish
    evict = replicating.evict
    unpin_for = replicating.unpin_for
    write_back = replicating.write_back
    wait_replicated = replicating.wait_replicated
