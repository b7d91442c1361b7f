"""Reads the packs and pieces that versions need, some of them a task, in any process.

The coordinator reads manifests ahead, decides which pieces no version before had, and cuts them
into tasks; results are the damaged pieces, and are taken in the order of the tasks. So each version
is concluded when the last of its pieces has been read, by it or by one before, and the findings are
the same in any engine, and in this process without one.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from ckptstore import errors, limits
from ckptstore.backends.base import Backend
from ckptstore.checkpoint.content import Content, read_content
from ckptstore.checkpoint.ranges import Range, read_ranges
from ckptstore.chunking import batches
from ckptstore.config import Options
from ckptstore.engine.calls import Shared
from ckptstore.format.manifest import PieceTable
from ckptstore.maintenance.check.integrity_scan import Survey, piece_key, row_of_recipe
from ckptstore.maintenance.core.live_set import changed
from ckptstore.maintenance.core.task_pool import Tasks, at_once, grouped
from ckptstore.manifests import read_manifest
from ckptstore.model import Version
from ckptstore.objects.packs import read_index
from ckptstore.objects.piece_reader import ReadItem, read_pieces
from ckptstore.objects.plan import cut_rows

# Manifests read ahead. Source: hides the latency of an object store (20 ms) behind the reading of
# data; a manifest of 1 TB takes some 16 MB.
_AHEAD = 8

Loaded = Content | errors.CkptStoreError
"""The content of a version, or the reason why it cannot be read."""


# --- one task -------------------------------------------------------------------------------------


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
    """The objects that one task reads and compares."""

    storage: Shared[Backend]
    options: Options
    frames: Sequence[tuple[str, int]] = ()
    """Packs whose header, index and trailer are checked, with their sizes."""
    table: PieceTable | None = None
    """Pieces that are read, and behind them the bases of those that are deltas."""
    count: int = 0
    """Number of rows that are read: the first ones of the table."""
    held: Held | None = None
    """The version whose derived tensors are made."""
    indices: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """The damage that a task found."""

    frames: Mapping[str, errors.CkptStoreError]
    """Packs whose frame is damaged, and how."""
    bad: Mapping[int, str]
    """Damaged rows of the task's table, each with its damage."""
    unlike: Mapping[int, str]
    """Tensors whose recipe gave other bytes than it should, each with the difference."""


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
    backend, table = task.storage.value, task.table
    bad: dict[int, str] = {}
    if table is not None:

        def failed(want: ReadItem, error: errors.CkptStoreError) -> None:
            """Note a piece that cannot be had."""
            cause = error.__cause__
            why = cause.message if isinstance(cause, errors.CkptStoreError) else error.message
            pack, offset, *_ = piece_key(table, want.row)
            bad[want.row] = f"pack {pack}, chunk at byte {offset}: {why}"

        read_pieces(
            table,
            [ReadItem(row=row, out=None, label="") for row in range(task.count)],
            backend=backend,
            options=task.options,
            progress=lambda step: tell(step.done),
            on_failure=failed,
        )
    found = at_once(backend, partial(_frame_problem, backend), task.frames)
    frames = {frame[0]: error for frame, error in zip(task.frames, found, strict=True) if error}
    return Looked(frames=frames, bad=bad, unlike=_unlike(task))


def _frame_problem(backend: Backend, frame: tuple[str, int]) -> errors.CkptStoreError | None:
    """Return the damage of header, index or trailer of a pack: a rebuild needs them, no load."""
    try:
        read_index(backend, *frame)
    except (errors.IntegrityError, errors.FormatError, errors.NotFoundError) as error:
        return error
    return None


def _unlike(task: LookTask) -> Mapping[int, str]:
    """Make the tensors that follow from others; return the differences of those that are wrong."""
    if task.held is None:
        return {}
    backend = task.storage.value
    try:
        content = task.held.content(backend)
    except (errors.IntegrityError, errors.FormatError) as error:  # since the task was made
        return dict.fromkeys(task.indices, error.message)
    return _differences(content, task.indices, backend=backend, options=task.options)


