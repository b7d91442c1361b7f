"""Fork: a run begins at a version of another, and shares its chunks. No tensor is read or written.

Within a store a fork is one manifest and one commit, whatever the size of the version. Into another
store, or of what only a replica has, the chunks that are missing travel as they are stored.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptstore import limits
from ckptstore.catalog import lifecycle_ops, run_ops
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.state import Op
from ckptstore.checkpoint.cold_reads import naming_cold
from ckptstore.checkpoint.content import content_digest
from ckptstore.checkpoint.request import NOWHERE
from ckptstore.checkpoint.selection import Selection, logical_roles, select
from ckptstore.errors import CondemnedError, ConflictError, CorruptObjectError, InvalidInputError
from ckptstore.events import ProgressCallback, silent
from ckptstore.format.fields import ManifestPointer
from ckptstore.format.keys import pack_id
from ckptstore.format.manifest import Manifest
from ckptstore.maintenance.replicas.copy_manifest import ORIGIN_KEY, Landed, transplant
from ckptstore.maintenance.replicas.fallback import Found
from ckptstore.manifests import relied_on
from ckptstore.model import RoleBytes, Version
from ckptstore.repo import Repo

__all__ = ["ForkRequest", "fork", "fork_into"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkRequest:
    """What the user asks for, besides the version."""

    run: str
    """Name of the new run."""
    selection: Selection = field(default_factory=Selection)
    directions: Mapping[str, str] = field(default_factory=dict)
    """Which way metrics get better, besides what the source's run knows."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    progress: ProgressCallback = silent
    """Called while chunks travel to another store."""


def fork(
    repo: Repo,
    source: Version,
    request: ForkRequest,
    *,
    lender: Found | None = None,
) -> Version:
    """Begin a run at a version of the same store; return its first version.

    What a collection condemns between reading the source and the commit is looked at again: the
    source may lie elsewhere since. The check and the commit are one step on the log.

    Parameters
    ----------
    lender
        A replica that has the content where this store does not: chunks that are not here travel,
        as far as the request takes them over.

    Raises
    ------
    ConflictError
        There is a run of this name.
    VersionNotFoundError
        The source was deleted, or only its record is kept.
    TensorNotFoundError, InvalidInputError
        A pattern, prefix, name or role is not accepted; nothing was written.
    CorruptObjectError
        Parts of the source are lost.
    ReadOnlyError, UnsafeBackendError, StorageError
        The store cannot be written to.
    CondemnedError
        Collections condemned what it needs, again and again.
    """
    repo.check_writable()
    version = name = repo.environment.random_hex(16)
    catalog = repo.refresh()
    build = _Forking(source=source, version=version, request=request)
    build(catalog)  # refuses now what the commit would refuse
    without: set[str] = set()
    for attempt in range(limits.CONDEMNED_TRIES_MAX):
        source = catalog.version(source.id)
        _check_whole(source)
        held = repo.manifests.load(source) if lender is None else lender.manifest
        manifest = select(held, request.selection, version=version)
        if lender is not None:
            landed = _bring(manifest, lender.version, lender.repo, repo, without, request.progress)
            manifest, build.roles = landed.manifest, landed.roles
        build.manifest = manifest
        build.content = content_digest(manifest)
        build.pointer = repo.manifests.put(manifest, name=name)
        try:
            repo.log.append(build)
        except CondemnedError as error:
            if attempt + 1 == limits.CONDEMNED_TRIES_MAX:
                raise
            without.update(pack for key in error.keys if (pack := pack_id(key)))
            name = repo.environment.random_hex(16)  # a name is never used again
            catalog = repo.refresh()
        else:
            repo.manifests.keep(build.pointer.digest, manifest)
            return repo.catalog.version(version)
    raise AssertionError  # pragma: no cover - the loop has no other end


@dataclass(slots=True, kw_only=True)
class _Forking:
    """Builds the commit of a fork, on whatever the catalog is then."""

    source: Version
    version: str
    request: ForkRequest
    manifest: Manifest | None = None
    pointer: ManifestPointer = NOWHERE
    content: str = "0" * 64
    roles: Mapping[str, RoleBytes] = field(default_factory=dict)
    """Bytes by role, where some travelled."""

    def __call__(self, catalog: Catalog) -> list[Op]:
        manifest = self.manifest
        return lifecycle_ops.fork(
            catalog,
            run=self.request.run,
            source=self.source.id,
            version=self.version,
            step=self.source.step,
            manifest=self.pointer,
            content=self.content,
            roles=self.roles or (logical_roles(manifest) if manifest is not None else {}),
            metrics={},
            metadata=self.request.metadata,
            directions=self.request.directions,
            relies_on=relied_on(self.pointer, manifest) if manifest is not None else (),
        )


