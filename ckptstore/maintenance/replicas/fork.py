"""Fork: a run begins at a version of another, and shares its chunks. No tensor is read or written.

Within a store a fork is one manifest and one commit, whatever the size of the version. Into another
store, or of what only a replica has, the chunks that are missing travel as they are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

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
from ckptstore.maintenance.replicas.copy_manifest import ORIGIN_KEY, Landed, transplant
from ckptstore.maintenance.replicas.fallback import Found
from ckptstore.manifests import relied_on
from ckptstore.model import RoleBytes, Version
from ckptstore.repo import Repo


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

    def held() -> Manifest:
        """Return the manifest of the source as it is now."""
        now = repo.catalog.version(source.id)
        _check_whole(now)
        return repo.manifests.load(now) if lender is None else lender.manifest

    return _begin(
        repo,
        partial(
            _Fork,
            source=source,
            run=request.run,
            metadata=request.metadata,
            directions=request.directions,
        ),
        request,
        held,
        place=None if lender is None else (lender.repo, lender.version),
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
    if ORIGIN_KEY in request.metadata:
        msg = f"the metadata key {ORIGIN_KEY!r} is taken"
        raise InvalidInputError(msg)
    _check_whole(source)
    return _begin(
        target,
        partial(
            _Fork,
            source=source,
            run=request.run,
            metadata={**request.metadata, ORIGIN_KEY: _origin(repo, source)},
            directions={**repo.catalog.run(source.run).metrics, **request.directions},
            is_foreign=True,
        ),
        request,
        lambda: repo.manifests.load(source) if lender is None else lender.manifest,
        place=(repo if lender is None else lender.repo, source),
    )


def _begin(
    target: Repo,
    draft: Callable[..., _Fork],
    request: ForkRequest,
    held: Callable[[], Manifest],
    *,
    place: tuple[Repo, Version] | None,
) -> Version:
    """Write and commit the first version of a run of `target`; return it.

    Parameters
    ----------
    draft
        Makes the builder of the commit for a version of this id.
    held
        Gives the manifest of the source.
    place
        The store that has the chunks, and the version that it has; None for `target`.
    """
    version = name = target.environment.random_hex(16)

    def attempt(condemned: set[str]) -> Version:
        """Write the manifest, over chunks that no collection has condemned, and commit."""
        nonlocal name
        first = draft(version=version)
        first(target.refresh())  # refuses now what the commit would refuse
        manifest = select(held(), request.selection, version=version)
        first.roles = logical_roles(manifest)
        if place is not None:
            landed = _bring(manifest, place, target, condemned, request.progress)
            manifest, first.roles, first.receipt = landed.manifest, landed.roles, landed.receipt
        first.content = content_digest(manifest)
        first.pointer = target.manifests.put(manifest, name=name)
        first.relies_on = relied_on(first.pointer, manifest)
        name = ""  # a name is never used again
        target.log.append(first)
        target.manifests.keep(first.pointer.digest, manifest)
        return target.catalog.version(version)

    return commit_retrying(attempt)


@dataclass(slots=True, kw_only=True)
class _Fork:
    """Builds the commit of a fork, on whatever the catalog is then."""

    source: Version
    version: str
    run: str
    metadata: Mapping[str, Any]
    directions: Mapping[str, str]
    is_foreign: bool = False
    """The source is a version of another store, which cannot be a parent."""
    pointer: ManifestPointer = NOWHERE
    content: str = "0" * 64
    roles: Mapping[str, RoleBytes] = field(default_factory=dict)
    receipt: Mapping[str, float] = field(default_factory=dict)
    relies_on: Sequence[str] = ()

    def __call__(self, catalog: Catalog) -> list[Op]:
        if not self.is_foreign:
            return lifecycle_ops.fork(
                catalog,
                run=self.run,
                source=self.source.id,
                version=self.version,
                step=self.source.step,
                manifest=self.pointer,
                content=self.content,
                roles=self.roles,
                metrics={},
                metadata=self.metadata,
                directions=self.directions,
                relies_on=self.relies_on,
            )
        if catalog.has_run(self.run):
            msg = f"there is a run {self.run!r} already"
            raise ConflictError(msg, hint="fork to another name")
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
            relies_on=self.relies_on,
        )


def _bring(
    wanted: Manifest,
    place: tuple[Repo, Version],
    target: Repo,
    without: Collection[str],
    progress: ProgressCallback,
) -> Landed:
    """Bring what a fork needs, and `target` does not have, from where it is."""
    there, source = place
    with naming_cold(source.id, there.url, shown=f"{source.run}@{source.step}"):
        return transplant(
            wanted,
            source=there,
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
