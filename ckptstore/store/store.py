"""A store: one location with everything in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckptstore.catalog import run_ops
from ckptstore.catalog.metrics import check_directions
from ckptstore.errors import FormatError, IntegrityError
from ckptstore.events import Events, ProgressCallback, silent
from ckptstore.format.names import check_run_name
from ckptstore.model import Version
from ckptstore.store import resume_check
from ckptstore.store.accounting import Accounting
from ckptstore.store.archiving import Archiving
from ckptstore.store.background import Background
from ckptstore.store.checking import Checking
from ckptstore.store.loading import Loading
from ckptstore.store.pickling import Opening, pickled, unpickled
from ckptstore.store.queries import Looking
from ckptstore.store.replica_pool import OpenedReplicas, ReplicaOptions
from ckptstore.store.replicating import Replicating
from ckptstore.store.retaining import Retaining
from ckptstore.store.run import Run
from ckptstore.store.tiers import Tiers
from ckptstore.store.writebacks import WritingBack

if TYPE_CHECKING:
    from ckptstore.catalog.catalog import Catalog
    from ckptstore.encodings.encoding_rules import Encodings
    from ckptstore.format.paths import Pattern
    from ckptstore.format.superblock import Superblock
    from ckptstore.maintenance.replicas.fallback import Found
    from ckptstore.maintenance.replicas.fork import ForkRequest
    from ckptstore.repo import Repo
    from ckptstore.saver.saver import Saver
    from ckptstore.store.writeback import WriteBack

__all__ = ["Store"]


class Store(
    Looking,
    Loading,
    Accounting,
    Archiving,
    Background,
    Checking,
    Replicating,
    Retaining,
    Tiers,
    WritingBack,
):
    """One location with everything in it; made by :func:`ckptstore.open`.

    A context manager. Any thread may use it. Close it when no save or load is running; saves in
    the background are waited for.

    It can be pickled, and so can its runs and lazy versions: another process opens it again, once
    for all pickles of it, with the same arguments. InvalidInputError says why not: it is in memory,
    has a live write-back, was given a key instead of the place of one, or a backend of its own.
    """

    def __init__(
        self,
        repo: Repo,
        *,
        replicas: ReplicaOptions | None = None,
        opening: Opening | None = None,
    ) -> None:
        self._repo = repo
        self._opening = opening
        self._events = Events()
        self._kept_savers: dict[int, Saver] = {}
        self._opened = OpenedReplicas(repo, replicas)
        self._told: set[tuple[str, str]] = set()
        self._write_backs: dict[tuple[int, str], WriteBack] = {}

    def __repr__(self) -> str:
        """Return the location, without credentials."""
        return f"<Store {self.url}>"

    def __reduce__(self) -> tuple[object, ...]:
        given, writes_back = self._opened.given, bool(self._own())
        return unpickled, (pickled(self.url, self._opening, given, writes_back=writes_back),)

    @property
    def url(self) -> str:
        """The location, without credentials."""
        return self._repo.url

    @property
    def info(self) -> Superblock:
        """Format, features, chunk size, and what the probe found."""
        return self._repo.superblock

    @property
    def repo(self) -> Repo:
        """The opened location, for maintenance and integrations."""
        return self._repo

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
        made = Run(self, check_run_name(name), wanted, rules)
        if wanted:
            run_ops.ensure_run(self._known(), name, wanted)
        if write_back is not None:
            self.write_back(write_back, runs=[name])
        return made

    def _known(self) -> Catalog:
        """Return the catalog as last read; where the log is damaged, what it held before."""
        try:
            return self._repo.catalog
        except (IntegrityError, FormatError):
            return self._repo.log.catalog

    def tag(self, ref: str, tag: str) -> Version:
        """Give a version a tag in its run; a tag of this name moves. Return the version.

        Raises
        ------
        InvalidInputError
            The tag is not accepted (digits only, ``latest``, ``best:...`` and ``~...`` are refs).
        ReadOnlyError, UnsafeBackendError, StorageError
            It could not be committed.
        """
        version = self.resolve(ref)
        self._repo.log.append(lambda now: run_ops.tag(now, version.run, version.id, tag))
        return self._repo.catalog.version(version.id)

    def untag(self, ref: str, tag: str) -> Version:
        """Take a tag away from a version; return the version.

        Raises
        ------
        VersionNotFoundError
            The version does not have this tag. Else as :meth:`resolve`.
        ReadOnlyError, UnsafeBackendError, StorageError
            It could not be committed.
        """
        found = self.resolve(ref)
        self._repo.log.append(lambda now: run_ops.untag(now, found.run, tag, version=found.id))
        return self._repo.catalog.version(found.id)

    def annotate(self, ref: str, metrics: Mapping[str, float]) -> Version:
        """Add metrics to a version, or replace their values; return the version.

        Raises
        ------
        InvalidInputError
            A metric is not a number.
        ReadOnlyError, UnsafeBackendError, StorageError
            It could not be committed.
        """
        version = self.resolve(ref)
        self._repo.log.append(lambda now: run_ops.annotate(now, version.id, metrics))
        return self._repo.catalog.version(version.id)

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
        source = self.resolve(ref)
        target = self if store is None or store._repo is self._repo else store
        self._lent(source, lambda lender: self._fork_to(target, source, request, lender))
        resume_check.chosen(target._repo, new_run)
        return target.run(new_run)

    def _fork_to(
        self, target: Store, source: Version, request: ForkRequest, lender: Found | None
    ) -> Version:
        """Begin a run in this store or another; return its first version."""
        from ckptstore.maintenance.replicas.fork import fork, fork_into

        if target is self:
            return fork(self._repo, source, request, lender=lender)
        return fork_into(target._repo, self._repo, source, request, lender=lender)

    def rollback(self, ref: str, *, reason: str = "") -> Version:
        """Make a version the head of its run again; return it. See :meth:`Run.rollback`."""
        from ckptstore.maintenance.retention.rollback import rollback

        version = self.resolve(ref)
        resume_check.chosen(self._repo, version.run)
        return rollback(self._repo, version.run, version.id, reason=reason).target
