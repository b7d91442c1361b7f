"""A survey whose reading is done by tasks: a few packs each, wherever the engine runs them.

The coordinator reads manifests ahead, decides which pieces no version before had, and cuts them
into tasks; results are what is wrong with which piece, and are taken in the order of the tasks. So
each version is concluded when the last of its pieces has been read, by it or by one before, and the
report is that of :meth:`ckptstore.maintenance.check.integrity_scan.Survey.check_all`, in any
engine.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ckptstore import limits
from ckptstore.backends.base import Backend
from ckptstore.checkpoint.content import Content, read_content
from ckptstore.config import Options
from ckptstore.engine.calls import Shared
from ckptstore.engine.engine import Engine
from ckptstore.errors import CkptStoreError, FormatError, IntegrityError
from ckptstore.events import silent
from ckptstore.format.manifest import PieceTable
from ckptstore.maintenance.check.integrity_scan import Loaded, Survey
from ckptstore.maintenance.check.piece_checks import (
    PieceKey,
    batches,
    frame_problem,
    piece_key,
    why_lost,
)
from ckptstore.maintenance.check.recipe_checks import problems_of, recipe_key, row_of_recipe
from ckptstore.maintenance.core.parallel_map import at_once
from ckptstore.manifests import read_manifest
from ckptstore.model import Version
from ckptstore.objects.piece_reader import Want, read_pieces
from ckptstore.objects.plan import cut_rows

__all__ = ["LookTask", "Looked", "check_spread", "look"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LookTask:
    """What one task reads and compares."""

    storage: Shared[Backend]
    options: Options
    frames: tuple[tuple[str, int], ...] = ()
    """Packs whose header, index and trailer are checked, with their sizes."""
    table: PieceTable | None = None
    """Pieces that are read, and behind them what these refer to."""
    count: int = 0
    """How many of the table's rows are asked for: the first ones."""
    version: Version | None = None
    """Of which tensors are made that follow from others."""
    indices: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """What a task found."""

    frames: tuple[tuple[str, CkptStoreError], ...] = ()
    """Packs whose frame is damaged, and how."""
    bad: Mapping[int, str] = field(default_factory=dict)
    """Rows of the task's table, and why they cannot be had."""
    unlike: Mapping[int, str] = field(default_factory=dict)
    """Tensors of which something else came than there should."""


def look(task: LookTask) -> Looked:
    """Do a task; it may be done any number of times.

    Raises
    ------
    StorageError
        The storage failed.
    """
    backend, options = task.storage.value, task.options
    bad: dict[int, str] = {}
    if task.table is not None:
        table = task.table

        def failed(want: Want, error: CkptStoreError) -> None:
            bad[want.row] = why_lost(piece_key(table, want.row), error)

        read_pieces(
            table,
            [Want(row=row, out=None, label="") for row in range(task.count)],
            backend=backend,
            options=options,
            progress=silent,
            on_failure=failed,
        )
    return Looked(frames=_frames(task), bad=bad, unlike=_unlike(task))


def _frames(task: LookTask) -> tuple[tuple[str, CkptStoreError], ...]:
    """Check frames of packs, some at a time, and return those that are damaged."""
    backend = task.storage.value
    found = at_once(backend, lambda frame: frame_problem(backend, *frame), task.frames)
    pairs = [(frame[0], error) for frame, error in zip(task.frames, found, strict=True)]
    return tuple((pack, error) for pack, error in pairs if error is not None)


def _unlike(task: LookTask) -> Mapping[int, str]:
    """Make the tensors that follow from others, and return what is wrong with which."""
    if task.version is None:
        return {}
    backend = task.storage.value
    try:
        content = read_content(read_manifest(backend, task.version))
    except (IntegrityError, FormatError) as error:  # it was there when the task was made
        return dict.fromkeys(task.indices, error.message)
    return problems_of(content, task.indices, backend=backend, options=task.options)


@dataclass(slots=True, kw_only=True)
class _Batch:
    """Rows of a version of which the state of a resumable check tells at once."""

    rows: range
    keys: Mapping[int, PieceKey]
    left: int = 0
    """Tasks of which there is no result."""


