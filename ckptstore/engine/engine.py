"""Engines: run many small tasks by an executor, a bounded number at a time.

A task is a function of a module and one argument; both are pickled for tasks in other processes. A
task may run twice, so repeating it must do no harm. Results should be small. The caller, the
coordinator, makes all decisions on them: tasks never commit.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from typing import Any, Final, TypeVar

from ckptstore import limits
from ckptstore.backends.base import Backend
from ckptstore.backends.transfers import Threads
from ckptstore.config import Options, workers_default
from ckptstore.engine.calls import Shared, no_answer, packed, pickled, run_packed, unpacked
from ckptstore.engine.dask_client import DaskExecutor, connected
from ckptstore.errors import InvalidInputError, WorkerDiedError

T = TypeVar("T")
R = TypeVar("R")

THREADS: Final = "threads"
"""Name of the default engine."""

EngineSpec = str | futures.Executor
"""``threads``, ``dask://HOST:PORT`` (also ``tcp://`` and ``tls://``), or any executor of
``concurrent.futures``, which stays the caller's."""

_SCHEDULER = re.compile(r"(?:dask|tcp|tls)://[^\s/@?#]+:[0-9]{1,5}/?\Z")
_HINT: Final = (
    "threads, or the workers of a Dask scheduler, dask://HOST:PORT (start them: dask scheduler, "
    "dask worker tcp://HOST:PORT); in Python any executor too, such as a ProcessPoolExecutor"
)


class Engine:
    """Runs tasks by an executor. Made by :func:`open_engine`; owned by one thread.

    Parameters
    ----------
    most
        Tasks at once; None for as many as the executor has workers.
    """

    def __init__(self, executor: futures.Executor, most: int | None = None) -> None:
        self._executor = executor
        self._most = most
        self.in_process = isinstance(executor, futures.ThreadPoolExecutor)
        """Tasks run in threads of this process: nothing is pickled, and memory is shared."""

    @property
    def workers(self) -> int:
        """Number of tasks that run at once, at this moment; 1 or more."""
        found = sum(self._threads())
        return max(1, min(found, self._most or found))

    def _threads(self) -> list[int]:
        """Return how many tasks run at once in each place that has memory of its own."""
        if isinstance(self._executor, DaskExecutor):  # how workers share machines is unknown
            return self._executor.threads()
        own = getattr(self._executor, "_max_workers", None)
        return [self._most or (own if isinstance(own, int) else workers_default())]

    def options_of_tasks(self, options: Options) -> Options:
        """Return the options of one task: its share of memory and threads."""
        sharing = max(self._threads(), default=1)
        return dataclasses.replace(
            options,
            host_bytes=max(1, options.host_bytes // sharing),
            workers=max(1, options.workers // sharing),
        )

    def share_storage(self, backend: Backend) -> Shared[Backend]:
        """Wrap a backend for tasks, so that each process makes it once.

        Raises
        ------
        InvalidInputError
            Other processes cannot reach it: it is in memory, or its options cannot be pickled.
        """
        shared = Shared(backend)
        if not self.in_process:
            if backend.capabilities.private:
                msg = f"the objects of {backend.url} are in the memory of this process"
                raise InvalidInputError(msg, hint="use the engine threads")
            pickled(shared, f"the storage {backend.url}, with its options,")
        return shared

    def map(self, function: Callable[[T], R], tasks: Iterable[T]) -> Iterator[R]:
        """Yield the results of ``function(task)`` in the order of the tasks.

        Tasks are taken from `tasks` only as there is room, so that a generator can plan as it goes.
        Closing the iterator, or an error, drops the tasks that have not begun.

        Parameters
        ----------
        function
            Of a module; other processes find it by its name.

        Raises
        ------
        WorkerDiedError
            Workers died, or none is left. What was done stays done.
        InvalidInputError
            A task cannot be sent to another process.
        CkptStoreError
            The error of `function`, of the first task that failed.
        """
        numbered = enumerate(tasks)
        pending: dict[futures.Future[Any], int] = {}
        held: dict[int, R] = {}
        due = 0
        try:
            while True:
                most = limits.ENGINE_AHEAD * self.workers
                room = min(most - len(pending), 4 * most - len(pending) - len(held))
                for number, task in itertools.islice(numbered, max(0, room)):
                    pending[self._submit(function, task)] = number
                if not pending:
                    return
                for future in self._wait(pending):
                    held[pending.pop(future)] = self._result(future)
                while due in held:
                    yield held.pop(due)
                    due += 1
        finally:
            for future in pending:
                future.cancel()

    def _submit(self, function: Callable[[T], R], task: T) -> futures.Future[Any]:
        """Have ``function(task)`` run; in this process as a part of the operation."""
        call: tuple[Any, ...] = copy_context().run, function, task
        if not self.in_process:
            # Some executors take equal calls for the same: the number tells them apart.
            call = run_packed, packed(function, task), secrets.token_hex(8)
        try:
            return self._executor.submit(*call)
        except Exception as error:
            raise no_answer(error) from error

    def _result(self, future: futures.Future[Any]) -> Any:  # noqa: ANN401 - whatever the function returned
        """Return the result of a future that is done, or raise the function's error."""
        try:
            answer = future.result()
        except Exception as error:  # of the executor: those of a task elsewhere travel as results
            if self.in_process and not isinstance(error, futures.CancelledError):
                raise
            raise no_answer(error) from error
        return answer if self.in_process else unpacked(answer)

    def _wait(self, pending: Iterable[futures.Future[Any]]) -> set[futures.Future[Any]]:
        """Return futures that are done; raise WorkerDiedError if no worker appears."""
        alone_s = 0.0
        while alone_s <= limits.ENGINE_WORKERS_WAIT_S:
            done, others = futures.wait(pending, limits.ENGINE_LOOK_S, futures.FIRST_COMPLETED)
            # A pool that is shut down cancels futures without waking their waiters.
            done |= {future for future in others if future.cancelled()}
            if done:
                return done
            alone_s = 0.0 if sum(self._threads()) else alone_s + limits.ENGINE_LOOK_S
        msg = f"no worker has been there for {alone_s:.0f} s"
        raise WorkerDiedError(msg, hint="what was done stays done: run it again")


def check_spec(spec: str) -> str:
    """Return the name of an engine.

    Raises
    ------
    InvalidInputError
        No engine has it.
    """
    if spec == THREADS or _SCHEDULER.match(str(spec)):
        return spec
    raise InvalidInputError(f"unknown engine {spec!r:.60}", hint=_HINT)


@contextmanager
def open_engine(spec: EngineSpec = THREADS, *, workers: int | None = None) -> Iterator[Engine]:
    """Yield an engine for the duration of a block.

    Parameters
    ----------
    workers
        Tasks at once. By default, for threads: the usable processors; for a scheduler or an
        executor: all that its workers take.

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
        raise InvalidInputError(f"workers is an integer from 1 on, not {workers!r}")
    with ExitStack() as stack:
        executor: futures.Executor
        if isinstance(spec, futures.Executor):
            executor = spec
            if type(spec).__name__ == "ClientExecutor" and hasattr(spec, "_client"):  # of Dask
                executor = DaskExecutor(spec._client)
        elif check_spec(spec) == THREADS:
            count = workers or workers_default()
            executor = Threads(count, thread_name_prefix="ckptstore-task")
            stack.callback(executor.shutdown, cancel_futures=True)
        else:
            address = re.sub("^dask://", "tcp://", spec.rstrip("/"))
            executor = stack.enter_context(connected(address))
        yield Engine(executor, workers)
