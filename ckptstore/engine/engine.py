"""Engines: run many small tasks, a bounded number at a time, and return their results.

A task is a function of a module and one argument; both are pickled for tasks in other processes. A
task may run twice, so repeating it must do no harm. Results should be small. The caller, the
coordinator, makes all decisions on them: tasks never commit.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from ckptstore import limits
from ckptstore.backends.base import Backend
from ckptstore.config import SYSTEM, Environment, Options, workers_default
from ckptstore.engine import dask_client, pools
from ckptstore.engine.calls import Shared
from ckptstore.engine.dask_client import DaskPool
from ckptstore.engine.pools import ExecutorPool, Pool, ThreadPool
from ckptstore.errors import InvalidInputError, WorkerDiedError

T = TypeVar("T")
R = TypeVar("R")

THREADS: Final = "threads"
"""Name of the default engine."""

EngineSpec = str | Executor
"""``threads``, ``processes``, ``dask:local``, ``dask://HOST:PORT``, ``tls://HOST:PORT``, or any
executor of ``concurrent.futures``, which stays the caller's."""

_SCHEDULER = re.compile(r"(?:dask|tls)://[^\s/@?#]+:[0-9]{1,5}/?\Z")
_FORMS: Final = "threads, processes, dask:local, dask://HOST:PORT or tls://HOST:PORT"


@dataclass(slots=True)
class _Flight(Generic[T]):
    """A task that was submitted."""

    number: int
    task: T
    tries: int = 1


