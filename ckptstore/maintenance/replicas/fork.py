"""Fork: a run begins at a version of another, and shares its chunks. No tensor is read or written.

Within a store a fork is one manifest and one commit, whatever the size of the version. Into another
store, or of what only a replica has, the chunks that are missing travel as they are stored.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ckptstore.catalog import lifecycle_ops, run_ops
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.state import Op
from ckptstore.checkpoint.cold_reads import naming_cold
from ckptstore.checkpoint.content import content_digest
from ckptstore.checkpoint.request import NOWHERE
from ckptstore.checkpoint.selection import Selection, logical_roles, select
from ckptstore.committing import commit_retrying
from ckptstore.errors import ConflictError, CorruptObjectError, InvalidInputError
from ckptstore.events import ProgressCallback, silent
from ckptstore.format.fields import ManifestPointer
from ckptstore.format.manifest import Manifest
from ckptstore.format.names import encode_metadata
from ckptstore.maintenance.replicas.copy_manifest import (
    ORIGIN_KEY,
    Landed,
    likely_versions,
    transplant,
)
from ckptstore.maintenance.replicas.fallback import Found
from ckptstore.manifests import relied_on
from ckptstore.model import RoleBytes, Version
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
    target: Repo,
    repo: Repo,
    source: Version,
    request: ForkRequest,
    *,
    lender: Found | None = None,
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
    metadata, directions = request.metadata, request.directions
    is_foreign = target is not repo
    if is_foreign:
        if ORIGIN_KEY in metadata:
            msg = f"the metadata key {ORIGIN_KEY!r} is taken"
            raise InvalidInputError(msg)
        _check_whole(source)
        metadata = {**metadata, ORIGIN_KEY: _origin(repo, source)}
        directions = {**repo.catalog.run(source.run).metrics, **directions}
    # The store that has the chunks, and the version that it has; None for `target`.
    place = (repo, source) if is_foreign else None
    if lender is not None:
        place = (lender.repo, source if is_foreign else lender.version)
    version = name = target.environment.random_hex(16)

    def build(now: Catalog, first: _First) -> list[Op]:
        """Return the operations of the fork on a catalog."""
        if not is_foreign:
            save = run_ops.Save(
                version=version,
                run=request.run,
                step=source.step,
                parent=source.id,
                manifest=first.pointer,
                content=first.content,
                metadata=msgspec.Raw(encode_metadata(metadata)),
                roles=run_ops.sizes(first.roles),
            )
            return lifecycle_ops.fork(now, save, directions=directions, relies_on=first.relies_on)
        if now.has_run(request.run):
            msg = f"there is a run {request.run!r} already"
            raise ConflictError(msg, hint="fork to another name")
        return run_ops.save(
            now,
            run=request.run,
            version=version,
            step=source.step,
            manifest=first.pointer,
            content=first.content,
            directions=directions,
            metadata=metadata,
            roles=first.roles,
            receipt=first.receipt,
            relies_on=first.relies_on,
        )

    def attempt(condemned: set[str]) -> Version:
        """Write the manifest, over chunks that no collection has condemned, and commit."""
        nonlocal name
        build(target.refresh(), _First())  # refuses now what the commit would refuse
        now = source
        if not is_foreign:
            now = target.catalog.version(source.id)
            _check_whole(now)
        held = repo.manifests.load(now) if lender is None else lender.manifest
        manifest = select(held, request.selection, version=version)
        first = _First(roles=logical_roles(manifest))
        if place is not None:
            landed = _bring(manifest, place, target, condemned, request.progress)
            manifest = landed.manifest
            first = _First(roles=landed.roles, receipt=landed.receipt)
        first.content = content_digest(manifest)
        first.pointer = target.manifests.put(manifest, name=name)
        first.relies_on = relied_on(first.pointer, manifest)
        name = ""  # a name is never used again
        target.log.append(lambda catalog: build(catalog, first))
        target.manifests.keep(first.pointer.digest, manifest)
        return target.catalog.version(version)

    return commit_retrying(attempt)


@dataclass(slots=True, kw_only=True)
class _First:
    """Content of the first version of a run, as its commit names it; before it is written, none."""

    pointer: ManifestPointer = NOWHERE
    content: str = "0" * 64
    roles: Mapping[str, RoleBytes] = field(default_factory=dict)
    receipt: Mapping[str, float] = field(default_factory=dict)
    relies_on: Sequence[str] = ()


def _bring(
    wanted: Manifest,
    place: tuple[Repo, Version],
    target: Repo,
    without: Collection[str],
    progress: ProgressCallback,
) -> Landed:
    """Bring the chunks of a fork that `target` does not have."""
    there, source = place
    with naming_cold(source.id, there.url, shown=f"{source.run}@{source.step}"):
        return transplant(
            wanted,
            source=there,
            target=target,
            candidates=likely_versions(target.catalog, source.id),
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
        msg = f"parts of {source.label} are lost"
        hint = "load what is intact (include=) and save it as a run of its own"
        raise CorruptObjectError(msg, hint=hint)