def _differences(
    content: Content, indices: Sequence[int], *, backend: Backend, options: Options
) -> dict[int, str]:
    """Make some tensors; one by one, if one of them differs from its recipe.

    Returns
    -------
    dict[int, str]
        The differences of those that are wrong; the others are left out.

    Raises
    ------
    StorageError
        The storage failed.
    """

    def difference(chosen: Sequence[int]) -> str:
        """Return the first difference; empty if there is none."""
        tensors = content.manifest.tensors
        whole = [Range(index=n, start=0, nbytes=tensors[n].nbytes, out=None) for n in chosen]
        try:
            read_ranges(content, whole, backend=backend, options=options)
        except errors.CorruptTensorError as error:
            return error.message.partition(": ")[2]
        return ""

    if not difference(indices):
        return {}
    return {index: text for index in indices if (text := difference([index]))}


# --- all tasks ------------------------------------------------------------------------------------


def check_all(
    survey: Survey, versions: Sequence[Version], tasks: Tasks | None = None
) -> Iterator[tuple[Version, Content | None]]:
    """Check versions in their order; yield each with its content, None if it cannot be read.

    Manifests are read a little ahead, in parallel.

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

    def load(version: Version) -> Loaded:
        """Return the content of a version, or the reason why it cannot be read."""
        try:
            return read_content(survey.repo.manifests.read(version))
        except (errors.IntegrityError, errors.FormatError) as error:
            return error.with_traceback(None)  # whose frames hold the manifest

    survey.total_bytes = sum(map(survey.share, versions))
    found = at_once(survey.repo.backend, load, versions, most=_AHEAD)
    with closing(found):  # its threads end with the check, failed too
        scan = _Scan(survey, tasks or Tasks.of(survey.repo))
        yield from scan.run(zip(versions, found, strict=True))


def check_content(survey: Survey, version: Version, content: Content) -> None:
    """Check the pieces of a manifest that was rebuilt for a version, in place of its own.

    Raises
    ------
    StorageError
        The storage failed.
    """
    for one, _ in _Scan(survey, Tasks.of(survey.repo)).run([(version, content)]):
        survey.sound.pop(one.id, None)  # its own manifest is damaged


def _batches(table: PieceTable) -> Iterator[range]:
    """Cut the rows of a table into ranges of at most ``VERIFY_BATCH_BYTES``, one row at least."""
    ends, start = np.cumsum(table.raw, dtype=np.uint64), 0
    while start < len(table):
        before = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, before + limits.VERIFY_BATCH_BYTES, "right"))
        stop = max(stop, start + 1)
        yield range(start, stop)
        start = stop


@dataclass(slots=True, kw_only=True)
class _Stage:
    """A version whose tasks are under way."""

    version: Version
    loaded: Loaded
    left: dict[range, int] = field(default_factory=dict)
    """Rows whose findings are kept together, each with the number of its unfinished tasks."""
    recipes: dict[int, bytes] = field(default_factory=dict)
    """Tensors that tasks make, with the keys of their recipes."""
    frames: dict[str, errors.CkptStoreError] = field(default_factory=dict)
    counted_bytes: int = 0


class _Scan:
    """One check; owned by the calling thread."""

    def __init__(self, survey: Survey, tasks: Tasks) -> None:
        self._survey = survey
        self._tasks = tasks
        self._task = partial(LookTask, storage=tasks.storage, options=tasks.options)
        # In this process a task has all threads and all memory: pieces of a version are not cut.
        local = tasks.engine is None
        self._task_bytes = limits.VERIFY_BATCH_BYTES if local else limits.VERIFY_TASK_BYTES
        self._sent: deque[tuple[_Stage, LookTask | None, range]] = deque()
        """Tasks under way, each with the rows whose findings it adds to. None is the last one of
        its version, which reads nothing: all others are done when it is."""
        self._planned: set[bytes] = set()
        """Keys of the recipes that tasks make or have made."""

    def run(
        self, versions: Iterable[tuple[Version, Loaded]]
    ) -> Generator[tuple[Version, Content | None], None, None]:
        """Check all versions; yield each when it is done, in their order."""
        for found in self._tasks.run(look, self._plan(versions), self._survey.tell):
            stage, task, rows = self._sent.popleft()
            if task is None:
                yield stage.version, self._conclude(stage)
            else:
                self._take(stage, task, rows, found)

    def _plan(self, versions: Iterable[tuple[Version, Loaded]]) -> Iterator[LookTask]:
        """Plan version after version, as there is room for tasks."""
        for version, loaded in versions:
            stage = _Stage(version=version, loaded=loaded)
            if isinstance(loaded, Content):
                for task, rows in self._of_version(stage, loaded):
                    self._sent.append((stage, task, rows))
                    yield task
            self._sent.append((stage, None, range(0)))
            yield self._task()

    def _of_version(self, stage: _Stage, content: Content) -> Iterator[tuple[LookTask, range]]:
        """Plan the tasks of one version: frames of packs, pieces, tensors that follow from them."""
        survey, table = self._survey, content.manifest.pieces
        fresh = survey.check_sizes(content)
        if not survey.full:
            return
        for part in batches(fresh, limits.VERIFY_TASK_PACKS):
            yield self._task(frames=part), range(0)
        for rows in _batches(table):
            chosen = survey.choose(stage.version, table, rows)
            if chosen is None:
                continue
            cuts = list(cut_rows(table, np.array(chosen, np.int64), self._task_bytes))
            stage.left[rows] = len(cuts)  # now: the result of the first may come before the next
            for cut in cuts:
                yield self._task(table=table.take(cut), count=len(cut)), rows
        for index, key in survey.recipes(content, self._planned):
            self._planned.add(key)
            if survey.known(stage.version, row_of_recipe(content, index)) is None:
                stage.recipes[index] = key
        indices = list(stage.recipes)
        sizes = [content.manifest.tensors[index].nbytes for index in indices]
        held = Held(stage.version, content)
        for group in grouped(indices, sizes, size=self._task_bytes, count=len(indices)):
            yield self._task(held=held, indices=group), range(0)

    def _take(self, stage: _Stage, task: LookTask, rows: range, found: Looked) -> None:
        """Note the result of a task; those of the tasks before are noted."""
        survey, content, table = self._survey, stage.loaded, task.table
        assert isinstance(content, Content)  # noqa: S101  # for the type checker: it has tasks
        stage.frames.update(found.frames)
        if table is not None:
            survey.bad.update((piece_key(table, row), text) for row, text in found.bad.items())
            stage.left[rows] -= 1
            if not stage.left[rows]:
                self._keep(stage, content, rows)
            size = int(table.raw[: task.count].sum(dtype=np.uint64))
            survey.read_bytes += size
            stage.counted_bytes += size
            survey.advance(size)
        for index in task.indices:
            if not survey.lost(content, index):  # else it is the piece that is reported
                key, text = stage.recipes[index], found.unlike.get(index, "")
                survey.followed_as(stage.version, content, index, key, text)

    def _keep(self, stage: _Stage, content: Content, rows: range) -> None:
        """Keep the findings of rows that were all read, for a check that continues this one."""
        table, bad = content.manifest.pieces, self._survey.bad
        keys = {row: piece_key(table, row) for row in rows} if bad else {}
        found = {row: bad[key] for row, key in keys.items() if key in bad}
        self._survey.keep(stage.version, rows, found)
        del stage.left[rows]

    def _conclude(self, stage: _Stage) -> Content | None:
        """Report a version whose tasks are all done."""
        survey, version, content = self._survey, stage.version, stage.loaded
        survey.seen.add(version.id)
        # In all it counts for its share; pieces that it has in common with others were counted.
        survey.advance(max(0, survey.share(version) - stage.counted_bytes))
        if (stage.frames or not isinstance(content, Content)) and changed(survey.repo, version):
            return None
        if not isinstance(content, Content):
            survey.unread[version.id] = content
            survey.found(content, version)
            return None
        for pack, problem in stage.frames.items():
            survey.broken_packs[pack] = problem.message
            msg = f"{problem.message} (needed to rebuild, not to load {version.run}@{version.step})"
            survey.found(type(problem)(msg), None)
        for rows in list(stage.left):  # every piece in them was read before
            self._keep(stage, content, rows)
        if survey.full and (survey.bad or survey.state):  # else its tasks have made them all
            self._follow_rest(version, content)
        whole = survey.full and survey.sample is None and version.id not in survey.cold_versions
        if survey.report(version, content) and whole:
            survey.sound[version.id] = version.manifest_digest
        return content

    def _follow_rest(self, version: Version, content: Content) -> None:
        """Make tensors that an earlier version could not, for a lost piece; take known results."""
        survey = self._survey
        backend, options = survey.repo.backend, survey.repo.options
        for index, key in survey.recipes(content, survey.followed):
            earlier = survey.known(version, row_of_recipe(content, index))
            if earlier is None:
                found = _differences(content, [index], backend=backend, options=options)
                survey.followed_as(version, content, index, key, found.get(index, ""))
            else:
                survey.followed.add(key)
                survey.unlike.update((key, text) for text in earlier.values())
