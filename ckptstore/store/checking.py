"""Methods of :class:`ckptstore.Store` that check, repair, count and compare."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from ckptstore.argument_checks import integer
from ckptstore.backends.key_sources import KeyInput, hidden
from ckptstore.backends.transfers import Direction, Transfers
from ckptstore.config import Options
from ckptstore.engine.engine import EngineSpec
from ckptstore.errors import InvalidInputError
from ckptstore.events import ProgressCallback, silent
from ckptstore.replicas.options import HasRepo, name_in
from ckptstore.repo import Repo, open_repo
from ckptstore.store.replicating import Place
from ckptstore.store.store_session import HasSession, Session
from ckptstore.store.version_lookup import named_version, named_versions

if TYPE_CHECKING:
    from ckptstore.catalog.commits import Commit
    from ckptstore.maintenance.check.verify import Level, VerifyReport
    from ckptstore.maintenance.repair.repair import RepairReport
    from ckptstore.maintenance.reports.diff import DiffReport
    from ckptstore.maintenance.reports.sharing import SharedUsage
    from ckptstore.maintenance.reports.usage import StoreStats


def verify(
    self: HasRepo,
    refs: Sequence[str] | None = None,
    *,
    level: Level = "full",
    sample: float = 1.0,
    part: int | None = None,
    record: bool = False,
    resume: str | os.PathLike[str] | None = None,
    unverified: bool = False,
    executor: EngineSpec | None = None,
    workers: int | None = None,
    progress: ProgressCallback = silent,
) -> VerifyReport:
    """Check that what the catalog names is there and is what was written.

    Parameters
    ----------
    refs
        Versions to check; all, and the log itself, if None.
    level
        ``full`` reads every byte, ``records`` only records and sizes.
    sample
        The fraction of the chunks to read, above 0; the others' packs must be there.
    part
        Which of the ``round(1 / sample)`` fixed parts of the chunks to read. None: the part of the
        day, so that daily checks read everything in turn.
    record
        Record in the log which versions are sound in every byte. Any number of processes may do so
        at once.
    resume
        A file that keeps the progress: an interrupted check with the same file continues. Removed
        when complete.
    unverified
        Only versions that are not recorded as sound since they lie where they lie.
    executor
        Who reads: ``threads`` of this process (and None), the workers of a Dask scheduler,
        ``dask://HOST:PORT``, or any executor of ``concurrent.futures``. The report is the same.
    workers
        How many tasks run at once; by default what the engine has.

    Returns
    -------
    VerifyReport
        Its ``ok`` says whether anything was found.

    Raises
    ------
    CorruptObjectError
        The log itself is damaged.
    InvalidInputError
        Arguments exclude each other, or the file is of another check.
    WorkerDiedError, MissingDependencyError
        Of the engine.
    StorageError
        The storage failed, so that the check is not complete.
    """
    from ckptstore.maintenance.check.verify import sample_of, verify

    versions = None if refs is None else named_versions(self.repo, refs)
    if unverified:
        if refs is not None:
            raise InvalidInputError("refs and unverified exclude each other")
        versions = [one for one in self.repo.refresh().versions() if not one.verified]
    return verify(
        self.repo,
        versions=versions,
        level=level,
        sample=sample_of(sample, part=part, now_ms=self.repo.environment.now_ms()),
        record=record,
        resume=None if resume is None else Path(resume),
        executor=executor,
        workers=workers,
        progress=progress,
    )


def repair(
    self: HasSession,
    source: Place | Sequence[Place] | None = None,
    *,
    level: Level = "full",
    dry_run: bool = False,
    source_key: KeyInput | None = None,
    progress: ProgressCallback = silent,
) -> RepairReport:
    """Bring back what is damaged as far as it can be had, and say exactly what is lost.

    Deletes and changes no object: recovered data is written again, and a commit relocates the
    versions. Those that stay incomplete are recorded as damaged, and no save shares with them.

    Parameters
    ----------
    source
        A second store, its location, or ``"replica:NAME"``: any store with the same tensors. It is
        only read. Of several, the next is asked for what the last one lacks or has in an archive
        class (``cold`` in the report).
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

    source_key = hidden(source_key)  # in place, so that no frame shows the key
    repo = self._session.repo
    with ExitStack() as stack:
        sources = _second_stores(self._session, source, source_key, stack)
        return repair(repo, sources=sources, level=level, dry_run=dry_run, progress=progress)


