"""A store: one location with everything in it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ckptstore import limits
from ckptstore.backends.key_sources import is_key_spec
from ckptstore.catalog import changes
from ckptstore.catalog.metrics import check_directions
from ckptstore.catalog.refs import parse_ref, resolve
from ckptstore.config import Options, workers_default
from ckptstore.errors import CkptStoreError, FormatError, IntegrityError, InvalidInputError
from ckptstore.events import Events, ProgressCallback, silent
from ckptstore.format.names import check_run_name
from ckptstore.model import Ref, RunInfo, Version
from ckptstore.repo import open_repo
from ckptstore.store import restarts
from ckptstore.store.archiving import Archiving
from ckptstore.store.background import Background
from ckptstore.store.checking import Checking
from ckptstore.store.opened import OpenedReplicas, ReplicaOptions
from ckptstore.store.replicating import Replicating
from ckptstore.store.retaining import Retaining
from ckptstore.store.run import Run
from ckptstore.store.tiers import Tiers, check_given
from ckptstore.store.writebacks import WritingBack

if TYPE_CHECKING:
    from ckptstore.backends.key_sources import KeyInput
    from ckptstore.catalog.catalog import Catalog
    from ckptstore.checkpoint.lazy import LazyVersion
    from ckptstore.checkpoint.manifests import Manifests
    from ckptstore.checkpoint.transfer import TransferReport
    from ckptstore.encodings.rules import Encodings
    from ckptstore.engine.engine import EngineSpec
    from ckptstore.format.commit import Commit
    from ckptstore.format.paths import Pattern
    from ckptstore.format.superblock import Superblock
    from ckptstore.ops.diff import DiffReport
    from ckptstore.ops.gc import GcReport
    from ckptstore.ops.sharing import SharedUsage, VersionSharing
    from ckptstore.ops.usage import StoreStats, VersionUsage
    from ckptstore.repo import Repo
    from ckptstore.saver.saver import Saver
    from ckptstore.store.writeback import WriteBack
    from ckptstore.tensors.adapters import TypeAdapter
    from ckptstore.tensors.restore import MapLocation

__all__ = ["Store", "open_store"]

_log = logging.getLogger("ckptstore")


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
    encryption_key: KeyInput | None = None,
    replicas: ReplicaOptions | None = None,
    **storage_options: Any,  # noqa: ANN401 - passed on to the storage library
) -> Store:
    """Open the store at a location. Exported as ``ckptstore.open``.

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
        You vouch that no one else writes while this store is open. Needed only on storage that
        cannot create an object conditionally (see ``ckptstore doctor``).
    chunk_bytes
        Size of chunks of a new store, in bytes.
    host_bytes
        Host memory for chunks in flight, in bytes, of one save or load.
    workers
        Threads that hash, encode and decode; by default the usable processors, at most 8.
    codec
        ``"auto"``: compressed or raw, whichever this storage and these processors are measured to
        save faster; ``"planes"``: always the fewest bytes; ``"raw"``, ``"zstd"``, or ``"delta"``:
        see :data:`ckptstore.config.CODEC_CHOICES`.
    base_bytes
        Host memory for what the next save with ``"delta"`` takes differences to, in bytes; 0 keeps
        nothing between saves.
    engine
        Who writes saves in the background: ``"process"``, ``"thread"``, or ``"auto"``, which is a
        process wherever one can reach the storage.
    staging_bytes
        Host memory for states that are staged and not yet durable, in bytes, never exceeded; by
        default half of what the process may use. None of it is taken before the first save in the
        background, and no more than its state needs.
    in_flight
        Saves in the background that may be under way at once.
    encryption_key
        Opens an encrypted store, and makes a new one such: ``"file:PATH"``, ``"env:NAME"``,
        ``"command:CMD"``, or 32 bytes. See docs/howto/encryption.md.
    replicas
        By the name of a replica (:meth:`Store.add_replica`): options to open it with, as for this
        function, such as ``{"cold": {"endpoint_url": "..."}}``; or an open store. Never stored.
    storage_options
        Handed to the storage library (s3fs, gcsfs, ...), such as ``endpoint_url`` or ``profile``.
        Credentials belong into their usual chains, not here.

    Raises
    ------
    InvalidUrlError
        It is no location.
    InvalidInputError
        An option is of another type, out of its bounds, or none of its choices.
    StoreNotFoundError
        There is no store, and `create` is False.
    MissingKeyError, WrongKeyError, EncryptionKeyError
        The store is encrypted, and no key was given, or another; or it is not, and one was.
    UnsafeBackendError
        A store is to be created where several writers would lose commits.
    StorageError
        The storage failed, or refused the credentials.
    """
    if is_key_spec(storage_options.get("key")):
        msg = "key is an option of the storage library, and not the key of an encrypted store"
        raise InvalidInputError(msg, hint="give encryption_key=")
    options = Options(
        host_bytes=host_bytes,
        workers=workers_default() if workers is None else workers,
        codec=codec,
        base_bytes=base_bytes,
        read_only=read_only,
        single_writer=single_writer,
        engine=engine,
        staging_bytes=staging_bytes,
        in_flight=in_flight,
    )
    check_given(replicas)
    repo = open_repo(
        url,
        create=create,
        options=options,
        chunk_bytes=chunk_bytes,
        key=encryption_key,
        storage_options=storage_options,
    )
    return Store(repo, replicas=replicas)


class Store(Archiving, Background, Checking, Replicating, Retaining, Tiers, WritingBack):
    """One location with everything in it; made by :func:`ckptstore.open`.

    A context manager. Any thread may use it. Close it when no save or load is running; saves in
    the background are waited for.
    """

    def __init__(self, repo: Repo, *, replicas: ReplicaOptions | None = None) -> None:
        self._repo = repo
        self._kept: Manifests | None = None
        self._events = Events()
        self._kept_savers: dict[int, Saver] = {}
        self._opened = OpenedReplicas(repo, replicas)
        self._told: set[tuple[str, str]] = set()
        self._write_backs: dict[tuple[int, str], WriteBack] = {}

    def __repr__(self) -> str:
        """Return the location, without credentials."""
        return f"<Store {self.url}>"

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

    @property
    def _manifests(self) -> Manifests:
        if self._kept is None:
            from ckptstore.checkpoint.manifests import Manifests

            self._kept = Manifests(self._repo)
        return self._kept

    # --- looking ------------------------------------------------------------------------------

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
            from ckptstore.encodings.rules import EncodingRules

            rules = EncodingRules(encodings)
        made = Run(self, check_run_name(name), wanted, rules)
        if wanted:
            changes.ensure_run(self._known(), name, wanted)
        if write_back is not None:
            self.write_back(write_back, runs=[name])
        return made

    def _known(self) -> Catalog:
        """Return the catalog as last read; where the log is damaged, what it held before."""
        try:
            return self._repo.catalog
        except (IntegrityError, FormatError):
            return self._repo.log.catalog

    def runs(self) -> list[RunInfo]:
        """Return all runs, by name.

        Raises
        ------
        StorageError, CorruptObjectError
            The log cannot be read.
        """
        return self._repo.refresh().runs()

    def versions(self, run: str | None = None) -> list[Version]:
        """Return all versions of a run, or of the store, oldest first.

        Raises
        ------
        RunNotFoundError
            There is no such run.
        """
        return list(self._repo.refresh().versions(run))

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
        parsed = parse_ref(ref)
        try:
            catalog = self._repo.refresh()
        except (IntegrityError, FormatError) as error:
            before = self._repo.log.catalog
            if parsed.kind != "id" or not _knows(before, parsed):
                raise
            _log.warning("%s is read from what the log held before its damage: %s", ref, error)
            catalog = before
        if parsed.kind == "valid":
            from ckptstore.ops.latest_valid import latest_valid

            return latest_valid(self._repo, self._manifests, parsed.run).version
        return resolve(catalog, parsed)

    def version(self, ref: str, *, fall_through: bool = True) -> LazyVersion:
        """Return a version to be read lazily; reads its manifest and no data.

        Parameters
        ----------
        fall_through
            As in :meth:`load`.

        Raises
        ------
        CorruptObjectError
            The manifest is damaged. Else as :meth:`resolve`.
        """
        return self._lazy(self.resolve(ref), fall_through=fall_through)

    def _lazy(self, version: Version, *, fall_through: bool = True) -> LazyVersion:
        from ckptstore.checkpoint.lazy import LazyVersion

        restarts.chosen(self._repo, version.run)
        content = self._content(version, fall_through=fall_through)
        whole = None
        if fall_through and version.level != "full" and self._repo.log.catalog.replicas:
            whole = partial(self._whole, version)
        return LazyVersion(self._repo, version, content, whole=whole)

    def log(self, *, first: int = 1) -> list[Commit]:
        """Return the commits from number `first` on, oldest first; reads each of them.

        Raises
        ------
        CorruptObjectError
            A commit is damaged or the history was changed; the message names it.
        """
        self._repo.check_open()
        return list(self._repo.log.commits(first))

    # --- loading ------------------------------------------------------------------------------

    def load(
        self,
        ref: str,
        *,
        include: Sequence[Pattern] | None = None,
        exclude: Sequence[Pattern] | None = None,
        map_location: MapLocation = None,
        into: object = None,
        adapters: Sequence[TypeAdapter] = (),
        progress: ProgressCallback = silent,
        fall_through: bool = True,
        refill: bool = False,
    ) -> Any:  # noqa: ANN401 - whatever was saved
        """Return the state of a version, every byte checked.

        What is not here (any more), or is damaged, is read from the nearest replica that has a
        name and has the version, what is here, here; the logger ``ckptstore`` says so once.

        Parameters
        ----------
        ref
            Names the version; see :meth:`resolve`. ``latest-valid`` takes the newest that loads:
            what is damaged in the part that is asked for is skipped, with a warning.
        include, exclude
            Patterns of paths, such as ``"model.*"``; ``*`` also crosses dots, and a path stands
            for everything below it. Only the chunks that are needed are fetched.
        map_location
            As in ``torch.load``, but None means the CPU.
        into
            A state whose tensors are filled in place (``model.state_dict()``, say) and returned.
            After an error they may hold anything.
        adapters
            For objects that were saved through a :class:`ckptstore.TypeAdapter`.
        progress
            Called with the bytes done.
        fall_through
            Whether replicas are asked at all.
        refill
            A version of which only the record is here is brought back from a replica first
            (:meth:`replicate`), and then loaded from here.

        Raises
        ------
        VersionNotFoundError, TensorNotFoundError
            The ref or a pattern names nothing; or only a part of the version is here, and no
            replica has it either, or none can be reached: the message has every reason.
        CorruptTensorError
            A stored tensor is damaged, here and in every replica; names it. Other tensors can still
            be loaded.
        StorageError
            The storage failed.
        """

        def load(version: Version) -> Any:  # noqa: ANN401 - whatever was saved
            found = self._refill(version) if refill else version
            return self._lazy(found, fall_through=fall_through).load(
                include=include,
                exclude=exclude,
                map_location=map_location,
                into=into,
                adapters=adapters,
                progress=progress,
            )

        parsed = parse_ref(ref)
        return (
            self._first_sound(parsed.run, load)
            if parsed.kind == "valid"
            else load(self.resolve(ref))
        )

    def load_into(
        self,
        ref: str,
        target: object,
        *,
        include: Sequence[Pattern] | None = None,
        exclude: Sequence[Pattern] | None = None,
        rename: Mapping[Pattern, Pattern] | None = None,
        cast: bool = True,
        strict: bool = False,
        progress: ProgressCallback = silent,
    ) -> TransferReport:
        """Fill a different model from a version, as far as names and shapes fit; say what did not.

        Parameters
        ----------
        ref
            Names the version; see :meth:`resolve`.
        target
            A module, or a state of tensors and modules such as ``{"model": model}``. Parameters
            and persistent buffers are filled in place, where they are.
        include, exclude
            Patterns of paths of the version; ``["model"]`` keeps the optimizer out of the report.
        rename
            Prefix of a path of the version to what the target calls it: ``{"model": ""}`` for a
            module whose names lie below ``model`` in the version.
        cast
            Convert values to the target's dtype; if not, another dtype is a mismatch.
        strict
            Refuse before anything is read unless all names and shapes fit.
        progress
            Called with the bytes done.

        Raises
        ------
        VersionNotFoundError, TensorNotFoundError
            The ref, a pattern or a prefix names nothing.
        InvalidInputError
            The target holds no tensor, two paths get one name, or `strict` is not met.
        CorruptTensorError, StorageError
            A tensor cannot be read; the target may then hold anything.
        """
        from ckptstore.checkpoint.transfer import TransferRequest, transfer

        version = self.version(ref)
        request = TransferRequest(
            include=include,
            exclude=exclude,
            rename=rename,
            cast=cast,
            strict=strict,
            progress=progress,
        )
        return transfer(self._repo, version.info, version._content, target, request)

    def _first_sound(self, run: str, load: Callable[[Version], Any]) -> Any:  # noqa: ANN401
        from ckptstore.ops.latest_valid import first_sound

        return first_sound(self._repo, run, load)

    # --- changing -----------------------------------------------------------------------------

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
        self._repo.log.append(lambda now: changes.tag(now, version.run, version.id, tag))
        return self._repo.catalog.version(version.id)

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
        self._repo.log.append(lambda now: changes.annotate(now, version.id, metrics))
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

        Its first version shares the chunks of the source, which it has for a parent, for good.
        It has the source's step, and neither its metrics nor its tags.

        Parameters
        ----------
        ref
            The version to begin at.
        new_run
            A name that no run has.
        include, exclude
            Patterns of paths: which leaves of the state to take over; all if not given.
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
        from ckptstore.ops.fork import ForkRequest, fork, fork_into

        chosen = Selection(include=include, exclude=exclude, roles=roles, rename=rename)
        request = ForkRequest(
            run=new_run,
            selection=chosen,
            directions=metrics or {},
            metadata=metadata or {},
            progress=progress,
        )
        source = self.resolve(ref)
        if store is None or store._repo is self._repo:
            fork(self._repo, self._manifests, source, request)
            restarts.chosen(self._repo, new_run)
            return self.run(new_run)
        fork_into(store._repo, store._manifests, self._repo, self._manifests, source, request)
        restarts.chosen(store._repo, new_run)
        return store.run(new_run)

    def rollback(self, ref: str, *, reason: str = "") -> Version:
        """Make a version the head of its run again; return it. See :meth:`Run.rollback`."""
        from ckptstore.ops.rollback import rollback

        version = self.resolve(ref)
        restarts.chosen(self._repo, version.run)
        return rollback(self._repo, version.run, version.id, reason=reason).target

    # --- maintenance --------------------------------------------------------------------------

    def diff(self, first: str, second: str) -> DiffReport:
        """Compare two versions by digest, and by value when asked; see :mod:`ckptstore.ops.diff`.

        Raises
        ------
        VersionNotFoundError
            A ref names no version, or one of which only the record is kept.
        CorruptObjectError
            A manifest is damaged.
        """
        from ckptstore.ops.diff import diff

        return diff(self._repo, self._manifests, self.resolve(first), self.resolve(second))

    def usage(self, run: str | None = None) -> list[VersionUsage]:
        """Return the bytes of each version, oldest first, from the catalog alone.

        Raises
        ------
        RunNotFoundError
            There is no such run.
        """
        from ckptstore.ops.usage import usage

        return usage(self._repo.refresh(), run)

    def stats(self) -> StoreStats:
        """Return the totals of the store; lists every object.

        Raises
        ------
        StorageError
            The storage failed.
        """
        from ckptstore.ops.usage import store_stats

        return store_stats(self._repo)

    def sharing(self, *, progress: ProgressCallback = silent) -> SharedUsage:
        """Return what runs and versions hold, alone and together; reads every live manifest.

        See :func:`ckptstore.ops.sharing.shared_usage`.
        """
        from ckptstore.ops.sharing import shared_usage

        return shared_usage(self._repo, self._manifests, progress=progress)

    def sharing_of(self, ref: str, *, progress: ProgressCallback = silent) -> VersionSharing:
        """Return what a version holds, and with whom; reads every live manifest.

        See :func:`ckptstore.ops.sharing.version_sharing`.
        """
        from ckptstore.ops.sharing import version_sharing

        version = self.resolve(ref)
        return version_sharing(self._repo, self._manifests, version, progress=progress)

    def gc(
        self,
        *,
        grace_s: float = limits.GC_GRACE_S,
        orphan_age_s: float = limits.GC_ORPHAN_AGE_S,
        repack_below: float | None = limits.GC_REPACK_BELOW,
        dry_run: bool = False,
        holders: bool = False,
        force: bool = False,
        executor: EngineSpec | None = None,
        workers: int | None = None,
        progress: ProgressCallback = silent,
    ) -> GcReport:
        """Free the space of what no version needs; see :func:`ckptstore.ops.gc.gc`."""
        from ckptstore.ops.gc import gc

        return gc(
            self._repo,
            self._manifests,
            grace_s=grace_s,
            orphan_age_s=orphan_age_s,
            repack_below=repack_below,
            dry_run=dry_run,
            holders=holders,
            force=force,
            executor=executor,
            workers=workers,
            progress=progress,
        )


def _knows(catalog: Catalog, ref: Ref) -> bool:
    try:
        resolve(catalog, ref)
    except CkptStoreError:
        return False
    return True
