"""Methods of :class:`ckptstore.Store` that count, list and compare."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptstore.events import ProgressCallback, silent
from ckptstore.replicas.options import HasRepo
from ckptstore.store.store_session import HasSession
from ckptstore.store.version_lookup import named_version

if TYPE_CHECKING:
    from ckptstore.catalog.commits import Commit
    from ckptstore.maintenance.reports.diff import DiffReport
    from ckptstore.maintenance.reports.sharing import SharedUsage, VersionSharing
    from ckptstore.maintenance.reports.usage import StoreStats, VersionUsage


def log(self: HasRepo, *, first: int = 1) -> list[Commit]:
    """Return the commits from number `first` on, oldest first; reads each of them.

    Raises
    ------
    CorruptObjectError
        A commit is damaged or the history was changed; the message names it.
    """
    self.repo.check_open()
    return list(self.repo.log.commits(first))


def diff(self: HasSession, first: str, second: str) -> DiffReport:
    """Compare two versions by digest, and by value when asked.

    See :mod:`ckptstore.maintenance.reports.diff`.

    What is not here, or damaged, is read from a replica, as in :meth:`load`.

    Raises
    ------
    VersionNotFoundError
        A ref names no version, or one of which only the record is kept, and no replica helps.
    CorruptObjectError
        A manifest is damaged, and no replica helps.
    """
    from ckptstore.maintenance.reports.diff import diff

    return diff(
        self._session.repo,
        self._session.replicas.content,
        named_version(self._session.repo, first),
        named_version(self._session.repo, second),
    )


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
        staging_bytes=0 if saver is None else saver.dispatcher.size_bytes,
    )
    return exposition(session.repo.refresh(), process)


def usage(self: HasRepo, run: str | None = None) -> list[VersionUsage]:
    """Return the bytes of each version, oldest first, from the catalog alone.

    Raises
    ------
    RunNotFoundError
        There is no such run.
    """
    from ckptstore.maintenance.reports.usage import usage

    return usage(self.repo.refresh(), run)


def stats(self: HasRepo) -> StoreStats:
    """Return the totals of the store; lists every object.

    Raises
    ------
    StorageError
        The storage failed.
    """
    from ckptstore.maintenance.reports.usage import store_stats

    return store_stats(self.repo)


def sharing(self: HasRepo, *, progress: ProgressCallback = silent) -> SharedUsage:
    """Return what runs and versions hold, alone and together; reads every live manifest.

    See :func:`ckptstore.maintenance.reports.sharing.shared_usage`.
    """
    from ckptstore.maintenance.reports.sharing import shared_usage

    return shared_usage(self.repo, progress=progress)


def sharing_of(self: HasRepo, ref: str, *, progress: ProgressCallback = silent) -> VersionSharing:
    """Return what a version holds, and with whom; reads every live manifest.

    See :func:`ckptstore.maintenance.reports.sharing.version_sharing`.
    """
    from ckptstore.maintenance.reports.sharing import version_sharing

    return version_sharing(self.repo, named_version(self.repo, ref), progress=progress)
