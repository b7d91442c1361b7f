"""Live chunks of packs, copied into new packs: the part of a repack that can be done anywhere.

A task holds all that it needs and commits nothing: it writes packs under names that nobody knows,
and tells where the chunks lie now. So it may run in another process, on another machine, twice, or
die; what it leaves behind are orphans.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from ckptstore import limits
from ckptstore.backends.base import Backend
from ckptstore.config import Environment
from ckptstore.engine.calls import Shared
from ckptstore.errors import ColdObjectError, FormatError, IntegrityError, NotFoundError
from ckptstore.format.pack import IndexRow
from ckptstore.maintenance.core.live_set import ChunkTable
from ckptstore.objects.copying import Room, broken, read_rows
from ckptstore.objects.pack_index import read_index
from ckptstore.objects.pack_plan import PackPlan
from ckptstore.objects.packs import PackSink
from ckptstore.objects.plan import join_chunks
from ckptstore.objects.threads import in_threads


@dataclass(frozen=True, slots=True, kw_only=True)
class Victim:
    """A pack that is to be written anew."""

    pack: str
    size_bytes: int
    live: ChunkTable

    @property
    def live_bytes(self) -> int:
        """Return what its live chunks take."""
        return self.live.size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """Where the chunks of one old pack lie now, in the order of their old offsets."""

    old: npt.NDArray[np.uint64]
    packs: tuple[str, ...]
    """New pack per chunk."""
    new: npt.NDArray[np.uint64]
    """New offset per chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recopied:
    """What became of the packs of a task."""

    places: Mapping[str, Moved]
    """By pack, of those whose live chunks are all elsewhere now."""
    skipped: tuple[str, ...]
    """Why a pack was left as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recopy:
    """A task: some packs of one storage, with what it may use."""

    storage: Shared[Backend]
    environment: Environment
    host_bytes: int
    """Memory for chunks in flight."""
    workers: int
    """Threads at most."""
    victims: tuple[Victim, ...]


def recopy(task: Recopy, tell: Callable[[int], None] = lambda _: None) -> Recopied:
    """Copy the live chunks of packs; return when the new packs are durable.

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
    run = _Copying(task=task, tell=tell)
    run.run()
    return Recopied(places=run.places, skipped=tuple(run.skipped))


@dataclass(slots=True, kw_only=True)
class _Copying:
    """One task while its threads run."""

    task: Recopy
    tell: Callable[[int], None]
    done: int = 0
    places: dict[str, Moved] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Copy; return when the new packs are durable."""
        task = self.task
        capabilities = task.storage.value.capabilities
        each = capabilities.read_bytes_max + capabilities.part_bytes + limits.CHUNK_RAW_BYTES_MAX
        room = max(1, task.host_bytes // each)
        workers = max(1, min(task.workers, room, len(task.victims)))
        size = capabilities.pack_bytes
        plan = PackPlan(streams=workers, at_once=workers, first_bytes=size, most_bytes=size)
        sink = PackSink(task.storage.value, task.environment, plan)

        def begin(turn: int) -> Callable[[Victim], None]:
            return partial(self._copy, turn, sink, Room())

        try:
            in_threads(workers, iter(task.victims), begin, self.stop, name="ckptstore-gc")
            sink.finish()
        except BaseException:
            sink.abort()
            raise

    def _copy(self, turn: int, sink: PackSink, room: Room, victim: Victim) -> None:
        packs: list[str] = []
        offsets: list[int] = []
        backend = self.task.storage.value
        try:
            for part in join_chunks(_live_rows(backend, victim), backend.capabilities):
                for found in read_rows(backend, victim.pack, part, room):
                    placed = sink.append(turn, found.encoded, found.chunk_id, found.raw_bytes)
                    packs.append(placed.pack)
                    offsets.append(placed.offset)
                with self.lock:
                    self.done += sum(row.stored_bytes for row in part)
                    self.tell(self.done)
        except (ColdObjectError, IntegrityError, FormatError, NotFoundError) as error:
            with self.lock:
                self.skipped.append(f"pack {victim.pack} stays as it is: {error.message}")
            return
        moved = Moved(old=victim.live.offset, packs=tuple(packs), new=np.array(offsets, np.uint64))
        with self.lock:
            self.places[victim.pack] = moved


def _live_rows(backend: Backend, victim: Victim) -> Iterator[IndexRow]:
    """Yield the rows of a pack's index whose chunks are live, in the order of their offsets."""
    index = {row.offset: row for row in read_index(backend, victim.pack, victim.size_bytes)}
    live = victim.live
    columns = (live.offset.tolist(), live.stored.tolist(), live.raw.tolist())
    for offset, stored, raw in zip(*columns, strict=True):
        row = index.get(offset)
        if row is None or (row.stored_bytes, row.raw_bytes) != (stored, raw):
            raise broken(f"{victim.pack} at {offset}", "its index names another chunk there")
        yield row
