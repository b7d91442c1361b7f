"""Deltas stored by themselves, where nothing else needs their bases and that takes less.

When the versions go that a keyframe belongs to, it stays for the deltas to it that are still
needed. With one of them left, keyframe and delta take more than the piece itself would: it is
rewritten without the base, the versions that hold it are relocated, and the keyframe is dead.
With several, what they would take by themselves is estimated from what their base does. No delta
is ever taken to another piece here, so that every delta stays one step from a piece that is stored
by itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ckptstore.catalog.catalog import Catalog
from ckptstore.errors import ColdObjectError, IntegrityError, NotFoundError
from ckptstore.events import Progress, ProgressCallback
from ckptstore.format.manifest import Manifest, PieceTable
from ckptstore.format.pack import CHUNK_HEADER_BYTES, INDEX_ROW_BYTES
from ckptstore.maintenance.collect.repack import Change, relocate_needing
from ckptstore.maintenance.core.live_set import Reach
from ckptstore.maintenance.repair.recover_pieces import Rescue, replaced
from ckptstore.objects.index import Location
from ckptstore.repo import Repo

# Pieces are rewritten only if that takes less than this share of the size of them and their base.
# Source: the estimate is within 3% (docs/design/0012-deltas.md), and a relocation costs a manifest.
_WORTH = 0.95

_EACH = CHUNK_HEADER_BYTES + INDEX_ROW_BYTES

_Chunk = tuple[str, int]
"""Pack and offset."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebased:
    """Result for deltas whose bases nothing else needs, or of a dry run."""

    pieces_count: int = 0
    """Deltas that are stored by themselves now."""
    written_bytes: int = 0
    """Bytes of the packs that they are in; in a dry run, an estimate."""
    dead_bytes: int = 0
    """Size of them and of their bases, for this or the next collection to free."""
    versions_count: int = 0
    """Versions that lie elsewhere now."""
    packs: tuple[str, ...] = ()
    """Ids of packs that the deltas and their bases were in."""


@dataclass(slots=True)
class _Child:
    """A delta, in one of the manifests that name it."""

    manifest: Manifest
    row: int
    stored_bytes: int
    raw_bytes: int


@dataclass(slots=True)
class _Family:
    """A base and the deltas to it."""

    stored_bytes: int
    raw_bytes: int
    whole: bool
    """It is a chunk of its own."""
    children: dict[_Chunk, _Child] = field(default_factory=dict)

    @property
    def held_bytes(self) -> int:
        sizes = (self.stored_bytes, *(child.stored_bytes for child in self.children.values()))
        return sum(_EACH + size for size in sizes)

    @property
    def alone_bytes(self) -> int:
        """Return what the children would take by themselves, if they compress as their base."""
        share = self.stored_bytes / self.raw_bytes
        return sum(_EACH + int(share * child.raw_bytes) for child in self.children.values())


