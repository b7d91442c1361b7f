"""A manifest of one store made into one of another: known chunks are shared, missing ones copied.

Which chunks the other store has is looked up in the manifests of its versions: first of those that
came from the same version or from its run, then of the heads of runs, then of all others, newest
first, until everything is found or ``TRANSPLANT_PIECES_MAX`` pieces have been looked at. A chunk
that is missed costs its bytes, nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from ckptstore import limits
from ckptstore.backends.base import Backend
from ckptstore.catalog.catalog import Catalog
from ckptstore.checkpoint.content import logical_bytes, read_content
from ckptstore.checkpoint.manifests import Manifests
from ckptstore.errors import IntegrityError
from ckptstore.events import ProgressCallback
from ckptstore.format.keys import pack_key
from ckptstore.format.manifest import Manifest, PieceTable
from ckptstore.format.pack import CHUNK_HEADER_BYTES
from ckptstore.model import RoleBytes, Version
from ckptstore.objects.copying import copy_chunks
from ckptstore.objects.index import KnownPieces, Location
from ckptstore.objects.packs import Placed
from ckptstore.objects.reader import Want
from ckptstore.repo import Repo

__all__ = ["ORIGIN_KEY", "Foreseen", "Landed", "foresee", "transplant"]

ORIGIN_KEY: Final = "forked_from"
"""Where the metadata of a version that came from another store says which one it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Landed:
    """A manifest whose pieces lie in the target store, durable."""

    manifest: Manifest
    roles: Mapping[str, RoleBytes]
    receipt: Mapping[str, float]
    rows: tuple[int, ...]
    """Rows of its pieces that travelled."""
    owners: tuple[int, ...]
    """For each of them the tensor's index."""
    chunks_count: int
    chunk_bytes: int
    """Stored bytes of the chunks that travelled, headers included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreseen:
    """What would travel."""

    chunks_count: int
    chunk_bytes: int
    """Stored bytes, headers included."""


def transplant(
    manifest: Manifest,
    *,
    source: Repo,
    target: Repo,
    target_cache: Manifests,
    source_id: str,
    without: Collection[str],
    progress: ProgressCallback,
    near: Sequence[str] = (),
    target_backend: Backend | None = None,
) -> Landed:
    """Bring what `manifest` needs to `target`; return the manifest as it is to be written there.

    Parameters
    ----------
    source_id
        The version that it is taken from: its other descendants in `target` are looked at first.
    without
        Packs of `target` that may not be shared.
    near
        Versions of `target` that are looked at before all others.
    target_backend
        What chunks are written through, in place of the target's own backend.

    Raises
    ------
    CorruptTensorError
        A chunk of the source is damaged.
    StorageError
        One of the storages failed.
    """
    began = target.environment.monotonic()
    found = _find(manifest.pieces, target, target_cache, source_id, without, near)
    missing = [row for row, place in enumerate(found) if place is None]
    labels = read_content(manifest).labels
    owners = np.repeat(np.arange(len(manifest.tensors)), np.diff(manifest.first))
    copied = copy_chunks(
        manifest.pieces,
        [Want(row=row, out=None, label=labels[int(owners[row])]) for row in missing],
        source=source.backend,
        target=target_backend or target.backend,
        environment=target.environment,
        options=target.options,
        progress=progress,
    )
    table = _placed(manifest.pieces, found, copied.places)
    return Landed(
        manifest=replace(manifest, pieces=table),
        roles=_role_bytes(manifest, owners, missing),
        receipt={
            "copy_s": target.environment.monotonic() - began,
            "pack_bytes": float(copied.pack_bytes),
            "packs_count": float(copied.packs_count),
        },
        rows=tuple(missing),
        owners=tuple(owners[missing].tolist()),
        chunks_count=len(copied.places),
        chunk_bytes=sum(
            CHUNK_HEADER_BYTES + place.stored_bytes for place in copied.places.values()
        ),
    )


def foresee(
    manifest: Manifest,
    *,
    target: Repo,
    target_cache: Manifests,
    source_id: str,
    near: Sequence[str],
    planned: set[bytes],
) -> Foreseen:
    """Count what :func:`transplant` would copy; reads manifests of the target, nothing else.

    Parameters
    ----------
    planned
        Ids of pieces that travel before, for versions that are copied earlier; is added to.
    """
    table = manifest.pieces
    found = _find(table, target, target_cache, source_id, (), near)
    chunks: dict[tuple[int, int], int] = {}
    for row, place in enumerate(found):
        piece = table.ids[row].tobytes()
        if place is None and piece not in planned:
            planned.add(piece)
            chunks[int(table.pack[row]), int(table.offset[row])] = int(table.stored[row])
    total = sum(chunks.values()) + CHUNK_HEADER_BYTES * len(chunks)
    return Foreseen(chunks_count=len(chunks), chunk_bytes=total)


def _find(
    table: PieceTable,
    target: Repo,
    cache: Manifests,
    source_id: str,
    without: Collection[str],
    near: Sequence[str],
) -> list[Location | None]:
    """Return where each piece lies in the target already, or None."""
    found: list[Location | None] = [None] * len(table)
    left = list(range(len(table)))
    catalog = target.catalog
    looked = 0
    for version in _candidates(catalog, source_id, near):
        if not left or looked > limits.TRANSPLANT_PIECES_MAX:
            break
        try:
            there = cache.load(version).pieces
        except IntegrityError:  # a damaged manifest: nothing can be shared with that one
            continue
        looked += len(there)
        gone = catalog.gone(map(pack_key, there.packs))
        avoid = {pack for pack in there.packs if pack_key(pack) in gone}.union(without)
        known = KnownPieces([there], without=avoid)
        for row in left:
            found[row] = known.find(table.ids[row].tobytes(), int(table.raw[row]))
        left = [row for row in left if found[row] is None]
    return found


def _candidates(catalog: Catalog, source_id: str, near: Sequence[str]) -> Iterator[Version]:
    """Yield live versions whose pieces are at hand, the likeliest first."""
    first = {version_id: place for place, version_id in enumerate(near)}
    live = [v for v in catalog.versions(newest_first=True) if v.level != "record" and not v.damaged]
    heads = {info.head for info in catalog.runs()}

    def rank(version: Version) -> tuple[int, bool, bool, bool]:
        origin = version.metadata.get(ORIGIN_KEY)
        lineage = isinstance(origin, Mapping)
        same = isinstance(origin, Mapping) and origin.get("version") == source_id
        place = first.get(version.id, len(first))
        return (place, not same, not lineage, version.id not in heads)

    yield from sorted(live, key=rank)


def _placed(
    table: PieceTable,
    found: Sequence[Location | None],
    places: Mapping[tuple[str, int], Placed],
) -> PieceTable:
    """Return the table with every piece where it lies in the target."""
    packs: dict[str, int] = {}
    pack = np.zeros(len(table), np.uint32)
    offset = np.zeros(len(table), np.uint64)
    stored, inner, slab = table.stored.copy(), table.inner.copy(), table.slab.copy()
    for row, location in enumerate(found):
        if location is None:
            placed = places[table.packs[int(table.pack[row])], int(table.offset[row])]
            pack[row] = packs.setdefault(placed.pack, len(packs))
            offset[row] = placed.offset
        else:
            pack[row] = packs.setdefault(location.pack, len(packs))
            offset[row] = location.offset
            stored[row], inner[row] = location.stored_bytes, location.inner
            slab[row] = location.slab_bytes
    return PieceTable(
        ids=table.ids,
        raw=table.raw,
        pack=pack,
        offset=offset,
        stored=stored,
        inner=inner,
        slab=slab,
        packs=list(packs),
    )


def _role_bytes(
    manifest: Manifest, owners: npt.NDArray[np.int64], missing: Sequence[int]
) -> dict[str, RoleBytes]:
    """Return bytes by role; a chunk that travelled counts for the role of its first piece."""
    table = manifest.pieces
    sums = {role: [size, 0, 0] for role, size in logical_bytes(manifest).items()}
    ids: set[bytes] = set()
    chunks: set[tuple[int, int]] = set()
    for row in missing:
        part = sums[manifest.tensors[int(owners[row])].role]
        if (piece := table.ids[row].tobytes()) not in ids:
            ids.add(piece)
            part[1] += int(table.raw[row])
        if (chunk := (int(table.pack[row]), int(table.offset[row]))) not in chunks:
            chunks.add(chunk)
            part[2] += int(table.stored[row]) + CHUNK_HEADER_BYTES
    return {
        role: RoleBytes(logical=logical, new=new, stored=stored)
        for role, (logical, new, stored) in sorted(sums.items())
    }
