"""Repack: copies the live chunks of mostly dead packs into new packs.

Every live version that needs one of the packs gets a new manifest; one commit for many versions
relocates them and condemns their old manifests. The old packs are then dead, and condemned like any
other. A crash leaves new packs and manifests that no commit names: orphans.

A task of the copying holds all that it needs and commits nothing: it writes packs under names that
nobody knows, and tells where the chunks lie now. So it may run in another process, on another
machine, twice, or die; it too leaves orphans at most.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import numpy as np
import numpy.typing as npt

from ckptstore import limits
from ckptstore.backends.base import Backend, Capabilities, ObjectInfo
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.content_ops import Move
from ckptstore.chunking import batches
from ckptstore.config import Environment, Options
from ckptstore.engine.calls import Shared
from ckptstore.errors import ColdObjectError, FormatError, IntegrityError, NotFoundError
from ckptstore.events import Progress, ProgressCallback
from ckptstore.format.keys import pack_key
from ckptstore.format.manifest import Manifest, PieceTable
from ckptstore.format.pack import CHUNK_HEADER_BYTES, HEADER_BYTES, TRAILER_BYTES, IndexRow, corrupt
from ckptstore.maintenance.core.live_set import ChunkTable, Reach, changed
from ckptstore.maintenance.core.relocate import relocate, still, write_move
from ckptstore.maintenance.core.task_pool import Tasks, at_once, grouped
from ckptstore.model import Version
from ckptstore.objects.copying import Room, read_rows
from ckptstore.objects.joining import join_chunks
from ckptstore.objects.packs import PackPlan, PackSink, plan_packs, read_index
from ckptstore.objects.plan import shorter
from ckptstore.objects.threads import in_threads
from ckptstore.repo import Repo


@dataclass(frozen=True, slots=True, kw_only=True)
class Victim:
    """A pack that is to be rewritten."""

    pack: str
    size_bytes: int
    live: ChunkTable

    @property
    def live_bytes(self) -> int:
        """Return what its live chunks take."""
        return self.live.size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """New places of the chunks of one old pack, in the order of their old offsets."""

    old: npt.NDArray[np.uint64]
    packs: tuple[str, ...]
    """New pack per chunk."""
    new: npt.NDArray[np.uint64]
    """New offset per chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repacked:
    """Result of a repack, or of its dry run."""

    packs_count: int = 0
    """Packs that were rewritten."""
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

    @classmethod
    def of(cls, packs: Sequence[Victim], versions: int = 0, skipped: Sequence[str] = ()) -> Self:
        """Return the result for packs that were rewritten in whole."""
        return cls(
            packs_count=len(packs),
            packs_bytes=sum(pack.size_bytes for pack in packs),
            copied_bytes=sum(pack.live_bytes for pack in packs),
            versions_count=versions,
            skipped=tuple(skipped),
        )


def choose(
    chunks: Iterable[tuple[str, ChunkTable]], objects: Mapping[str, ObjectInfo], *, below: float
) -> tuple[list[Victim], int]:
    """Return the packs that are live to less than the share `below`; those wholly dead not.

    With them the bytes of all live chunks.
    """
    victims = []
    live_bytes = 0
    for pack, live in chunks:
        size = live.size_bytes
        live_bytes += size
        info = objects.get(pack_key(pack))
        if info is not None and is_sparse(size, info, below=below):
            victims.append(Victim(pack=pack, size_bytes=info.size_bytes, live=live))
    return sorted(victims, key=lambda victim: victim.pack), live_bytes


def is_sparse(live_bytes: int, pack: ObjectInfo, *, below: float) -> bool:
    """Return whether a pack is live to less than the share `below`."""
    return live_bytes < below * (pack.size_bytes - HEADER_BYTES - TRAILER_BYTES)