class Engine:
    """Runs tasks in one pool. Made by :func:`open_engine`; owned by one thread."""

    def __init__(self, name: str, pool: Pool, environment: Environment = SYSTEM) -> None:
        self.name = name
        self._pool = pool
        self._environment = environment

    @property
    def in_process(self) -> bool:
        """Tasks run in threads of this process: nothing is pickled, and memory is shared."""
        return self._pool.in_process

    @property
    def workers(self) -> int:
        """Number of tasks that run at once, at this moment; 1 or more."""
        return max(1, self._pool.workers())

    @property
    def sharing(self) -> int:
        """Number of them that share the memory of one machine, as far as is known; 1 or more.

        A task may hold the memory budget of the store divided by this number.
        """
        return max(1, self._pool.sharing())

    def options_of_tasks(self, options: Options) -> Options:
        """Return the options of one task: its share of memory and threads."""
        sharing = self.sharing
        return dataclasses.replace(
            options,
            host_bytes=max(1, options.host_bytes // sharing),
            workers=max(1, options.workers // sharing),
        )

    def share(self, value: T, what: str) -> Shared[T]:
        """Wrap a value that many tasks hold, so that each process makes it once.

        Parameters
        ----------
        what
            Its name in errors.

        Raises
        ------
        InvalidInputError
            It cannot be sent to the processes in which tasks run.
        """
        return Shared(value) if self.in_process else Shared.portable(value, what)

    def share_storage(self, backend: Backend) -> Shared[Backend]:
        """Wrap a backend for tasks.

        Raises
        ------
        InvalidInputError
            Other processes cannot reach it: it is in memory, or its options cannot be pickled.
        """
        if not self.in_process and backend.capabilities.private:
            msg = f"the objects of {backend.url} are in the memory of this process"
            raise InvalidInputError(msg, hint="use the engine threads")
        return self.share(backend, f"the storage {backend.url}, with its options,")

    def map(self, function: Callable[[T], R], tasks: Iterable[T]) -> Iterator[R]:
        """Yield the results of ``function(task)`` in the order of the tasks.

        Raises
        ------
        WorkerDiedError, CkptStoreError
            As :meth:`map_unordered`.
        """
        held: dict[int, R] = {}
        due = 0
        for number, _, result in self._run(function, tasks, held):
            held[number] = result
            while due in held:
                yield held.pop(due)
                due += 1

    def map_unordered(
        self, function: Callable[[T], R], tasks: Iterable[T]
    ) -> Iterator[tuple[T, R]]:
        """Yield tasks with their results, in the order in which they finish.

        Tasks are taken from `tasks` only as there is room, so that a generator can plan as it goes.
        Closing the iterator, or an error, drops the tasks that have not begun.

        Parameters
        ----------
        function
            Of a module; other processes find it by its name.

        Raises
        ------
        WorkerDiedError
            The worker of a task died ``TASK_TRIES_MAX`` times; or no worker is left.
        InvalidInputError
            A task cannot be sent to another process.
        CkptStoreError
            The error of `function`, of the first task that failed.
        """
        for _, task, result in self._run(function, tasks, {}):
            yield task, result

    def _run(
        self,
        function: Callable[[T], R],
        tasks: Iterable[T],
        held: dict[int, R],
    ) -> Iterator[tuple[int, T, R]]:
        """Yield number, task and result; `held` are results that wait for earlier ones."""
        numbered = enumerate(tasks)
        pending: dict[Future[Any], _Flight[T]] = {}
        try:
            while True:
                most = limits.ENGINE_AHEAD * self.workers
                room = min(most - len(pending), 4 * most - len(pending) - len(held))
                for number, task in itertools.islice(numbered, max(0, room)):
                    pending[self._pool.submit(function, task)] = _Flight(number, task)
                if not pending:
                    return
                for future in self._wait(pending):
                    flight = pending.pop(future)
                    try:
                        result = self._pool.result(future)
                    except WorkerDiedError as error:
                        self._again(flight, error)
                        pending[self._pool.submit(function, flight.task)] = flight
                        continue
                    yield flight.number, flight.task, result
        finally:
            for future in pending:
                future.cancel()

    def _again(self, flight: _Flight[T], error: WorkerDiedError) -> None:
        """Count a try; raise WorkerDiedError after the last one."""
        if not self._pool.recovers(error):
            raise error
        if flight.tries == limits.TASK_TRIES_MAX:
            msg = f"{error.message}; it was tried {flight.tries} times"
            hint = "look for what kills it: memory limits, or a fault in a library"
            raise WorkerDiedError(msg, hint=hint) from error
        flight.tries += 1

    def _wait(self, pending: Iterable[Future[Any]]) -> set[Future[Any]]:
        """Return futures that are done; raise WorkerDiedError if no worker appears."""
        since = self._environment.monotonic()
        while True:
            done, others = wait(pending, limits.ENGINE_LOOK_S, FIRST_COMPLETED)
            # A pool that is shut down cancels futures without waking their waiters.
            done |= {future for future in others if future.cancelled()}
            if done:
                return done
            now = self._environment.monotonic()
            if self._pool.workers() > 0:
                since = now
            elif now - since > limits.ENGINE_WORKERS_WAIT_S:
                msg = f"no worker has been there for {now - since:.0f} s"
                raise WorkerDiedError(msg, hint="what was done stays done: run it again")


def check_spec(spec: str) -> str:
    """Return the name of an engine.

    Raises
    ------
    InvalidInputError
        No engine has it.
    """
    known = spec in (THREADS, "processes", "dask:local")
    if known or _SCHEDULER.match(str(spec)):
        return spec
    msg = f"unknown engine {spec!r:.60}"
    raise InvalidInputError(msg, hint=f"one of {_FORMS}")


@contextmanager
def open_engine(
    spec: EngineSpec = THREADS, *, workers: int | None = None, environment: Environment = SYSTEM
) -> Iterator[Engine]:
    """Yield an engine for the duration of a block.

    If the block ends by an error, Ctrl-C included, worker processes that were started for it are
    stopped at once; no process is left behind.

    Parameters
    ----------
    workers
        Tasks at once. By default, for threads and processes: the usable processors; for a running
        scheduler: all that its workers take.

    Raises
    ------
    InvalidInputError
        The text names no engine, or `workers` is below 1.
    MissingDependencyError
        Dask is named and not installed.
    StorageError
        The scheduler does not answer, or has no workers.
    """
    if workers is not None and workers < 1:
        msg = f"workers is an integer from 1 on, not {workers!r}"
        raise InvalidInputError(msg)
    if isinstance(spec, Executor):
        yield Engine("executor", _foreign(spec, workers), environment)
        return
    count = workers or workers_default()
    name = check_spec(spec)
    opening: AbstractContextManager[Pool]
    if name == THREADS:
        opening = pools.threads(count)
    elif name == "processes":
        opening = pools.processes(count)
    elif name == "dask:local":
        opening = dask_client.local_cluster(count)
    else:
        address = re.sub("^dask://", "tcp://", name.rstrip("/"))
        opening = dask_client.connected(address, workers or 0)
    with opening as pool:
        yield Engine(name, pool, environment)


def _foreign(executor: Executor, workers: int | None) -> Pool:
    """Return the pool of an executor that the user brought."""
    own = getattr(executor, "_max_workers", None)
    count = workers or (own if isinstance(own, int) else workers_default())
    if isinstance(executor, ThreadPoolExecutor):
        return ThreadPool(executor, count)
    if type(executor).__name__ == "ClientExecutor" and hasattr(executor, "_client"):
        return DaskPool(lambda: executor._client, "of the executor", most=workers or 0)
    return ExecutorPool(executor, count)
