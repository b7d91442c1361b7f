"""The part of the facade that says what takes which bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptstore.events import ProgressCallback, silent
from ckptstore.model import Version
from ckptstore.repo import Repo

if TYPE_CHECKING:
    from ckptstore.maintenance.reports.sharing import SharedUsage, VersionSharing
    from ckptstore.maintenance.reports.usage import StoreStats, VersionUsage

__all__ = ["Accounting"]


class Accounting:
    """What :class:`ckptstore.Store` does to count bytes."""

    _repo: Repo

    if TYPE_CHECKING:

        def resolve(self, ref: str) -> Version:
            """Return the version that a ref names."""

    def usage(self, run: str | None = None) -> list[VersionUsage]:
        """Return the bytes of each version, oldest first, from the catalog alone.

        Raises
        ------
        RunNotFoundError
            There is no such run.
        """
        from ckptstore.maintenance.reports.usage import usage

        return usage(self._repo.refresh(), run)

    def stats(self) -> StoreStats:
        """Return the totals of the store; lists every object.

        Raises
        ------
        StorageError
            The storage failed.
        """
        from ckptstore.maintenance.reports.usage import store_stats

        return store_stats(self._repo)

    def sharing(self, *, progress: ProgressCallback = silent) -> SharedUsage:
        """Return what runs and versions hold, alone and together; reads every live manifest.

        See :func:`ckptstore.maintenance.reports.sharing.shared_usage`.
        """
        from ckptstore.maintenance.reports.sharing import shared_usage

        return shared_usage(self._repo, progress=progress)

    def sharing_of(self, ref: str, *, progress: ProgressCallback = silent) -> VersionSharing:
        """Return what a version holds, and with whom; reads every live manifest.

        See :func:`ckptstore.maintenance.reports.sharing.version_sharing`.
        """
        from ckptstore.maintenance.reports.sharing import version_sharing

        version = self.resolve(ref)
        return version_sharing(self._repo, version, progress=progress)