def _second_stores(
    session: Session, source: Place | Iterable[Place] | None, key: KeyInput | None, stack: ExitStack
) -> list[Repo]:
    """Return the stores to repair from; those that are given as places are open for the stack."""
    if isinstance(source, HasRepo | str) or not isinstance(source, Iterable | None):
        source = (source,)
    found = []
    for each in source or ():
        name = name_in(each)
        if name is not None:
            found.append(session.replicas.find(name))
        elif isinstance(each, HasRepo):
            found.append(each.repo)
        else:
            opening = open_repo(each, options=Options(read_only=True), key=key)
            found.append(stack.enter_context(opening))
    return found


def log(self: HasRepo, *, first: int = 1) -> list[Commit]:
    """Return the commits from number `first` on, oldest first; reads each of them.

    Raises
    ------
    CorruptObjectError
        A commit is damaged or the history was changed; the message names it.
    """
    self.repo.check_open()
    return list(self.repo.log.commits(integer("first", first)))


def diff(self: HasSession, first: str, second: str) -> DiffReport:
    """Compare two versions by digest, and by value when asked.

    See :mod:`ckptstore.maintenance.reports.diff`.

    What is not here, or damaged, is read from a replica, as in :meth:`load`.

    Raises
    ------
    VersionNotFoundError
        A ref names no version, or one that has only its record, and no replica helps.
    CorruptObjectError
        A manifest is damaged, and no replica helps.
    """
    from ckptstore.maintenance.reports.diff import diff

    repo, content_of = self._session.repo, self._session.replicas.content
    return diff(repo, content_of, named_version(repo, first), named_version(repo, second))


def prometheus(self: HasSession) -> str:
    """Return the figures of the store, and of the saves of this process, for Prometheus.

    Reads the log, and nothing else of the storage. Serve it by any HTTP server, or write it
    to a file for node_exporter; ``ckptstore stats --prometheus`` prints the store's part.

    Raises
    ------
    StorageError, CorruptObjectError
        The log cannot be read.
    """
    from ckptstore.maintenance.reports.prometheus_text import ProcessFigures, exposition

    session = self._session
    saver = session.own_saver
    process = ProcessFigures(
        outcomes=session.events.counts(),
        in_flight=0 if saver is None else saver.in_flight,
        staging_bytes=0 if saver is None else saver.dispatcher.pool.size_bytes,
    )
    return exposition(session.repo.refresh(), process)


def stats(self: HasRepo) -> StoreStats:
    """Return the totals of the store; lists every object.

    Raises
    ------
    StorageError
        The storage failed.
    """
    from ckptstore.maintenance.reports.usage import store_stats

    return store_stats(self.repo)


def transfers(self: HasRepo) -> Mapping[str, Mapping[Direction, Transfers]]:
    """Return requests, bytes and times of this open store in this process; reads nothing.

    By operation (``save``, ``load``, ``verify`` ...; ``other`` for the log) and direction, ``read``
    or ``write``. Those of a replica are in :meth:`replica`, those of background saves in their
    receipts.
    """
    storage = self.repo.backend.transfers
    return {} if storage is None else storage.get().stats()


def sharing(self: HasRepo, *, progress: ProgressCallback = silent) -> SharedUsage:
    """Return the bytes of runs and versions, alone and together; reads every live manifest.

    See :func:`ckptstore.maintenance.reports.sharing.shared_usage`.
    """
    from ckptstore.maintenance.reports.sharing import shared_usage

    return shared_usage(self.repo, progress=progress)
