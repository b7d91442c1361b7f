"""Saving: a state becomes pieces, a manifest and one commit, in that order.

Nothing is visible before the commit, and the commit never names anything that is not durable. A
failure anywhere raises and leaves no version; what was written before it is an orphan for gc.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ckptstore import limits
from ckptstore.catalog import changes
from ckptstore.catalog.catalog import Catalog
from ckptstore.checkpoint.content import content_digest
from ckptstore.checkpoint.manifests import Manifests
from ckptstore.codecs.registry import check_choice
from ckptstore.errors import CondemnedError, FormatError, IntegrityError
from ckptstore.events import ProgressCallback, silent
from ckptstore.format import manifest as manifests
from ckptstore.format import skeleton
from ckptstore.format.commit import ManifestPointer, Op
from ckptstore.format.keys import manifest_key, pack_key
from ckptstore.format.manifest import Manifest, PieceTable, TensorRecord
from ckptstore.format.paths import Pattern
from ckptstore.format.roles import RoleRules
from ckptstore.hashing import blake3_hex
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
    holds already are shared with it. What a collection condemns between the look-up and the
    commit is written again under new names: the check and the commit are one step on the log.

    Raises
    ------
    StateError
        Something in the state cannot be represented; nothing was written.
    InvalidInputError
        A name, metric, tag or step is not accepted; nothing was written.
    ReadOnlyError, UnsafeBackendError
        The store cannot be written to; nothing was written.
    CondemnedError
        Collections condemned what this save wrote, again and again.
    StorageError
        The storage failed; no version appeared.
    """
    began = repo.environment.monotonic()
    repo.check_writable()
    check_choice(request.codec)
    flat = flatten(state, request.adapters)
    saving = _Saving(
        repo=repo,
        request=request,
        version=repo.environment.random_hex(16),
        flat=flat,
        records=_records(flat, request.roles),
        frame=skeleton.encode(flat.skeleton),
        began=began,
    )
    catalog = repo.log.refresh()
    saving.check_wishes(catalog)
    parent = catalog.head(request.run) if catalog.has_run(request.run) else None
    shared = [] if parent is None else _shareable(cache, parent)
    settle(flat.tensors)
    manifest, pointer = saving.run(shared)
    cache.keep(pointer.digest, manifest)
    return repo.log.catalog.version(saving.version)


def _shareable(cache: Manifests, parent: Version) -> list[PieceTable]:
    """Return what can be shared with the parent; damage to it must not stop the training."""
    if parent.level == "record":
        return []
    if parent.damaged:
        _log.warning("nothing is shared with version #%s, parts of which are lost", parent.id[:8])
        return []
    try:
        return [cache.load(parent).pieces]
    except (IntegrityError, FormatError) as error:
        _log.warning("nothing is shared with the version before, which is damaged: %s", error)
        return []


_NOWHERE = ManifestPointer(
    key=manifest_key("0" * 32), stored_bytes=0, digest="0" * 64
)  # for the trial that refuses bad names before a byte is written