def rebase(
    repo: Repo, reach: Reach, catalog: Catalog, *, dry_run: bool, progress: ProgressCallback
) -> Rebased:
    """Store deltas by themselves where that takes less, and relocate the versions that hold them.

    Reads the manifests of versions live in `catalog`, the newest, that hold deltas. A crash
    anywhere leaves new packs and manifests that nobody names: orphans. Deltas that cannot be read
    stay as they are.

    Raises
    ------
    StorageError
        The storage failed.
    CkptStoreError
        As :meth:`ckptstore.catalog.log.Log.append`.
    """
    families = _families(repo, reach, catalog)
    if not families:
        return Rebased()
    chosen: dict[_Chunk, _Child] = {}
    for family in families.values():
        chosen |= family.children
    packs = tuple(sorted({pack for pack, _ in (*families, *chosen)}))
    dead = sum(family.held_bytes for family in families.values())
    if dry_run:
        return Rebased(
            pieces_count=len(chosen),
            written_bytes=sum(family.alone_bytes for family in families.values()),
            dead_bytes=dead,
            packs=packs,
        )
    rescue = Rescue(repo=repo, dry_run=False, codec="auto")
    by_manifest: dict[int, tuple[Manifest, list[int]]] = {}
    for child in chosen.values():
        rescue.need(child.manifest, child.row)
        by_manifest.setdefault(id(child.manifest), (child.manifest, []))[1].append(child.row)
    for manifest, rows in by_manifest.values():
        with contextlib.suppress(ColdObjectError):  # a piece in an archive class stays there
            rescue.fetch(manifest.pieces, rows, repo, "moved")
        done, total = len(rescue.rescued), len(chosen)
        progress(Progress(stage="rebase", done=done, total=total, unit="pieces"))
    rescue.flush()
    versions = relocate_needing(repo, reach, packs, _change(chosen, rescue.placed))
    return Rebased(
        pieces_count=len(rescue.placed),
        written_bytes=rescue.written_bytes,
        dead_bytes=dead,
        versions_count=versions,
        packs=packs,
    )


def _families(repo: Repo, reach: Reach, catalog: Catalog) -> dict[_Chunk, _Family]:
    """Return the bases that are needed as bases only and whose children take less without them."""
    families: dict[_Chunk, _Family] = {}
    needed: list[tuple[str, npt.NDArray[np.uint64]]] = []
    """Chunks that are needed as they are, whatever becomes of deltas: packs and offsets."""
    for version, need in reach.of(catalog).items():
        found = catalog.version(version)
        manifest = None
        if need.deltas and not found.damaged:  # one that has lost parts stays as it is
            with contextlib.suppress(IntegrityError, NotFoundError):  # the next collection sees it
                manifest = repo.manifests.load(found)
        if manifest is None:
            needed += zip(need.packs, (table.offset for table in need.chunks), strict=True)
            continue
        _collect(manifest, families)
        table, own = manifest.pieces, manifest.first[-1]
        for place in np.unique(table.pack[:own]):
            needed.append((table.packs[int(place)], table.offset[:own][table.pack[:own] == place]))
    by_pack: dict[str, set[int]] = {}
    for pack, offset in families:
        by_pack.setdefault(pack, set()).add(offset)
    for pack, there in needed:
        bases = by_pack.get(pack, set())
        for offset in bases.intersection(there.tolist()) if bases else ():
            families.pop((pack, offset), None)
    return {
        chunk: family
        for chunk, family in families.items()
        if family.whole and family.alone_bytes < _WORTH * family.held_bytes
    }


def _collect(manifest: Manifest, families: dict[_Chunk, _Family]) -> None:
    """Add the deltas of a manifest to their families."""
    table = manifest.pieces
    assert table.base is not None  # noqa: S101  # for the type checker: it holds deltas
    for row in np.flatnonzero(table.base < len(table)).tolist():
        base = int(table.base[row])
        stored, slab, raw = (int(x[base]) for x in (table.stored, table.slab, table.raw))
        family = families.setdefault(table.chunk_of(base), _Family(stored, slab, whole=slab == raw))
        family.children.setdefault(
            table.chunk_of(row), _Child(manifest, row, int(table.stored[row]), int(table.raw[row]))
        )


def _change(chosen: Mapping[_Chunk, _Child], placed: Mapping[bytes, Location]) -> Change:
    """Return a function that gives the table of a manifest without the rewritten deltas."""

    def change(manifest: Manifest) -> PieceTable | None:
        """Return the table of a manifest over the new places; None if none concerns it."""
        table = manifest.pieces
        if table.base is None:
            return None
        places: dict[int, Location] = {}
        for row in np.flatnonzero(table.base < len(table)).tolist():
            place = placed.get(table.ids[row].tobytes())
            if place is not None and table.chunk_of(row) in chosen:
                places[row] = place
        return replaced(table, manifest.first[-1], places) if places else None

    return change