def repack(
    repo: Repo, reach: Reach, victims: Sequence[Victim], *, progress: ProgressCallback, tasks: Tasks
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
    whole: list[Victim] = []
    skipped: list[str] = []
    moved = before = 0

    def tell(size: int) -> None:
        progress(Progress(stage="repack", done=before + size, total=sum(sizes)))

    for batch in grouped(victims, sizes, size=limits.GC_REPACK_BATCH_BYTES, count=len(victims)):
        before = sum(victim.live_bytes for victim in whole)
        places, why = _copied(repo, batch, tell, tasks)
        moved += relocate_needing(repo, reach, places, partial(_elsewhere, places=places))
        whole += [victim for victim in batch if victim.pack in places]
        skipped += why
    return Repacked.of(whole, moved, skipped)


def _copied(
    repo: Repo, batch: Sequence[Victim], tell: Callable[[int], None], tasks: Tasks
) -> tuple[Mapping[str, Moved], Sequence[str]]:
    """Copy one batch; return where the chunks of each pack are now, and why not of the others."""
    engine = tasks.engine
    groups: list[Sequence[Victim]] = [batch]
    if engine is not None:
        sizes = [victim.live_bytes for victim in batch]
        share = min(sum(sizes) // (2 * engine.workers), limits.GC_TASK_COPY_BYTES_MAX)
        size = max(share, limits.GC_TASK_COPY_BYTES_MIN)
        groups = [*grouped(batch, sizes, size=size, count=limits.GC_TASK_VICTIMS)]
    copies = (Recopy(tasks.storage, repo.environment, tasks.options, group) for group in groups)
    places: dict[str, Moved] = {}
    skipped: list[str] = []
    done = 0
    for group, (there, why) in zip(groups, tasks.run(recopy, copies, tell), strict=True):
        places |= there
        skipped += why
        done += sum(victim.live_bytes for victim in group)
        tell(done)
    return places, sorted(skipped)


@dataclass(slots=True)
class _Rewrite:
    """One old pack while its chunks are copied."""

    victim: Victim
    packs: list[str]
    """New pack per chunk, in the order of the old offsets."""
    offsets: npt.NDArray[np.uint64]
    problem: str = ""
    """Reason for which the pack stays as it is."""


_Part = tuple[_Rewrite, int, list[IndexRow]]
"""Chunks that one request fetches: of which pack, the place of the first, their rows."""
_KEPT = (ColdObjectError, IntegrityError, FormatError, NotFoundError)
"""Errors of a pack that stays as it is."""


@dataclass(frozen=True, slots=True)
class Recopy:
    """A task: some packs of one storage, with what it may use."""

    storage: Shared[Backend]
    environment: Environment
    options: Options
    victims: Sequence[Victim]


def recopy(
    task: Recopy, tell: Callable[[int], None] = lambda _: None
) -> tuple[Mapping[str, Moved], Sequence[str]]:
    """Copy the live chunks of packs; return where they lie, and why a pack was left as it is.

    Durable in their new packs, by old pack; those of a pack in whole or not at all.

    Each chunk is copied as it is stored. On the way its stored bytes are compared with their
    checksum, its id with the index of the pack, and its content with its id (that of deltas is not:
    see :mod:`ckptstore.objects.copying`). A pack that fails a check, or whose index is damaged, is
    left as it is, since a repair may still find the right chunks in it.

    Parameters
    ----------
    tell
        Told the live bytes of the task that are done so far, by one thread at a time.

    Raises
    ------
    StorageError
        The storage failed; what was written is left as orphans.
    """
    threads, shape, plan = _width(task)
    backend = task.storage.value
    sink = PackSink(backend, task.environment, plan)
    rewrites: list[_Rewrite] = []
    lock, done = threading.Lock(), 0

    def copy_part(turn: int, room: Room, part: _Part) -> None:
        """Copy the chunks that one request fetches."""
        nonlocal done
        rewrite, first, rows = part
        if rewrite.problem:
            return
        try:
            for at, found in enumerate(read_rows(backend, rewrite.victim.pack, rows, room), first):
                placed = sink.append(turn, found.encoded, found.chunk_id, found.raw_bytes)
                rewrite.packs[at], rewrite.offsets[at] = placed.pack, placed.offset
        except _KEPT as error:
            rewrite.problem = error.message
        with lock:
            done += sum(row.stored_bytes for row in rows)
            tell(done)

    def begin(turn: int) -> Callable[[_Part], None]:
        return partial(copy_part, turn, Room())

    try:
        with closing(_parts(task, threads, shape, rewrites)) as parts:
            in_threads(threads, parts, begin, name="ckptstore-gc")
        sink.finish()
    except BaseException:
        sink.abort()
        raise
    places = {
        one.victim.pack: Moved(old=one.victim.live.offset, packs=tuple(one.packs), new=one.offsets)
        for one in rewrites
        if not one.problem
    }
    kept = [one for one in rewrites if one.problem]
    named = {pack for moved in places.values() for pack in moved.packs}
    for pack in {pack for one in kept for pack in one.packs if pack} - named:
        backend.delete(pack_key(pack))  # else each collection would leave another copy
    return places, [f"pack {one.victim.pack} stays as it is: {one.problem}" for one in kept]


def _parts(
    task: Recopy, threads: int, shape: Capabilities, rewrites: list[_Rewrite]
) -> Generator[_Part, None, None]:
    """Yield what one request fetches each, pack after pack; their indexes are read ahead."""
    rows_of = partial(_rows_of, task.storage.value)
    with closing(at_once(task.storage.value, rows_of, task.victims, most=threads)) as found:
        for rewrite, rows in found:
            rewrites.append(rewrite)
            first = 0
            for part in join_chunks(rows, shape):
                yield rewrite, first, part
                first += len(part)


def _rows_of(backend: Backend, victim: Victim) -> tuple[_Rewrite, list[IndexRow]]:
    """Return the live rows of a pack; none if it stays as it is."""
    rows, problem = list[IndexRow](), ""
    try:
        rows = list(_live_rows(backend, victim))
    except _KEPT as error:
        problem = error.message
    return _Rewrite(victim, [""] * len(rows), np.zeros(len(rows), np.uint64), problem), rows


def _width(task: Recopy) -> tuple[int, Capabilities, PackPlan]:
    """Return how many threads copy, what each of their requests fetches, and the new packs.

    As many as the storage takes requests at once, within half of the memory; the packs have the
    other half.
    """
    capabilities = task.storage.value.capabilities
    total = sum(victim.live_bytes for victim in task.victims)
    threads = max(task.options.workers, capabilities.concurrency)
    shape = shorter(capabilities, total, threads)
    stored = max(int(victim.live.stored.max(initial=0)) for victim in task.victims)
    raw = max(int(victim.live.raw.max(initial=0)) for victim in task.victims)
    each = max(shape.read_bytes_max, stored + CHUNK_HEADER_BYTES) + raw
    threads = max(1, min(threads, task.options.host_bytes // 2 // each))
    plan = plan_packs(
        total,
        capabilities,
        threads=threads,
        memory_bytes=task.options.host_bytes - threads * each,
        chunk_bytes=raw,
        in_memory=limits.COPIED_PACKS_IN_MEMORY,
        whole_bytes=total,
    )
    return threads, shape, plan


def _live_rows(backend: Backend, victim: Victim) -> Iterator[IndexRow]:
    """Yield the rows of a pack's index whose chunks are live, in the order of their offsets."""
    index = {row.offset: row for row in read_index(backend, victim.pack, victim.size_bytes)}
    live = victim.live
    columns = (live.offset.tolist(), live.stored.tolist(), live.raw.tolist())
    for offset, stored, raw in zip(*columns, strict=True):
        row = index.get(offset)
        if row is None or (row.stored_bytes, row.raw_bytes) != (stored, raw):
            raise corrupt(f"{victim.pack} at {offset}", "its index names another chunk there")
        yield row


# --- versions -----------------------------------------------------------------------------------


Change = Callable[[Manifest], PieceTable | None]
"""Returns the pieces of a manifest at their new places; None if it stays as it is."""


def relocate_needing(repo: Repo, reach: Reach, packs: Container[str], change: Change) -> int:
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
    concerned = [
        catalog.version(version)
        for version, need in reach.of(catalog).items()
        if any(pack in packs for pack in need.packs)
    ]
    # Of a version that has lost parts, a relocation would say that it is mended.
    concerned = [version for version in concerned if not version.damaged]
    moved = 0
    for part in batches(concerned, limits.RELOCATES_PER_COMMIT):
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


def _moves(repo: Repo, reach: Reach, versions: Sequence[Version], change: Change) -> Iterator[Move]:
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


def _elsewhere(manifest: Manifest, places: Mapping[str, Moved]) -> PieceTable | None:
    """Return the table of a manifest whose pieces lie where their chunks were copied to.

    None if a chunk was not copied: a version that came after the copying was planned needs it.
    """
    table = manifest.pieces
    packs: dict[str, int] = {}
    pack, offset = table.pack.copy(), table.offset.copy()
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
    moved_table = copy(table)
    moved_table.pack, moved_table.offset, moved_table.packs = pack, offset, tuple(packs)
    return moved_table
