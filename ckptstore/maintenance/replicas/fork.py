"""Fork: a run begins at a version of another, and shares its chunks. No tensor is read or written.

Within a store a fork is one manifest and one commit, whatever the size of the version. Into another
store, or of what only a replica has, the chunks that are missing travel as they are stored.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import msgspec

from ckptstore.catalog import lifecycle_ops, replica_ops, run_ops
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.retention import fixed_roles, inherit_roles
from ckptstore.catalog.state import Op
from ckptstore.checkpoint.cold_reads import naming_cold
from ckptstore.checkpoint.content import content_digest
from ckptstore.checkpoint.request import NOWHERE
from ckptstore.checkpoint.selection import Selection, logical_roles, select
from ckptstore.committing import commit_retrying
from ckptstore.errors import ConflictError, CorruptObjectError, InvalidInputError
from ckptstore.events import ProgressCallback, silent
from ckptstore.format.manifest import Manifest
from ckptstore.format.names import encode_metadata
from ckptstore.format.paths import Pattern
from ckptstore.maintenance.replicas import copy_manifest
from ckptstore.maintenance.replicas.fallback import Found
from ckptstore.manifests import relied_on
from ckptstore.model import Version, naming
from ckptstore.repo import Repo


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkRequest:
    """Options of a fork, besides the version."""

    run: str
    """Name of the new run."""
    selection: Selection = field(default_factory=Selection)
    directions: Mapping[str, str] = field(default_factory=dict)
    """Whether metrics are to be least or most, besides what the source's run knows."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    progress: ProgressCallback = silent
    """Called while chunks travel to another store."""


def fork(
    target: Repo, repo: Repo, source: Version, request: ForkRequest, *, lender: Found | None = None
) -> Version:
    """Begin a run of `target` at a version of a store, the same or another; return the first one.

    Chunks that versions of `target` hold already are shared with them (see
    :mod:`ckptstore.maintenance.replicas.copy_manifest` for which are looked at); the others travel
    as they are stored, and each is checked on the way. In another store the metadata keep where it
    came from, below :data:`ckptstore.maintenance.replicas.copy_manifest.ORIGIN_KEY`: a version of
    another store cannot be a parent.

    What a collection condemns between reading the source and the commit is looked at again: the
    source may lie elsewhere since. The check and the commit are one step on the log.

    Parameters
    ----------
    repo
        The store that has the version; `target` itself for a fork within it.
    lender
        A replica that has the content where `repo` does not: chunks that `target` lacks travel
        from there, as far as the request takes them over.

    Raises
    ------
    ConflictError
        `target` has a run of this name.
    VersionNotFoundError
        The source was deleted, or only its record is kept.
    TensorNotFoundError, InvalidInputError
        A pattern, prefix, name or role is not accepted; nothing was written.
    CorruptObjectError, CorruptTensorError
        Parts of the source are lost, or a chunk of it is damaged.
    ReadOnlyError, UnsafeBackendError, StorageError
        The store cannot be written to.
    CondemnedError
        Collections condemned what it needs, again and again.
    """
    target.check_writable()
    work = _Fork(target=target, repo=repo, source=source, request=request, lender=lender)
    if work.is_foreign:
        if copy_manifest.ORIGIN_KEY in request.metadata:
            raise InvalidInputError(f"the metadata key {copy_manifest.ORIGIN_KEY!r} is taken")
        _check_whole(source)
    return commit_retrying(work.attempt)


_UNWRITTEN: Final = replica_ops.Arrival(manifest=NOWHERE, roles={}, relies_on=())
"""Content of the first version of a run before it is written."""


