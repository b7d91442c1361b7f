"""Chunks copied to another storage and read back there: in this process, or by tasks of an engine.

Each task fills packs of its own in the target. One that runs twice leaves packs that nobody names,
for a collection; its result says which of the two is used. A copy does not read deltas back, since
their bases may lie elsewhere: the caller, who knows the whole table, does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ckptstore import limits
from ckptstore.backends.base import Backend
from ckptstore.backends.throttled import ThrottledBackend
from ckptstore.config import SYSTEM, Environment, Options
from ckptstore.engine.calls import Shared
from ckptstore.engine.engine import Engine
from ckptstore.errors import IntegrityError
from ckptstore.events import Progress, ProgressCallback, silent
from ckptstore.format.manifest import PieceTable
from ckptstore.format.pack import CHUNK_HEADER_BYTES
from ckptstore.objects.copying import Copied, ReadBack, altered, copy_chunks
from ckptstore.objects.piece_reader import ReadItem, read_pieces
from ckptstore.objects.plan import Items, cut_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyTask:
    """Chunks that one task copies."""

    copies: ChunkCopies
    """As it does that itself: with its own share of the memory, the threads and the bandwidth."""
    table: PieceTable
    """What is copied, and behind it what deltas refer to."""
    labels: tuple[str, ...]
    """Of the tensors to which the pieces belong that are copied: the table's first rows."""
    whole_bytes: int
    """Stored bytes of all tasks; 0 where nothing is written."""

    def items(self) -> list[ReadItem]:
        """Return what is copied, for a call of this process."""
        return [ReadItem(row=row, out=None, label=label) for row, label in enumerate(self.labels)]


def copy_part(task: CopyTask) -> Copied:
    """Do a task; it may be done any number of times.

    Raises
    ------
    CorruptTensorError
        A chunk of the source is damaged.
    CorruptObjectError
        The target does not hold what was written there.
    StorageError
        One of the storages failed.
    """
    return task.copies.copy(task.table, task.items(), silent, task.whole_bytes)


def read_part(task: CopyTask) -> None:
    """Read pieces from the target, where the task's table says that they lie.

    Raises
    ------
    CorruptObjectError
        The target does not hold what was written there.
    StorageError
        The storage failed.
    """
    task.copies.read_back(task.table, task.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkCopies:
    """Copies chunks from one storage to another, in this process or by tasks of an engine."""

    source: Shared[Backend]
    target: Shared[Backend]
    options: Options
    """Of the target, whole: tasks that share a machine share its budget."""
    environment: Environment
    """Of this process; tasks elsewhere have that of theirs."""
    engine: Engine | None = None
    bytes_per_s: float = 0.0
    """Of all tasks together; 0 for no limit."""
    check: bool = False
    """Read back what was written, but for what deltas decode to."""

    def copy(
        self, table: PieceTable, items: Items, progress: ProgressCallback, whole_bytes: int = 0
    ) -> Copied:
        """Copy the chunks of pieces; see :func:`ckptstore.objects.copying.copy_chunks`.

        Raises
        ------
        CorruptTensorError, CorruptObjectError, StorageError
            As :func:`copy_part`, of the first task that failed; WorkerDiedError of the engine.
        """
        if self.engine is None:
            target = self._throttled()
            return copy_chunks(
                table,
                items,
                source=self.source.value,
                target=target,
                environment=self.environment,
                options=self.options,
                progress=progress,
                after=ReadBack(target, self.environment) if self.check else None,
                whole_bytes=whole_bytes,
            )
        pack, offset, stored = (
            column[[item.row for item in items]].tolist()
            for column in (table.pack, table.offset, table.stored)
        )
        sizes = dict(zip(zip(pack, offset, strict=True), stored, strict=True))
        total = sum(sizes.values()) + CHUNK_HEADER_BYTES * len(sizes)
        most = max(self.target.value.capabilities.pack_bytes, limits.COPY_TASK_BYTES)
        size = max(limits.COPY_TASK_BYTES_MIN, min(most, -(-total // self.engine.workers)))
        copied, done = Copied(), 0
        tasks = self._tasks(self.engine, table, items, size, total)
        for part in self.engine.map(copy_part, tasks):
            copied.places.update(part.places)
            copied.pack_bytes += part.pack_bytes
            copied.packs_count += part.packs_count
            copied.read_back_s += part.read_back_s
            copied.is_cold |= part.is_cold
            done += sum(CHUNK_HEADER_BYTES + p.stored_bytes for p in part.places.values())
            progress(Progress(stage="copy", done=min(done, total), total=total))
        return copied

    def read_back(self, table: PieceTable, items: Items) -> None:
        """Read pieces from the target, where `table` says that they lie, as a load does.

        Raises
        ------
        CorruptObjectError
            The target does not hold what was written there.
        StorageError
            The storage failed; WorkerDiedError of the engine.
        """
        if self.engine is None:
            target, options = self._throttled(), self.options
            try:
                read_pieces(table, items, backend=target, options=options, progress=silent)
            except IntegrityError as error:
                raise altered(target.url, error) from error
            return
        for _ in self.engine.map(
            read_part, self._tasks(self.engine, table, items, limits.COPY_TASK_BYTES_MIN)
        ):
            pass

    def _throttled(self) -> Backend:
        """Return the target at the bandwidth that is allowed."""
        if not self.bytes_per_s:
            return self.target.value
        return ThrottledBackend(
            self.target.value, bytes_per_s=self.bytes_per_s, environment=self.environment
        )

    def _tasks(
        self, engine: Engine, table: PieceTable, items: Items, size: int, whole_bytes: int = 0
    ) -> Iterator[CopyTask]:
        """Yield tasks of `size` stored bytes each, with their shares of what tasks share."""
        labels = {item.row: item.label for item in items}
        for rows in cut_rows(table, np.fromiter(labels, np.int64), size):
            own = replace(
                self,
                engine=None,
                environment=SYSTEM,
                options=engine.options_of_tasks(self.options),
                bytes_per_s=self.bytes_per_s / engine.workers,
            )
            told = tuple(labels[row] for row in rows.tolist())
            part = table.take(rows)
            yield CopyTask(copies=own, table=part, labels=told, whole_bytes=whole_bytes)
