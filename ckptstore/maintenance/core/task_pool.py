"""Runs the steps of one operation on a store: in this process, or as tasks of an engine.

Small requests run in as many threads as the storage likes; their results come in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Final, Protocol, Self, TypeVar

from ckptstore.backends.base import Backend
from ckptstore.backends.transfers import Threads
from ckptstore.config import Options
from ckptstore.engine.calls import Shared
from ckptstore.engine.engine import THREADS, Engine, EngineSpec, open_engine
from ckptstore.repo import Repo

S = TypeVar("S")
T = TypeVar("T")
R = TypeVar("R")
T_contra = TypeVar("T_contra", contravariant=True)
R_co = TypeVar("R_co", covariant=True)

Tell = Callable[[int], None]

_AHEAD: Final = 16
"""Items a thread that are under way, or done and not yet taken: bounds the results that wait
for their reader. Source: enough that one slow request does not leave the other threads idle."""
_AHEAD_MAX: Final = 256
"""Such items of all threads. Source: results are manifests, of some megabytes at most."""


def at_once(
    backend: Backend, work: Callable[[S], T], items: Sequence[S], *, most: int | None = None
) -> Generator[T, None, None]:
    """Yield ``work(item)`` for each item, in their order; `work` is called from several threads.

    An error of `work` is raised in its turn; then, and when the caller stops taking results, no
    further item is begun, and those under way are waited for.

    Parameters
    ----------
    backend
        The storage that `work` asks; its ``concurrency`` says how many threads there are.
    most
        Items that are under way, or done and not yet taken; None for 16 a thread, at most 256.
    """
    workers = min(backend.capabilities.concurrency, len(items), most or len(items))
    if workers < 2:
        yield from map(work, items)
        return
    ahead, due = iter(items), min(workers * _AHEAD, max(workers, _AHEAD_MAX))
    with Threads(workers, thread_name_prefix="ckptstore-requests") as pool:
        coming = deque(pool.submit(work, item) for item in islice(ahead, most or due))
        try:
            while coming:
                result = coming.popleft().result()
                coming.extend(pool.submit(work, item) for item in islice(ahead, 1))
                yield result
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _ignore(_done: int) -> None:
    """Do nothing with a progress."""


class Step(Protocol[T_contra, R_co]):
    """A function of a module that does one large task."""

    def __call__(self, task: T_contra, tell: Tell = ..., /) -> R_co:
        """Do a task; in the process of the operation, `tell` is told the bytes done so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tasks:
    """The storage and the resources of the tasks of one operation; owned by one thread."""

    storage: Shared[Backend]
    options: Options
    """Of one large task: its share of memory and threads."""
    engine: Engine | None = None
    """None runs everything in this process, without tasks."""

    @classmethod
    def of(cls, repo: Repo, engine: Engine | None = None) -> Self:
        """Return the tasks of a store, in this process unless an engine is given.

        Raises
        ------
        InvalidInputError
            Processes of the engine cannot reach the storage.
        """
        if engine is None:
            return cls(storage=Shared(repo.backend), options=repo.options)
        options = engine.options_of_tasks(repo.options)
        return cls(storage=engine.share_storage(repo.backend), options=options, engine=engine)

    def map(
        self,
        function: Callable[[Backend, S], R],
        items: Sequence[S],
        *,
        count: int,
        bytes_of: Callable[[S], int] = lambda _: 0,
        bytes_max: int = 1,
    ) -> Iterator[R]:
        """Yield ``function(storage, item)`` for each item, in their order: small requests.

        Parameters
        ----------
        function
            Of a module; several threads call it.
        count
            Items of one task of an engine; that many, or fewer, are done in this process.
        bytes_of, bytes_max
            Bytes of an item, and those at which a task of several items ends.

        Raises
        ------
        CkptStoreError
            As `function`; with an engine, as :meth:`ckptstore.engine.engine.Engine.map`.
        """
        if self.engine is None or len(items) <= count:
            backend = self.storage.value
            yield from at_once(backend, partial(function, backend), items)
            return
        groups = grouped(items, [bytes_of(item) for item in items], size=bytes_max, count=count)
        parts = ((self.storage, function, group) for group in groups)
        for results in self.engine.map(_part_results, parts):
            yield from results

    def run(self, step: Step[T, R], tasks: Iterable[T], tell: Tell = _ignore) -> Iterator[R]:
        """Yield ``step(task)`` for large tasks, in their order.

        In this process one runs after another, each when its result is asked for, and `tell` is
        told how far it has come.

        Raises
        ------
        CkptStoreError
            As `step`; with an engine, as :meth:`ckptstore.engine.engine.Engine.map`.
        """
        if self.engine is None:
            return (step(task, tell) for task in tasks)
        return self.engine.map(step, tasks)


_Part = tuple[Shared[Backend], Callable[[Backend, Any], Any], Sequence[Any]]
"""The storage, and the items that one task of an engine calls a function with."""


def _part_results(part: _Part) -> list[Any]:
    storage, function, items = part
    return list(at_once(storage.value, partial(function, storage.value), items))


@contextmanager
def open_tasks(repo: Repo, executor: EngineSpec | None, workers: int | None) -> Iterator[Tasks]:
    """Open the engine of an operation on a store for the length of a block.

    Parameters
    ----------
    executor
        None for ``threads``; without `workers`, these are no tasks.

    Raises
    ------
    CkptStoreError
        As :func:`ckptstore.engine.engine.open_engine`; InvalidInputError too where other processes
        cannot reach the storage.
    """
    if workers is None and (executor is None or executor == THREADS):
        yield Tasks.of(repo)
        return
    with open_engine(THREADS if executor is None else executor, workers=workers) as engine:
        yield Tasks.of(repo, engine)


def grouped(
    items: Sequence[T], sizes: Sequence[int], *, size: int, count: int
) -> Iterator[list[T]]:
    """Cut a sequence into groups that end once they reach a sum of sizes, or a number of items."""
    group: list[T] = []
    total = 0
    for item, one in zip(items, sizes, strict=True):
        group.append(item)
        total += one
        if total >= size or len(group) == count:
            yield group
            group, total = [], 0
    if group:
        yield group