@dataclass(slots=True, kw_only=True)
class _Fork:
    """One fork; owned by the calling thread."""

    target: Repo
    repo: Repo
    source: Version
    request: ForkRequest
    lender: Found | None
    version: str = field(init=False)
    """Id of the first version."""
    name: str = field(init=False)
    """Of its manifest; empty for one that was never used."""

    def __post_init__(self) -> None:
        self.version = self.name = self.target.environment.random_hex(16)

    @property
    def fixed(self) -> dict[Pattern, str]:
        """Return the roles that are fixed for the run of the source."""
        return fixed_roles(self.repo.catalog, self.source.run)

    @property
    def is_foreign(self) -> bool:
        """Return whether the source is a version of another store, which cannot be a parent."""
        return self.target is not self.repo

    def attempt(self, condemned: set[str]) -> Version:
        """Write the manifest, over chunks that no collection has condemned, and commit."""
        target, lender, source = self.target, self.lender, self.source
        self._ops(target.refresh(), _UNWRITTEN, "0" * 64)  # refuses what the commit would
        if not self.is_foreign:
            source = target.catalog.version(source.id)
            _check_whole(source)
        held = self.repo.manifests.load(source) if lender is None else lender.manifest
        manifest = select(held, self.request.selection, version=self.version, fixed=self.fixed)
        first = replace(_UNWRITTEN, roles=logical_roles(manifest))
        if self.is_foreign or lender is not None:
            landed = self._bring(manifest, condemned)
            manifest = landed.manifest
            first = replace(first, roles=landed.roles, receipt=landed.receipt)
        content = content_digest(manifest)
        pointer = target.manifests.put(manifest, name=self.name)
        first = replace(first, manifest=pointer, relies_on=relied_on(pointer, manifest))
        self.name = ""  # a name is never used again
        target.log.append(lambda now: self._ops(now, first, content))
        target.manifests.keep(pointer.digest, manifest)
        return target.catalog.version(self.version)

    def _ops(self, now: Catalog, first: replica_ops.Arrival, content: str) -> list[Op]:
        """Return the operations of the fork on a catalog."""
        request, source = self.request, self.source
        if not self.is_foreign:
            save = run_ops.Save(
                version=self.version,
                run=request.run,
                step=source.step,
                parent=source.id,
                manifest=first.manifest,
                content=content,
                metadata=msgspec.Raw(encode_metadata(request.metadata)),
                roles=run_ops.sizes(first.roles),
            )
            ops = lifecycle_ops.fork(
                now, save, directions=request.directions, relies_on=first.relies_on
            )
            return [*ops, *inherit_roles(now, request.run, self.fixed)]
        if now.has_run(request.run):
            msg = f"there is a run {request.run!r} already"
            raise ConflictError(msg, hint="fork to another name")
        ops = run_ops.save(
            now,
            run=request.run,
            version=self.version,
            step=source.step,
            manifest=first.manifest,
            content=content,
            directions={**self.repo.catalog.run(source.run).metrics, **request.directions},
            metadata={**request.metadata, copy_manifest.ORIGIN_KEY: _origin(self.repo, source)},
            roles=first.roles,
            receipt=first.receipt,
            relies_on=first.relies_on,
        )
        return [*ops, *inherit_roles(now, request.run, self.fixed)]

    def _bring(self, wanted: Manifest, without: Collection[str]) -> copy_manifest.Landed:
        """Bring the chunks of a fork that the target does not have."""
        there = self.repo if self.lender is None else self.lender.repo
        with naming_cold(self.source.id, there.url, shown=f"{self.source.run}@{self.source.step}"):
            return copy_manifest.transplant(
                wanted,
                source=there,
                target=self.target,
                candidates=copy_manifest.likely_versions(self.target.catalog, self.source.id),
                without=without,
                progress=self.request.progress,
            )


def _origin(repo: Repo, source: Version) -> dict[str, object]:
    return {"store_id": repo.superblock.store_id, "url": repo.url, **naming(source)}


def _check_whole(source: Version) -> None:
    if source.damaged:
        hint = "load what is intact (include=) and save it as a run of its own"
        raise CorruptObjectError(f"parts of {source.label} are lost", hint=hint)