def fork_into(
    target: Repo,
    repo: Repo,
    source: Version,
    request: ForkRequest,
    *,
    lender: Found | None = None,
) -> Version:
    """Begin a run of `target` at a version of another store; return its first version.

    Chunks that versions of `target` hold already are shared with them (see
    :mod:`ckptstore.maintenance.replicas.copy_manifest` for which are looked at); the others travel
    as they are stored, and each is checked on the way. The metadata keep where it came from, below
    :data:`ckptstore.maintenance.replicas.copy_manifest.ORIGIN_KEY`: a version of another store
    cannot be a parent.

    Parameters
    ----------
    lender
        A replica of the other store that has the content where that one does not.

    Raises
    ------
    ConflictError
        `target` has a run of this name.
    CorruptTensorError
        A chunk of the source is damaged.
    CkptStoreError
        As :func:`fork`.
    """
    target.check_writable()
    version = name = target.environment.random_hex(16)
    plan = _Landing.of(repo, source, request, version=version)
    plan(target.refresh())  # refuses now what the commit would refuse
    held = repo.manifests.load(source) if lender is None else lender.manifest
    wanted = select(held, request.selection, version=version)
    place = repo if lender is None else lender.repo
    without: set[str] = set()
    for attempt in range(limits.CONDEMNED_TRIES_MAX):
        landed = _bring(wanted, source, place, target, without, request.progress)
        plan.manifest, plan.roles = landed.manifest, landed.roles
        plan.receipt = landed.receipt
        plan.content = content_digest(landed.manifest)
        plan.pointer = target.manifests.put(landed.manifest, name=name)
        try:
            target.log.append(plan)
        except CondemnedError as error:
            if attempt + 1 == limits.CONDEMNED_TRIES_MAX:
                raise
            without.update(pack for key in error.keys if (pack := pack_id(key)))
            name = target.environment.random_hex(16)
        else:
            target.manifests.keep(plan.pointer.digest, landed.manifest)
            return target.catalog.version(version)
    raise AssertionError  # pragma: no cover - the loop has no other end


@dataclass(slots=True, kw_only=True)
class _Landing:
    """Builds the commit of a fork that came from another store."""

    version: str
    source: Version
    run: str
    metadata: Mapping[str, Any]
    directions: Mapping[str, str]
    manifest: Manifest | None = None
    pointer: ManifestPointer = NOWHERE
    content: str = "0" * 64
    roles: Mapping[str, Any] = field(default_factory=dict)
    receipt: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, repo: Repo, source: Version, request: ForkRequest, *, version: str) -> _Landing:
        """Return what is known before anything travelled.

        Raises
        ------
        InvalidInputError
            The key of the metadata that says where it came from is taken.
        CorruptObjectError
            Parts of the source are lost.
        """
        if ORIGIN_KEY in request.metadata:
            msg = f"the metadata key {ORIGIN_KEY!r} is taken"
            raise InvalidInputError(msg)
        _check_whole(source)
        return cls(
            version=version,
            source=source,
            run=request.run,
            metadata={**request.metadata, ORIGIN_KEY: _origin(repo, source)},
            directions={**repo.catalog.run(source.run).metrics, **request.directions},
        )

    def __call__(self, catalog: Catalog) -> list[Op]:
        if catalog.has_run(self.run):
            msg = f"there is a run {self.run!r} already"
            raise ConflictError(msg, hint="fork to another name")
        manifest = self.manifest
        return run_ops.save(
            catalog,
            run=self.run,
            version=self.version,
            step=self.source.step,
            manifest=self.pointer,
            content=self.content,
            directions=self.directions,
            metadata=self.metadata,
            roles=self.roles,
            receipt=self.receipt,
            relies_on=relied_on(self.pointer, manifest) if manifest is not None else (),
        )


def _bring(
    wanted: Manifest,
    source: Version,
    place: Repo,
    target: Repo,
    without: Collection[str],
    progress: ProgressCallback,
) -> Landed:
    """Bring what a fork needs of `source`, and `target` does not have, from where it is."""
    with naming_cold(source.id, place.url, shown=f"{source.run}@{source.step}"):
        return transplant(
            wanted,
            source=place,
            target=target,
            source_id=source.id,
            without=without,
            progress=progress,
        )


def _origin(repo: Repo, source: Version) -> dict[str, object]:
    return {
        "store_id": repo.superblock.store_id,
        "url": repo.url,
        "version": source.id,
        "run": source.run,
        "step": source.step,
    }


def _check_whole(source: Version) -> None:
    if source.damaged:
        msg = f"parts of {source.run}@{source.step} (#{source.id[:8]}) are lost"
        hint = "load what is intact (include=) and save it as a run of its own"
        raise CorruptObjectError(msg, hint=hint)
