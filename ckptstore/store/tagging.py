"""Methods of :class:`ckptstore.Store` that change what the catalog says of a version."""

from __future__ import annotations

from collections.abc import Mapping

from ckptstore.catalog import run_ops
from ckptstore.model import Version
from ckptstore.replicas.options import HasRepo
from ckptstore.store import resume_check
from ckptstore.store.refs import named_version


def tag(self: HasRepo, ref: str, tag: str) -> Version:
    """Give a version a tag in its run; a tag of this name moves. Return the version.

    Raises
    ------
    InvalidInputError
        The tag is not accepted (digits only, ``latest``, ``best:...`` and ``~...`` are refs).
    ReadOnlyError, UnsafeBackendError, StorageError
        It could not be committed.
    """
    version = named_version(self.repo, ref)
    self.repo.log.append(lambda now: run_ops.tag(now, version.run, version.id, tag))
    return self.repo.catalog.version(version.id)


def untag(self: HasRepo, ref: str, tag: str) -> Version:
    """Take a tag away from a version; return the version.

    Raises
    ------
    VersionNotFoundError
        The version does not have this tag. Else as :meth:`resolve`.
    ReadOnlyError, UnsafeBackendError, StorageError
        It could not be committed.
    """
    found = named_version(self.repo, ref)
    self.repo.log.append(lambda now: run_ops.untag(now, found.run, tag, version=found.id))
    return self.repo.catalog.version(found.id)


def annotate(self: HasRepo, ref: str, metrics: Mapping[str, float]) -> Version:
    """Add metrics to a version, or replace their values; return the version.

    Raises
    ------
    InvalidInputError
        A metric is not a number.
    ReadOnlyError, UnsafeBackendError, StorageError
        It could not be committed.
    """
    version = named_version(self.repo, ref)
    self.repo.log.append(lambda now: run_ops.annotate(now, version.id, metrics))
    return self.repo.catalog.version(version.id)


def rollback(self: HasRepo, ref: str, *, reason: str = "") -> Version:
    """Make a version the head of its run again; return it. See :meth:`Run.rollback`."""
    from ckptstore.maintenance.retention.rollback import rollback

    version = named_version(self.repo, ref)
    resume_check.chosen(self.repo, version.run)
    return rollback(self.repo, version.run, version.id, reason=reason).target
