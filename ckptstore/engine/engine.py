"""Engines: run many small tasks by an executor, a bounded number at a time.

A task is a function of a module and one argument; both are pickled for tasks in other processes. A
task may run twice, so repeating it must do no harm. Results should be small. The caller, the
coordinator, makes all decisions on them: tasks never commit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from concurrent.futures import Executor, Future, InvalidStateError
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from functools import partial
from typing import Any, Final, TypeVar

from ckptstore import errors, limits
from ckptstore.argument_checks import integer
from ckptstore.backends.base import Backend
from ckptstore.backends.transfers import Threads
from ckptstore.config import Options, workers_default
from ckptstore.engine.calls import Shared, no_answer, packed, pickled, run_packed, unpacked

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
                raise errors.InvalidInputError(msg, hint="use the engine threads")
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
        raise errors.WorkerDiedError(msg, hint="what was done stays done: run it again")


def check_spec(spec: str) -> str:
    """Return the name of an engine.

    Raises
    ------
    InvalidInputError
        No engine has it.
    """
    if spec == THREADS or _SCHEDULER.match(str(spec)):
        return spec
    raise errors.InvalidInputError(f"unknown engine {spec!r:.60}", hint=_HINT)


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
    if workers is not None:
        workers = integer("workers", workers)
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


class DaskExecutor(Executor):
    """Runs calls through a client of a scheduler, which itself repeats the tasks of a dead worker.

    Dask's own executor is not used: its futures never end when an answer is lost.
    """

    def __init__(self, client: Any) -> None:  # noqa: ANN401 - its methods have no types
        self._client = client

    def threads(self) -> list[int]:
        """Return how many tasks each worker runs at once.

        Raises
        ------
        WorkerDiedError
            The scheduler is gone.
        """
        try:
            return [int(count) for count in self._client.nthreads().values()]
        except Exception as error:
            raise no_answer(error) from error

    def submit(self, fn: Callable[..., Any], /, *args: object, **kwargs: object) -> Future[Any]:
        """Have a worker run a call; the future ends with whatever error Dask ends its own with."""
        theirs = self._client.submit(fn, *args, **kwargs, pure=False)
        ours: Future[Any] = Future()
        ours.add_done_callback(partial(_drop, theirs))
        theirs.add_done_callback(partial(_deliver, ours))
        return ours


def _deliver(ours: Future[Any], theirs: Any) -> None:  # noqa: ANN401 - a future of Dask
    """Pass Dask's answer or failure on, unless nobody waits for it."""
    with contextlib.suppress(InvalidStateError):  # cancelled meanwhile
        try:
            answer = theirs.result()
        except BaseException as error:  # noqa: BLE001 - for the caller that waits
            ours.set_exception(error)
        else:
            ours.set_result(answer)


def _drop(theirs: Any, ours: Future[Any]) -> None:  # noqa: ANN401 - a future of Dask
    """Cancel Dask's future with ours; a scheduler that is gone has dropped it already."""
    if ours.cancelled():
        with contextlib.suppress(OSError, RuntimeError):
            theirs.cancel()


@contextmanager
def connected(address: str) -> Iterator[DaskExecutor]:
    """Connect to a scheduler for the duration of a block.

    Raises
    ------
    MissingDependencyError
        Dask is not installed.
    StorageError
        No scheduler answers, or it has no workers.
    """
    try:
        import distributed
    except ImportError as error:
        msg = f"Dask is not installed ({error.name})"
        raise errors.MissingDependencyError(msg, hint="pip install 'ckptstore[dask]'") from error
    try:
        start: Any = distributed.Client  # it has no types
        client = start(
            address, timeout=limits.CONNECT_TIMEOUT_S, set_as_default=False, name="ckptstore"
        )
    except (OSError, ValueError, RuntimeError) as error:
        msg = f"no Dask scheduler answers at {address}: {error}"
        hint = "a scheduler prints its address when it starts: dask scheduler"
        raise errors.StorageError(msg, hint=hint) from error
    try:
        try:
            client.wait_for_workers(1, timeout=limits.ENGINE_WORKERS_WAIT_S)
        except (OSError, RuntimeError) as error:  # a timeout is an OSError
            msg = f"the Dask scheduler at {address} has no workers"
            raise errors.StorageError(msg, hint=f"start some: dask worker {address}") from error
        yield DaskExecutor(client)
    finally:
        with contextlib.suppress(OSError, RuntimeError):  # the scheduler is gone
            client.close(timeout=limits.CHILD_EXIT_S)
