"""The part of the facade that says what is there: runs, versions, commits, differences."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ckptstore.catalog.refs import parse_ref, resolve
from ckptstore.errors import CkptStoreError, FormatError, IntegrityError
from ckptstore.model import Ref, RunInfo, Version
from ckptstore.repo import Repo

if TYPE_CHECKING:
    from ckptstore.catalog.catalog import Catalog
    from ckptstore.catalog.commits import Commit
    from ckptstore.checkpoint.content import Content
    from ckptstore.maintenance.reports.diff import DiffReport

__all__ = ["Looking"]

_log = logging.getLogger("ckptstore")


class Looking:
    """What :class:`ckptstore.Store` does to find versions and to compare them."""

    _repo: Repo

    if TYPE_CHECKING:

        def _content(self, version: Version, *, fall_through: bool = True) -> Content: ...

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
            from ckptstore.maintenance.check.latest_valid import latest_valid

            return latest_valid(self._repo, parsed.run).version
        return resolve(catalog, parsed)

    def log(self, *, first: int = 1) -> list[Commit]:
        """Return the commits from number `first` on, oldest first; reads each of them.

        Raises
        ------
        CorruptObjectError
            A commit is damaged or the history was changed; the message names it.
        """
        self._repo.check_open()
        return list(self._repo.log.commits(first))

    def diff(self, first: str, second: str) -> DiffReport:
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

        return diff(self._repo, self._content, self.resolve(first), self.resolve(second))


def _knows(catalog: Catalog, ref: Ref) -> bool:
    try:
        resolve(catalog, ref)
    except CkptStoreError:
        return False
    return True