@dataclass(slots=True, kw_only=True)
class _Stage:
    """A version whose tasks are under way."""

    version: Version
    loaded: Loaded
    batches: list[_Batch] = field(default_factory=list)
    frames: dict[str, CkptStoreError] = field(default_factory=dict)
    counted_bytes: int = 0
    left: int = 0
    """Tasks of which there is no result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sent:
    """What the coordinator keeps of a task."""

    stage: _Stage
    batch: _Batch | None = None
    keys: Sequence[PieceKey] = ()
    """Of the rows of its table."""
    read_bytes: int = 0
    indices: Sequence[int] = ()


def check_spread(
    survey: Survey, versions: Sequence[Version], engine: Engine
) -> Iterator[tuple[Version, Content | None]]:
    """Check versions in their order, as :meth:`Survey.check_all` does.

    Raises
    ------
    StorageError
        The storage failed, or workers died again and again.
    InvalidInputError
        The storage cannot be reached by other processes.
    """
    yield from _Spread(survey, engine).run(versions)


class _Spread:
    """One check; owned by the calling thread."""

    def __init__(self, survey: Survey, engine: Engine) -> None:
        self._survey = survey
        self._engine = engine
        self._storage = engine.share_storage(survey.repo.backend)
        self._options = engine.options_of_tasks(survey.repo.options)
        self._stages: deque[_Stage] = deque()
        self._sent: deque[_Sent] = deque()
        self._planned: set[bytes] = set()

    def run(self, versions: Sequence[Version]) -> Iterator[tuple[Version, Content | None]]:
        """Check all versions; yield each when it is done, in their order."""
        for result in self._engine.map(look, self._tasks(versions)):
            self._take(self._sent.popleft(), result)
            while self._stages and not self._stages[0].left:
                stage = self._stages.popleft()
                yield stage.version, self._conclude(stage)

    def _tasks(self, versions: Sequence[Version]) -> Iterator[LookTask]:
        """Plan version after version, as there is room for tasks."""
        for version, loaded in self._survey.loaded(versions):
            stage = _Stage(version=version, loaded=loaded)
            tasks = list(self._of_stage(stage))
            if not tasks:  # its turn comes with an empty one
                tasks = [(self._task(), _Sent(stage=stage))]
            stage.left = len(tasks)
            self._stages.append(stage)
            for task, sent in tasks:
                self._sent.append(sent)
                yield task

    def _task(self) -> LookTask:
        return LookTask(storage=self._storage, options=self._options)

    def _of_stage(self, stage: _Stage) -> Iterator[tuple[LookTask, _Sent]]:
        content = stage.loaded
        if not isinstance(content, Content):
            return
        survey = self._survey
        fresh = survey.check_sizes(content)
        if not survey.full:
            return
        for start in range(0, len(fresh), limits.VERIFY_TASK_PACKS):
            part = fresh[start : start + limits.VERIFY_TASK_PACKS]
            frames = tuple((pack, info.size_bytes) for pack, info in part)
            yield dataclasses.replace(self._task(), frames=frames), _Sent(stage=stage)
        table = content.manifest.pieces
        for rows in batches(table):
            keys = {row: piece_key(table, row) for row in rows}
            chosen = survey.choose(stage.version, rows, keys)
            if chosen is None:
                continue
            batch = _Batch(rows=rows, keys=keys)
            stage.batches.append(batch)
            for cut in cut_rows(table, np.array(chosen, np.int64), limits.VERIFY_TASK_BYTES):
                batch.left += 1
                task = dataclasses.replace(self._task(), table=table.take(cut), count=len(cut))
                size = int(table.raw[cut].sum(dtype=np.uint64))
                found = [keys[row] for row in cut.tolist()]
                yield task, _Sent(stage=stage, batch=batch, keys=found, read_bytes=size)
        yield from self._recipes(stage, content)

    def _recipes(self, stage: _Stage, content: Content) -> Iterator[tuple[LookTask, _Sent]]:
        """Plan to make tensors, each recipe once, whatever becomes of the pieces."""
        survey = self._survey
        version = dataclasses.replace(stage.version, metrics={}, metadata={}, roles={}, receipt={})
        batch: list[int] = []
        size = 0
        for index, record in enumerate(content.manifest.tensors):
            if record.recipe is None:
                continue
            key = recipe_key(content, index)
            if key in self._planned or (survey.sample and not survey.sample.holds(key.hex(), 0)):
                continue
            if survey.cold_pieces and survey.is_cold(content, index):
                continue
            self._planned.add(key)
            if survey.known(stage.version, row_of_recipe(content, index)) is not None:
                continue
            batch.append(index)
            size += record.nbytes
            if size >= limits.VERIFY_TASK_BYTES:
                yield self._making(stage, version, batch)
                batch, size = [], 0
        if batch:
            yield self._making(stage, version, batch)

    def _making(
        self, stage: _Stage, version: Version, batch: Sequence[int]
    ) -> tuple[LookTask, _Sent]:
        task = dataclasses.replace(self._task(), version=version, indices=tuple(batch))
        return task, _Sent(stage=stage, indices=tuple(batch))

    def _take(self, sent: _Sent, found: Looked) -> None:
        """Note the result of a task; those of the tasks before are noted."""
        survey, stage, batch = self._survey, sent.stage, sent.batch
        stage.left -= 1
        stage.frames.update(found.frames)
        survey.bad.update((sent.keys[row], text) for row, text in found.bad.items())
        if batch is not None:
            batch.left -= 1
            if not batch.left:
                self._tell(stage, batch)
        if sent.indices and isinstance(stage.loaded, Content):
            table = stage.loaded.manifest.pieces
            for index in sent.indices:  # of what has lost a piece, it is the piece that is told
                rows = stage.loaded.rows(index)
                if not any(survey.why(table, row) for row in (rows if survey.bad else ())):
                    key, text = recipe_key(stage.loaded, index), found.unlike.get(index, "")
                    survey.followed_as(stage.version, stage.loaded, index, key, text)
        survey.read_bytes += sent.read_bytes
        stage.counted_bytes += sent.read_bytes
        survey.advance(sent.read_bytes)

    def _tell(self, stage: _Stage, batch: _Batch) -> None:
        bad = self._survey.bad
        wrong = {row: bad[key] for row, key in batch.keys.items() if key in bad}
        self._survey.told(stage.version, batch.rows, wrong)
        stage.batches.remove(batch)

    def _conclude(self, stage: _Stage) -> Content | None:
        """Report a version of which everything was read."""
        survey, content, sound = self._survey, stage.loaded, False
        if isinstance(content, Content):
            for pack in content.manifest.pieces.packs:
                survey.found_frame(stage.version, pack, stage.frames.get(pack))
            for batch in list(stage.batches):  # nothing of them was left to be read
                self._tell(stage, batch)
            if survey.full:  # what a version before was to make, and has lost a piece of
                backend, options = survey.repo.backend, survey.repo.options
                for index, key in survey.choose_recipes(stage.version, content):
                    found = problems_of(content, [index], backend=backend, options=options)
                    text = found.get(index, "")
                    survey.followed_as(stage.version, content, index, key, text)
            sound = survey.report(stage.version, content)
        counted = stage.counted_bytes
        return survey.conclude(stage.version, content, sound=sound, counted_bytes=counted)
