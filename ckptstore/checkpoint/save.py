"""Saving: a state becomes pieces, a manifest and one commit, in that order.

Nothing is visible before the commit, and the commit never names anything that is not durable. A
failure anywhere raises and leaves no version; what was written before it is an orphan for gc.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from ckptstore.catalog import changes
from ckptstore.catalog.catalog import Catalog
from ckptstore.checkpoint.manifests import Manifests
from ckptstore.codecs.registry import check_choice
from ckptstore.errors import FormatError, IntegrityError
from ckptstore.events import ProgressCallback, silent
from ckptstore.format import manifest as manifests
from ckptstore.format import skeleton
from ckptstore.format.commit import ManifestPointer, Op
from ckptstore.format.keys import manifest_key
from ckptstore.format.manifest import Manifest, TensorRecord
from ckptstore.format.paths import Pattern
from ckptstore.format.roles import RoleRules
from ckptstore.hashing import blake3_hex, blake3_of
from ckptstore.model import RoleBytes, Version
from ckptstore.objects.index import KnownPieces
from ckptstore.objects.writer import Written, write_pieces
from ckptstore.repo import Repo
from ckptstore.tensors.adapters import TypeAdapter
from ckptstore.tensors.flatten import FlatState, flatten
from ckptstore.tensors.source import settle

__all__ = ["SaveRequest", "save_version"]

_log = logging.getLogger("ckptstore")


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """What the user asks for, besides the state."""

    run: str
    step: int
    directions: Mapping[str, str] = field(default_factory=dict)
    """Which way each metric gets better, for a run that is new."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    tags: Sequence[str] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    roles: Mapping[Pattern, str] = field(default_factory=dict)
    """Pattern to role, before the conventions."""
    codec: str = "auto"
    adapters: Sequence[TypeAdapter] = ()
    progress: ProgressCallback = silent


def save_version(repo: Repo, cache: Manifests, state: object, request: SaveRequest) -> Version:
    """Write a state as a new version of a run; return when it is durable and visible.

    The state must not be changed by other threads until this returns. Pieces that the run's head
    holds already are shared with it.

    Raises
    ------
    StateError
        Something in the state cannot be represented; nothing was written.
    InvalidInputError
        A name, metric, tag or step is not accepted; nothing was written.
    ReadOnlyError, UnsafeBackendError
        The store cannot be written to; nothing was written.
    StorageError
        The storage failed; no version appeared.
    """
    environment = repo.environment
    began = environment.monotonic()
    repo.check_writable()
    choice = check_choice(request.codec)
    flat = flatten(state, request.adapters)
    records = _records(flat, request.roles)
    frame = skeleton.encode(flat.skeleton)
    version = environment.random_hex(16)
    catalog = repo.log.refresh()
    _build(catalog, request, version, pointer=_NOWHERE, content="0" * 64, roles={}, receipt={})
    parent = catalog.head(request.run) if catalog.has_run(request.run) else None
    known = _known(cache, parent)
    settle(flat.tensors)
    staged = environment.monotonic()
    written = write_pieces(
        flat.tensors,
        backend=repo.backend,
        environment=environment,
        options=repo.options,
        known=known,
        chunk_bytes=repo.superblock.chunk_bytes,
        choice=choice,
        progress=request.progress,
    )
    packed = environment.monotonic()
    manifest = Manifest(
        version=version,
        chunk_bytes=repo.superblock.chunk_bytes,
        skeleton=frame,
        tensors=records,
        first=written.first,
        pieces=written.table,
    )
    data = manifests.encode(manifest)
    key = manifest_key(version)
    repo.backend.put(key, data)
    described = environment.monotonic()
    receipt = {
        "prepare_s": staged - began,
        "packs_s": packed - staged,
        "manifest_s": described - packed,
        "pack_bytes": float(written.pack_bytes),
        "packs_count": float(written.packs_count),
        "tensors_count": float(len(records)),
    }

    def build(now: Catalog) -> list[Op]:
        return _build(
            now,
            request,
            version,
            pointer=ManifestPointer(key=key, stored_bytes=len(data), digest=blake3_hex(data)),
            content=_content(manifest),
            roles=_role_bytes(records, written),
            receipt=receipt,
        )

    repo.log.append(build)
    cache.keep(manifest)
    return repo.log.catalog.version(version)


def _known(cache: Manifests, parent: Version | None) -> KnownPieces:
    """Return what can be shared with the parent; damage to it must not stop the training."""
    if parent is None:
        return KnownPieces([])
    try:
        return KnownPieces([cache.load(parent).pieces])
    except (IntegrityError, FormatError) as error:
        _log.warning("nothing is shared with the version before, which is damaged: %s", error)
        return KnownPieces([])


_NOWHERE = ManifestPointer(
    key=manifest_key("0" * 32), stored_bytes=0, digest="0" * 64
)  # for the dry run that refuses bad names before a byte is written


def _build(
    catalog: Catalog,
    request: SaveRequest,
    version: str,
    *,
    pointer: ManifestPointer,
    content: str,
    roles: Mapping[str, RoleBytes],
    receipt: Mapping[str, float],
) -> list[Op]:
    return changes.save(
        catalog,
        run=request.run,
        version=version,
        step=request.step,
        manifest=pointer,
        content=content,
        directions=request.directions,
        metrics=request.metrics,
        tags=request.tags,
        metadata=request.metadata,
        roles=roles,
        receipt=receipt,
    )


def _records(flat: FlatState, roles: Mapping[Pattern, str]) -> tuple[TensorRecord, ...]:
    """Return what the manifest says of each tensor; a tied one has the role of its first path."""
    first_paths = [tensor.paths[0] for tensor in flat.tensors]
    rules = RoleRules(roles, flat=RoleRules.is_flat(first_paths))
    return tuple(
        TensorRecord(
            dtype=tensor.dtype,
            shape=tensor.shape,
            order=tensor.order,
            role=rules(path),
            nbytes=tensor.nbytes,
        )
        for tensor, path in zip(flat.tensors, first_paths, strict=True)
    )


def _content(manifest: Manifest) -> str:
    """Return the digest of what was saved: the skeleton, what each tensor is, and its pieces."""
    tensors = [(r.dtype, r.shape, r.order, r.nbytes) for r in manifest.tensors]
    parts = (manifest.skeleton, msgspec.msgpack.encode(tensors), manifest.pieces.ids.tobytes())
    return blake3_of(parts).hex()


def _role_bytes(records: Sequence[TensorRecord], written: Written) -> dict[str, RoleBytes]:
    """Return logical, new and stored bytes by role."""
    pairs = zip(written.first, written.first[1:], strict=False)
    counts = [last - first for first, last in pairs]
    places = {role: place for place, role in enumerate(sorted({r.role for r in records}))}
    by_tensor = np.fromiter((places[r.role] for r in records), np.int64, len(records))
    by_piece = np.repeat(by_tensor, counts)
    raw = written.table.raw.astype(np.float64)
    sums = {
        "logical": np.bincount(by_piece, raw, minlength=len(places)),
        "new": np.bincount(by_piece, raw * written.is_new, minlength=len(places)),
        "stored": np.bincount(by_piece, written.stored_new, minlength=len(places)),
    }
    return {
        role: RoleBytes(**{name: int(column[place]) for name, column in sums.items()})
        for role, place in places.items()
    }
