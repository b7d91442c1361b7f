"""Repack: copies the live chunks of mostly dead packs into new packs.

:mod:`ckptstore.maintenance.collect.copy_live` copies, in tasks where there is an engine. Every live
version that needs one of the packs gets a new manifest; one commit for many versions relocates them
and condemns their old manifests. The old packs are then dead, and condemned like any other. A crash
leaves new packs and manifests that no commit names: orphans.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ckptstore import limits
from ckptstore.backends.base import ObjectInfo
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.content_ops import Move
from ckptstore.errors import IntegrityError, NotFoundError
from ckptstore.events import Progress, ProgressCallback
from ckptstore.format.keys import pack_key
from ckptstore.format.manifest import Manifest, PieceTable
from ckptstore.format.pack import HEADER_BYTES, TRAILER_BYTES
from ckptstore.maintenance.collect.copy_live import Moved, Recopy, Victim, recopy
from ckptstore.maintenance.core.live_set import ChunkTable, Reach, changed
from ckptstore.maintenance.core.relocate import relocate, still, write_move
from ckptstore.maintenance.core.task_pool import Tasks, at_once, grouped
from ckptstore.model import Version
from ckptstore.repo import Repo


@dataclass(frozen=True, slots=True, kw_only=True)
class Repacked:
    """What a repack did, or would do."""

    packs_count: int = 0
    """Packs that were written anew."""
    packs_bytes: int = 0
    copied_bytes: int = 0
    """The live part of them."""
    versions_count: int = 0
    """Versions that lie elsewhere now."""
    skipped: tuple[str, ...] = ()
    """Why a pack was left as it is: a chunk of it is damaged, say."""

    @property
    def freed_bytes(self) -> int:
        """Return the difference."""
        return self.packs_bytes - self.copied_bytes


def choose(
    chunks: Iterable[tuple[str, ChunkTable]], objects: Mapping[str, ObjectInfo], *, below: float
) -> tuple[list[Victim], int]:
    """Return the packs of which less than the share `below` is live; those wholly dead not.

    With them the bytes of all live chunks.
    """
    victims = []
    live_bytes = 0
    for pack, live in chunks:
        size = live.size_bytes
        live_bytes += size
        info = objects.get(pack_key(pack))
        if info is None:
            continue
        room = info.size_bytes - HEADER_BYTES - TRAILER_BYTES
        if size < below * room:
            victims.append(Victim(pack=pack, size_bytes=info.size_bytes, live=live))
    return sorted(victims, key=lambda victim: victim.pack), live_bytes


def repack(
    repo: Repo,
    reach: Reach,
    victims: Sequence[Victim],
    *,
    progress: ProgressCallback,
    tasks: Tasks,
) -> Repacked:
    """Copy the live chunks of packs elsewhere, and relocate every live version that needs them.

    Host memory stays within ``options.host_bytes``, plus 100 bytes a copied chunk. Versions that
    were deleted, relocated or condemned in part meanwhile are left out: the next collection sees
    them. So are damaged ones, until they are mended: their packs stay.

    Raises
    ------
    StorageError
        The storage failed; what was written is left as orphans.
    CkptStoreError
        As :meth:`ckptstore.catalog.log.Log.append`.
    """
    sizes = [victim.live_bytes for victim in victims]
    total = sum(sizes)
    done = Repacked()
    batch_bytes = limits.GC_REPACK_BATCH_BYTES
    for batch in grouped(victims, sizes, size=batch_bytes, count=len(victims)):

        def tell(size: int, before: int = done.copied_bytes) -> None:
            progress(Progress(stage="repack", done=before + size, total=total))

        places, skipped = _copied(repo, batch, tell, tasks)
        moved = relocate_needing(
            repo,
            reach,
            places,
            lambda manifest, places=places: _elsewhere(manifest.pieces, places),  # type: ignore[misc]
        )
        whole = [victim for victim in batch if victim.pack in places]
        done = Repacked(
            packs_count=done.packs_count + len(whole),
            packs_bytes=done.packs_bytes + sum(victim.size_bytes for victim in whole),
            copied_bytes=done.copied_bytes + sum(victim.live_bytes for victim in whole),
            versions_count=done.versions_count + moved,
            skipped=(*done.skipped, *skipped),
        )
    return done


def _copied(
    repo: Repo, batch: Sequence[Victim], tell: Callable[[int], None], tasks: Tasks
) -> tuple[Mapping[str, Moved], tuple[str, ...]]:
    """Copy one batch; return where the chunks of which packs are now, and why not of the others."""
    engine = tasks.engine
    groups: list[Sequence[Victim]] = [batch]
    if engine is not None:
        sizes = [victim.live_bytes for victim in batch]
        share = min(sum(sizes) // (2 * engine.workers), limits.GC_TASK_COPY_BYTES_MAX)
        size = max(share, limits.GC_TASK_COPY_BYTES_MIN)
        groups = [*grouped(batch, sizes, size=size, count=limits.GC_TASK_VICTIMS)]
    copies = (
        Recopy(
            storage=tasks.storage,
            host_bytes=tasks.options.host_bytes,
            workers=tasks.options.workers,
            environment=repo.environment,
            victims=tuple(group),
        )
        for group in groups
    )
    places: dict[str, Moved] = {}
    skipped: list[str] = []
    done = 0
    for group, part in zip(groups, tasks.run(recopy, copies, tell), strict=True):
        places |= part.places
        skipped += part.skipped
        done += sum(victim.live_bytes for victim in group)
        tell(done)
    return places, tuple(sorted(skipped))


# --- versions -----------------------------------------------------------------------------------


def relocate_needing(
    repo: Repo,
    reach: Reach,
    packs: Container[str],
    change: Callable[[Manifest], PieceTable | None],
) -> int:
    """Write manifests and commit; return how many versions lie elsewhere now.

    Parameters
    ----------
    packs
        Live versions that need one of these are asked for.
    change
        Returns the table that a version is to have, over other places of the same pieces; None if
        it stays as it is.

    Raises
    ------
    StorageError
        The storage failed; what was written is left as orphans.
    CkptStoreError
        As :meth:`ckptstore.catalog.log.Log.append`.
    """
    catalog = repo.refresh()
    needs = reach.of(catalog)
    concerned = [
        catalog.version(version)
        for version, need in needs.items()
        if any(pack in packs for pack in need.packs)
    ]
    # Of a version that has lost parts, a relocation would say that it is mended.
    concerned = [version for version in concerned if not version.damaged]
    moved = 0
    for start in range(0, len(concerned), limits.GC_MOVES_PER_COMMIT):
        part = concerned[start : start + limits.GC_MOVES_PER_COMMIT]
        moved += len(relocate(repo, partial(_standing, list(_moves(repo, reach, part, change)))))
    return moved


def _standing(moves: Sequence[Move], now: Catalog) -> list[Move]:
    """Return the moves of versions that are as they were, to what no collection condemned."""
    return [
        move
        for move in moves
        if still(now, move)
        and not now.version(move.version).damaged
        and now.version(move.version).level == move.level
        and not now.gone(move.relies_on)
    ]


def _moves(
    repo: Repo,
    reach: Reach,
    versions: Sequence[Version],
    change: Callable[[Manifest], PieceTable | None],
) -> Iterator[Move]:
    """Write the new manifests of versions; those that changed meanwhile are left out."""

    def one(version: Version) -> tuple[Move, Manifest] | None:
        """Write the new manifest of a version; None if it stays, or is another by now."""
        try:
            manifest = repo.manifests.load(version)
        except (IntegrityError, NotFoundError):
            if not changed(repo, version):
                raise
            return None
        pieces = change(manifest)
        if pieces is None:
            return None
        manifest = replace(manifest, pieces=pieces)
        return write_move(repo, version, manifest), manifest

    for pair in list(at_once(repo.backend, one, versions)):  # all are written, or one raises
        if pair is not None and pair[0].manifest is not None:
            reach.note(pair[0].manifest.digest, pair[1])
            yield pair[0]


def _elsewhere(table: PieceTable, places: Mapping[str, Moved]) -> PieceTable | None:
    """Return a table whose pieces lie where their chunks were copied to.

    None if a chunk was not copied: a version that came after the copying was planned needs it.
    """
    packs: dict[str, int] = {}
    pack = table.pack.copy()
    offset = table.offset.copy()
    for place in np.unique(table.pack):
        rows = np.nonzero(table.pack == place)[0]
        name = table.packs[int(place)]
        moved = places.get(name)
        if moved is None:
            pack[rows] = packs.setdefault(name, len(packs))
            continue
        at = np.minimum(np.searchsorted(moved.old, table.offset[rows]), len(moved.old) - 1)
        if not np.array_equal(moved.old[at], table.offset[rows]):
            return None
        pack[rows] = [packs.setdefault(moved.packs[row], len(packs)) for row in at]
        offset[rows] = moved.new[at]
    return PieceTable(
        ids=table.ids,
        raw=table.raw,
        pack=pack,
        offset=offset,
        stored=table.stored,
        inner=table.inner,
        slab=table.slab,
        packs=list(packs),
        base=table.base,
    )
