"""Reads what versions need, in tasks: some packs or pieces each, wherever these run.

The coordinator reads manifests ahead, decides which pieces no version before had, and cuts them
into tasks; results are what is wrong with which piece, and are taken in the order of the tasks. So
each version is concluded when the last of its pieces has been read, by it or by one before, and the
findings are the same in any engine, and in this process without one.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np

from ckptstore import limits
from ckptstore.backends.base import Backend
from ckptstore.checkpoint.content import Content, read_content
from ckptstore.config import Options
from ckptstore.engine.calls import Shared
from ckptstore.errors import CkptStoreError, FormatError, IntegrityError
from ckptstore.format.manifest import PieceTable
from ckptstore.maintenance.check.integrity_scan import Loaded, Survey
from ckptstore.maintenance.check.piece_checks import (
    PieceKey,
    batches,
    frame_problem,
    piece_key,
    why_lost,
)
from ckptstore.maintenance.check.recipe_checks import problems_of, row_of_recipe
from ckptstore.maintenance.core.task_pool import Tasks, at_once
from ckptstore.manifests import read_manifest
from ckptstore.model import Version
from ckptstore.objects.piece_reader import Want, read_pieces
from ckptstore.objects.plan import cut_rows


class Held:
    """The content of a version, as a task holds it; another process reads its manifest again."""

    def __init__(self, version: Version, content: Content | None = None) -> None:
        self._version = version
        self._content = content

    def __reduce__(self) -> tuple[object, ...]:
        bare = dataclasses.replace(self._version, metrics={}, metadata={}, roles={}, receipt={})
        return Held, (bare,)

    def content(self, backend: Backend) -> Content:
        """Return the content.

        Raises
        ------
        IntegrityError, FormatError, StorageError
            The manifest cannot be read.
        """
        return self._content or read_content(read_manifest(backend, self._version))


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
    held: Held | None = None
    """The version of which tensors are made that follow from others."""
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


def look(task: LookTask, tell: Callable[[int], None] = lambda _: None) -> Looked:
    """Do a task; it may be done any number of times.

    Parameters
    ----------
    tell
        Told the bytes of pieces that are read so far.

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
            progress=lambda step: tell(step.done),
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
    if task.held is None:
        return {}
    backend = task.storage.value
    try:
        content = task.held.content(backend)
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
    resumed: bool = False
    """An interrupted check has made tensors of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sent:
    """What the coordinator keeps of a task."""

    stage: _Stage
    batch: _Batch | None = None
    keys: Sequence[PieceKey] = ()
    """Of the rows of its table."""
    read_bytes: int = 0
    recipes: Mapping[int, bytes] = field(default_factory=dict)
    """Tensors that it makes, with the keys of their recipes."""
    last: bool = False
    """The last one of its version, which does nothing: all others are done when it is."""


def check_all(
    survey: Survey, versions: Sequence[Version], tasks: Tasks | None = None
) -> Iterator[tuple[Version, Content | None]]:
    """Check versions in their order; yield each with its content, None if that cannot be had.

    Parameters
    ----------
    tasks
        None for this process.

    Raises
    ------
    StorageError
        The storage failed, or workers died again and again: nothing is known of the versions that
        were not yielded.
    """
    with closing(survey.loaded(versions)) as loaded:  # its threads end with the check, failed too
        yield from _Scan(survey, tasks or Tasks.of(survey.repo)).run(loaded)


def check_content(survey: Survey, version: Version, content: Content) -> None:
    """Check the pieces that a manifest names which is not that of the version, but made for it.

    Raises
    ------
    StorageError
        The storage failed.
    """
    for one, _ in _Scan(survey, Tasks.of(survey.repo)).run([(version, content)]):
        survey.sound.pop(one.id, None)  # its own manifest is damaged


class _Scan:
    """One check; owned by the calling thread."""

    def __init__(self, survey: Survey, tasks: Tasks) -> None:
        self._survey = survey
        self._tasks = tasks
        # In this process a task has all threads and all memory: pieces of a version are not cut.
        local = tasks.engine is None
        self._task_bytes = limits.VERIFY_BATCH_BYTES if local else limits.VERIFY_TASK_BYTES
        self._sent: deque[_Sent] = deque()
        self._planned: set[bytes] = set()
        """Keys of the recipes of which there are tasks."""

    def run(
        self, versions: Iterable[tuple[Version, Loaded]]
    ) -> Iterator[tuple[Version, Content | None]]:
        """Check all versions; yield each when it is done, in their order."""
        for result in self._tasks.run(look, self._plan(versions), self._survey.tell):
            sent = self._sent.popleft()
            self._take(sent, result)
            if sent.last:
                yield sent.stage.version, self._conclude(sent.stage)

    def _plan(self, versions: Iterable[tuple[Version, Loaded]]) -> Iterator[LookTask]:
        """Plan version after version, as there is room for tasks."""
        for version, loaded in versions:
            stage = _Stage(version=version, loaded=loaded)
            for task, sent in self._of_stage(stage):
                self._sent.append(sent)
                yield task
            self._sent.append(_Sent(stage=stage, last=True))
            yield self._task()

    def _task(self) -> LookTask:
        return LookTask(storage=self._tasks.storage, options=self._tasks.options)

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
            cuts = list(cut_rows(table, np.array(chosen, np.int64), self._task_bytes))
            batch.left = len(cuts)  # before the first is sent: its result may come before the next
            for cut in cuts:
                task = dataclasses.replace(self._task(), table=table.take(cut), count=len(cut))
                size = int(table.raw[cut].sum(dtype=np.uint64))
                found = [keys[row] for row in cut.tolist()]
                yield task, _Sent(stage=stage, batch=batch, keys=found, read_bytes=size)
        yield from self._recipes(stage, content)

    def _recipes(self, stage: _Stage, content: Content) -> Iterator[tuple[LookTask, _Sent]]:
        """Plan to make tensors, each recipe once."""
        held = Held(stage.version, content)

        def making(batch: Mapping[int, bytes]) -> tuple[LookTask, _Sent]:
            task = dataclasses.replace(self._task(), held=held, indices=tuple(batch))
            return task, _Sent(stage=stage, recipes=batch)

        batch: dict[int, bytes] = {}
        size = 0
        for index, key in self._survey.recipes(content, self._planned):
            self._planned.add(key)
            if self._survey.known(stage.version, row_of_recipe(content, index)) is not None:
                stage.resumed = True
                continue
            nbytes = content.manifest.tensors[index].nbytes
            if batch and size + nbytes > self._task_bytes:
                yield making(batch)
                batch, size = {}, 0
            batch[index] = key
            size += nbytes
        if batch:
            yield making(batch)

    def _take(self, sent: _Sent, found: Looked) -> None:
        """Note the result of a task; those of the tasks before are noted."""
        survey, stage, batch = self._survey, sent.stage, sent.batch
        stage.frames.update(found.frames)
        survey.bad.update((sent.keys[row], text) for row, text in found.bad.items())
        if batch is not None:
            batch.left -= 1
            if not batch.left:
                self._tell(stage, batch)
        if sent.recipes and isinstance(stage.loaded, Content):
            table = stage.loaded.manifest.pieces
            for index, key in sent.recipes.items():
                # Of what has lost a piece, it is the piece that is told.
                rows = stage.loaded.rows(index) if survey.bad else ()
                if not any(survey.why(table, row) for row in rows):
                    text = found.unlike.get(index, "")
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
            if survey.full and (survey.bad or stage.resumed):  # else its tasks have made them all
                self._follow_rest(stage.version, content)
            sound = survey.report(stage.version, content)
        counted = stage.counted_bytes
        return survey.conclude(stage.version, content, sound=sound, counted_bytes=counted)

    def _follow_rest(self, version: Version, content: Content) -> None:
        """Make what a version before was to make, and has lost a piece of; take what is known."""
        survey = self._survey
        backend, options = survey.repo.backend, survey.repo.options
        for index, key in survey.recipes(content, survey.followed):
            earlier = survey.known(version, row_of_recipe(content, index))
            if earlier is None:
                found = problems_of(content, [index], backend=backend, options=options)
                survey.followed_as(version, content, index, key, found.get(index, ""))
            else:
                survey.followed.add(key)
                survey.unlike.update((key, text) for text in earlier.values())
