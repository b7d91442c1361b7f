"""Chunks copied to another storage and read back there: in this process, or by tasks of an engine.

Each task fills packs of its own in the target. One that runs twice leaves packs that nobody names,
for a collection; its result says which of the two is used. A copy does not read deltas back, since
their bases may lie elsewhere: the caller, who knows the whole table, does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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
from ckptstore.objects.plan import cut_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyTask:
    """Chunks that one task copies."""

    source: Shared[Backend]
    target: Shared[Backend]
    options: Options
    bytes_per_s: float
    """Of its own; 0 for no limit."""
    check: bool
    """Read back what was written, but for deltas."""
    table: PieceTable
    """What is copied, and behind it what deltas refer to."""
    labels: tuple[str, ...]
    """Of the tensors to which the pieces belong that are copied: the table's first rows."""
    whole_bytes: int
    """Stored bytes of all tasks; 0 where nothing is written."""


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
    target = _target(task)
    return copy_chunks(
        task.table,
        [ReadItem(row=row, out=None, label=label) for row, label in enumerate(task.labels)],
        source=task.source.value,
        target=target,
        environment=SYSTEM,
        options=task.options,
        progress=silent,
        after=ReadBack(target, SYSTEM) if task.check else None,
        whole_bytes=task.whole_bytes,
    )


def read_part(task: CopyTask) -> None:
    """Read pieces from the target, where the task's table says that they lie.

    Raises
    ------
    CorruptObjectError
        The target does not hold what was written there.
    StorageError
        The storage failed.
    """
    items = [ReadItem(row=row, out=None, label=label) for row, label in enumerate(task.labels)]
    _read_back(task.table, items, _target(task), task.options)


def _read_back(
    table: PieceTable, items: Sequence[ReadItem], target: Backend, options: Options
) -> None:
    try:
        read_pieces(table, items, backend=target, options=options, progress=silent)
    except IntegrityError as error:
        raise altered(target.url, error) from error


def _target(task: CopyTask) -> Backend:
    """Return the target at the task's share of the bandwidth."""
    if not task.bytes_per_s:
        return task.target.value
    return ThrottledBackend(task.target.value, bytes_per_s=task.bytes_per_s)


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
        self, table: PieceTable, items: Sequence[ReadItem], progress: ProgressCallback
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
            )
        copied = Copied()
        tasks, total = self._plan(self.engine, table, items)
        done = 0
        for _, part in self.engine.map_unordered(copy_part, tasks):
            copied.places.update(part.places)
            copied.pack_bytes += part.pack_bytes
            copied.packs_count += part.packs_count
            copied.read_back_s += part.read_back_s
            copied.is_cold |= part.is_cold
            done += sum(CHUNK_HEADER_BYTES + p.stored_bytes for p in part.places.values())
            progress(Progress(stage="copy", done=min(done, total), total=total))
        return copied

    def read_back(self, table: PieceTable, items: Sequence[ReadItem]) -> None:
        """Read pieces from the target, where `table` says that they lie, as a load does.

        Raises
        ------
        CorruptObjectError
            The target does not hold what was written there.
        StorageError
            The storage failed; WorkerDiedError of the engine.
        """
        if self.engine is None:
            _read_back(table, items, self._throttled(), self.options)
            return
        labels = {item.row: item.label for item in items}
        rows = np.fromiter(labels, np.int64, len(labels))
        parts = cut_rows(table, rows, limits.COPY_TASK_BYTES_MIN)
        tasks = (self._task(self.engine, table, part, labels, 0) for part in parts)
        for _ in self.engine.map_unordered(read_part, tasks):
            pass

    def _throttled(self) -> Backend:
        """Return the target at the bandwidth that is allowed."""
        if not self.bytes_per_s:
            return self.target.value
        return ThrottledBackend(
            self.target.value, bytes_per_s=self.bytes_per_s, environment=self.environment
        )

    def _task(
        self,
        engine: Engine,
        table: PieceTable,
        rows: npt.NDArray[np.int64],
        labels: Mapping[int, str],
        whole_bytes: int,
    ) -> CopyTask:
        return CopyTask(
            source=self.source,
            target=self.target,
            options=engine.options_of_tasks(self.options),
            bytes_per_s=self.bytes_per_s / engine.workers,
            check=self.check,
            table=table.take(rows),
            labels=tuple(labels[row] for row in rows.tolist()),
            whole_bytes=whole_bytes,
        )

    def _plan(
        self, engine: Engine, table: PieceTable, items: Sequence[ReadItem]
    ) -> tuple[Iterator[CopyTask], int]:
        """Return the tasks, and the stored bytes of them all."""
        labels = {item.row: item.label for item in items}
        rows = np.fromiter(labels, np.int64, len(labels))
        sizes = dict(
            zip(
                zip(table.pack[rows].tolist(), table.offset[rows].tolist(), strict=True),
                table.stored[rows].tolist(),
                strict=True,
            )
        )
        total = sum(sizes.values()) + CHUNK_HEADER_BYTES * len(sizes)
        most = max(self.target.value.capabilities.pack_bytes, limits.COPY_TASK_BYTES)
        size = max(limits.COPY_TASK_BYTES_MIN, min(most, -(-total // engine.workers)))
        parts = cut_rows(table, rows, size)
        return (self._task(engine, table, part, labels, total) for part in parts), total