@dataclass(slots=True, kw_only=True)
class _Saving:
    """One save under way; owned by the calling thread."""

    repo: Repo
    request: SaveRequest
    version: str
    flat: FlatState
    records: tuple[TensorRecord, ...]
    frame: bytes
    began: float
    receipt: dict[str, float] = field(default_factory=dict)

    def check_wishes(self, catalog: Catalog) -> None:
        """Raise now what the commit would raise for a name, a metric or a step."""
        self._ops(catalog, _NOWHERE, content="0" * 64, roles={}, relies_on=())

    def run(self, shared: list[PieceTable]) -> tuple[Manifest, ManifestPointer]:
        """Write and commit, again if something was condemned; return manifest and place."""
        environment = self.repo.environment
        self.receipt["prepare_s"] = environment.monotonic() - self.began
        written: list[Written] = []
        without: set[str] = set()
        name = self.version
        for attempt in range(limits.CONDEMNED_TRIES_MAX):
            tables = [*(part.table for part in reversed(written)), *shared]
            written.append(self._write(KnownPieces(tables, without=without)))
            manifest, pointer = self._describe(written[-1], name)
            packs = {pack_key(pack): pack for pack in manifest.pieces.packs}
            roles = _role_bytes(self.records, written)
            content = content_digest(manifest)

            def build(
                now: Catalog,
                pointer: ManifestPointer = pointer,
                roles: dict[str, RoleBytes] = roles,
                content: str = content,
                relies_on: tuple[str, ...] = (pointer.key, *packs),
            ) -> list[Op]:
                return self._ops(now, pointer, content=content, roles=roles, relies_on=relies_on)

            try:
                self.repo.log.append(build)
            except CondemnedError as error:
                if attempt + 1 == limits.CONDEMNED_TRIES_MAX:
                    raise
                without.update(packs[key] for key in error.keys if key in packs)
                name = environment.random_hex(16)  # a name is never used again
            else:
                return manifest, pointer
        raise AssertionError  # pragma: no cover - the loop has no other end

    def _write(self, known: KnownPieces) -> Written:
        repo = self.repo
        began = repo.environment.monotonic()
        written = write_pieces(
            self.flat.tensors,
            backend=repo.backend,
            environment=repo.environment,
            options=repo.options,
            known=known,
            chunk_bytes=repo.superblock.chunk_bytes,
            choice=check_choice(self.request.codec),
            progress=self.request.progress,
        )
        self._add("packs_s", repo.environment.monotonic() - began)
        self._add("pack_bytes", float(written.pack_bytes))
        self._add("packs_count", float(written.packs_count))
        self.receipt["tensors_count"] = float(len(self.records))
        return written

    def _describe(self, written: Written, name: str) -> tuple[Manifest, ManifestPointer]:
        """Write the manifest; return it and where it is."""
        environment = self.repo.environment
        began = environment.monotonic()
        manifest = Manifest(
            version=self.version,
            chunk_bytes=self.repo.superblock.chunk_bytes,
            skeleton=self.frame,
            tensors=self.records,
            first=written.first,
            pieces=written.table,
        )
        data = manifests.encode(manifest)
        key = manifest_key(name)
        self.repo.backend.put(key, data)
        self._add("manifest_s", environment.monotonic() - began)
        return manifest, ManifestPointer(key=key, stored_bytes=len(data), digest=blake3_hex(data))

    def _add(self, name: str, value: float) -> None:
        self.receipt[name] = self.receipt.get(name, 0.0) + value

    def _ops(
        self,
        catalog: Catalog,
        pointer: ManifestPointer,
        *,
        content: str,
        roles: Mapping[str, RoleBytes],
        relies_on: Collection[str],
    ) -> list[Op]:
        request = self.request
        return changes.save(
            catalog,
            run=request.run,
            version=self.version,
            step=request.step,
            manifest=pointer,
            content=content,
            directions=request.directions,
            metrics=request.metrics,
            tags=request.tags,
            metadata=request.metadata,
            roles=roles,
            receipt=self.receipt,
            relies_on=relies_on,
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


def _role_bytes(
    records: Sequence[TensorRecord], attempts: Sequence[Written]
) -> dict[str, RoleBytes]:
    """Return logical, new and stored bytes by role; what was written twice is stored twice."""
    written = attempts[-1]
    is_new = np.logical_or.reduce([part.is_new for part in attempts])
    stored_new = np.add.reduce([part.stored_new for part in attempts])
    pairs = zip(written.first, written.first[1:], strict=False)
    counts = [last - first for first, last in pairs]
    places = {role: place for place, role in enumerate(sorted({r.role for r in records}))}
    by_tensor = np.fromiter((places[r.role] for r in records), np.int64, len(records))
    by_piece = np.repeat(by_tensor, counts)
    raw = written.table.raw.astype(np.float64)
    sums = {
        "logical": np.bincount(by_piece, raw, minlength=len(places)),
        "new": np.bincount(by_piece, raw * is_new, minlength=len(places)),
        "stored": np.bincount(by_piece, stored_new, minlength=len(places)),
    }
    return {
        role: RoleBytes(**{name: int(column[place]) for name, column in sums.items()})
        for role, place in places.items()
    }
